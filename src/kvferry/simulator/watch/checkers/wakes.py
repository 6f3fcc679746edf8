"""How much of a time a rank's agent could use, by its own clock."""

from __future__ import annotations

from kvferry.ids import PeerName
from kvferry.simulator.ground.events import FaultInjected, Healed
from kvferry.simulator.watch.checkers.base import Checker, Handlers, Oracle

STALLED = "stall_agent"


class Wakes(Checker):
    """Remembers when agents' threads were kept from running; it judges nothing."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._stalls: dict[str, list[tuple[float, float]]] = {}
        """Per rank from when until when, in order and apart."""
        super().__init__()

    def handlers(self) -> Handlers:
        """What is called for which kind of event."""
        return {FaultInjected: self._injected, Healed: self._healed}

    def own_seconds(self, rank: PeerName, since: float, until: float) -> float:
        """How long that was by the rank's clock."""
        return (until - since) * self._oracle.clock_rate_of(rank)

    def awake_seconds(self, rank: PeerName, since: float, until: float) -> float:
        """How long of it the rank's agent could run, by the rank's clock."""
        asleep = sum(
            max(min(until, end) - max(since, start), 0.0) for start, end in self._stalls.get(rank, ())
        )
        return self.own_seconds(rank, since, until - asleep)

    def _injected(self, event: FaultInjected) -> None:
        if event.kind != STALLED:
            return
        rank, _, words = event.what.partition(" for ")
        start, end = event.at_seconds, event.at_seconds + float(words.removesuffix(" s"))
        known = self._stalls.setdefault(rank, [])
        start = max(start, known[-1][1]) if known else start
        if end > start:
            known.append((start, end))

    def _healed(self, event: Healed) -> None:
        # Whoever is stalled then runs again.
        for known in self._stalls.values():
            known[:] = [
                (start, min(end, event.at_seconds)) for start, end in known if start < event.at_seconds
            ]
