"""One outcome per transfer, whatever its ranks report and how often."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.connector.stats import FerryStats
from kvferry.host import outcomes as outcomes_module
from kvferry.host.events import Ended
from kvferry.host.facts import EngineFacts
from kvferry.host.outcomes import Outcomes
from kvferry.ids import EngineId

FACTS = EngineFacts(EngineId("e"), tp=2, pp=1, produces=True, consumes=True, block_tokens=16, block_count=64)


def outcomes_of(tp=2):
    stats = FerryStats()
    return Outcomes(replace(FACTS, tp=tp), stats), stats


def counted(stats):
    found = {}
    for key, value in stats.data["counters"].items():
        name, *labels = key.split("\x1f")
        if name == "kvferry_transfers":
            found[tuple(labels[1:])] = value
    return found


def ended(rank, reason="written", request="r", **more):
    return Ended(rank, request, reason, **more)


def test_one_counter_moves_when_every_rank_has_reported():
    outcomes, stats = outcomes_of()
    outcomes.add(ended(0))
    assert counted(stats) == {}
    outcomes.add(ended(1))
    assert counted(stats) == {("completed", "written"): 1}


def test_a_repeated_report_changes_nothing():
    """Promise 8: reports are counted by sets of ranks, and the first of a rank stands."""
    outcomes, stats = outcomes_of()
    outcomes.add(ended(0, bytes=10))
    outcomes.add(ended(0, "peer_lost", failed=True, bytes=99))
    assert counted(stats) == {}
    outcomes.add(ended(1, bytes=5))
    assert counted(stats) == {("completed", "written"): 1}
    (moved,) = [value for key, value in stats.data["counters"].items() if "bytes" in key]
    assert moved == 15


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize(
    ("first", "second", "outcome"),
    [
        ({}, {"reason": "peer_lost: x", "failed": True}, ("failed", "peer_lost")),
        ({}, {"reason": "cancelled", "failed": True, "cancelled": True}, ("cancelled", "cancelled")),
        (
            {"reason": "cancelled", "failed": True, "cancelled": True},
            {"reason": "post_failed", "failed": True},
            ("failed", "post_failed"),
        ),
    ],
)
def test_the_worst_rank_decides(order, first, second, outcome):
    outcomes, stats = outcomes_of()
    for rank, changes in zip(order, (first, second), strict=True):
        outcomes.add(ended(rank, **changes))
    assert counted(stats) == {outcome: 1}


def test_a_transfer_is_as_slow_as_its_slowest_rank():
    outcomes, stats = outcomes_of()
    outcomes.add(ended(0, handover_seconds=0.5))
    outcomes.add(ended(1, handover_seconds=0.2))
    assert stats.data["observations"]["kvferry_handover_seconds"] == [0.5]


def test_requests_whose_ranks_never_all_report_are_bounded(monkeypatch):
    """Everything has a limit: the oldest is counted as it is."""
    monkeypatch.setattr(outcomes_module, "REQUESTS_MAX", 3)
    outcomes, stats = outcomes_of()
    for number in range(5):
        outcomes.add(ended(0, request=f"r{number}"))
    assert counted(stats) == {("completed", "written"): 2}
    outcomes.add(ended(1, request="r4"))
    assert counted(stats) == {("completed", "written"): 3}


def test_each_mode_is_counted_by_itself():
    """With one rank's end that of its mode; the worst one of several says it."""
    outcomes, stats = outcomes_of(tp=1)
    outcomes.add(ended(0, "fetched", "a", mode="pull", bytes=3))
    outcomes.add(ended(0, "written", "b", mode="push", bytes=4))
    outcomes.skipped("prefix_hit", "pull")
    labels = [key.split("\x1f")[:2] for key in stats.data["counters"]]
    assert labels == [
        ["kvferry_transfers", "pull"],
        ["kvferry_transfer_bytes", "pull"],
        ["kvferry_transfers", "push"],
        ["kvferry_transfer_bytes", "push"],
        ["kvferry_transfers", "pull"],
    ]


def test_a_transfer_that_no_rank_had_a_part_in_is_skipped():
    outcomes, stats = outcomes_of()
    outcomes.skipped("prefix_hit", "pull")
    assert counted(stats) == {("skipped", "prefix_hit"): 1}


def test_a_prefill_that_got_its_history_is_counted_once_for_each_side():
    """One name, two transfers: after an abort their ends come from several ranks in any order."""
    outcomes, stats = outcomes_of()
    for rank, sending in ((0, False), (1, True), (1, False), (0, True)):
        reason = "cancelled" if sending else "written"
        outcomes.add(ended(rank, reason, failed=sending, cancelled=sending, sending=sending))
    assert counted(stats) == {("completed", "written"): 1, ("cancelled", "cancelled"): 1}
    assert outcomes.open_count == 0
