"""What an engine asks of the agent's counters in every step."""

from __future__ import annotations

from kvferry.agent.stats import Stats


def test_the_bytes_moved_are_one_object_until_something_is_posted() -> None:
    stats = Stats()
    before = stats.moved
    stats.steps += 1
    stats.messages_sent += 1
    assert stats.moved is before == (0, 0)
    stats.posted(100, 2, early=True)
    stats.posted(50, 1, early=False)
    assert stats.moved == (150, 100) == (stats.bytes_posted, stats.bytes_posted_early)
    assert stats.moved is stats.moved


def test_a_snapshot_has_every_counter_and_the_gauges() -> None:
    stats = Stats(gauges={"producer_held": 3})
    stats.posted(100, 2, early=True)
    snapshot = stats.snapshot()
    assert (snapshot["bytes_posted"], snapshot["posted_descriptors"], snapshot["producer_held"]) == (
        100,
        2,
        3,
    )
    assert "moved" not in snapshot
