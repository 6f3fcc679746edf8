"""Checkers of promises 5 to 8, on hand-made histories: one that holds, and each way in which it can break."""

from __future__ import annotations

import pytest

from kvferry.protocol.commands import (
    Abandon,
    AnnounceCommand,
    BlocksSafe,
    Drained,
    Expect,
    Finish,
    Received,
    ReceiveFailed,
    Released,
    Result,
)
from kvferry.simulator.ground.events import FabricFault, LegSent, MessageEnded
from kvferry.simulator.watch.checkers import Ledger, checkers
from kvferry.simulator.watch.checkers.base import VIOLATIONS_MAX
from kvferry.simulator.watch.checkers.calm import CalmSucceeds
from kvferry.simulator.watch.checkers.content import ContentIsExact
from kvferry.simulator.watch.checkers.endings import EveryTransferEndsOnce
from kvferry.simulator.watch.checkers.leftovers import NothingIsLeft
from kvferry.simulator.watch.checkers.outcomes import OneOutcomeEach
from tests.support.history import (
    CONSUMER,
    D0,
    D1,
    P0,
    P1,
    PRODUCER,
    SOURCE,
    C,
    FakeOracle,
    History,
    T,
    advance,
    preempt,
    receive,
)

# --- promise 5 -----------------------------------------------------------------------------------


def test_exact_bytes_from_received_to_the_end_of_decoding_hold() -> None:
    history = History(ContentIsExact)
    history.command(D0, receive([10, 11]))
    history.report(D0, Received(T, C, 64))
    history.decode([10, 11], tokens=8)
    history.end_decode()
    history.oracle.wrong.add((D0, 10))
    assert history.finish() == []


def test_received_with_wrong_bytes_is_found() -> None:
    history = History(ContentIsExact)
    history.command(D0, receive([10, 11]))
    history.oracle.wrong.add((D0, 11))
    history.report(D0, Received(T, C, 64))
    assert len(history.finish()) == 1
    assert "[0, 8)" in history.found[0]


def test_a_failure_answers_for_its_good_prefix_only() -> None:
    for good_until, count in ((0, 0), (4, 0), (5, 1), (8, 1)):
        history = History(ContentIsExact)
        history.command(D0, receive([10, 11]))
        history.oracle.wrong.add((D0, 11))
        history.report(D0, ReceiveFailed(T, C, "peer_lost", good_until, fenced=True))
        assert len(history.finish()) == count, good_until


def test_a_good_prefix_outside_of_the_registration_is_found() -> None:
    history = History(ContentIsExact)
    history.command(D0, receive([10, 11], 4, 12))
    history.report(D0, ReceiveFailed(T, C, "peer_lost", 16, fenced=True))
    assert len(history.finish()) == 1


def test_decoding_from_wrong_bytes_on_one_rank_is_found() -> None:
    history = History(ContentIsExact, tp=2)
    history.oracle.wrong.add((D1, 9))
    history.decode([9, 10, 11], tokens=12)
    assert len(history.finish()) == 1
    assert D1 in history.found[0]


def test_bytes_that_change_while_decoding_are_found() -> None:
    history = History(ContentIsExact)
    history.decode([10, 11], tokens=8)
    history.oracle.wrong.add((D0, 11))
    history.end_decode()
    assert len(history.finish()) == 1


def test_blocks_of_a_preempted_decode_are_not_looked_at_again() -> None:
    history = History(ContentIsExact)
    history.decode([10, 11], tokens=8)
    history.give(CONSUMER, 11)
    history.oracle.wrong.add((D0, 11))
    history.end_decode()
    assert history.finish() == []


def test_the_requests_of_a_dead_engine_are_not_looked_at_again() -> None:
    history = History(ContentIsExact)
    history.decode([10, 11], tokens=8)
    history.crash(CONSUMER)
    history.start(CONSUMER, history.consumers)
    history.oracle.wrong.add((D0, 11))
    history.end_decode()
    assert history.finish() == []


# --- promise 6 -----------------------------------------------------------------------------------

FENCED = ReceiveFailed(T, C, "peer_lost", 0, fenced=True)
UNFENCED = ReceiveFailed(T, C, "peer_silent", 0, fenced=False)


def test_one_end_of_each_on_each_side_holds() -> None:
    for ends in ((Received(T, C, 64),), (FENCED,), (UNFENCED, BlocksSafe(T, C))):
        history = History(EveryTransferEndsOnce)
        history.command(P0, Expect(T, 8), preempt(3))
        history.report(P0, Drained(3))
        history.command(P0, Finish(T))
        history.command(D0, AnnounceCommand(T, C, SOURCE), receive([10, 11]))
        history.report(D0, *ends)
        history.report(P0, Released(T, "written"))
        history.end(PRODUCER, "completed", "p")
        history.end(CONSUMER, "completed")
        assert history.finish() == [], ends


