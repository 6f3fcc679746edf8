"""Order, time and identity of a comparison."""

from __future__ import annotations

import msgspec
import pytest

from kvferry.bench.connectors import BASELINE
from kvferry.bench.grid import GRIDS, Cell
from kvferry.bench.plan import (
    CELL_SECONDS_MAX,
    Session,
    estimate_seconds,
    fitting_cell_seconds,
    requests_in,
    sessions,
)
from kvferry.errors import UsageError
from tests.support.bench_results import options


def test_every_connector_meets_every_cell_once_per_repeat() -> None:
    made = options(repeats=3)
    listed = [session for session in sessions(made) if session.connector != BASELINE]
    met = [(one.repeat, one.connector, cell) for one in listed for cell in one.cells]
    assert len(met) == len(set(met)) == 3 * 3 * 3
    assert {connector for _, connector, _ in met} == set(made.connectors)


def test_each_repeat_begins_with_another_connector() -> None:
    listed = sessions(options(repeats=3, baseline=False))
    order = [[one.connector for one in listed if one.repeat == repeat] for repeat in range(3)]
    assert order == [
        ["ferry-push", "vllm-push", "vllm-pull"],
        ["vllm-push", "vllm-pull", "ferry-push"],
        ["vllm-pull", "ferry-push", "vllm-push"],
    ]


def test_within_a_repeat_the_cells_come_in_one_order_for_all() -> None:
    cells = tuple((cell.rate, cell.input_tokens) for cell in GRIDS["published"].cells)
    listed = sessions(options(repeats=2, cells=cells, baseline=False))
    orders = {(one.repeat, one.cells) for one in listed}
    assert len(orders) == 2
    assert len({cells for _, cells in orders}) == 2


def test_the_baseline_runs_the_largest_cell_only() -> None:
    listed = [session for session in sessions(options()) if session.connector == BASELINE]
    assert [session.cells for session in listed] == [(Cell(8, 16384),)] * 2
    assert not [one for one in sessions(options(baseline=False)) if one.connector == BASELINE]


@pytest.mark.parametrize("grid", ["quick", "published"])
def test_a_grid_fits_into_its_time_with_three_connectors_and_the_baseline(grid: str) -> None:
    chosen = GRIDS[grid]
    cells = tuple((cell.rate, cell.input_tokens) for cell in chosen.cells)
    listed = sessions(options(cells=cells, repeats=chosen.repeats))
    seconds = fitting_cell_seconds(listed, chosen.minutes_max)
    assert seconds >= 8
    assert estimate_seconds(listed, seconds) <= chosen.minutes_max * 60


def test_much_time_does_not_make_cells_endless_and_too_little_is_refused() -> None:
    listed = sessions(options())
    assert fitting_cell_seconds(listed, 10_000) == CELL_SECONDS_MAX
    with pytest.raises(UsageError, match=r"this takes at least . minutes and may take 1"):
        fitting_cell_seconds(listed, 1)


def test_a_cell_sends_at_least_two_requests() -> None:
    assert requests_in(Cell(8, 1024), 10.0) == 80
    assert requests_in(Cell(0.1, 1024), 3.0) == 2


def test_longer_cells_take_longer() -> None:
    session = [Session(0, "ferry-push", (Cell(4, 1024),))]
    assert estimate_seconds(session, 20.0) - estimate_seconds(session, 10.0) == pytest.approx(10.0)


def test_options_survive_a_file() -> None:
    made = options(engines={"preset": "x", "emulator.layouts": ["LBHNC"], "n": 1})
    again = msgspec.json.decode(msgspec.json.encode(made), type=type(made))
    assert again == made
