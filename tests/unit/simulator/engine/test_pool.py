from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvferry.simulator.engine.pool import BlockPool


class Told:
    """A pool of four blocks and what it has told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, tuple[int, ...]]] = []
        self.pool = BlockPool(
            4,
            taken=lambda blocks, owner: self.events.append((f"taken by {owner}", blocks)),
            returned=lambda blocks: self.events.append(("returned", blocks)),
            spoilt=self._spoilt,
        )

    def _spoilt(self, blocks: Sequence[int]) -> None:
        self.events.append(("spoilt", tuple(blocks)))

    def told(self) -> list[tuple[str, tuple[int, ...]]]:
        """What it has told since the last call."""
        events, self.events = self.events, []
        return events


def test_blocks_are_given_out_in_the_order_in_which_they_became_free():
    told = Told()
    assert told.pool.take(3, "a") == [0, 1, 2]
    told.pool.free_blocks([2, 0])
    assert told.pool.take(3, "b") == [3, 2, 0]
    assert told.pool.take(1, "c") is None
    assert told.told() == [
        ("taken by a", (0, 1, 2)),
        ("returned", (2, 0)),
        ("spoilt", (2, 0)),
        ("taken by b", (3, 2, 0)),
    ]


def test_too_few_free_blocks_change_nothing():
    told = Told()
    told.pool.take(3, "a")
    assert told.pool.take(2, "b") is None
    assert told.pool.free_count == 1
    assert told.pool.held() == [0, 1, 2]


def test_a_shared_block_is_free_when_its_last_holder_has_dropped_it():
    told = Told()
    blocks = told.pool.take(1, "a")
    told.pool.touch(blocks, "b")
    told.told()
    told.pool.free_blocks(blocks)
    assert told.told() == []
    told.pool.free_blocks(blocks)
    assert told.told() == [("returned", (0,)), ("spoilt", (0,))]


def test_freeing_twice_is_our_own_mistake():
    told = Told()
    blocks = told.pool.take(1, "a")
    told.pool.free_blocks(blocks)
    with pytest.raises(AssertionError, match="block 0 is freed twice"):
        told.pool.free_blocks(blocks)


def test_a_cached_block_keeps_its_content_until_it_is_given_out_anew():
    told = Told()
    [block] = told.pool.take(1, "a")
    told.pool.cache(block, (7, 0))
    told.pool.free_blocks([block])
    assert told.told()[-1] == ("returned", (block,))
    assert told.pool.cached((7, 0)) == block
    told.pool.take(4, "b")
    assert told.told() == [("taken by b", (1, 2, 3, 0)), ("spoilt", (0,))]
    assert told.pool.cached((7, 0)) is None


def test_a_hit_takes_a_free_block_out_of_the_queue():
    told = Told()
    [block] = told.pool.take(1, "a")
    told.pool.cache(block, (7, 0))
    told.pool.free_blocks([block])
    told.told()
    assert told.pool.is_free(block)
    told.pool.touch([block], "b")
    assert told.told() == [("taken by b", (block,))]
    assert told.pool.take(3, "c") == [1, 2, 3]
    assert told.pool.take(1, "d") is None


def test_a_second_block_with_the_same_content_stays_anonymous():
    told = Told()
    first, second = told.pool.take(2, "a")
    for block in (first, second):
        told.pool.cache(block, (7, 0))
    assert told.pool.cached((7, 0)) == first
    told.told()
    told.pool.free_blocks([second])
    assert told.told()[-1] == ("spoilt", (second,))
