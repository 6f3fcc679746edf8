"""Medians, ratios and a verdict of what was measured. Ratios are of one repeat each, which the machine's mood
touches less than times."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.microbench.cells import Cell
from kvferry.microbench.handover import Measured, Waiting
from kvferry.microbench.producer import Sample
from kvferry.microbench.tasks import Steps

GIB = float(1 << 30)
CONTIGUOUS_SHARE_MIN = 0.85
"""Of what raw NIXL reaches from one thread."""
SCATTERED_RATIO_MAX = 1.10
"""Times what raw NIXL takes."""
STEP_SECONDS_MAX = 0.005
"""Of a loop's step with `OUTSTANDING` transfers."""
OUTSTANDING = 1000


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with the quarter below and above which a quarter of the values lie."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class CellFigures:
    """One cell. Times in seconds, CPU times per GiB or transfer, host times per transfer."""

    cell: Cell
    ferry_seconds: Spread
    raw_seconds: Spread
    transfer_seconds: float
    """kvferry's, of a single one of the transfers."""
    ratio: Spread
    """kvferry's time over raw NIXL's."""
    gib_per_second: float
    raw_gib_per_second: float
    copy_share: float
    """Of the bandwidth of a memory copy by one thread."""
    producer_cpu_per_gib: float
    consumer_cpu_per_gib: float
    raw_cpu_per_gib: float
    cpu_per_transfer: float
    producer_host_per_transfer: float
    consumer_host_per_transfer: float
    ferry_descriptors: int
    raw_descriptors: int


@dataclass(frozen=True, slots=True)
class StepFigures:
    """The steps of one loop. Seconds; `cpu` is CPU time of its thread."""

    side: str
    transfers: int
    steps: int
    median: float
    p99: float
    longest: float
    cpu_median: float
    cpu_longest: float
    share_of_core: float
    """CPU time of all steps over the time that they were watched."""


@dataclass(frozen=True, slots=True)
class Target:
    """What the project has set itself, and what came of it. `met` is None where it was not measured."""

    name: str
    wanted: str
    figure: str
    met: bool | None


@dataclass(frozen=True, slots=True)
class Figures:
    """All figures of a run."""

    cells: tuple[CellFigures, ...]
    steps: tuple[StepFigures, ...]
    copy_gib_per_second: float
    repeats: int
    targets: tuple[Target, ...]
    wrong_pages: int
    problems: tuple[str, ...]


def figures_of(measured: Measured) -> Figures:
    """Make figures of everything that was measured."""
    copy = float(np.median(measured.copy_bytes_per_second)) / GIB
    cells = tuple(
        _cell_figures(cell, kinds["ferry"], kinds["raw"], copy) for cell, kinds in measured.samples.items()
    )
    steps = tuple(one for waiting in measured.waiting for one in _step_figures(waiting))
    samples = [one for kinds in measured.samples.values() for many in kinds.values() for one in many]
    named = [
        f"{cell.name}, {one.kind}: {problem}"
        for cell, kinds in measured.samples.items()
        for many in kinds.values()
        for one in many
        for problem in _problems(one)
    ]
    named += [f"{one.transfers} waiting: {problem}" for one in measured.waiting for problem in _problems(one)]
    return Figures(
        cells,
        steps,
        copy,
        measured.repeats,
        targets=tuple(_targets(cells, steps)),
        wrong_pages=sum(one.wrong_pages for one in samples)
        + sum(one.wrong_pages for one in measured.waiting),
        problems=tuple(dict.fromkeys(named)),
    )


def _problems(one: Sample | Waiting) -> Iterator[str]:
    if one.wrong_pages:
        yield f"{one.wrong_pages} pages are wrong"
    yield from one.problems


