"""The report as one HTML page that needs nothing else: styles, figures and tables stand in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from kvferry.bench.analysis import Comparison
from kvferry.bench.connectors import BASELINE, CONNECTORS
from kvferry.bench.costs import SIDES
from kvferry.bench.grid import Cell
from kvferry.bench.phases import PHASES
from kvferry.bench.results import HookCost
from kvferry.bench.tables import Row
from kvferry.bench.targets import Target

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1f2933; background: #fff; margin: 0 auto;
  max-width: 1120px; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.6rem; margin: 0 0 .3rem; } h2 { font-size: 1.2rem; margin: 2.4rem 0 .4rem; }
p { max-width: 75ch; margin: .4rem 0 .8rem; } .faint { color: #52606d; }
figure { margin: 1rem 0; } svg text { font-family: system-ui, sans-serif !important; }
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .6rem; text-align: right; border-bottom: 1px solid #e4e7eb; white-space: nowrap; }
th { border-bottom-color: #9aa5b1; } th:first-child, td:first-child, td.text, th.text { text-align: left; }
td.text { white-space: normal; } .scroll { overflow-x: auto; }
.met { color: #18633c; font-weight: 600; } .missed { color: #a61b1b; font-weight: 600; }
.open { color: #52606d; } summary { cursor: pointer; margin: .6rem 0; }
"""
SHOWN_SECONDS_MIN = 5e-6
"""Hooks that take less per request are not shown."""
_CLASSES = {"met": "met", "missed": "missed", "not measured": "open"}


def page(
    comparison: Comparison,
    verdict: str,
    targets: Sequence[Target],
    rows: Sequence[Row],
    pictures: Mapping[str, str],
) -> str:
    """The whole page. `pictures` has SVG elements by the name of their section."""
    parts = [
        "<h1>kvferry and vLLM's own connectors, on emulated engines</h1>",
        f"<p>{escape(verdict)}</p>",
        _method(comparison),
        _section("Targets", "", _targets(targets)),
        _section(
            "Time to first token",
            "From the moment a request is due. Points are medians (above) and 95th percentiles (below) of "
            "all repeats, bars their 95 % intervals.",
            _picture(pictures, "ttft"),
        ),
        _section(
            "Time per output token",
            "After the first one, counted by the usage that the server reports.",
            _picture(pictures, "tpot"),
        ),
        _section("Hand-over", _HANDOVER, _picture(pictures, "handover")),
        _section("Where the time to first token goes", _phase_words(), _picture(pictures, "phases")),
        _section("Posted before prefill ended", _HIDDEN, _hidden(comparison), _transfers(comparison)),
        _section(
            "What it costs the engines",
            _COSTS,
            _picture(pictures, "costs"),
            _hooks(comparison),
            _costliest_hooks(comparison),
        ),
        _section("All figures", "Milliseconds.", _all_figures(rows)),
        _section("How it was run", "", _options(comparison)),
    ]
    inside = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>kvferry bench compare</title><style>{STYLE}</style></head>\n"
        f"<body>\n{inside}\n</body></html>\n"
    )


_HANDOVER = (
    "From the end of prefill on the prefill engine's device to the end of the first decode step on the "
    "decode engine's. It includes the steps that vLLM's asynchronous scheduling had already planned."
)
_HIDDEN = (
    "Share of the KV's bytes that had been posted when prefill ended. vLLM's connectors begin when the "
    "request has ended, so theirs is none."
)
_COSTS = (
    "Hooks run on an engine's main thread. In the picture, calls in steps that move nothing are included; "
    "the table tells them from calls that have to do with a request. A step is late by what it took longer "
    "than its modelled time, the device's wait for it included."
)


def _method(comparison: Comparison) -> str:
    options = comparison.options
    engines = options.engines
    words = (
        "Real vLLM engines, schedulers, connectors and NIXL, real KV memory and bytes; only the GPU's "
        "compute time is emulated. One prefill and one decode engine at a time, prefix caching off, every "
        f"prompt new. {options.output_tokens} output tokens. Requests come at random moments, the same for "
        f"every connector. {options.repeats} interleaved repeats of {options.cell_seconds:g} s per cell. "
        f"Preset {engines.get('preset')}, steps of at most {engines.get('step_tokens')} tokens. The machine "
        "also runs the load generator: ratios count."
    )
    return f'<p class="faint">{escape(words)}</p>'


def _section(title: str, words: str, *content: str) -> str:
    told = f"<p>{escape(words)}</p>" if words else ""
    return f"<h2>{escape(title)}</h2>{told}{''.join(content)}"


