"""Block tables: as scattered as they say, and no block in two transfers."""

from __future__ import annotations

from itertools import chain
from random import Random

import pytest

from kvferry.layout.spans import to_spans
from kvferry.microbench.cells import FRAGMENTATIONS, Fragmentation
from kvferry.microbench.placement import place

POOL = 2048


@pytest.mark.parametrize("fragmentation", FRAGMENTATIONS)
@pytest.mark.parametrize(("blocks", "transfers"), [(1, 1), (64, 4), (1024, 1)])
def test_each_transfer_has_its_own_blocks_of_the_pool(
    fragmentation: Fragmentation, blocks: int, transfers: int
) -> None:
    placed = place(fragmentation, POOL, blocks, transfers, Random(1))
    assert [len(one) for one in placed] == [blocks] * transfers
    taken = list(chain(*placed))
    assert len(set(taken)) == blocks * transfers
    assert 0 <= min(taken) <= max(taken) < POOL
    assert placed == place(fragmentation, POOL, blocks, transfers, Random(1))


def test_contiguous_is_one_run_per_transfer() -> None:
    for blocks in place("contiguous", POOL, 64, 4, Random(2)):
        assert len(to_spans(blocks)) == 1


def test_scattered_has_no_neighbours_even_when_sorted() -> None:
    for blocks in place("scattered", POOL, 256, 4, Random(3)):
        assert len(to_spans(blocks)) == len(to_spans(sorted(blocks))) == 256


def test_churned_is_in_between_as_a_pool_after_hours_is() -> None:
    [blocks] = place("churned", POOL, 1024, 1, Random(4))
    assert 512 < len(to_spans(blocks)) < 1024
