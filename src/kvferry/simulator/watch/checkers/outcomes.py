"""Promise 8: every ended transfer moves exactly one outcome counter on each side, and the right one."""

from __future__ import annotations

from typing import ClassVar

from kvferry.ids import ConsumerId, EngineId, PeerName, TransferId
from kvferry.protocol.commands import Expect, Receive, Received, ReceiveFailed, Released
from kvferry.simulator.ground.events import Commanded, EngineCrashed, LegSent, Reported, RequestEnded
from kvferry.simulator.watch.checkers.base import Checker, Handlers
from kvferry.simulator.watch.checkers.ledger import Ledger

COMPLETED = "completed"
SKIPPED = "skipped"
OUTCOMES = frozenset({COMPLETED, "failed", "cancelled", SKIPPED})
GOOD_RELEASES = frozenset({"written", "fetched"})


class OneOutcomeEach(Checker):
    """Counts outcomes per request, and compares them with what the engine's ranks were told and reported.

    `skipped` is right for a request of which no rank was ever handed anything: no destination, and no prefill
    request. Whatever has begun on a rank ends as completed, failed or cancelled.
    """

    promise: ClassVar[int] = 8

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._sent_count: dict[tuple[EngineId, str], int] = {}
        self._counted: dict[tuple[EngineId, str], list[str]] = {}
        self._reports: dict[tuple[TransferId, ConsumerId | None], dict[PeerName, bool]] = {}
        """Per part in a transfer what each rank said last: whether it went well."""
        self._begun: dict[tuple[EngineId, TransferId, ConsumerId | None], dict[PeerName, int]] = {}
        """Per part in a transfer how often each rank has begun it and it has not been counted since."""
        super().__init__()

    def handlers(self) -> Handlers:
        """What is called for which kind of event."""
        return {
            LegSent: self._sent,
            Commanded: self._commanded,
            Reported: self._reported,
            RequestEnded: self._ended,
            EngineCrashed: self._crashed,
        }

    def _sent(self, event: LegSent) -> None:
        # A name may be used again once the earlier request of that name has ended, and be counted again.
        key = event.engine, event.request
        self._sent_count[key] = self._sent_count.get(key, 0) + 1

    def _commanded(self, event: Commanded) -> None:
        command = event.command
        if isinstance(command, Expect | Receive):
            consumer = command.consumer if isinstance(command, Receive) else None
            key = self._ledger.life_of[event.rank].engine, command.transfer, consumer
            begun = self._begun.setdefault(key, {})
            begun[event.rank] = begun.get(event.rank, 0) + 1

    def _reported(self, event: Reported) -> None:
        result = event.result
        if isinstance(result, Released):
            good = result.outcome.partition(":")[0] in GOOD_RELEASES
            self._reports.setdefault((result.transfer, None), {})[event.rank] = good
        elif isinstance(result, Received):
            self._reports.setdefault((result.transfer, result.consumer), {})[event.rank] = True
        elif isinstance(result, ReceiveFailed):
            self._reports.setdefault((result.transfer, result.consumer), {})[event.rank] = False

    def _ended(self, event: RequestEnded) -> None:
        at, who = event.at_seconds, f"{event.request} on {event.engine}"
        key = event.engine, event.request
        before = self._counted.setdefault(key, [])
        if len(before) >= self._sent_count.get(key, 1):
            self.broken(at, f"{who} was counted as {', '.join(before)}, then as {event.outcome}")
            return
        before.append(event.outcome)
        if event.outcome not in OUTCOMES:
            self.broken(at, f"{who} was counted under {event.outcome!r}, which is no outcome")
        begun = self._begun.get((event.engine, event.transfer, event.consumer), {})
        if event.outcome == SKIPPED:
            # Another request under the same id may have begun, and have reports to come.
            uncounted = self._sent_count.get(key, 1) - len(before) + 1
            ranks_begun = [rank for rank, times in begun.items() if times >= uncounted]
            if ranks_begun:
                self.broken(
                    at, f"{who} was counted as skipped though it had begun on {', '.join(ranks_begun)}"
                )
            return
        for rank, times in begun.items():
            begun[rank] = max(times - 1, 0)
        ranks = self._ledger.lives[event.engine].ranks
        reports = self._reports.get((event.transfer, event.consumer), {})
        # Popped: the same id may live again, and its ranks have to report again.
        went_well = [reports.pop(rank, None) for rank in ranks]
        if event.outcome == COMPLETED and not all(went_well):
            self.broken(at, f"{who} was counted as completed, its ranks say {went_well}")
        elif event.outcome != COMPLETED and all(went_well):
            self.broken(at, f"{who} was counted as {event.outcome} though every rank says that it went well")

    def _crashed(self, event: EngineCrashed) -> None:
        for counts in (self._counted, self._sent_count):
            for key in [key for key in counts if key[0] == event.engine]:
                del counts[key]
        for part in [part for part in self._begun if part[0] == event.engine]:
            del self._begun[part]
