"""The report's tables of what connectors cost the engines."""

from __future__ import annotations

from html import escape

from kvferry.bench.analysis import Comparison
from kvferry.bench.connectors import BASELINE, CONNECTORS, PUSH
from kvferry.bench.costs import SIDES
from kvferry.bench.grid import Cell
from kvferry.bench.markup import by_load, folded, table
from kvferry.bench.results import HookCost

SHOWN_SECONDS_MIN = 5e-6
"""Hooks that take less per request are not shown."""
_PARTS = {
    "http": "HTTP",
    "main": "main thread",
    "kvferry": "kvferry's threads",
    "emulator": "emulated device",
    "other": "other threads",
}


def hidden(comparison: Comparison) -> str:
    """What share of the KV our push had posted when prefill ended, per cell."""

    def share(cell: Cell) -> str:
        found = comparison.costs.hidden_share(PUSH, cell)
        return "" if found is None else f"<td>{found:.0%}</td>"

    return by_load(comparison.cells, share)


def transfers(comparison: Comparison) -> str:
    """What vLLM's connectors and kvferry count of their transfers, per answered request."""
    cell = comparison.longest_quiet_cell
    rows = []
    for name in comparison.connectors:
        runs = comparison.runs_of(name, cell)
        requests = sum(len(run.load.records) - len(run.load.failures) for run in runs)
        for side in SIDES:
            for metric, value in sorted(comparison.costs.counted(name, cell, side).items()):
                row = [CONNECTORS[name].label, side, metric, f"{value / requests:,.4g}"]
                rows += [row] if requests else []
    if not rows:
        return ""
    head = ["connector", "engine", "metric", "per request"]
    return folded(f"What the engines count at {cell.name}", table(head, rows, labels=3))


def hooks(comparison: Comparison) -> str:
    """Per connector and engine: what its hooks cost for a request, and what in a step that has none."""
    cell, costs = comparison.longest_quiet_cell, comparison.costs
    rows = []
    for name in comparison.connectors:
        for side in SIDES:
            busy = costs.busy_hooks_per_request(name, cell, side)
            if busy is None:
                continue
            computing = costs.busy_hooks_per_request(name, cell, side, cpu=True) or 0.0
            idle = costs.hooks_per_idle_step(name, cell, side)
            every = costs.hooks_per_request(name, cell, side) or 0.0
            row = [CONNECTORS[name].label, side, f"{busy * 1000:.3f}", f"{computing * 1000:.3f}"]
            rows.append([*row, "" if idle is None else f"{idle * 1e6:.1f}", f"{every * 1000:.3f}"])
    if not rows:
        return ""
    head = ["connector", "engine", "ms per request", "computing", "us per idle step", "with idle calls, ms"]
    return f"<p>Hooks at {escape(cell.name)}:</p>{table(head, rows)}"


def costliest_hooks(comparison: Comparison) -> str:
    """The hooks that take most of the main thread's time, one by one."""
    cell = comparison.longest_quiet_cell
    rows = []
    for name in comparison.connectors:
        requests = sum(len(run.load.records) for run in comparison.runs_of(name, cell))
        for side in SIDES:
            costliest = comparison.costs.hook_costs(name, cell, side)[:4]
            rows += [
                [CONNECTORS[name].label, side, *_hook(hook, requests)]
                for hook in costliest
                if hook.seconds / requests >= SHOWN_SECONDS_MIN
            ]
    if not rows:
        return ""
    head = ["connector", "engine", "hook", "ms per request", "computing"]
    head += ["calls", "us per call", "idle calls", "us per idle call"]
    return folded(f"The costliest hooks at {cell.name}", table(head, rows, labels=3))


def processor(comparison: Comparison) -> str:
    """Where an engine's processor time goes, by what its threads do."""
    cell = comparison.busiest_cell
    found = {
        (name, side): parts
        for name in [*comparison.connectors, BASELINE]
        for side in SIDES
        if (parts := comparison.costs.parts_per_request(name, cell, side))
    }
    if not found:
        return ""
    columns = list(dict.fromkeys(part for parts in found.values() for part in parts))
    rows = [
        [
            CONNECTORS[name].label,
            side,
            *(f"{parts.get(part, 0.0) * 1000:.1f}" for part in columns),
            f"{sum(parts.values()) * 1000:.1f}",
        ]
        for (name, side), parts in found.items()
    ]
    head = ["connector", "engine", *(_PARTS.get(part, part) for part in columns), "all"]
    words = f"Processor time per request at {cell.name}, in ms, by what an engine's threads do:"
    return f"<p>{escape(words)}</p>{table(head, rows)}"


def jitter(comparison: Comparison) -> str:
    """How late steps were at the cell that asks most, under each connector and without any."""
    cell = comparison.busiest_cell
    rows = []
    for name in [*comparison.connectors, BASELINE]:
        for side in SIDES:
            steps = comparison.costs.steps(name, cell, side)
            if steps is None:
                continue
            late = (steps.p50, steps.p95, steps.p99, steps.max)
            figures = [f"{seconds * 1000:.2f}" for seconds in (steps.modelled, *late)]
            rows.append([CONNECTORS[name].label, side, f"{steps.count:,}", *figures])
    if not rows:
        return '<p class="faint">Not measured.</p>'
    head = ["connector", "engine", "steps", "modelled, ms", "late p50", "p95", "p99", "most"]
    return f"<p>At {escape(cell.name)}, the repeat in the middle:</p>{table(head, rows)}"


def _hook(hook: HookCost, requests: int) -> list[str]:
    """Its calls that had to do with a request, then those that had not."""
    return [
        f"{hook.side}.{hook.hook}",
        f"{hook.busy_seconds / requests * 1000:.3f}",
        f"{hook.busy_cpu_seconds / requests * 1000:.3f}",
        f"{hook.busy_count / requests:.1f}",
        f"{hook.busy_seconds / hook.busy_count * 1e6:.1f}" if hook.busy_count else "",
        f"{hook.idle_count / requests:.1f}",
        f"{hook.idle_seconds / hook.idle_count * 1e6:.1f}" if hook.idle_count else "",
    ]
