"""Checkers of promises 1 to 4, on hand-made histories: one that holds, and each way in which it can break."""

from __future__ import annotations

from kvferry.protocol.commands import (
    BlocksSafe,
    Drained,
    Expect,
    Finish,
    Received,
    ReceiveFailed,
    Released,
)
from kvferry.simulator.watch.checkers.base import Checker
from kvferry.simulator.watch.checkers.overlaps import NoOverlappingWrites
from kvferry.simulator.watch.checkers.posting import PostedUnderPermission
from kvferry.simulator.watch.checkers.sources import NoReadOfFreedSources
from kvferry.simulator.watch.checkers.targets import NoLandingInFreedTargets
from tests.support.history import (
    CONSUMER,
    D0,
    D1,
    P0,
    P1,
    PRODUCER,
    C,
    History,
    T,
    advance,
    preempt,
    receive,
)


def opened(checker: type[Checker], *, tp: int = 1) -> History:
    """Source blocks 2 and 3 are readable, destination blocks 10 and 11 are open, on every rank."""
    history = History(checker, tp=tp)
    history.take(PRODUCER, 2, 3)
    history.take(CONSUMER, 10, 11)
    for rank in history.producers:
        history.command(rank, Expect(T, 8), advance([2, 3]))
    for rank in history.consumers:
        history.command(rank, receive([10, 11]))
    return history


# --- promise 1 -----------------------------------------------------------------------------------


def test_a_post_between_open_blocks_holds() -> None:
    history = opened(PostedUnderPermission)
    history.post(1, [2], [10])
    history.post(2, [3], [11])
    history.report(D0, Received(T, C, 64))
    history.report(P0, Released(T, "written"))
    assert history.finish() == []


def test_a_post_after_the_destination_was_called_safe_is_found() -> None:
    for result in (
        Received(T, C, 64),
        ReceiveFailed(T, C, "peer_lost", 0, fenced=True),
        BlocksSafe(T, C),
    ):
        history = opened(PostedUnderPermission)
        if isinstance(result, BlocksSafe):
            history.report(D0, ReceiveFailed(T, C, "peer_silent", 0, fenced=False))
        history.report(D0, result)
        history.post(1, [2], [10])
        assert len(history.finish()) == 1, result
        assert "has ended" in history.found[0]


def test_a_post_while_the_destination_is_in_quarantine_holds() -> None:
    history = opened(PostedUnderPermission)
    history.report(D0, ReceiveFailed(T, C, "peer_silent", 0, fenced=False))
    history.post(1, [2], [10])
    assert history.finish() == []


def test_a_post_into_blocks_that_nobody_registered_is_found() -> None:
    history = opened(PostedUnderPermission)
    history.post(1, [2], [12])
    history.post(2, [2, 3], [10, 12])
    assert len(history.finish()) == 2


def test_a_post_from_released_blocks_is_found() -> None:
    history = opened(PostedUnderPermission)
    history.command(P0, Finish(T))
    history.report(P0, Released(T, "lease_expired"))
    history.post(1, [2], [10])
    assert len(history.finish()) == 1
    assert "not held" in history.found[0]


def test_a_post_from_blocks_that_were_drained_is_found_and_from_the_new_ones_holds() -> None:
    history = opened(PostedUnderPermission)
    history.command(P0, preempt(1))
    history.post(1, [2], [10])
    history.report(P0, Drained(1))
    history.command(P0, advance([6, 7]))
    history.post(2, [6], [10])
    assert history.found == []
    history.post(3, [3], [11])
    assert len(history.finish()) == 1


def test_a_post_from_blocks_of_another_transfer_is_found() -> None:
    history = opened(PostedUnderPermission)
    history.post(1, [5], [10])
    assert len(history.finish()) == 1


def test_a_post_to_a_dead_rank_is_no_break() -> None:
    history = opened(PostedUnderPermission)
    history.crash(CONSUMER)
    history.post(1, [2], [10])
    assert history.finish() == []


# --- promise 2 -----------------------------------------------------------------------------------


