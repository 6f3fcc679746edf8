"""The figures of a comparison as rows: for CSV, for JSON, and for the report's tables."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from kvferry.bench.analysis import METRICS, Comparison
from kvferry.bench.circumstances import machines, others_share
from kvferry.bench.costs import SIDES
from kvferry.bench.grid import Cell
from kvferry.bench.targets import Target

SHARES = (0.5, 0.9, 0.95, 0.99)
WITH_INTERVAL = (0.5, 0.95)

Row = dict[str, Any]


def cell_rows(comparison: Comparison) -> list[Row]:
    """One row per cell and connector: requests, quantiles in milliseconds with intervals, ratios to stock."""
    names = sorted({run.connector for run in comparison.runs}, key=_place(comparison))
    return [
        _row(comparison, name, cell)
        for cell in comparison.cells
        for name in names
        if comparison.runs_of(name, cell)
    ]


def as_csv(rows: list[Row]) -> str:
    """Rows as CSV; a column that a row lacks is empty there."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def as_document(
    comparison: Comparison, rows: list[Row], targets: list[Target], remarks: Sequence[str] = ()
) -> Row:
    """Everything in one JSON document."""
    return {
        "options": {name: getattr(comparison.options, name) for name in comparison.options.__struct_fields__},
        "targets": [asdict(target) for target in targets],
        "remarks": list(remarks),
        "machines": [msgspec.to_builtins(one) for one in machines(comparison)],
        "cells": rows,
        "phases_ms": [
            {"connector": name, "rate": cell.rate, "input_tokens": cell.input_tokens}
            | {phase: _ms(seconds) for phase, seconds in comparison.phases(name, cell).items()}
            for cell in comparison.cells
            for name in comparison.connectors
            if comparison.phases(name, cell)
        ],
        "idle_cores": {
            name: {
                side: round(share, 4)
                for side in SIDES
                if (share := comparison.costs.idle_share(name, side)) is not None
            }
            for name in comparison.connectors
        },
        "pages": comparison.checks.pages(),
        "mismatches": comparison.checks.mismatches(),
        "different_answers": comparison.checks.different_answers(),
        "failures": [
            {
                "connector": run.connector,
                "repeat": run.repeat,
                "request": record.request,
                "error": record.error,
            }
            for run, record in comparison.checks.failures()
        ],
    }


def _row(comparison: Comparison, name: str, cell: Cell) -> Row:
    runs = comparison.runs_of(name, cell)
    row: Row = {
        "rate": float(cell.rate),
        "input_tokens": cell.input_tokens,
        "connector": name,
        "repeats": len(runs),
        "requests": sum(len(run.load.records) for run in runs),
        "failed": sum(len(run.load.failures) for run in runs),
    }
    for share in WITH_INTERVAL:
        row[f"p{share * 100:g}_not_judged"] = comparison.shortage((name,), cell, "e2el", share)
    for metric in METRICS:
        row |= _quantiles(comparison, name, cell, metric)
    for side in SIDES:
        row |= _side(comparison, name, cell, side)
    hidden = comparison.costs.hidden_share(name, cell)
    row["posted_before_prefill_end"] = None if hidden is None else round(hidden, 4)
    shares = others_share(runs)
    row["others_share"], row["others_share_most"] = (None, None) if shares is None else map(_rounded, shares)
    return row


def _quantiles(comparison: Comparison, name: str, cell: Cell, metric: str) -> Row:
    row: Row = {}
    for share in SHARES:
        level = comparison.level(name, cell, metric, share)
        label = f"{metric}_p{share * 100:g}_ms"
        row[label] = None if level is None else _ms(level)
        found = comparison.figure(name, cell, metric, share) if share in WITH_INTERVAL else None
        few = comparison.shortage((name,), cell, metric, share)
        if found is not None and found.high > found.low and few is None:
            row |= {f"{label}_low": _ms(found.low), f"{label}_high": _ms(found.high)}
    if name in comparison.ours():
        for share in WITH_INTERVAL:
            told = comparison.against_better(name, cell, metric, share)
            if told is not None:
                label = f"{metric}_p{share * 100:g}_ratio"
                row[f"{label}_to"] = told.connector
                row[label] = round(told.ratio.figure, 4)
                if comparison.shortage((name, told.connector), cell, metric, share) is None:
                    low, high = round(told.ratio.low, 4), round(told.ratio.high, 4)
                    row |= {f"{label}_low": low, f"{label}_high": high}
    return row


def _side(comparison: Comparison, name: str, cell: Cell, side: str) -> Row:
    costs = comparison.costs
    steps, cpu = costs.steps(name, cell, side), costs.cpu_share(name, cell, side)
    idle_step = costs.hooks_per_idle_step(name, cell, side)
    hooks = {
        "hooks_ms_per_request": costs.hooks_per_request(name, cell, side),
        "hooks_cpu_ms_per_request": costs.hooks_per_request(name, cell, side, cpu=True),
        "busy_hooks_ms_per_request": costs.busy_hooks_per_request(name, cell, side),
        "busy_hooks_cpu_ms_per_request": costs.busy_hooks_per_request(name, cell, side, cpu=True),
    }
    return {
        **{f"{side}_{what}": None if seconds is None else _ms(seconds) for what, seconds in hooks.items()},
        f"{side}_hooks_us_per_idle_step": None if idle_step is None else round(idle_step * 1e6, 2),
        f"{side}_steps_late_p50_ms": None if steps is None else _ms(steps.p50),
        f"{side}_steps_late_p95_ms": None if steps is None else _ms(steps.p95),
        f"{side}_busy_cores": None if cpu is None else round(cpu, 3),
    }


def _place(comparison: Comparison) -> Any:
    order = {name: position for position, name in enumerate(comparison.connectors)}
    return lambda name: order.get(name, len(order))


def _rounded(share: float) -> float:
    return round(share, 4)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
