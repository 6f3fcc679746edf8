"""Which peers the transport is connected to, and which of them have not been spoken with for long.

A connection that nothing waits for is given up in time, so that engines which come and go leave nothing
behind. It is no farewell: whoever speaks next opens it anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set

from kvferry.ids import PeerName
from kvferry.protocol.timers import Timers


class Connections:
    """Every peer that the transport is connected to, and when it was last heard or spoken to."""

    def __init__(self, idle_seconds: float, clock: Callable[[], float]) -> None:
        self._idle_seconds, self._clock = idle_seconds, clock
        self._used: dict[PeerName, float] = {}
        self._looks: Timers[PeerName] = Timers()

    def __len__(self) -> int:
        return len(self._used)

    def __contains__(self, peer: PeerName) -> bool:
        return peer in self._used

    def opened(self, peer: PeerName) -> None:
        """The transport has connected to a peer, or would have if it had not been."""
        self._used[peer] = self._clock()
        if peer not in self._looks:
            self._looks.set(peer, self._used[peer] + self._idle_seconds)

    def closed(self, peer: PeerName) -> None:
        """The transport has forgotten a peer."""
        self._used.pop(peer, None)
        self._looks.cancel(peer)

    def used(self, peer: PeerName, now: float) -> None:
        """It has said something, or was told something."""
        if peer in self._used:
            self._used[peer] = now

    def idle(self, now: float, is_patient: Callable[[PeerName], bool]) -> Iterator[PeerName]:
        """Peers that were not used for the idle time, twice as long for those that we are patient with.

        Each is named once per idle time, so one that is needed may be left as it is.
        """
        for peer in self._looks.pop_due(now):
            seconds = 2 * self._idle_seconds if is_patient(peer) else self._idle_seconds
            due = self._used[peer] + seconds
            self._looks.set(peer, due if due > now else now + self._idle_seconds)
            if due <= now:
                yield peer

    def longest_idle(self, needed: Set[PeerName]) -> PeerName | None:
        """The peer that was not used for longest of those that nothing needs."""
        free = [peer for peer in self._used if peer not in needed]
        return min(free, key=self._used.__getitem__, default=None)
