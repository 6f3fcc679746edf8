"""Engines of unequal shapes hand KV over: production loops, cores and messages over real memory.

Goal: for every pair of a matrix, each rank of the consumer ends with exactly the KV that it should have and
not a byte else, every rank of the producer lets go at once, and no table has a row left. Method: KV is a
function of layer, head, token and place; one request is computed in two chunks and handed over.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random

import numpy as np
import pytest

from kvferry.handoff import TransferMode
from kvferry.layout.describe import STRIDE_ORDERS
from kvferry.protocol.commands import Received, Released
from kvferry.protocol.limits import Limits
from tests.support.engines import FORMS, Sizes
from tests.support.ranks import World
from tests.support.shaped import ShapedEngine, hand_over

LAYERS = 4
SPLITS = ((4,), (2, 2), (1, 3))
TPS = (1, 2, 4)
LIMITS = Limits(slice_runs=48)
"""Small, so that a request takes several slices."""


def matrix() -> list[tuple[Sizes, Sizes]]:
    """Every pair of parallel sizes and numbers of heads; memory of both sides in turn."""
    random = Random(6)
    pairs = []
    for heads, tp, their_tp, split, their_split in product((1, 2, 4), TPS, TPS, SPLITS, SPLITS):
        model = Sizes(heads=heads, blocks=24, scales=random.random() < 0.3, window=random.choice((0, 0, 5)))
        sides = [
            replace(
                model,
                tp=tp,
                split=split,
                order=random.choice(STRIDE_ORDERS),
                form=random.choice(FORMS),
                block_tokens=random.choice((1, 2, 4)),
            )
            for tp, split in ((tp, split), (their_tp, their_split))
        ]
        ours, theirs = sides
        if model.window and ours.block_tokens % theirs.block_tokens:
            # Of a window whole blocks travel.
            ours, theirs = (
                replace(side, block_tokens=other.block_tokens)
                for side, other in ((ours, theirs), (theirs, ours))
            )
        pairs.append((ours, theirs))
    random.shuffle(pairs)
    return pairs


MATRIX = matrix()


def check(ours: Sizes, theirs: Sizes, seed: int, mode: TransferMode = "push") -> None:
    """Hand one request over, and look at everything."""
    world, random = World(LIMITS, seed), Random(seed)
    producer = ShapedEngine(world, "P", 1, ours)
    consumer = ShapedEngine(world, f"D{seed}", 2, theirs)
    start = random.choice((0, 1, 2)) * theirs.block_tokens
    tokens = range(start, start + random.randint(1, 15))
    expected = hand_over(world, producer, consumer, tokens, random, mode=mode)
    world.until(lambda: len(consumer.results(Received)) == len(consumer.ranks), 2.0)
    for rank, memory in zip(consumer.ranks, expected, strict=True):
        assert np.array_equal(rank.memory, memory), f"the memory of {rank.peer} is not what it should be"
    # Those that had nothing to send as well: the engine frees blocks when all of its ranks have let go.
    world.until(lambda: len(producer.results(Released)) == len(producer.ranks), 2.0)
    outcome = "fetched" if mode == "pull" else "written"
    assert {result.outcome for result in producer.results(Released)} == {outcome}  # type: ignore[attr-defined]
    world.assert_empty()


@pytest.mark.parametrize("number", range(len(MATRIX)))
def test_kv_goes_from_any_shape_to_any_shape(number: int) -> None:
    """V06 V07 V08 V09 V11 V13 V14 P42 P51: byte for byte."""
    check(*MATRIX[number], seed=number)


@pytest.mark.parametrize("number", range(len(MATRIX)))
def test_kv_is_read_from_any_shape_into_any_shape(number: int) -> None:
    """V06 V07 V08 V09 V11 V13 V14 P42 P51: the same plan the other way round."""
    check(*MATRIX[number], seed=number, mode="pull")


def test_the_matrix_is_large_enough() -> None:
    assert len({repr(pair) for pair in MATRIX}) >= 200
