"""Stamps: they stand where the cache's description says, and every page that is not right is counted."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import pytest

from kvferry.layout.descriptors import expand
from kvferry.layout.plan import plan
from kvferry.layout.runs import Runs
from kvferry.microbench.cells import LAYOUTS, Shape
from kvferry.microbench.memory import Cache, Memory

LAYERS = 3
PAGE_BYTES = 256
BLOCKS = 10
SEED = 7


def made(order: str) -> tuple[Memory, Cache]:
    shape = Shape(order, PAGE_BYTES, LAYERS)
    memory = Memory(BLOCKS * shape.block_bytes)
    return memory, Cache(memory, shape)


def copied(source: Cache, target: Cache, blocks: Sequence[int], into: Sequence[int]) -> Runs:
    """The runs of a whole transfer."""
    joint = plan(source.spec, target.spec)
    return expand(joint, 0, np.array(blocks), np.array(into))


def move(runs: Runs) -> None:
    for source, target, size in zip(runs.source, runs.target, runs.length, strict=True):
        ctypes.memmove(int(target), int(source), int(size))


@pytest.mark.parametrize("order", LAYOUTS)
@pytest.mark.parametrize("into", LAYOUTS)
def test_what_a_transfer_carries_is_right_and_what_it_leaves_out_is_counted(order: str, into: str) -> None:
    (kept, source), (kept_too, target) = made(order), made(into)
    blocks, targets = [4, 0, 7], [1, 9, 3]
    source.stamp(blocks, SEED)
    assert target.wrong_pages(targets, SEED) == LAYERS * len(targets)
    runs = copied(source, target, blocks, targets)
    move(Runs(runs.source[1:], runs.target[1:], runs.length[1:]))
    assert target.wrong_pages(targets, SEED) == int(runs.length[0]) // PAGE_BYTES
    move(runs)
    assert target.wrong_pages(targets, SEED) == 0
    assert kept.region.bytes == kept_too.region.bytes == BLOCKS * LAYERS * PAGE_BYTES


def test_the_ends_of_a_page_are_stamped_and_nothing_else() -> None:
    memory, cache = made("LBHNC")
    cache.stamp([2], SEED)
    changed = np.flatnonzero(memory.words) * 8
    starts = [layer * BLOCKS * PAGE_BYTES + 2 * PAGE_BYTES for layer in range(LAYERS)]
    assert changed.tolist() == sorted(at for start in starts for at in (start, start + PAGE_BYTES - 8))


def test_blocks_in_another_order_and_other_seeds_are_wrong() -> None:
    _, cache = made("BLHNC")
    cache.stamp([4, 0, 7], SEED)
    assert cache.wrong_pages([4, 0, 7], SEED) == 0
    assert cache.wrong_pages([4, 7, 0], SEED) == 2 * LAYERS
    assert cache.wrong_pages([4, 0, 7], SEED + 1) == 3 * LAYERS


@pytest.mark.parametrize("order", LAYOUTS)
def test_one_damaged_end_is_one_wrong_page(order: str) -> None:
    memory, cache = made(order)
    cache.stamp(range(BLOCKS), SEED)
    cache.damage(6)
    assert cache.wrong_pages(range(BLOCKS), SEED) == 1
    memory.words[-1] ^= np.uint64(1)
    assert cache.wrong_pages(range(BLOCKS), SEED) == 2


def test_memory_starts_at_a_page_of_the_machine_and_copies_its_half() -> None:
    memory = Memory(1 << 16)
    assert memory.region.address % 4096 == 0
    memory.words[0] = 5
    copied_bytes, seconds = memory.copy_seconds()
    assert copied_bytes == 1 << 15
    assert seconds > 0
    assert memory.words[1 << 12] == 5
