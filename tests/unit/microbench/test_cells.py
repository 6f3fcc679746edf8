"""Which hand-overs are measured: all combinations that fit, and errors that name the option."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.errors import UsageError
from kvferry.microbench.cells import Cell, Grid, Shape, make_grid

MIB = 1 << 20


def grid(**changed: Any) -> Grid:
    given: dict[str, Any] = {
        "blocks": (16, 64),
        "pages": (2048,),
        "layers": 64,
        "layouts": ("LBHNC", "BLHNC"),
        "fragmentations": ("contiguous", "scattered"),
        "concurrencies": (1, 4),
        "cache_bytes": 64 * MIB,
    }
    return make_grid(**given | changed)


def test_a_cell_counts_what_all_its_transfers_move() -> None:
    cell = Cell(Shape("LBHNC", 2048, 64), 16, "scattered", 4)
    assert (cell.bytes, cell.pages, cell.tokens) == (4 * 16 * 64 * 2048, 4 * 16 * 64, 256)
    assert cell.name == "LBHNC 2048 B scattered 16 blocks x 4"


def test_every_combination_that_leaves_half_of_the_cache_is_there_once() -> None:
    """64 blocks of 128 KiB, four times, are 32 MiB: they fit into 64 MiB and not into one byte less."""
    whole = grid()
    assert len(whole.cells) == len(set(whole.cells)) == 16
    assert whole.left_out == 0
    less = grid(cache_bytes=64 * MIB - 1)
    assert less.left_out == 4
    assert {(cell.blocks, cell.concurrency) for cell in set(whole.cells) - set(less.cells)} == {(64, 4)}


def test_shapes_are_named_once_each() -> None:
    assert grid().shapes == (Shape("LBHNC", 2048, 64), Shape("BLHNC", 2048, 64))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"blocks": (0,)}, "--blocks must be from 1 to 65536, not 0"),
        ({"concurrencies": (4096,)}, "--concurrency must be from 1 to 1024, not 4096"),
        ({"layers": 0}, "--layers must be from 1 to 1024, not 0"),
        ({"pages": (2000,)}, "--pages must be multiples of 128 bytes"),
        ({"cache_bytes": MIB}, "--cache-mib must be at least 4 for the smallest transfer"),
    ],
)
def test_impossible_grids_say_what_is_possible(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match="--") as caught:
        grid(**changed)
    assert str(caught.value).startswith(said)