@pytest.mark.parametrize(
    "ends",
    [
        (Received(T, C, 64), Received(T, C, 64)),
        (Received(T, C, 64), FENCED),
        (FENCED, Received(T, C, 64)),
        (FENCED, BlocksSafe(T, C)),
        (UNFENCED, BlocksSafe(T, C), BlocksSafe(T, C)),
        (UNFENCED, FENCED, BlocksSafe(T, C)),
    ],
)
def test_a_second_end_of_a_reception_is_found(ends: tuple[Result, ...]) -> None:
    history = History(EveryTransferEndsOnce)
    history.command(D0, receive([10, 11]))
    history.report(D0, *ends)
    history.end(CONSUMER, "failed")
    assert len(history.finish()) == 1


def test_a_release_before_the_host_ended_it_or_a_second_one_is_found() -> None:
    history = History(EveryTransferEndsOnce)
    history.command(P0, Expect(T, 8))
    history.report(P0, Released(T, "written"))
    assert len(history.found) == 1
    history.command(P0, Abandon(T, "abandoned"))
    history.report(P0, Released(T, "abandoned"), Released(T, "abandoned"))
    history.end(PRODUCER, "failed", "p")
    assert len(history.finish()) == 2


def test_the_same_id_may_live_and_end_again() -> None:
    history = History(EveryTransferEndsOnce)
    for request in ("p1", "p2"):
        history.command(P0, Expect(T, 8), Finish(T))
        history.report(P0, Released(T, "written"))
        history.end(PRODUCER, "completed", request)
    assert history.finish() == []


def test_ends_that_never_come_are_found_per_rank() -> None:
    history = History(EveryTransferEndsOnce, tp=2)
    history.command(P0, Expect(T, 8), Finish(T), preempt(3))
    history.command(P1, Expect(T, 8), Finish(T))
    history.report(P1, Released(T, "written"))
    history.command(D0, receive([10, 11]))
    history.command(D1, receive([10, 11]))
    history.report(D0, UNFENCED)
    assert len(history.finish()) == 6, "released, drained, safe, received, and both requests"


def test_a_request_that_only_announced_must_end_too() -> None:
    history = History(EveryTransferEndsOnce)
    history.command(D0, AnnounceCommand(T, C, SOURCE))
    assert len(history.finish()) == 1


def test_a_rank_may_hear_of_a_request_after_it_ended() -> None:
    history = History(EveryTransferEndsOnce, tp=2)
    history.command(D0, AnnounceCommand(T, C, SOURCE))
    history.end(CONSUMER, "skipped")
    history.command(D1, AnnounceCommand(T, C, SOURCE))
    assert history.finish() == []


def test_a_name_that_is_sent_again_must_end_again() -> None:
    history = History(EveryTransferEndsOnce)
    for _ in range(2):
        history.see(LegSent(0.0, CONSUMER, "c", T, C))
        history.command(D0, AnnounceCommand(T, C, SOURCE))
        assert len(history.checker.violations) == 0
        history.end(CONSUMER, "skipped")
    history.see(LegSent(0.0, CONSUMER, "c", T, C))
    history.command(D0, AnnounceCommand(T, C, SOURCE))
    assert len(history.finish()) == 1


def test_each_destination_of_a_name_is_owed_its_own_result() -> None:
    history = History(EveryTransferEndsOnce)
    history.command(D0, receive([10, 11]))
    history.report(D0, ReceiveFailed(T, C, "peer_silent", 0, fenced=False))
    history.command(D0, receive([12, 13]))
    history.end(CONSUMER, "failed")
    history.report(D0, BlocksSafe(T, C))
    history.end(CONSUMER, "failed")
    assert len(history.finish()) == 1
    assert "never reported received" in history.found[0]


def test_the_dead_owe_nothing() -> None:
    history = History(EveryTransferEndsOnce)
    history.command(P0, Expect(T, 8), Finish(T))
    history.command(D0, receive([10, 11]))
    history.crash(PRODUCER)
    history.crash(CONSUMER)
    assert history.finish() == []


def test_an_end_after_the_bound_is_found() -> None:
    history = History(EveryTransferEndsOnce)
    history.command(D0, receive([10, 11]))
    history.heal(history.now + 2.5)
    history.report(D0, Received(T, C, 64))
    assert history.found == []
    history.end(CONSUMER, "completed")
    assert len(history.finish()) == 1
    assert "after the bound" in history.found[0]


