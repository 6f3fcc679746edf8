"""What a step of an engine carries from its scheduler to each of its ranks.

Under asynchronous scheduling several steps are under way; each has its own orders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from kvferry.handoff import TransferMode
from kvferry.host.events import RequestId
from kvferry.ids import BlockId, TransferId
from kvferry.protocol.commands import Advance, Command, Preempt


class Sender(msgspec.Struct, frozen=True):
    """A prefill request of this engine, or what it keeps of a turn: the request behind an `Expect`."""

    transfer: TransferId
    request: RequestId
    mode: TransferMode = "push"
    """What its consumers are expected to do; each may decide otherwise."""
    held: bool = False
    """Kept after a turn: no request of the engine waits for its end."""


class Scheduled(msgspec.Struct, frozen=True):
    """What a step does to one request: it computes up to token `stop`.

    `blocks` of each cache group are appended to its block table, or replace all of it when `replaced`; no
    groups: there are no new ones.
    """

    request: RequestId
    stop: int
    blocks: Sequence[list[BlockId]]
    replaced: bool


@dataclass
class StepOrders:
    """One step's work for the ranks."""

    senders: list[Sender] = field(default_factory=list)
    """New prefill requests; their `Expect` is among the commands."""
    commands: list[Command] = field(default_factory=list)
    """To be submitted before the forward pass, in order."""
    advances: list[Advance] = field(default_factory=list)
    """True once this step's forward pass has succeeded, and not before."""
    preempt: Preempt | None = None
    """Blocks that the engine has taken away from these transfers."""
