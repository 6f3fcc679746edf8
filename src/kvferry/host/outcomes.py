"""One outcome per transfer, made of what its ranks report."""

from __future__ import annotations

from kvferry.handoff import TransferMode
from kvferry.host.events import Ended, RequestId
from kvferry.host.facts import EngineFacts
from kvferry.host.metrics import BYTES, HANDOVER, LOST_TOKENS, TRANSFERS, WRITE, Counts
from kvferry.protocol import reasons

REQUESTS_MAX = 65536


class Outcomes:
    """Collects the ranks' `Ended` of each transfer and moves exactly one counter when all have come.

    A request whose ranks never all report would stay; beyond `REQUESTS_MAX` the oldest is counted as it is.
    """

    def __init__(self, facts: EngineFacts, counts: Counts) -> None:
        self._facts = facts
        self._counts = counts
        self._ended: dict[tuple[RequestId, bool], dict[int, Ended]] = {}
        """By request and whether it was sent."""

    @property
    def open_count(self) -> int:
        """Transfers of which some ranks have reported and some have not."""
        return len(self._ended)

    def add(self, event: Ended) -> None:
        """A rank has reported the end of its part."""
        key = (event.request, event.sending)
        ranks = self._ended.setdefault(key, {})
        ranks.setdefault(event.rank, event)
        if ranks.keys() >= self._facts.ranks:
            self._count(self._ended.pop(key))
        elif len(self._ended) > REQUESTS_MAX:
            self._count(self._ended.pop(next(iter(self._ended))))

    def skipped(self, reason: str, mode: TransferMode) -> None:
        """A transfer ended before any rank had a part in it."""
        self._counts.count(TRANSFERS, labels=(mode, "skipped", reason))

    def _count(self, ranks: dict[int, Ended]) -> None:
        events = list(ranks.values())
        worst = next((event for event in events if event.failed and not event.cancelled), None)
        worst = worst or next((event for event in events if event.cancelled), events[0])
        outcome = "cancelled" if worst.cancelled else "failed" if worst.failed else "completed"
        self._counts.count(TRANSFERS, labels=(worst.mode, outcome, reasons.code_of(worst.reason)))
        moved = sum(event.bytes for event in events)
        if moved:
            self._counts.count(BYTES, moved, labels=(worst.mode,))
        # What one rank lacks all ranks have to compute.
        lost = max(event.lost_tokens for event in events)
        if lost:
            self._counts.count(LOST_TOKENS, lost)
        for name, seconds in (
            (HANDOVER, [event.handover_seconds for event in events]),
            (WRITE, [event.write_seconds for event in events]),
        ):
            measured = [value for value in seconds if value is not None]
            if measured:
                # A transfer is as slow as its slowest rank.
                self._counts.observe(name, max(measured))
