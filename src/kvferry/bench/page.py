"""The report as one HTML page that needs nothing else: styles, figures and tables stand in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from kvferry.bench.analysis import HANDOVER, Comparison
from kvferry.bench.circumstances import machine_section
from kvferry.bench.connectors import BASELINE, CONNECTORS
from kvferry.bench.cost_tables import costliest_hooks, hidden, hooks, jitter, processor, transfers
from kvferry.bench.grid import Cell
from kvferry.bench.machine import OTHERS_SHARE_MAX
from kvferry.bench.markup import by_load, folded, table
from kvferry.bench.phases import PHASES
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
.label { text-align: left; } td.text { white-space: normal; } .scroll { overflow-x: auto; }
.met { color: #18633c; font-weight: 600; } .missed { color: #a61b1b; font-weight: 600; }
.open { color: #52606d; } td.group { border-top: 2px solid #9aa5b1; }
.remark { border-left: 4px solid #f2b134; padding-left: .6rem; }
.beside { display: flex; flex-wrap: wrap; gap: .4rem 1.6rem; }
.beside th, .beside td { padding: .28rem .42rem; }
.beside h3 { font-size: .9rem; margin: .6rem 0 .1rem; }
.better { background: #d8f0e0; } .worse { background: #fbdcdc; } summary { cursor: pointer; margin: .6rem 0; }
"""
_CLASSES = {"met": "met", "missed": "missed", "not judged": "open", "not measured": "open"}


def page(
    comparison: Comparison,
    verdict: str,
    targets: Sequence[Target],
    rows: Sequence[Row],
    pictures: Mapping[str, str],
    remarks: Sequence[str] = (),
) -> str:
    """The whole page. `pictures` has SVG elements by the name of their section."""
    parts = [
        "<h1>kvferry and vLLM's own connectors, on emulated engines</h1>",
        f"<p>{escape(verdict)}</p>",
        *(f'<p class="remark">{escape(one[:1].upper() + one[1:])}.</p>' for one in remarks),
        _method(comparison),
        _section("Targets", _TARGETS if len(comparison.ours()) > 1 else "", _targets(targets)),
        _section("Beside the better of vLLM's connectors", _GLANCE, _glance(comparison)),
        _section(
            "Time to first token",
            "From the moment a request is due. Points are medians (above) and 95th percentiles (below) of "
            "all repeats, bars their 95 % intervals where there are enough requests for one.",
            _picture(pictures, "ttft"),
        ),
        _section(
            "Time per output token",
            "After the first one, counted by the usage that the server reports.",
            _picture(pictures, "tpot"),
        ),
        _section("Hand-over", _HANDOVER, _picture(pictures, "handover")),
        _section("Where the time to first token goes", _PHASES, _picture(pictures, "phases"), _phase_words()),
        _section("Posted before prefill ended", _HIDDEN, hidden(comparison), transfers(comparison)),
        _section(
            "What it costs the engines",
            _COSTS,
            _picture(pictures, "costs"),
            hooks(comparison),
            costliest_hooks(comparison),
            processor(comparison),
        ),
        _section("Steps with and without transfers", _JITTER, jitter(comparison)),
        _section("All figures", "Milliseconds.", _all_figures(rows)),
        _section("The machine", _MACHINE, machine_section(comparison)),
        _section("How it was run", "", _options(comparison)),
    ]
    inside = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>kvferry bench compare</title><style>{STYLE}</style></head>\n"
        f"<body>\n{inside}\n</body></html>\n"
    )


