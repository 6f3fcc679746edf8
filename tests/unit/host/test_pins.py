"""References to blocks, by owner: counted once each, given back once each."""

from __future__ import annotations

from collections import Counter

from kvferry.host.pins import Pins


class Pool:
    """Counts references; its blocks are their own names."""

    def __init__(self):
        self.blocks = [f"block {number}" for number in range(10)]
        self.references = Counter()
        self.freed = []

    def touch(self, blocks):
        self.references.update(blocks)

    def free_blocks(self, ordered_blocks):
        ordered = list(ordered_blocks)
        self.freed += ordered
        self.references.subtract(ordered)
        assert min(self.references.values()) >= 0, "a block is given back more often than it was held"


def bound():
    pins, pool = Pins(), Pool()
    pins.bind(pool)
    return pins, pool


def test_blocks_are_held_from_add_to_drop_once_per_owner():
    pins, pool = bound()
    pins.add("a", [1, 2])
    pins.add("a", [3])
    pins.add("b", [2])
    assert pool.references == {"block 1": 1, "block 2": 2, "block 3": 1}
    assert (len(pins), pins.count("a"), pins.count("b"), pins.count("c")) == (4, 3, 1, 0)
    pins.drop("a")
    pins.drop("a")
    assert +pool.references == {"block 2": 1}
    pins.drop("b")
    assert len(pins) == 0
    assert not +pool.references


def test_the_tail_comes_back_first():
    """What is freed first is reused first, and a prefix is worth more than what follows it."""
    pins, pool = bound()
    pins.add("a", [1, 2])
    pins.add("a", [3])
    pins.drop("a")
    assert pool.freed == ["block 3", "block 2", "block 1"]


def test_moved_blocks_join_those_of_the_new_owner():
    pins, pool = bound()
    pins.add("a", [1])
    pins.add("b", [2])
    pins.move("a", "ticket")
    pins.move("b", "ticket")
    pins.move("unknown", "ticket")
    assert (pins.count("a"), pins.count("b"), pins.count("ticket")) == (0, 0, 2)
    pins.drop("a")
    assert pool.freed == []
    pins.drop("ticket")
    assert set(pool.freed) == {"block 1", "block 2"}


def test_nothing_is_no_owner():
    pins, pool = bound()
    pins.add("a", [])
    pins.drop("a")
    assert (len(pins), pool.freed) == (0, [])


def test_without_a_pool_it_only_counts():
    pins = Pins()
    pins.add("a", [1, 2])
    assert pins.count("a") == 2
    pins.drop("a")
    assert len(pins) == 0
