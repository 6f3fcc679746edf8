"""Checkers of pull, on hand-made histories: one that holds, and each way in which it can break."""

from __future__ import annotations

import pytest

from kvferry.protocol.commands import (
    BlocksSafe,
    Drained,
    Expect,
    Finish,
    Received,
    ReceiveFailed,
    Released,
)
from kvferry.protocol.messages import Cancel, Fetch, Fetched, Offer, Renew, Status, TransferStatus
from kvferry.simulator.watch.checkers.base import Checker
from kvferry.simulator.watch.checkers.fences import FencesHold
from kvferry.simulator.watch.checkers.posting import PostedUnderPermission
from kvferry.simulator.watch.checkers.readers import LoansAreKept, OnlyKeptIsUsed, ReadersAreSilent
from kvferry.simulator.watch.checkers.sources import NoReadOfFreedSources
from kvferry.simulator.watch.checkers.targets import NoLandingInFreedTargets
from tests.support.history import (
    CONSUMER,
    D0,
    P0,
    PRODUCER,
    C,
    History,
    T,
    advance,
    preempt,
    receive,
)

FETCH = Fetch(transfer=T, consumer=C, start=0, stop=8, asked=5.0)
FETCHED = Fetched(transfer=T, consumer=C)
CANCEL = Cancel(transfer=T, consumer=C, reason="left")


def offer(keep_seconds: float = 30.0, attempt: int = 1) -> Offer:
    return Offer(
        transfer=T,
        consumer=C,
        attempt=attempt,
        start=0,
        stop=8,
        groups=(((2, 2),),),
        asked=5.0,
        keep_seconds=keep_seconds,
    )


def asked(checker: type[Checker]) -> History:
    """Source blocks 2 and 3 are held for a reader that has blocks 10 and 11 and has asked."""
    history = History(checker)
    history.take(PRODUCER, 2, 3)
    history.take(CONSUMER, 10, 11)
    history.command(P0, Expect(T, 8), advance([2, 3]), Finish(T))
    history.command(D0, receive([10, 11], mode="pull"))
    history.say(D0, P0, FETCH)
    return history


def offered(checker: type[Checker], keep_seconds: float = 30.0) -> History:
    history = asked(checker)
    history.say(P0, D0, offer(keep_seconds))
    return history


@pytest.mark.parametrize(
    "checker",
    [
        LoansAreKept,
        OnlyKeptIsUsed,
        ReadersAreSilent,
        PostedUnderPermission,
        NoReadOfFreedSources,
        NoLandingInFreedTargets,
        FencesHold,
    ],
)
def test_a_transfer_that_is_read_under_a_promise_holds(checker: type[Checker]) -> None:
    history = offered(checker)
    history.read(1, [2, 3], [10, 11])
    history.land(1, D0, D0)
    history.end_post(1, D0, D0)
    history.say(D0, P0, FETCHED)
    history.report(D0, Received(T, C, 64))
    history.report(P0, Released(T, "fetched"))
    history.give(PRODUCER, 2, 3)
    history.give(CONSUMER, 10, 11)
    assert history.finish() == []


# --- promises 1 and 3 ----------------------------------------------------------------------------


def test_a_read_of_blocks_that_are_not_held_is_found() -> None:
    history = offered(PostedUnderPermission)
    history.read(1, [2, 7], [10, 11])
    assert "source blocks [7] are not held" in history.found[0]
    assert "read 1 from" in history.found[0]


@pytest.mark.parametrize("promised", ["nothing", "lost", "another attempt", "too short"])
def test_a_read_without_a_promise_is_found(promised: str) -> None:
    history = asked(LoansAreKept)
    if promised == "lost":
        history.say(P0, D0, offer(), arrives=False)
    elif promised == "another attempt":
        history.say(P0, D0, offer(attempt=2))
    elif promised == "too short":
        history.say(P0, D0, offer(1.0))
    history.read(1, [2, 3], [10, 11])
    assert len(history.found) == 1
    assert "without a promise that its blocks are kept" in history.found[0]


def test_a_renewal_prolongs_a_promise_and_makes_none() -> None:
    renew = Renew(transfers=((T, C, 1),), write_seconds=10.0, asked=6.0)
    kept = Status(transfers=(TransferStatus(T, C, "held", 8, 1, 30.0),), asked=6.0)
    history = asked(LoansAreKept)
    history.say(D0, P0, renew)
    history.say(P0, D0, kept)
    history.read(1, [2], [10])
    assert len(history.found) == 1
    history = offered(LoansAreKept, 1.5)
    history.say(D0, P0, renew)
    history.say(P0, D0, kept)
    history.read(1, [2], [10])
    assert history.found == []


@pytest.mark.parametrize("given_back", [Released(T, "lease_expired"), Drained(4)])
def test_blocks_that_are_given_back_under_a_promise_are_found(given_back: Released | Drained) -> None:
    history = offered(LoansAreKept)
    history.command(P0, preempt(4))
    history.report(P0, given_back)
    assert len(history.found) == 1
    assert "gave back what it lends" in history.found[0]