def _cell_figures(cell: Cell, ferry: Sequence[Sample], raw: Sequence[Sample], copy: float) -> CellFigures:
    gib = cell.bytes / GIB
    seconds, raw_seconds = _seconds(ferry), _seconds(raw)
    ratios = [one.seconds / other.seconds for one, other in zip(ferry, raw, strict=True)]

    def median(field: str, samples: Sequence[Sample] = ferry) -> float:
        return float(np.median([getattr(sample, field) for sample in samples]))

    cpu = median("producer_cpu_seconds") + median("consumer_cpu_seconds")
    return CellFigures(
        cell,
        ferry_seconds=seconds,
        raw_seconds=raw_seconds,
        transfer_seconds=median("transfer_seconds"),
        ratio=_spread(ratios),
        gib_per_second=gib / seconds.median,
        raw_gib_per_second=gib / raw_seconds.median,
        copy_share=gib / seconds.median / copy,
        producer_cpu_per_gib=median("producer_cpu_seconds") / gib,
        consumer_cpu_per_gib=median("consumer_cpu_seconds") / gib,
        raw_cpu_per_gib=median("producer_cpu_seconds", raw) / gib,
        cpu_per_transfer=cpu / cell.concurrency,
        producer_host_per_transfer=median("producer_host_seconds") / cell.concurrency,
        consumer_host_per_transfer=median("consumer_host_seconds") / cell.concurrency,
        ferry_descriptors=int(median("descriptors")),
        raw_descriptors=int(median("descriptors", raw)),
    )


def _seconds(samples: Sequence[Sample]) -> Spread:
    return _spread([sample.seconds for sample in samples])


def _spread(values: Sequence[float]) -> Spread:
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75])
    return Spread(float(median), float(low), float(high))


def _step_figures(waiting: Waiting) -> Iterator[StepFigures]:
    for side, steps in (("producer", waiting.producer), ("consumer", waiting.consumer)):
        if steps.wall_seconds:
            yield _side_figures(side, waiting.transfers, steps)


def _side_figures(side: str, transfers: int, steps: Steps) -> StepFigures:
    wall, cpu = np.array(steps.wall_seconds), np.array(steps.cpu_seconds)
    return StepFigures(
        side,
        transfers,
        len(wall),
        median=float(np.median(wall)),
        p99=float(np.quantile(wall, 0.99)),
        longest=float(wall.max()),
        cpu_median=float(np.median(cpu)),
        cpu_longest=float(cpu.max()),
        share_of_core=float(cpu.sum() / steps.watched_seconds),
    )


# --- targets -----------------------------------------------------------------------------------------


def _targets(cells: Sequence[CellFigures], steps: Sequence[StepFigures]) -> Iterator[Target]:
    """The bandwidth targets are those of the longest transfers; of short ones the table says all."""
    most = max(one.cell.blocks for one in cells)
    alone = [one for one in cells if one.cell.blocks == most and one.cell.concurrency == 1]
    shares = [1 / one.ratio.median for one in alone if one.cell.fragmentation == "contiguous"]
    ratios = [one.ratio.median for one in alone if one.cell.fragmentation == "scattered"]
    yield _target(
        f"contiguous, {most} blocks, share of raw NIXL's bandwidth",
        f"at least {CONTIGUOUS_SHARE_MIN:.0%}",
        min(shares, default=None),
        "{:.0%}",
        lambda worst: worst >= CONTIGUOUS_SHARE_MIN,
    )
    yield _target(
        f"scattered, {most} blocks, times raw NIXL's time",
        f"at most {SCATTERED_RATIO_MAX:.2f}",
        max(ratios, default=None),
        "{:.2f}",
        lambda worst: worst <= SCATTERED_RATIO_MAX,
    )
    longest = [one.cpu_longest for one in steps if one.transfers >= OUTSTANDING]
    yield _target(
        f"longest loop step with {OUTSTANDING} transfers waiting, ms of CPU",
        f"less than {STEP_SECONDS_MAX * 1e3:g}",
        max(longest) * 1e3 if longest else None,
        "{:.2f}",
        lambda worst: worst < STEP_SECONDS_MAX * 1e3,
    )


def _target(
    name: str, wanted: str, worst: float | None, form: str, is_met: Callable[[float], bool]
) -> Target:
    if worst is None:
        return Target(name, wanted, "not measured", None)
    return Target(name, wanted, form.format(worst), is_met(worst))
