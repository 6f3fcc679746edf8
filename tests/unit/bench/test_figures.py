"""The plots show the figures: read back from matplotlib's own objects, without drawing."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib")

from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from kvferry.bench import figures
from kvferry.bench.analysis import Comparison
from kvferry.bench.connectors import CONNECTORS
from kvferry.bench.grid import Cell
from kvferry.bench.phases import PHASES
from tests.support.bench_results import NAMES, World, imagined, options

BUSY, LONG = Cell(8, 16384), Cell(1, 16384)


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return Comparison(imagined())


def test_every_connector_has_its_line_through_its_figures(comparison: Comparison) -> None:
    axes = Figure().subplots()
    figures.over_load(axes, comparison, "ttft", 0.5, 16384)
    bars = [one for one in axes.containers if isinstance(one, ErrorbarContainer)]
    assert len(bars) == len(NAMES)
    for container, name in zip(bars, NAMES, strict=True):
        line = container.lines[0]
        found = [comparison.figure(name, cell, "ttft", 0.5) for cell in (LONG, BUSY)]
        assert list(line.get_ydata()) == pytest.approx([one.figure * 1000 for one in found if one])
        assert line.get_color() == figures.COLOURS[name]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "8"]
    assert axes.get_ylim()[0] == 0


def test_intervals_are_drawn_around_the_figures(comparison: Comparison) -> None:
    axes = Figure().subplots()
    figures.over_load(axes, comparison, "ttft", 0.95, 16384)
    container = next(one for one in axes.containers if isinstance(one, ErrorbarContainer))
    ((few, enough), *_) = [collection.get_segments() for collection in container.lines[2]]
    found = comparison.figure(NAMES[0], BUSY, "ttft", 0.95)
    assert found is not None
    assert sorted(point[1] for point in enough) == pytest.approx([found.low * 1000, found.high * 1000])
    # 16 requests have no interval of a 95th percentile, so its point has no bar.
    assert len({point[1] for point in few}) == 1


def test_phases_stand_end_to_end_in_their_order(comparison: Comparison) -> None:
    axes = Figure().subplots()
    figures.phase_bars(axes, comparison, BUSY)
    bars = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        CONNECTORS[name].label for name in NAMES
    ]
    for row, name in enumerate(NAMES):
        own = [bar for bar in bars if row - 0.5 < bar.get_y() + 0.31 < row + 0.5]
        expected = comparison.phases(name, BUSY)
        assert [bar.get_width() for bar in own] == pytest.approx(
            [value * 1000 for value in expected.values()]
        )
        ends = [0.0, *(bar.get_x() + bar.get_width() for bar in own)]
        assert [bar.get_x() for bar in own] == pytest.approx(ends[:-1])


def test_every_phase_and_connector_has_a_colour() -> None:
    assert set(figures.PHASE_COLOURS) == set(PHASES)
    assert set(figures.COLOURS) == set(CONNECTORS)


def test_synchronous_posting_is_dashed() -> None:
    made = options(connectors=("vllm-push", "vllm-push-sync"), cells=((1, 1024),), baseline=False)
    world = World(handover={"vllm-push": 0.1, "vllm-push-sync": 0.1})
    axes = Figure().subplots()
    figures.over_load(axes, Comparison(imagined(world, made)), "ttft", 0.5, 1024)
    styles = [one.lines[0].get_linestyle() for one in axes.containers if isinstance(one, ErrorbarContainer)]
    assert styles == ["-", "--"]
