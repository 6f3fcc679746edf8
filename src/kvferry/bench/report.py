"""Writes what a comparison has found: `report.html`, `report.json`, `cells.csv` and `summary.png`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from kvferry.bench import figures
from kvferry.bench.analysis import HANDOVER, Comparison
from kvferry.bench.circumstances import remarks
from kvferry.bench.connectors import CONNECTORS
from kvferry.bench.grid import Cell
from kvferry.bench.page import page
from kvferry.bench.results import Results
from kvferry.bench.tables import as_csv, as_document, cell_rows
from kvferry.bench.targets import Target, targets
from kvferry.errors import UsageError

HTML, JSON, CSV, PNG = "report.html", "report.json", "cells.csv", "summary.png"


@dataclass(frozen=True, slots=True)
class Written:
    """A written report: its last line, its problems, and the targets."""

    verdict: str
    problems: tuple[str, ...]
    """Why the figures are not to be trusted; none where everything was right."""
    targets: tuple[Target, ...]
    remarks: tuple[str, ...] = ()
    """What a reader must know before believing the figures."""


def write_report(results: Results) -> Written:
    """Make figures of all results and write them into their directory.

    Raises:
        UsageError: nothing has been measured yet.
    """
    comparison = Comparison(results)
    if not comparison.connectors:
        raise UsageError(f"{results.directory} holds no measured cell yet")
    told, rows = targets(comparison), cell_rows(comparison)
    verdict = verdict_of(comparison)
    said = remarks(comparison)
    drawn = draw(comparison, results.directory)
    document = json.dumps(as_document(comparison, rows, told, said), indent=1)
    _write(results.directory / JSON, document + "\n")
    _write(results.directory / CSV, as_csv(rows))
    _write(results.directory / HTML, page(comparison, verdict, told, rows, drawn, said))
    return Written(verdict, tuple(problems(comparison)), tuple(told), tuple(said))


def verdict_of(comparison: Comparison) -> str:
    """One line: our figures at the cell that asks most, beside the better stock connector's."""
    names = comparison.ours() or comparison.connectors
    return "; ".join(_told(comparison, name, comparison.busiest_cell) for name in names)


def problems(comparison: Comparison) -> list[str]:
    """What makes a comparison fail: wrong pages, different answers, requests that were not answered."""
    found = []
    if comparison.checks.mismatches():
        found.append(f"{comparison.checks.mismatches()} pages arrived with other content than was sent")
    if comparison.checks.different_answers():
        found.append(
            f"{comparison.checks.different_answers()} requests were answered differently by two connectors"
        )
    failures = comparison.checks.failures()
    if failures:
        run, record = failures[0]
        found.append(f"{len(failures)} requests failed, the first under {run.connector}: {record.error}")
    return found


def _told(comparison: Comparison, name: str, cell: Cell) -> str:
    parts = [f"{CONNECTORS[name].label} at {cell.name}:"]
    for metric, share in (("ttft", 0.5), ("ttft", 0.95), ("tpot", 0.5)):
        one = comparison.figure(name, cell, metric, share)
        if one is None:
            continue
        told = comparison.against_better(name, cell, metric, share)
        better = f" ({told.ratio.figure:.2f} x {CONNECTORS[told.connector].label})" if told else ""
        if comparison.shortage((name,), cell, metric, share) is not None:
            better = better.removesuffix(")") + ", not judged)" if told else " (not judged)"
        digits = 1 if metric == "tpot" else 0
        parts.append(f"{metric.upper()} p{share * 100:g} {one.figure * 1000:.{digits}f} ms{better},")
    return " ".join(parts).rstrip(",")


def draw(comparison: Comparison, directory: Path) -> dict[str, str]:
    """Write the PNG, and return the SVG elements of the page by section."""
    with figures.styled():
        figures.save_png(figures.summary_figure(comparison, _title(comparison)), directory / PNG)
        return _pictures(comparison)


def _pictures(comparison: Comparison) -> dict[str, str]:
    drawn = {name: figures.load_figure(comparison, name) for name in ("ttft", "tpot")}
    measured = [
        name
        for name in comparison.connectors
        for cell in comparison.cells
        if comparison.figure(name, cell, HANDOVER, 0.5) is not None
    ]
    if measured:
        drawn[HANDOVER] = figures.load_figure(comparison, HANDOVER)
    cells = _telling_cells(comparison)
    if any(comparison.phases(name, cell) for name in comparison.connectors for cell in cells):
        drawn["phases"] = figures.phases_figure(comparison, cells)
    drawn["costs"] = figures.costs_figure(comparison, comparison.longest_quiet_cell)
    return {name: figures.as_svg(figure, salt=name) for name, figure in drawn.items()}


def _telling_cells(comparison: Comparison) -> list[Cell]:
    """The longest prompts at every rate, and the shortest at the lowest."""
    longest = max(cell.input_tokens for cell in comparison.cells)
    return sorted({min(comparison.cells), *(c for c in comparison.cells if c.input_tokens == longest)})


def _title(comparison: Comparison) -> str:
    engines = comparison.options.engines
    return (
        f"One prefill and one decode engine, {engines.get('preset')}, chunks of {engines.get('step_tokens')}"
    )


def _write(path: Path, text: str) -> None:
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)