def test_landing_before_the_end_and_freeing_after_it_holds() -> None:
    history = opened(NoLandingInFreedTargets)
    history.post(1, [2, 3], [10, 11])
    history.land(1)
    history.report(D0, Received(T, C, 64))
    history.give(CONSUMER, 10, 11)
    assert history.finish() == []


def test_landing_after_the_rank_declared_its_end_is_found() -> None:
    history = opened(NoLandingInFreedTargets)
    history.post(1, [2, 3], [10, 11])
    history.land(1)
    history.report(D0, ReceiveFailed(T, C, "cancelled", 0, fenced=True, cancelled=True))
    history.land(1)
    assert len(history.finish()) == 1
    assert "closed" in history.found[0]


def test_landing_in_quarantined_blocks_holds_until_they_are_called_safe() -> None:
    history = opened(NoLandingInFreedTargets)
    history.post(1, [2, 3], [10, 11])
    history.report(D0, ReceiveFailed(T, C, "peer_silent", 0, fenced=False))
    history.land(1)
    assert history.found == []
    history.report(D0, BlocksSafe(T, C))
    history.land(1)
    assert len(history.finish()) == 1


def test_a_name_used_again_in_other_blocks_leaves_its_quarantined_ones_open() -> None:
    history = opened(NoLandingInFreedTargets)
    history.post(1, [2], [10])
    history.report(D0, ReceiveFailed(T, C, "peer_silent", 0, fenced=False))
    history.take(CONSUMER, 12, 13)
    history.command(D0, receive([12, 13]))
    history.post(2, [2], [12])
    history.report(D0, Received(T, C, 64))
    history.land(1)
    assert history.found == []
    history.land(2)
    assert len(history.found) == 1
    history.report(D0, BlocksSafe(T, C))
    history.land(1)
    assert len(history.finish()) == 2


def test_landing_in_a_block_that_the_pool_got_back_is_found_even_when_it_was_given_out_again() -> None:
    history = opened(NoLandingInFreedTargets)
    history.post(1, [2, 3], [10, 11])
    history.give(CONSUMER, 11)
    history.take(CONSUMER, 11)
    history.land(1)
    assert len(history.finish()) == 2, "the freeing itself, and the landing"


def test_freeing_on_the_word_of_one_rank_alone_is_found() -> None:
    history = opened(NoLandingInFreedTargets, tp=2)
    history.report(D0, Received(T, C, 64))
    history.give(CONSUMER, 10, 11)
    assert len(history.finish()) == 1
    assert D1 in history.found[0]


def test_the_memory_of_a_dead_consumer_is_nobodys() -> None:
    history = opened(NoLandingInFreedTargets)
    history.post(1, [2, 3], [10, 11])
    history.crash(CONSUMER)
    history.land(1)
    assert history.finish() == []


def test_a_dead_producers_write_into_blocks_of_the_next_owner_is_found() -> None:
    history = opened(NoLandingInFreedTargets)
    history.post(1, [2, 3], [10, 11])
    history.crash(PRODUCER)
    history.report(D0, ReceiveFailed(T, C, "peer_lost", 0, fenced=True))
    history.give(CONSUMER, 10, 11)
    history.land(1)
    assert len(history.finish()) == 1


# --- promise 3 -----------------------------------------------------------------------------------


def test_reading_before_the_release_and_freeing_after_it_holds() -> None:
    history = opened(NoReadOfFreedSources)
    history.post(1, [2, 3], [10, 11])
    history.land(1)
    history.command(P0, Finish(T))
    history.report(P0, Released(T, "written"))
    history.give(PRODUCER, 2, 3)
    assert history.finish() == []


def test_reading_after_the_release_is_found() -> None:
    history = opened(NoReadOfFreedSources)
    history.post(1, [2, 3], [10, 11])
    history.report(P0, Released(T, "lease_expired"))
    history.land(1)
    assert len(history.finish()) == 1
    assert "given them back" in history.found[0]