@pytest.mark.parametrize("silent", [FETCHED, CANCEL])
def test_blocks_may_be_given_back_when_the_reader_is_silent(silent: Fetched | Cancel) -> None:
    history = offered(LoansAreKept)
    history.say(D0, P0, silent)
    # An offer that was under way in the other direction changes nothing.
    history.say(P0, D0, offer())
    history.report(P0, Released(T, "cancelled"))
    assert history.found == []


def test_a_farewell_that_is_lost_or_another_attempts_frees_nothing() -> None:
    for message, arrives in ((FETCHED, False), (Fetched(transfer=T, consumer=C, attempt=2), True)):
        history = offered(LoansAreKept)
        history.say(D0, P0, message, arrives=arrives)
        history.report(P0, Released(T, "fetched"))
        assert len(history.found) == 1


def test_a_promise_ends_by_the_readers_clock() -> None:
    """It was made for 5 s, of which the clocks' hundredth is taken off; a fast clock has fewer true ones."""
    for rate, kept in ((1.0, False), (2.5, True)):
        history = asked(LoansAreKept)
        history.oracle.clock_rate = rate
        history.say(P0, D0, offer(5.0))
        history.now += 1.5
        history.report(P0, Released(T, "lease_expired"))
        assert (history.found == []) is kept, rate


# --- promise 5 -----------------------------------------------------------------------------------


def test_what_was_read_after_its_source_was_given_back_is_not_good() -> None:
    history = offered(OnlyKeptIsUsed)
    history.read(1, [2], [10])
    history.read(2, [3], [11])
    history.land(1, D0, D0)
    history.report(P0, Released(T, "lease_expired"))
    history.land(2, D0, D0)
    for handle in (1, 2):
        history.end_post(handle, D0, D0)
    history.report(D0, ReceiveFailed(T, C, "lease_expired", 4, fenced=True))
    assert history.found == []
    for result in (Received(T, C, 64), ReceiveFailed(T, C, "lease_expired", 5, fenced=True)):
        history = offered(OnlyKeptIsUsed)
        history.report(P0, Released(T, "lease_expired"))
        history.read(2, [3], [11])
        history.read(1, [2], [10])
        history.land(2, D0, D0)
        history.end_post(1, D0, D0)
        history.end_post(2, D0, D0)
        history.report(D0, result)
        assert len(history.found) == 1
        assert "its read 2 came after its source had been given back" in history.found[0]


def test_what_was_read_again_in_time_is_good() -> None:
    history = offered(OnlyKeptIsUsed)
    history.read(1, [2, 3], [10, 11])
    history.command(P0, preempt(4))
    history.report(P0, Drained(4))
    history.land(1, D0, D0)
    history.end_post(1, D0, D0)
    history.command(P0, advance([2, 3]))
    history.read(2, [2, 3], [10, 11])
    history.land(2, D0, D0)
    history.end_post(2, D0, D0)
    history.report(D0, Received(T, C, 64))
    assert history.found == []


def test_what_was_never_read_is_not_good() -> None:
    history = offered(OnlyKeptIsUsed)
    history.read(1, [2], [10])
    history.end_post(1, D0, D0)
    history.report(D0, Received(T, C, 64))
    assert len(history.found) == 1
    assert "block 11 good and has never read it" in history.found[0]


# --- promise 2 -----------------------------------------------------------------------------------


def test_blocks_called_safe_with_a_read_in_flight_are_found() -> None:
    for result in (Received(T, C, 64), ReceiveFailed(T, C, "x", 0, fenced=True)):
        history = offered(ReadersAreSilent)
        history.read(1, [2], [10])
        history.report(D0, result)
        assert len(history.found) == 1
        assert "while its reads [1] into them are in flight" in history.found[0]
    history = offered(ReadersAreSilent)
    history.read(1, [2], [10])
    history.report(D0, ReceiveFailed(T, C, "x", 0, fenced=False))
    assert history.found == []
    history.report(D0, BlocksSafe(T, C))
    assert len(history.found) == 1


@pytest.mark.parametrize("message", [FETCHED, CANCEL])
def test_a_farewell_with_a_read_in_flight_is_found(message: Fetched | Cancel) -> None:
    history = offered(ReadersAreSilent)
    history.read(1, [2], [10])
    history.say(D0, P0, message)
    assert len(history.found) == 1
    assert f"says {type(message).__name__} of c" in history.found[0]
    history = offered(ReadersAreSilent)
    history.read(1, [2], [10])
    history.end_post(1, D0, D0)
    history.say(D0, P0, message)
    assert history.found == []


def test_a_read_that_lands_in_freed_blocks_is_found() -> None:
    history = offered(NoLandingInFreedTargets)
    history.read(1, [2], [10])
    history.report(D0, ReceiveFailed(T, C, "x", 0, fenced=True))
    history.land(1, D0, D0)
    assert len(history.found) == 1
