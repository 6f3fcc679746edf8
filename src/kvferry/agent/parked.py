"""Messages of ranks that have not said Hello yet: kept for it, within bounds."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.errors import PeerError
from kvferry.ids import PeerName
from kvferry.protocol.limits import Limits
from kvferry.protocol.messages import AnyMessage

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Kept:
    since: float
    """When the first of them came."""
    messages: list[AnyMessage] = field(default_factory=list)
    bytes: int = 0


@dataclass(slots=True)
class Parked:
    """What each stranger has said. `measure` gives the bytes of a message on the wire."""

    limits: Limits
    measure: Callable[[AnyMessage], int]
    _kept: OrderedDict[PeerName, _Kept] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return sum(len(kept.messages) for kept in self._kept.values())

    def keep(self, peer: PeerName, message: AnyMessage, now: float) -> None:
        """Keep a message for its sender's Hello; with too many strangers the oldest one's are dropped.

        Raises:
            PeerError: too many are kept of this peer already, or too long ones.
        """
        kept = self._kept.get(peer)
        if kept is None:
            kept = self._kept[peer] = _Kept(now)
            while len(self._kept) > self.limits.parked_peers_max:
                self._drop(next(iter(self._kept)), "others speak without one")
        name, limits = type(message).__name__, self.limits
        if len(kept.messages) >= limits.parked_messages_max:
            raise PeerError(f"{name} before Hello, after {limits.parked_messages_max} others")
        kept.bytes += (size := self.measure(message))
        if kept.bytes > limits.parked_bytes_max:
            kept.bytes -= size
            raise PeerError(f"{name} before Hello, of more than {limits.parked_bytes_max} bytes with others")
        kept.messages.append(message)

    def take(self, peer: PeerName) -> list[AnyMessage]:
        """Everything that was kept of a peer, which has said Hello."""
        kept = self._kept.pop(peer, None)
        return [] if kept is None else kept.messages

    def expire(self, now: float) -> None:
        """Drop what has waited for its Hello for too long."""
        while self._kept:
            peer, kept = next(iter(self._kept.items()))
            if now < kept.since + self.limits.parked_seconds:
                return
            self._drop(peer, f"{self.limits.parked_seconds:g} s have passed")

    def _drop(self, peer: PeerName, reason: str) -> None:
        dropped = len(self._kept.pop(peer).messages)
        logger.warning("%d messages of %s, which has not said Hello, are dropped: %s", dropped, peer, reason)