_TARGETS = "Those of kvferry push, where a row does not name pull."
_GLANCE = (
    "Our figure over that of vLLM's connector, with its usual posting, which is better in that cell, on the "
    "requests that both have answered. Green and red where the whole 95 % interval is on one side of 1, grey "
    "where there are too few requests or repeats for one; the interval shows where the pointer rests."
)
_JITTER = (
    "By how much steps took longer than their modelled time, the device's wait for them included. What the "
    "machine itself adds stands in the row of the engine without transfers."
)
_HANDOVER = (
    "From the end of prefill on the prefill engine's device to the end of the first decode step on the "
    "decode engine's. It includes the steps that vLLM's asynchronous scheduling had already planned."
)
_PHASES = "What has happened before its phase's turn costs nothing in it: it was hidden."
_HIDDEN = (
    "Share of the KV's bytes that kvferry's push had posted when prefill ended. vLLM's connectors begin when "
    "the request has ended, and so does pull; theirs is none."
)
_MACHINE = (
    "Processor time of the whole machine by who used it, in cores. Others are all processes but the engines "
    "and the load generator, and the kernel's own work; the host is what runs this virtual machine, if one "
    f"does. Where these two take more than {OTHERS_SHARE_MAX:.0%} of all processors' time, it says so above."
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
    told = table(["phase", "its time"], PHASES.items(), prose=True)
    return folded("What each phase is", told)


def _glance(comparison: Comparison) -> str:
    """Our ratios to the better stock connector: a small table per metric, lengths down, rates across."""
    found = []
    for name in comparison.ours():
        for metric, share, title in _GLANCED:

            def ratio(cell: Cell, name: str = name, metric: str = metric, share: float = share) -> str:
                return _ratio(comparison, name, cell, metric, share)

            made = by_load(comparison.cells, ratio)
            found += [f"<div><h3>{CONNECTORS[name].label}, {title}</h3>{made}</div>"] if made else []
    return f'<div class="beside">{"".join(found)}</div>' if found else '<p class="faint">Not measured.</p>'


_GLANCED = (
    ("ttft", 0.5, "TTFT p50"),
    ("ttft", 0.95, "TTFT p95"),
    ("tpot", 0.5, "TPOT p50"),
    (HANDOVER, 0.5, "hand-over p50"),
)


def _ratio(comparison: Comparison, name: str, cell: Cell, metric: str, share: float) -> str:
    told = comparison.against_better(name, cell, metric, share)
    if told is None:
        return ""
    one = told.ratio
    few = comparison.shortage((name, told.connector), cell, metric, share)
    side = ' class="better"' if one.high < 1 else ' class="worse"' if one.low > 1 else ""
    side = side if few is None else ' class="open"'
    interval = f"{one.low:.2f} to {one.high:.2f}" if few is None else f"not judged: {few}"
    hint = escape(f"{CONNECTORS[told.connector].label}, {interval}")
    # Near 1 two digits would hide on which side it is.
    figure = f"{one.figure:.3f}" if abs(one.figure - 1) < 0.0095 else f"{one.figure:.2f}"
    return f'<td{side} title="{hint}">{figure}</td>'


def _all_figures(rows: Sequence[Row]) -> str:
    columns = {
        "ttft_p50_ms": "TTFT p50",
        "ttft_p95_ms": "p95",
        "tpot_p50_ms": "TPOT p50",
        "tpot_p95_ms": "p95",
        "gap_p95_ms": "gap p95",
        "handover_p50_ms": "hand-over p50",
        "handover_p95_ms": "p95",
        "prefill_busy_cores": "busy P",
        "decode_busy_cores": "D",
    }
    head = ["requests", "failed", *columns.values()]
    body, before = "", None
    for row in rows:
        cell = Cell(row["rate"], row["input_tokens"])
        # A cell's name stands before its first connector, under a line.
        name, kind = ("", "") if cell == before else (cell.name, " group")
        labels = (name, CONNECTORS[row["connector"]].label)
        shown = [str(row["requests"]), str(row["failed"]), *(_figure(row.get(column)) for column in columns)]
        texts = "".join(f'<td class="label{kind}">{escape(one)}</td>' for one in labels)
        figures = "".join(f'<td class="{kind.strip()}">{one}</td>' for one in shown)
        body += f"<tr>{texts}{figures}</tr>"
        before = cell
    top = "".join(f'<th class="label">{one}</th>' for one in ("cell", "connector"))
    top += "".join(f"<th>{escape(one)}</th>" for one in head)
    words = "busy: cores kept busy by the engine during the cell."
    return f'<div class="scroll"><table><tr>{top}</tr>{body}</table></div><p class="faint">{words}</p>'


def _figure(value: float | None) -> str:
    """As many digits as tell something, so that the table is not too wide to be read."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


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
    return table(["option", "value"], rows, prose=True)
