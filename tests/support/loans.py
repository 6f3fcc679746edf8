"""What readers were promised: an account of its own, kept of messages and not of what cores believe."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvferry.ids import ConsumerId, PeerName, TransferId
from kvferry.protocol.messages import Offer, Status

Attempt = tuple[PeerName, TransferId, ConsumerId, int]
"""Consumer rank, transfer, consumer and attempt."""
DRIFT = 0.01


@dataclass(slots=True)
class Loans:
    """Until when each producer rank keeps what each reader may read, by the reader's clock."""

    _until: dict[tuple[PeerName, Attempt], float] = field(default_factory=dict)
    _offered: dict[tuple[PeerName, Attempt], set[int]] = field(default_factory=dict)
    """The source blocks of each offer."""
    _returned: set[tuple[PeerName, Attempt]] = field(default_factory=set)

    def heard(self, producer: PeerName, consumer: PeerName, message: Offer | Status) -> None:
        """A reader has read an offer, or how what it was offered stands."""
        if isinstance(message, Offer):
            attempt = (consumer, message.transfer, message.consumer, message.attempt)
            self._offered[producer, attempt] = {
                first + at for first, count in message.groups[0] for at in range(count)
            }
            self._extend(producer, attempt, message.asked, message.keep_seconds)
        elif message.asked is not None:
            for entry in message.transfers:
                attempt = (consumer, entry.transfer, entry.consumer, entry.attempt)
                self._extend(producer, attempt, message.asked, entry.keep_seconds)

    def _extend(self, producer: PeerName, attempt: Attempt, asked: float, keep_seconds: float) -> None:
        if keep_seconds > 0:
            key, until = (producer, attempt), asked + keep_seconds / (1 + DRIFT)
            self._until[key] = max(self._until.get(key, -math.inf), until)

    def returned(self, producer: PeerName, attempt: Attempt) -> None:
        """A reader has said that it is silent."""
        self._returned.add((producer, attempt))

    def runs(self, producer: PeerName, attempt: Attempt, now: float) -> bool:
        """Whether a reader may post."""
        key = (producer, attempt)
        given = key in self._offered and key not in self._returned
        return given and now < self._until.get(key, -math.inf)

    def running(self, blocks: Iterable[int], now: float) -> bool:
        """Whether anybody may still use what it reads of some source blocks."""
        wanted = set(blocks)
        return any(wanted & lent and self.runs(*key, now) for key, lent in self._offered.items())