def _picture(pictures: Mapping[str, str], name: str) -> str:
    drawn = pictures.get(name)
    return f"<figure>{drawn}</figure>" if drawn else '<p class="faint">Not measured.</p>'


def _targets(targets: Sequence[Target]) -> str:
    if not targets:
        return '<p class="faint">No connector of kvferry took part.</p>'
    rows = "".join(map(_target_row, targets))
    head = "".join(f'<th class="text">{name}</th>' for name in ("target", "limit", "measured", ""))
    return f'<div class="scroll"><table><tr>{head}</tr>{rows}</table></div>'


def _target_row(target: Target) -> str:
    words = (target.what, target.limit, target.figure)
    cells = "".join(f'<td class="text">{escape(one)}</td>' for one in words)
    return f'<tr>{cells}<td class="{_CLASSES[target.verdict]}">{target.verdict}</td></tr>'


def _phase_words() -> str:
    told = "; ".join(f"{name}: {what}" for name, what in PHASES.items())
    return f"What has happened before its phase's turn costs nothing in it. {told[0].upper()}{told[1:]}."


def _hidden(comparison: Comparison) -> str:
    rows = []
    for name in comparison.ours():
        shares = [comparison.costs.hidden_share(name, cell) for cell in comparison.cells]
        cells = ["" if share is None else f"{share:.0%}" for share in shares]
        rows.append([CONNECTORS[name].label, *cells])
    if not rows:
        return ""
    return _table(["requests/s x tokens", *(cell.name for cell in comparison.cells)], rows)


def _transfers(comparison: Comparison) -> str:
    """What vLLM's connectors and kvferry count of their transfers, per answered request."""
    cell = longest_quiet_cell(comparison)
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
    return f"<details><summary>What the engines count at {cell.name}</summary>{_table(head, rows)}</details>"


def _hooks(comparison: Comparison) -> str:
    """Per connector and engine: what its hooks cost for a request, and what in a step that has none."""
    cell, costs = longest_quiet_cell(comparison), comparison.costs
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
    return f"<p>Hooks at {escape(cell.name)}:</p>{_table(head, rows)}"


def _costliest_hooks(comparison: Comparison) -> str:
    cell = longest_quiet_cell(comparison)
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
    return f"<details><summary>The costliest hooks at {cell.name}</summary>{_table(head, rows)}</details>"


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


def longest_quiet_cell(comparison: Comparison) -> Cell:
    """The cell with the longest prompts at the lowest rate: a request's own costs show there."""
    return min(comparison.cells, key=lambda cell: (-cell.input_tokens, cell.rate))


def _all_figures(rows: Sequence[Row]) -> str:
    columns = {
        "TTFT p50": "ttft_p50_ms",
        "p95": "ttft_p95_ms",
        "TPOT p50": "tpot_p50_ms",
        "TPOT p95": "tpot_p95_ms",
        "gap p95": "gap_p95_ms",
        "hand-over p50": "handover_p50_ms",
        "hand-over p95": "handover_p95_ms",
        "busy P": "prefill_busy_cores",
        "busy D": "decode_busy_cores",
    }
    head = ["cell", "connector", "requests", "failed", *columns]
    body = []
    for row in rows:
        cell = Cell(row["rate"], row["input_tokens"])
        found = [row.get(column) for column in columns.values()]
        shown = ["" if value is None else f"{value:,.2f}" for value in found]
        label = CONNECTORS[row["connector"]].label
        body.append([cell.name, label, str(row["requests"]), str(row["failed"]), *shown])
    return _table(head, body) + "<p class='faint'>busy: cores kept busy by the engine during the cell.</p>"


def _options(comparison: Comparison) -> str:
    options = comparison.options
    names = [*options.connectors, *([BASELINE] if options.baseline else [])]
    told: dict[str, Any] = {
        "connectors": ", ".join(CONNECTORS[name].label for name in names),
        "repeats": options.repeats,
        "seconds per cell": options.cell_seconds,
        "output tokens": options.output_tokens,
        "seed": options.seed,
        **options.versions,
        **options.engines,
    }
    rows = [[str(name), str(value)] for name, value in told.items()]
    return _table(["option", "value"], rows, text=True)


def _table(head: Iterable[str], rows: Iterable[Sequence[str]], *, text: bool = False) -> str:
    kind = ' class="text"' if text else ""
    top = "".join(f"<th{kind}>{escape(one)}</th>" for one in head)
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table><tr>{top}</tr>{body}</table></div>'
