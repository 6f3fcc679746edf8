"""The pictures of a comparison, drawn with matplotlib: as SVG for the report, as PNG for a README."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from kvferry.bench.analysis import Comparison
from kvferry.bench.connectors import BASELINE, CONNECTORS
from kvferry.bench.costs import SIDES
from kvferry.bench.grid import Cell, tokens_text
from kvferry.bench.phases import PHASES
from kvferry.bench.svg import slim

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#1f2933"
FAINT = "#7b8794"
GRID = "#e4e7eb"
# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = {
    "ferry-push": "#0072b2",
    "ferry-pull": "#009e73",
    "vllm-push": "#e69f00",
    "vllm-pull": "#d55e00",
    "vllm-push-sync": "#e69f00",
    "vllm-pull-sync": "#d55e00",
    BASELINE: "#7b8794",
}
MARKERS = {
    "ferry-pull": "D",
    "vllm-push": "s",
    "vllm-pull": "^",
    "vllm-push-sync": "s",
    "vllm-pull-sync": "^",
}
# What would be there without any hand-over is grey and blue; what the hand-over adds is warm.
PHASE_COLOURS = {
    "send": "#cbd2d9",
    "queue": "#9aa5b1",
    "prefill": "#616e7c",
    "registration": "#8e3b46",
    "match": "#c1443c",
    "write": "#e07a3f",
    "read": "#a8622a",
    "notice": "#f2b134",
    "transfer": "#e07a3f",
    "wait": "#f6dd8f",
    "first step": "#74a9cf",
    "answer": "#c3d9e8",
}
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "figure.facecolor": "white",
}
PNG_DOTS_PER_INCH = 160


def load_figure(comparison: Comparison, metric: str) -> Figure:
    """A metric over the load: a column per prompt length, the median above and p95 below."""
    lengths = sorted({cell.input_tokens for cell in comparison.cells})
    shares = (0.5, 0.95)
    figure = Figure(figsize=(1.2 + 2.6 * len(lengths), 5.4), layout="constrained")
    panels = figure.subplots(len(shares), len(lengths), squeeze=False)
    for row, share in enumerate(shares):
        for column, tokens in enumerate(lengths):
            axes = panels[row][column]
            over_load(axes, comparison, metric, share, tokens)
            if row == 0:
                axes.set_title(f"{tokens_text(tokens)} tokens")
            if column == 0:
                axes.set_ylabel(f"p{share * 100:g}, ms")
            if row == len(shares) - 1:
                axes.set_xlabel("requests/s")
    _legend(figure, comparison.connectors)
    return figure


def over_load(axes: Axes, comparison: Comparison, metric: str, share: float, tokens: int) -> None:
    """One line per connector over the rates of one prompt length, with 95 % intervals of enough requests."""
    rates = sorted({cell.rate for cell in comparison.cells if cell.input_tokens == tokens})
    width = 0.05
    for index, name in enumerate(comparison.connectors):
        shift = (index - (len(comparison.connectors) - 1) / 2) * width
        points = [
            (Cell(rate, tokens), position + shift, found)
            for position, rate in enumerate(rates)
            if (found := comparison.figure(name, Cell(rate, tokens), metric, share)) is not None
        ]
        if not points:
            continue
        heights = np.array([one.figure for _, _, one in points]) * 1000
        spread = np.array([[one.figure - one.low, one.high - one.figure] for _, _, one in points]).T * 1000
        spread *= [comparison.shortage((name,), cell, metric, share) is None for cell, _, _ in points]
        axes.errorbar(
            [at for _, at, _ in points],
            heights,
            yerr=np.maximum(spread, 0),
            color=COLOURS[name],
            marker=MARKERS.get(name, "o"),
            markersize=5,
            linewidth=1.8,
            elinewidth=1.1,
            linestyle=_dashes(name),
        )
    axes.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
    axes.set_xlim(-0.4, len(rates) - 0.6)
    # Room for the highest marker.
    axes.set_ylim(0, axes.get_ylim()[1] * 1.05)


def phases_figure(comparison: Comparison, cells: Sequence[Cell]) -> Figure:
    """Where the mean time to first token goes: a bar per connector, a panel per cell."""
    rows = max(1, len(comparison.connectors))
    figure = Figure(figsize=(11, 0.9 + len(cells) * (0.7 + 0.42 * rows)), layout="constrained")
    panels = figure.subplots(len(cells), 1, squeeze=False)
    for panel, cell in zip(panels[:, 0], cells, strict=True):
        phase_bars(panel, comparison, cell)
        panel.set_title(f"{cell.name} tokens (requests/s x tokens per prompt)")
    panels[-1][0].set_xlabel("mean ms from the moment a request is due until its first token")
    _phase_legend(figure, comparison, cells)
    return figure


def phase_bars(axes: Axes, comparison: Comparison, cell: Cell) -> None:
    """One stacked bar per connector."""
    names = [name for name in comparison.connectors if comparison.phases(name, cell)]
    longest = max((sum(comparison.phases(name, cell).values()) for name in names), default=1.0) * 1000
    for row, name in enumerate(names):
        left = 0.0
        for phase, seconds in comparison.phases(name, cell).items():
            width = seconds * 1000
            axes.barh(row, width, left=left, height=0.62, color=PHASE_COLOURS[phase], edgecolor="white")
            if width > longest * 0.045:
                ink = _ink_on(PHASE_COLOURS[phase])
                axes.text(
                    left + width / 2, row, f"{width:.0f}", ha="center", va="center", color=ink, fontsize=9
                )
            left += width
        axes.text(left + longest * 0.008, row, f"{left:.0f} ms", va="center", fontsize=9, fontweight="bold")
    axes.set_yticks(range(len(names)), [CONNECTORS[name].label for name in names])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(0, longest * 1.1)
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")


def costs_figure(comparison: Comparison, cell: Cell) -> Figure:
    """What the connectors cost the engines: hooks per request, late steps, idle CPU."""
    figure = Figure(figsize=(11, 1.2 + 0.5 * max(2, len(comparison.connectors))), layout="constrained")
    panels = figure.subplots(1, 3)
    hooks = {
        (name, side): _milliseconds(comparison.costs.hooks_per_request(name, cell, side))
        for name in comparison.connectors
        for side in SIDES
    }
    late = {
        (name, side): _milliseconds(
            steps.p95 if (steps := comparison.costs.steps(name, cell, side)) else None
        )
        for name in comparison.connectors
        for side in SIDES
    }
    idle = {
        (name, side): None if (share := comparison.costs.idle_share(name, side)) is None else share * 100
        for name in comparison.connectors
        for side in SIDES
    }
    _side_bars(panels[0], comparison.connectors, hooks, f"Connector hooks, ms per request, {cell.name}")
    _side_bars(panels[1], comparison.connectors, late, f"Late steps, p95 ms, {cell.name}")
    _side_bars(panels[2], comparison.connectors, idle, "Idle engine, % of a core")
    for panel in panels[1:]:
        panel.set_yticklabels([])
    handles = [
        Patch(color=FAINT, label="prefill engine"),
        Patch(color=FAINT, alpha=0.45, label="decode engine"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    return figure


def summary_figure(comparison: Comparison, title: str) -> Figure:
    """The picture for a README: both latencies at the longest prompts, and where the time goes."""
    tokens = max(cell.input_tokens for cell in comparison.cells)
    busiest = max(cell for cell in comparison.cells if cell.input_tokens == tokens)
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=(1.15, 1))
    above, below = parts
    left, middle, right = above.subplots(1, 3)
    over_load(left, comparison, "ttft", 0.5, tokens)
    left.set_title("Time to first token, p50")
    over_load(middle, comparison, "ttft", 0.95, tokens)
    middle.set_title("Time to first token, p95")
    over_load(right, comparison, "tpot", 0.5, tokens)
    right.set_title("Time per output token, p50")
    left.set_ylabel("ms")
    for axes in (left, middle, right):
        axes.set_xlabel(f"requests/s of {tokens_text(tokens)} tokens")
    bars = below.subplots()
    phase_bars(bars, comparison, busiest)
    bars.set_title(f"Where the time to first token goes, mean ms, at {busiest.rate:g} requests/s")
    above.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=12)
    _legend(above, comparison.connectors)
    _phase_legend(below, comparison, [busiest])
    return figure


@contextmanager
def styled() -> Iterator[None]:
    """Draw and save inside of this: it sets fonts and colours, and puts matplotlib's own back."""
    with mpl.rc_context(STYLE):
        yield