def test_reading_after_drained_is_found() -> None:
    history = opened(NoReadOfFreedSources)
    history.post(1, [2], [10])
    history.command(P0, preempt(4))
    history.land(1)
    assert history.found == []
    history.report(P0, Drained(4))
    history.land(1)
    assert len(history.finish()) == 1


def test_a_request_that_resumes_on_its_own_old_blocks_may_be_read_after_drained() -> None:
    """Its prefix is still cached, so old and new blocks are the same."""
    history = opened(NoReadOfFreedSources)
    history.command(P0, preempt(1), advance([2, 6]))
    history.post(1, [2, 6], [10, 11])
    history.report(P0, Drained(1))
    history.land(1)
    assert history.finish() == []


def test_a_request_that_resumes_elsewhere_may_not_be_read_where_it_was() -> None:
    history = opened(NoReadOfFreedSources)
    history.command(P0, preempt(1), advance([6, 7]))
    history.post(1, [2], [10])
    history.report(P0, Drained(1))
    history.land(1)
    assert len(history.finish()) == 1


def test_freeing_while_one_rank_still_offers_the_blocks_is_found() -> None:
    history = opened(NoReadOfFreedSources, tp=2)
    history.report(P0, Released(T, "written"))
    history.give(PRODUCER, 2, 3)
    assert len(history.finish()) == 1
    assert P1 in history.found[0]


def test_freeing_preempted_blocks_before_they_are_drained_is_found() -> None:
    history = opened(NoReadOfFreedSources)
    history.command(P0, preempt(4), advance([6, 7]))
    history.give(PRODUCER, 2)
    assert len(history.finish()) == 1


def test_reading_blocks_that_went_through_the_pool_is_found() -> None:
    history = opened(NoReadOfFreedSources)
    history.post(1, [2, 3], [10, 11])
    history.give(PRODUCER, 3)
    history.take(PRODUCER, 3)
    history.land(1)
    assert len(history.finish()) == 2, "the freeing itself, and the landing"


def test_the_memory_of_a_dead_producer_stays_as_it_was() -> None:
    history = opened(NoReadOfFreedSources)
    history.post(1, [2, 3], [10, 11])
    history.crash(PRODUCER)
    history.land(1)
    assert history.finish() == []


# --- promise 4 -----------------------------------------------------------------------------------


def test_writes_to_different_blocks_or_one_after_the_other_hold() -> None:
    history = opened(NoOverlappingWrites)
    history.post(1, [2], [10])
    history.post(2, [3], [11])
    history.land(1)
    history.end_post(1)
    history.post(3, [2], [10])
    history.land(3)
    assert history.finish() == []


def test_a_second_write_of_a_rank_to_the_same_block_is_found() -> None:
    history = opened(NoOverlappingWrites)
    history.post(1, [2, 3], [10, 11])
    history.post(2, [6], [11])
    assert len(history.finish()) == 1
    assert "block 11" in history.found[0]


def test_an_older_write_of_another_engine_that_lands_later_is_found() -> None:
    history = opened(NoOverlappingWrites)
    history.start(PRODUCER, (P1,))
    history.post(1, [2, 3], [10, 11], rank=P0)
    history.post(1, [2, 3], [10, 11], rank=P1)
    history.land(1, rank=P1)
    assert history.found == []
    history.land(1, rank=P0)
    assert len(history.finish()) == 1


def test_ranks_of_one_engine_may_write_their_parts_of_one_block() -> None:
    history = opened(NoOverlappingWrites, tp=2)
    history.post(1, [2], [10], rank=P0)
    history.post(1, [2], [10], rank=P1)
    history.land(1, rank=P0)
    assert history.finish() == []


def test_writes_to_the_same_block_of_different_ranks_hold() -> None:
    history = opened(NoOverlappingWrites, tp=2)
    history.post(1, [2], [10], to=D0)
    history.post(2, [2], [10], to=D1)
    assert history.finish() == []


def test_a_write_that_never_ends_keeps_its_blocks_for_ever() -> None:
    history = opened(NoOverlappingWrites)
    history.post(1, [2, 3], [10, 11])
    history.now += 1000.0
    history.post(2, [6], [11])
    assert len(history.finish()) == 1
