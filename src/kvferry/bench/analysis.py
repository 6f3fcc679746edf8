"""Figures of a comparison: per cell and connector, and one connector against another.

A sample belongs to a request, and a request has the same name, prompt and moment under every connector of one
repeat. So two connectors are compared on the requests that both have answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvferry.bench.checks import Checks
from kvferry.bench.connectors import BASELINE, CONNECTORS, PULLING
from kvferry.bench.costs import Costs
from kvferry.bench.enough import shortage
from kvferry.bench.grid import Cell
from kvferry.bench.phases import PHASES, Phases, as_fetched
from kvferry.bench.records import Record
from kvferry.bench.results import CellRun, Results
from kvferry.bench.statistics import Floats, Interval, interval, quantile, ratio, seed_of

PER_REQUEST: Mapping[str, Callable[[Record], float | None]] = {
    "ttft": lambda record: record.ttft_seconds,
    "tpot": lambda record: record.tpot_seconds,
    "e2el": lambda record: record.e2e_seconds,
}
HANDOVER = "handover"
GAP = "gap"
METRICS = (*PER_REQUEST, HANDOVER, GAP)
"""`gap` has many samples per request, and no interval."""

Named = dict[str, float]
"""Samples by request."""


@dataclass(frozen=True, slots=True)
class Against:
    """Our figure over that of another connector, and which one that is."""

    connector: str
    ratio: Interval


class Comparison:
    """Read-only view of results; figures are made when they are asked for."""

    def __init__(self, results: Results) -> None:
        self.options = results.options
        self.sessions = results.sessions
        self.runs = results.runs
        self.costs = Costs(self.runs_of, self.sessions)
        self.checks = Checks(self.runs, self.sessions)
        self._figures: dict[tuple[object, ...], Interval | None] = {}

    @cached_property
    def connectors(self) -> list[str]:
        """Connectors that have run, in the order of the registry, without the baseline."""
        seen = {run.connector for run in self.runs}
        return [name for name in CONNECTORS if name in seen and name != BASELINE]

    @cached_property
    def cells(self) -> list[Cell]:
        """Cells that have run."""
        return sorted({Cell(*run.cell) for run in self.runs})

    @cached_property
    def busiest_cell(self) -> Cell:
        """The cell that asks most of the engines."""
        return max(self.cells, key=lambda cell: (cell.rate * cell.input_tokens, cell.input_tokens))

    @cached_property
    def longest_quiet_cell(self) -> Cell:
        """The cell with the longest prompts at the lowest rate: a request's own costs show there."""
        return min(self.cells, key=lambda cell: (-cell.input_tokens, cell.rate))

    @cached_property
    def _runs_of(self) -> dict[tuple[str, Cell], list[CellRun]]:
        found: dict[tuple[str, Cell], list[CellRun]] = {}
        for run in sorted(self.runs, key=lambda run: run.repeat):
            found.setdefault((run.connector, Cell(*run.cell)), []).append(run)
        return found

    def runs_of(self, connector: str, cell: Cell) -> list[CellRun]:
        """The runs of one cell, repeat by repeat."""
        return self._runs_of.get((connector, cell), [])

    def stock(self, cell: Cell, *, synchronous: bool = False) -> list[str]:
        """vLLM's own connectors that have run a cell, with their usual or with synchronous posting."""
        return [
            name
            for name in self.connectors
            if CONNECTORS[name].kind == "stock"
            and bool(CONNECTORS[name].extra) == synchronous
            and self.runs_of(name, cell)
        ]

    def ours(self) -> list[str]:
        """kvferry's connectors that have run."""
        return [name for name in self.connectors if CONNECTORS[name].kind == "ours"]

    def figure(self, connector: str, cell: Cell, metric: str, share: float) -> Interval | None:
        """A quantile of a metric, in seconds; None where there are no samples."""
        key = ("figure", connector, cell, metric, share)
        if key not in self._figures:
            self._figures[key] = self._figure(connector, cell, metric, share)
        return self._figures[key]

    def moving(self, connector: str, cell: Cell) -> float | None:
        """Seconds in which a request's KV moved, the median; None where no engine told of its transfers."""
        seconds = [
            one.moving
            for run in self.runs_of(connector, cell)
            for one in run.phases
            if one.moving is not None
        ]
        return float(np.median(seconds)) if seconds else None

    def level(self, connector: str, cell: Cell, metric: str, share: float) -> float | None:
        """A quantile of a metric without its interval, which takes a thousand times as long."""
        if metric == GAP:
            samples = [gap for run in self.runs_of(connector, cell) for gap in _gaps(run)]
        else:
            named = self.named_samples(connector, cell, metric)
            samples = [value for one in named for value in one.values()]
        return float(np.quantile(samples, share)) if samples else None

    def against(self, ours: str, theirs: str, cell: Cell, metric: str, share: float) -> Interval | None:
        """Our quantile over theirs, on the requests that both have answered."""
        key = ("ratio", ours, theirs, cell, metric, share)
        if key not in self._figures:
            self._figures[key] = self._ratio(ours, theirs, cell, metric, share)
        return self._figures[key]

    def against_better(
        self, ours: str, cell: Cell, metric: str, share: float, *, synchronous: bool = False
    ) -> Against | None:
        """Our quantile over that of the stock connector that is better there."""
        found = {
            name: level
            for name in self.stock(cell, synchronous=synchronous)
            if (level := self.level(name, cell, metric, share)) is not None
        }
        if not found:
            return None
        better = min(found, key=lambda name: found[name])
        compared = self.against(ours, better, cell, metric, share)
        return None if compared is None else Against(better, compared)

    def phases(self, connector: str, cell: Cell) -> dict[str, float]:
        """Mean seconds per phase of the time to first token; phases that nobody noted are left out."""
        rows = [one for run in self.runs_of(connector, cell) for one in run.phases]
        return mean_phases(list(map(as_fetched, rows)) if connector in PULLING else rows)

    def shortage(self, names: Iterable[str], cell: Cell, metric: str, share: float) -> str | None:
        """What is missing for judging a quantile under all of these connectors; None when nothing is."""
        named = [self.named_samples(name, cell, "e2el" if metric == GAP else metric) for name in names]
        requests = min((sum(map(len, repeats)) for repeats in named), default=0)
        return shortage(requests, min((sum(map(bool, repeats)) for repeats in named), default=0), share)

    def named_samples(self, connector: str, cell: Cell, metric: str) -> list[Named]:
        """Samples by request, one dictionary per repeat."""
        return [_named(run, metric) for run in self.runs_of(connector, cell)]

    def _figure(self, connector: str, cell: Cell, metric: str, share: float) -> Interval | None:
        if metric == GAP:
            level = self.level(connector, cell, metric, share)
            return None if level is None else Interval(level, level, level)
        groups = [_array(named.values()) for named in self.named_samples(connector, cell, metric)]
        if not any(group.size for group in groups):
            return None
        return interval(groups, quantile(share), seed=seed_of(connector, cell.name, metric, share))

    def _ratio(self, ours: str, theirs: str, cell: Cell, metric: str, share: float) -> Interval | None:
        if metric == GAP:
            above, below = (self.level(name, cell, metric, share) for name in (ours, theirs))
            if above is None or not below:
                return None
            return Interval(above / below, above / below, above / below)
        by_repeat = {run.repeat: _named(run, metric) for run in self.runs_of(theirs, cell)}
        pairs = [
            _common(_named(run, metric), by_repeat[run.repeat])
            for run in self.runs_of(ours, cell)
            if run.repeat in by_repeat
        ]
        if not any(mine.size for mine, _ in pairs):
            return None
        our_groups, their_groups = [mine for mine, _ in pairs], [other for _, other in pairs]
        return ratio(
            our_groups, their_groups, quantile(share), seed=seed_of(ours, theirs, cell.name, metric, share)
        )


