"""What a rank brings back from one step."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.host.events import Event, RequestId
from kvferry.ids import BlockId


@dataclass(frozen=True, slots=True)
class Finished:
    """Requests whose transfers have ended on this rank; `failed` is a subset of `receiving`."""

    sending: set[RequestId] = field(default_factory=set)
    receiving: set[RequestId] = field(default_factory=set)
    failed: set[RequestId] = field(default_factory=set)


@dataclass(slots=True)
class Reported:
    """What a step's results come to."""

    finished: Finished = field(default_factory=Finished)
    bad_blocks: set[BlockId] = field(default_factory=set)
    events: list[Event] = field(default_factory=list)


NOTHING = Reported()
"""What most steps come to: one value for all of them, which nobody changes."""
