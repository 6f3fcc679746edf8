"""The table of deadlines."""

from __future__ import annotations

import random

from kvferry.protocol.timers import Timers


def test_deadlines_come_in_order_of_time_not_of_setting() -> None:
    """P12: a renewed entry at the head hides nothing behind it; long and short limits share one table."""
    timers: Timers[str] = Timers()
    timers.set("long", 480.0)
    timers.set("renewed", 30.0)
    timers.set("short", 31.0)
    timers.set("renewed", 60.0)
    assert timers.next_due() == 31.0
    assert timers.pop_due(31.0) == ["short"]
    assert timers.pop_due(59.9) == []
    assert timers.pop_due(500.0) == ["renewed", "long"]
    assert timers.next_due() is None


def test_a_moved_deadline_fires_once_at_its_new_time() -> None:
    timers: Timers[str] = Timers()
    timers.set("a", 5.0)
    timers.set("a", 3.0)
    assert timers.pop_due(4.0) == ["a"]
    assert timers.pop_due(10.0) == []
    timers.set("a", 12.0)
    assert timers.pop_due(12.0) == ["a"]


def test_a_cancelled_deadline_never_fires() -> None:
    timers: Timers[str] = Timers()
    timers.set("a", 1.0)
    timers.cancel("a")
    timers.cancel("never set")
    assert "a" not in timers
    assert len(timers) == 0
    assert timers.next_due() is None
    assert timers.pop_due(2.0) == []


def test_memory_follows_the_live_keys_and_order_survives_the_rebuild() -> None:
    timers: Timers[int] = Timers()
    chance = random.Random(1)
    due = {key: chance.random() for key in range(20)}
    for _ in range(100):
        for key, when in due.items():
            timers.set(key, when)
    assert len(timers) == 20
    assert len(timers._heap) <= 64 + 1
    assert timers.pop_due(1.0) == sorted(due, key=due.__getitem__)


def test_equal_deadlines_fire_in_the_order_of_setting() -> None:
    timers: Timers[str] = Timers()
    for key in "cab":
        timers.set(key, 1.0)
    assert timers.pop_due(1.0) == ["c", "a", "b"]
