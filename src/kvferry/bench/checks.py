"""Whether the figures of a comparison can be trusted: pages, answers and requests that were wrong."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.bench.connectors import BASELINE
from kvferry.bench.records import Record
from kvferry.bench.results import CellRun, SessionRun


class Checks:
    """What was wrong, over all runs."""

    def __init__(self, runs: Sequence[CellRun], sessions: Sequence[SessionRun]) -> None:
        self._runs = runs
        self._sessions = sessions

    def failures(self) -> list[tuple[CellRun, Record]]:
        """Requests that were not answered in full."""
        return [(run, record) for run in self._runs for record in run.load.failures]

    def mismatches(self) -> int:
        """Pages that arrived with other content than was sent."""
        warm = sum(session.mismatches for session in self._sessions)
        return warm + sum(cost.mismatches for run in self._runs for cost in run.engines.values())

    def pages(self) -> int:
        """Pages that were compared."""
        warm = sum(session.pages for session in self._sessions)
        return warm + sum(cost.pages for run in self._runs for cost in run.engines.values())

    def different_answers(self) -> int:
        """Requests that were not answered alike under every connector; the baseline answers without KV."""
        answers: dict[tuple[int, str], set[int]] = {}
        for run in self._runs:
            if run.connector != BASELINE:
                for record in run.load.records:
                    if record.succeeded and record.answer is not None:
                        answers.setdefault((run.repeat, record.request), set()).add(record.answer)
        return sum(len(found) > 1 for found in answers.values())
