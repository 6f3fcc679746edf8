"""Free lists after churn: nothing is lost, the same seed gives the same list, and neighbours are apart."""

from __future__ import annotations

from itertools import pairwise

import pytest
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

from kvferry.emulator.fragmentation import fragment
from kvferry.emulator.options import Fragmentation

BLOCKS = 4096


def churned(kind: Fragmentation, seed: int = 0) -> list[int]:
    free = FreeKVCacheBlockQueue([KVCacheBlock(index) for index in range(BLOCKS)])
    fragment(free, kind, seed)
    assert free.num_free_blocks == BLOCKS
    return [block.block_id for block in free.get_all_free_blocks()]


def neighbours(ids: list[int]) -> int:
    return sum(abs(one - other) == 1 for one, other in pairwise(ids))


@pytest.mark.parametrize("kind", ["none", "shuffled", "churned"])
def test_every_block_is_still_free_once(kind: Fragmentation) -> None:
    assert sorted(churned(kind)) == list(range(BLOCKS))


def test_none_leaves_the_order_alone() -> None:
    assert churned("none") == list(range(BLOCKS))


@pytest.mark.parametrize("kind", ["shuffled", "churned"])
def test_a_seed_decides_the_order(kind: Fragmentation) -> None:
    assert churned(kind, 1) == churned(kind, 1)
    assert churned(kind, 1) != churned(kind, 2)


def test_shuffled_leaves_hardly_any_neighbours() -> None:
    assert neighbours(churned("shuffled")) < BLOCKS // 100


def test_churned_lies_between_fresh_and_shuffled() -> None:
    left = neighbours(churned("churned"))
    assert neighbours(churned("shuffled")) < left < BLOCKS - 1