def as_svg(figure: Figure, salt: str) -> str:
    """The figure as an SVG element for a page. `salt` keeps its ids apart from those of other figures."""
    with mpl.rc_context({"svg.hashsalt": salt}):
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    element = text[text.index("<svg") :]
    # Every part has a name, the same in every figure; only what is referred to keeps it.
    used = set(re.findall(r"#([\w-]+)", element))
    element = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", element)
    return slim(element.replace("<svg ", '<svg role="img" style="max-width:100%;height:auto" ', 1), salt)


def save_png(figure: Figure, path: Path) -> None:
    """Write the figure as a picture."""
    figure.savefig(path, format="png", dpi=PNG_DOTS_PER_INCH)


def _side_bars(
    axes: Axes, names: Sequence[str], values: Mapping[tuple[str, str], float | None], title: str
) -> None:
    height = 0.36
    longest = max((value for value in values.values() if value is not None), default=1.0) or 1.0
    for row, name in enumerate(names):
        for offset, side in ((-height / 2, "prefill"), (height / 2, "decode")):
            value = values.get((name, side))
            if value is None:
                continue
            alpha = 1.0 if side == "prefill" else 0.45
            axes.barh(row + offset, value, height=height, color=COLOURS[name], alpha=alpha)
            axes.text(value + longest * 0.015, row + offset, _short(value), va="center", fontsize=8.5)
    axes.set_yticks(range(len(names)), [CONNECTORS[name].label for name in names])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, longest * 1.2)
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    axes.set_title(title, fontsize=9.5)


def _legend(figure: Any, names: Sequence[str]) -> None:
    handles = [
        Line2D(
            [],
            [],
            color=COLOURS[name],
            marker=MARKERS.get(name, "o"),
            linestyle=_dashes(name),
            linewidth=1.8,
            label=CONNECTORS[name].label,
        )
        for name in names
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=max(1, len(handles)))


def _phase_legend(figure: Any, comparison: Comparison, cells: Sequence[Cell]) -> None:
    noted = {
        phase for name in comparison.connectors for cell in cells for phase in comparison.phases(name, cell)
    }
    handles = [Patch(color=PHASE_COLOURS[phase], label=phase) for phase in PHASES if phase in noted]
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), columnspacing=1.2)


def _dashes(name: str) -> Literal["-", "--"]:
    return "--" if CONNECTORS[name].extra else "-"


def _ink_on(colour: str) -> str:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 140 else INK


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"