# --- promise 7 -----------------------------------------------------------------------------------


def test_a_pool_that_gets_everything_back_holds() -> None:
    history = History(NothingIsLeft)
    history.take(CONSUMER, 0, 31)
    history.take(PRODUCER, 0)
    history.give(CONSUMER, 31)
    history.take(CONSUMER, 31)
    history.give(CONSUMER, 0, 31)
    history.give(PRODUCER, 0)
    assert history.finish() == []


def test_a_block_that_is_given_out_twice_is_found() -> None:
    history = History(NothingIsLeft)
    history.take(CONSUMER, 4, owner="a")
    history.take(CONSUMER, 4, owner="b")
    history.give(CONSUMER, 4)
    assert len(history.finish()) == 1
    assert "while it is a's" in history.found[0]


def test_a_block_that_is_freed_twice_or_does_not_exist_is_found() -> None:
    history = History(NothingIsLeft)
    history.take(CONSUMER, 4)
    history.give(CONSUMER, 4)
    history.give(CONSUMER, 4)
    history.take(CONSUMER, 32)
    history.give(CONSUMER, 32)
    assert len(history.finish()) == 2


def test_blocks_and_rows_that_stay_are_found() -> None:
    history = History(NothingIsLeft)
    history.take(CONSUMER, 4, 5, owner="a")
    history.give(CONSUMER, 4)
    history.oracle.left.append("a row")
    assert len(history.finish()) == 2
    assert "a row" in history.found[1]


def test_a_dead_engine_takes_its_blocks_with_it() -> None:
    history = History(NothingIsLeft)
    history.take(CONSUMER, 4)
    history.crash(CONSUMER)
    history.start(CONSUMER, history.consumers)
    history.take(CONSUMER, 4)
    history.give(CONSUMER, 4)
    assert history.finish() == []


# --- promise 8 -----------------------------------------------------------------------------------


def test_one_outcome_that_agrees_with_the_ranks_holds() -> None:
    history = History(OneOutcomeEach, tp=2)
    history.report(D0, Received(T, C, 64))
    history.report(D1, Received(T, C, 64))
    history.report(P0, Released(T, "written"))
    history.report(P1, Released(T, "lease_expired: after 30 s"))
    history.end(CONSUMER, "completed")
    history.end(PRODUCER, "failed", "p")
    history.end(PRODUCER, "skipped", "refused twin")
    assert history.finish() == []


def test_a_second_outcome_of_a_request_is_found_unless_the_engine_died() -> None:
    history = History(OneOutcomeEach)
    history.report(D0, FENCED)
    history.end(CONSUMER, "failed")
    history.end(CONSUMER, "failed")
    assert len(history.found) == 1
    history.crash(CONSUMER)
    history.start(CONSUMER, history.consumers)
    history.end(CONSUMER, "failed")
    assert len(history.finish()) == 1


def test_a_name_that_is_sent_again_is_counted_again() -> None:
    history = History(OneOutcomeEach)
    for _ in range(2):
        history.see(LegSent(0.0, CONSUMER, "c", T, C))
        history.report(D0, FENCED)
        history.end(CONSUMER, "failed")
    assert history.finish() == []


def test_a_name_that_is_sent_again_is_not_counted_three_times() -> None:
    """The first one's end may be counted after the second was sent."""
    history = History(OneOutcomeEach)
    for _ in range(2):
        history.see(LegSent(0.0, CONSUMER, "c", T, C))
    for _ in range(2):
        history.report(D0, FENCED)
        history.end(CONSUMER, "failed")
    assert history.found == []
    history.end(CONSUMER, "failed")
    assert len(history.finish()) == 1
    assert "failed, failed, then as failed" in history.found[0]


def test_completed_although_a_rank_failed_is_found() -> None:
    history = History(OneOutcomeEach, tp=2)
    history.report(D0, Received(T, C, 64))
    history.report(D1, FENCED)
    history.end(CONSUMER, "completed")
    assert len(history.finish()) == 1


def test_completed_although_a_rank_has_said_nothing_is_found() -> None:
    history = History(OneOutcomeEach, tp=2)
    history.report(P0, Released(T, "written"))
    history.end(PRODUCER, "completed", "p")
    assert len(history.finish()) == 1


def test_failed_although_every_rank_did_well_is_found() -> None:
    history = History(OneOutcomeEach)
    history.report(D0, Received(T, C, 64))
    history.end(CONSUMER, "failed")
    assert len(history.finish()) == 1


