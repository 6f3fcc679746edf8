"""The self-test's oracle and its late device: what makes a wrong transfer visible."""

from __future__ import annotations

import multiprocessing

import pytest

from kvferry.connector.selftest_memory import (
    BLOCK_BYTES,
    STALE,
    UNTOUCHED,
    Difference,
    LateThread,
    Memory,
    compare_target,
    content,
)
from kvferry.connector.selftest_peer import serve

BLOCKS = 8
TARGETS = [6, 1, 3]
SEED = 5
ORDERS = ["LBHNC", "BLHNC", "BHLNC"]


def received(order: str) -> Memory:
    """A consumer's memory after a right transfer."""
    memory = Memory(order, BLOCKS, "cpu", UNTOUCHED)
    memory.view[:, TARGETS] = content(SEED, len(TARGETS))
    return memory


@pytest.mark.parametrize("order", ORDERS)
def test_a_right_transfer_has_no_difference(order: str) -> None:
    assert compare_target(received(order), TARGETS, SEED) == Difference(0, 0)


@pytest.mark.parametrize("order", ORDERS)
def test_one_wrong_byte_and_one_stray_byte_are_counted(order: str) -> None:
    memory = received(order)
    memory.view[2, TARGETS[1], 1, 7, 9] ^= 1
    memory.view[0, 0, 0, 0, 0] ^= 1
    assert compare_target(memory, TARGETS, SEED) == Difference(1, 1)


def test_stale_or_swapped_blocks_are_wrong() -> None:
    memory = received("LBHNC")
    memory.view[:, TARGETS[0]] = STALE
    assert compare_target(memory, TARGETS, SEED).wrong_bytes > BLOCK_BYTES * 0.9
    assert compare_target(received("LBHNC"), TARGETS[::-1], SEED).wrong_bytes > BLOCK_BYTES
    assert compare_target(received("LBHNC"), TARGETS, SEED + 1).wrong_bytes > BLOCK_BYTES


@pytest.mark.parametrize("order", ORDERS)
def test_the_description_names_where_each_element_lies(order: str) -> None:
    memory = Memory(order, BLOCKS, "cpu", 0)
    spec = memory.describe()
    group = spec.groups[0]
    assert group.block_bytes == BLOCK_BYTES
    assert spec.regions[0].bytes == BLOCKS * BLOCK_BYTES
    layer, block, head, token = 2, 5, 1, 3
    address = group.planes[layer].address + block * group.block_stride
    address += head * group.head_stride + token * group.token_stride
    assert address == memory.view[layer, block, head, token].data_ptr()


def test_the_late_thread_fills_in_order_and_says_when() -> None:
    memory = Memory("LBHNC", BLOCKS, "cpu", STALE)
    device = LateThread(delay_seconds=3600)
    values = content(SEED, 2)
    events = [device.fill(memory, [4], values[:, :1]), device.fill(memory, [2], values[:, 1:])]
    assert not any(ready() for ready in events)
    assert bool((memory.view == STALE).all())
    device.close()
    assert all(ready() for ready in events)
    assert bool((memory.view[:, [4, 2]] == values).all())


def test_the_consumer_process_ends_with_its_pipe() -> None:
    ours, theirs = multiprocessing.Pipe()
    ours.close()
    serve(theirs)
    theirs.close()