def mean_phases(rows: Sequence[Phases]) -> dict[str, float]:
    """The mean of each phase over some requests, in order; together they are the mean time to first token."""
    if not rows:
        return {}
    sums = {name: sum(row.seconds.get(name, 0.0) for row in rows) for name in PHASES}
    noted = {name for row in rows for name in row.seconds}
    return {name: total / len(rows) for name, total in sums.items() if name in noted}


def _named(run: CellRun, metric: str) -> Named:
    """In the order in which the requests were due, so that neighbours stay neighbours."""
    if metric == HANDOVER:
        handovers = {one.request: one.handover for one in run.phases}
        values = [(record.request, handovers.get(record.request)) for record in _ordered(run)]
    else:
        values = [(record.request, PER_REQUEST[metric](record)) for record in _ordered(run)]
    return {request: value for request, value in values if value is not None}


def _ordered(run: CellRun) -> list[Record]:
    return sorted((one for one in run.load.records if one.succeeded), key=lambda record: record.due)


def _gaps(run: CellRun) -> list[float]:
    return [gap for record in run.load.records if record.succeeded for gap in record.gaps_seconds]


def _common(ours: Named, theirs: Named) -> tuple[Floats, Floats]:
    both = [request for request in ours if request in theirs]
    return _array(ours[request] for request in both), _array(theirs[request] for request in both)


def _array(values: Iterable[float]) -> Floats:
    return np.asarray(list(values), dtype=np.float64)
