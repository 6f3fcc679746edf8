"""The grids, and cells from the command line."""

from __future__ import annotations

import pytest

from kvferry.bench.grid import GRIDS, Cell, parse_cells, tokens_text
from kvferry.errors import UsageError


def test_the_published_grid_has_its_sixteen_cells_three_times_within_an_hour() -> None:
    grid = GRIDS["published"]
    assert {cell.rate for cell in grid.cells} == {1, 2, 4, 8}
    assert {cell.input_tokens for cell in grid.cells} == {1024, 4096, 8192, 16384}
    assert (len(set(grid.cells)), grid.repeats, grid.minutes_max) == (16, 3, 60)


def test_the_quick_grid_has_four_of_these_cells_within_ten_minutes() -> None:
    grid = GRIDS["quick"]
    assert len(grid.cells) == 4
    assert set(grid.cells) < set(GRIDS["published"].cells)
    assert grid.minutes_max == 10


def test_cells_are_read_in_tokens_or_thousands_of_them() -> None:
    assert parse_cells("8x16k, 1x300,0.5x16k,1x300") == (Cell(0.5, 16384), Cell(1, 300), Cell(8, 16384))
    assert [cell.name for cell in parse_cells("0.5x16k,1x300")] == ["0.5 x 16k", "1 x 300"]


@pytest.mark.parametrize("text", ["8", "8x", "x16k", "0x16k", "8x0", "8x16m", "-1x16"])
def test_a_cell_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=f"--cells must be RATExTOKENS,.*not '{text}'"):
        parse_cells(text)


def test_there_are_cells_and_not_too_many() -> None:
    with pytest.raises(UsageError, match="from 1 to 64 cells, not 0"):
        parse_cells(",")
    with pytest.raises(UsageError, match="from 1 to 64 cells, not 65"):
        parse_cells(",".join(f"{rate}x1k" for rate in range(1, 66)))


def test_tokens_are_short_where_they_are_round() -> None:
    assert (tokens_text(16384), tokens_text(1000)) == ("16k", "1000")
