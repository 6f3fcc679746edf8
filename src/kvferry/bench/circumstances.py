"""Under what the figures of a comparison were measured: too few requests, a machine that others used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from kvferry.bench.analysis import Comparison
from kvferry.bench.connectors import CONNECTORS
from kvferry.bench.grid import Cell
from kvferry.bench.machine import OTHERS_SHARE_MAX, Machine
from kvferry.bench.markup import folded, table
from kvferry.bench.results import CellRun

JUDGED_SHARES = {0.5: "medians", 0.95: "95th percentiles"}
"""Quantiles that have intervals, and what they are called."""


def remarks(comparison: Comparison) -> list[str]:
    """What a reader must know before believing the figures; nothing where all is well."""
    return [*_too_few(comparison), *_others(comparison)]


def machines(comparison: Comparison) -> list[Machine]:
    """Those on which it was measured, in order; none where nobody noted it."""
    return list(dict.fromkeys(one.machine for one in comparison.sessions if one.machine is not None))


def machine_section(comparison: Comparison) -> str:
    """The machine, and who used it in each cell, as HTML."""
    found = [one.words for one in machines(comparison)]
    told = [run for run in comparison.runs if run.machine is not None]
    if not found or not told:
        return '<p class="faint">Not noted: this run is older than these figures.</p>'
    head = [
        "cell",
        "connector",
        "repeats",
        "engines, cores",
        "load generator",
        "others",
        "host",
        "others' share",
        "most",
    ]
    rows = [
        _use_row(cell, name, runs)
        for cell in comparison.cells
        for name in CONNECTORS
        if (runs := [run for run in comparison.runs_of(name, cell) if run.machine is not None])
    ]
    listed = "".join(f"<p>{escape(one)}.</p>" for one in found)
    return listed + folded("Who used the processors, cell by cell", table(head, rows))


def others_share(runs: Iterable[CellRun]) -> tuple[float, float] | None:
    """What others used of all processors' time, over all runs and in the worst one; None if not noted."""
    uses = [run.machine for run in runs if run.machine is not None]
    if not uses:
        return None
    lost = sum(one.others + one.stolen for one in uses)
    return lost / max(sum(one.seconds * one.cores for one in uses), 1e-9), max(
        one.others_share for one in uses
    )


def _too_few(comparison: Comparison) -> Iterator[str]:
    for share, called in JUDGED_SHARES.items():
        cells: dict[str, list[str]] = {}
        for cell in comparison.cells:
            names = [name for name in comparison.connectors if comparison.runs_of(name, cell)]
            reason = comparison.shortage(names, cell, "e2el", share)
            if reason is not None:
                cells.setdefault(reason, []).append(cell.name)
        for reason, named in cells.items():
            where = "every cell" if len(named) == len(comparison.cells) else ", ".join(named)
            yield f"too few to judge {called} at {where}: {reason}"


def _others(comparison: Comparison) -> Iterator[str]:
    told = [(run.machine.others_share, run) for run in comparison.runs if run.machine is not None]
    busy = [(share, run) for share, run in told if share > OTHERS_SHARE_MAX]
    if busy:
        share, run = max(busy, key=lambda one: one[0])
        yield (
            f"the machine was not quiet: others took more than {OTHERS_SHARE_MAX:.0%} of all processors' "
            f"time in {len(busy)} of {len(told)} runs of a cell, most in repeat {run.repeat + 1} of "
            f"{CONNECTORS[run.connector].label} at {Cell(*run.cell).name}, {share:.0%}"
        )
    found = machines(comparison)
    if len(found) > 1:
        yield f"measured on {len(found)} machines: {'; '.join(one.words for one in found)}"


def _use_row(cell: Cell, name: str, runs: list[CellRun]) -> list[str]:
    uses = [run.machine for run in runs if run.machine is not None]
    seconds = max(sum(one.seconds for one in uses), 1e-9)
    spent = [
        sum(parts) / seconds
        for parts in (
            [one.engines for one in uses],
            [one.load_generator for one in uses],
            [one.others for one in uses],
            [one.stolen for one in uses],
        )
    ]
    shares = others_share(runs) or (0.0, 0.0)
    figures = [f"{cores:.2f}" for cores in spent] + [f"{share:.1%}" for share in shares]
    return [cell.name, CONNECTORS[name].label, str(len(uses)), *figures]