@pytest.mark.parametrize("outcome", ["skipped", "failed"])
def test_a_transfer_that_has_begun_is_not_skipped(outcome: str) -> None:
    history = History(OneOutcomeEach)
    history.command(D0, receive([10, 11]))
    history.command(P0, Expect(T, 8))
    history.report(D0, FENCED)
    history.end(CONSUMER, outcome)
    history.end(PRODUCER, outcome, request="p")
    expected = 2 if outcome == "skipped" else 0
    assert len([what for what in history.finish() if "skipped though it had begun" in what]) == expected


def test_a_transfer_that_has_not_begun_may_be_skipped_beside_one_of_its_name_that_has() -> None:
    history = History(OneOutcomeEach)
    history.command(D0, AnnounceCommand(T, C, SOURCE))
    history.see(LegSent(3.0, CONSUMER, "c", T, C))
    history.end(CONSUMER, "skipped")
    history.see(LegSent(4.0, CONSUMER, "c", T, C))
    history.command(D0, receive([10, 11]))
    history.see(LegSent(5.0, CONSUMER, "c", T, C))
    history.end(CONSUMER, "skipped")
    assert history.finish() == []
    history.end(CONSUMER, "skipped")
    assert len(history.finish()) == 1, "the one that has begun is left"


def test_an_outcome_of_no_known_name_is_found() -> None:
    history = History(OneOutcomeEach)
    history.end(CONSUMER, "lost")
    assert len(history.finish()) == 1


def test_a_second_life_of_an_id_needs_reports_of_its_own() -> None:
    history = History(OneOutcomeEach)
    history.report(P0, Released(T, "written"))
    history.end(PRODUCER, "completed", "p1")
    history.end(PRODUCER, "completed", "p2")
    assert len(history.finish()) == 1


# --- promise 6 in calm histories --------------------------------------------------------------------


def calm(*, waited_seconds: float = 1.0) -> History:
    """A calm history in which KV comes some seconds after it could have."""
    history = History(CalmSucceeds, calm=True)
    history.command(D0, receive([10, 11]))
    history.command(P0, Expect(T, 8), advance([2, 3], frontier=4), advance([3], 8, 1), Finish(T))
    history.now = 7.0 + waited_seconds - 2.0
    history.report(D0, Received(T, C, 64))
    return history


def test_kv_that_comes_soon_holds_and_so_does_a_cancelled_lease() -> None:
    history = calm(waited_seconds=5.0)
    history.report(P0, Released(T, "written"), Released(T, "cancelled: the KV is here already"))
    assert history.finish() == []


def test_kv_that_comes_late_is_found() -> None:
    assert "after it could have" in calm(waited_seconds=6.0).finish()[0]


def test_kv_may_take_longer_that_takes_more_posts() -> None:
    history = History(CalmSucceeds, calm=True)
    history.command(D0, receive([10, 11]))
    history.command(P0, Expect(T, 8), advance([2, 3]))
    history.post(1, [2], [10])
    history.post(2, [3], [11])
    history.now += 3.5
    history.report(D0, Received(T, C, 64))
    assert history.finish() == []


def test_a_failure_without_a_fault_is_found() -> None:
    for result in (FENCED, UNFENCED, Released(T, "lease_expired: after 30 s")):
        history = History(CalmSucceeds, calm=True)
        history.report(P0 if isinstance(result, Released) else D0, result)
        assert len(history.finish()) == 1, result


def test_a_fault_in_a_calm_history_is_found() -> None:
    history = History(CalmSucceeds, calm=True)
    history.see(FabricFault(1.0, P0, D0, "refuse", (10,)))
    history.see(MessageEnded(1.0, P0, D0, 1, arrived=False))
    history.see(MessageEnded(1.0, P0, D0, 2, arrived=True))
    assert len(history.finish()) == 2


def test_other_histories_may_fail_and_be_late() -> None:
    history = History(CalmSucceeds)
    history.report(D0, FENCED)
    history.see(FabricFault(1.0, P0, D0, "refuse", (10,)))
    assert history.finish() == []


# --- all -----------------------------------------------------------------------------------------


def test_each_promise_has_a_checker_behind_the_ledger() -> None:
    first, *others = checkers(FakeOracle())
    assert isinstance(first, Ledger)
    promises = [checker.promise for checker in others if checker.promise]
    assert promises == [1, 2, 2, 2, 3, 3, 4, 5, 5, 5, 5, 6, 6, 6, 6, 7, 8, 6]


def test_violations_are_bounded() -> None:
    history = History(NothingIsLeft)
    history.oracle.left.extend(str(number) for number in range(VIOLATIONS_MAX + 5))
    assert len(history.finish()) == VIOLATIONS_MAX
