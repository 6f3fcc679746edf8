"""Checkers of evidence, of bounds per transfer and of starvation, on hand-made histories."""

from __future__ import annotations

import pytest

from kvferry.ids import ConsumerId, PeerName
from kvferry.protocol.codec import Encoder, is_part
from kvferry.protocol.commands import (
    Abandon,
    BlocksSafe,
    Expect,
    Finish,
    Received,
    ReceiveFailed,
    Reclaim,
    Released,
    Relinquish,
    Withdraw,
)
from kvferry.protocol.limits import Limits
from kvferry.protocol.messages import (
    Announce,
    AnyMessage,
    Cancel,
    Cancelled,
    Failed,
    HelloRefused,
    Register,
    Renew,
    Status,
    TransferStatus,
    Written,
)
from kvferry.simulator.ground.events import FaultInjected, Healed, MessageEnded, MessageSent
from kvferry.simulator.watch.checkers.bounds import EndsWithinBounds
from kvferry.simulator.watch.checkers.calm import CalmSucceeds
from kvferry.simulator.watch.checkers.fences import FencesHold
from kvferry.simulator.watch.checkers.leases import ServedToAll, TravellingIsKept
from kvferry.simulator.watch.checkers.letters import Letters
from tests.support.history import D0, D1, P0, PRODUCER, SOURCE, C, History, T, advance, receive

LAPSE_SECONDS = 15.0 * 1.01
FENCED = ReceiveFailed(T, C, "peer_lost", 0, fenced=True)
UNFENCED = ReceiveFailed(T, C, "peer_silent", 0, fenced=False)
CANCELLED = Cancelled(transfer=T, consumer=C, attempt=1)
FAILED = Failed(transfer=T, consumer=C, attempt=1, reason="post_failed", valid_until=0)
WRITTEN = Written(transfer=T, consumer=C, attempt=1, start=0, stop=8)


def status(state: str = "computing", mark: float | None = 70.0) -> Status:
    """How the transfer stands."""
    return Status(transfers=(TransferStatus(T, C, state, 0, 1),), mark=mark)


def register(mark: float | None = 70.0) -> Register:
    """The registration of blocks 10 and 11."""
    return Register(
        transfer=T,
        consumer=C,
        start=0,
        stop=8,
        groups=(((10, 2),),),
        write_seconds=10.0,
        mark=mark,
        attempt=1,
    )


# --- evidence --------------------------------------------------------------------------------------


def permitted(mark: float | None = 70.0) -> History:
    """P0 may write the blocks of a request on D0."""
    history = History(FencesHold)
    history.command(P0, Expect(T, 8), advance([2, 3]))
    history.command(D0, receive([10, 11]))
    history.say(P0, D0, status())
    history.say(D0, P0, register(mark))
    return history


@pytest.mark.parametrize("answer", [CANCELLED, FAILED, WRITTEN])
def test_an_answer_makes_blocks_safe(answer: AnyMessage) -> None:
    history = permitted()
    history.say(P0, D0, answer)
    history.report(D0, FENCED)
    assert history.finish() == []


def test_a_lost_answer_or_a_refusal_proves_nothing() -> None:
    for answer, arrives in ((CANCELLED, False), (HelloRefused(reason="busy"), True)):
        history = permitted()
        history.say(P0, D0, answer, arrives=arrives)
        history.report(D0, FENCED)
        assert "has neither answered" in history.finish()[0]


def test_blocks_that_nobody_may_write_need_no_answer() -> None:
    history = permitted(mark=None)
    history.report(D0, FENCED)
    assert history.finish() == []
    history = History(FencesHold)
    history.command(D0, receive([10, 11]))
    history.report(D0, FENCED)
    assert history.finish() == []


@pytest.mark.parametrize(("late_seconds", "found"), [(-0.01, 1), (0.01, 0)])
def test_a_permission_lapses_by_the_ranks_own_clock_and_with_the_margin(
    late_seconds: float, found: int
) -> None:
    history = permitted()
    history.oracle.clock_rate = 1.005
    heard_at = history.now - 1.0
    history.report(D0, UNFENCED)
    history.now = heard_at + LAPSE_SECONDS / 1.005 + late_seconds - 1.0
    history.report(D0, BlocksSafe(T, C))
    assert len(history.finish()) == found


def test_who_was_never_told_of_the_blocks_owes_no_answer() -> None:
    """An earlier life of the producer may have heard a renewal while the request was only announced."""
    history = permitted()
    history.say(PeerName("P/0/tp0"), D0, status(mark=9.0))
    history.say(D0, PeerName("P/0/tp0"), Renew(transfers=((T, C, 1),), write_seconds=10.0, mark=9.0))
    history.say(P0, D0, WRITTEN)
    history.report(D0, Received(T, C, 64))
    assert history.finish() == []


def test_a_renewal_permits_anew() -> None:
    history = permitted()
    history.now = 20.0
    history.say(P0, D0, status(mark=84.0))
    history.say(D0, P0, Renew(transfers=((T, C, 1),), write_seconds=10.0, mark=84.0))
    history.now = 5.0 + LAPSE_SECONDS + 2.0
    history.report(D0, FENCED)
    assert len(history.finish()) == 1


@pytest.mark.parametrize(("dead_seconds", "found"), [(0.5, 1), (1.0, 0)])
def test_a_dead_engines_ranks_may_outlive_it_for_a_moment(dead_seconds: float, found: int) -> None:
    history = permitted()
    history.see(FaultInjected(history.now + 1.0, "crash", "P, noticed after 0 s"))
    history.now += dead_seconds
    history.report(D0, FENCED)
    assert len(history.finish()) == found


def test_received_needs_a_written_of_everyone() -> None:
    history = permitted()
    history.report(D0, Received(T, C, 64))
    assert "has not said so" in history.finish()[0]


def test_a_late_other_answer_takes_no_written_back() -> None:
    history = permitted()
    history.say(P0, D0, WRITTEN)
    history.say(P0, D0, CANCELLED)
    history.report(D0, Received(T, C, 64))
    assert history.finish() == []


@pytest.mark.parametrize("answer", [CANCELLED, FAILED])
def test_an_answer_for_good_while_a_write_is_in_flight_is_found(answer: AnyMessage) -> None:
    history = permitted()
    history.post(1, [2], [10])
    history.say(P0, D0, answer)
    assert len(history.finish()) == 1
    history = permitted()
    history.post(1, [2], [10])
    history.end_post(1)
    history.say(P0, D0, answer)
    assert history.finish() == []


@pytest.mark.parametrize("answer", [CANCELLED, FAILED])
def test_whoever_has_answered_for_good_posts_nothing_and_says_no_written(answer: AnyMessage) -> None:
    history = permitted()
    history.say(P0, D0, answer)
    history.post(1, [2], [10])
    history.say(P0, D0, WRITTEN)
    assert len(history.finish()) == 2


def test_what_was_written_may_be_said_again_after_a_cancel() -> None:
    """A renewal that is read after the Cancel is answered as the ones before it."""
    history = permitted()
    history.say(P0, D0, WRITTEN)
    history.say(P0, D0, CANCELLED)
    history.say(P0, D0, WRITTEN)
    assert history.finish() == []


# --- bounds ----------------------------------------------------------------------------------------


def waiting() -> History:
    """A request on D0 waits for P0, which has said how it stands; it is 4 s."""
    history = History(EndsWithinBounds)
    history.command(D0, receive([10, 11]))
    history.say(P0, D0, status())
    return history


@pytest.mark.parametrize(("seconds", "found"), [(22.0, 0), (23.0, 1)])
def test_silence_is_borne_no_longer_than_its_limit(seconds: float, found: int) -> None:
    """10 s for the handshake, 10 of silence, 2 until the next renewal, and a little."""
    history = waiting()
    history.now = 2.0 + seconds
    history.report(D0, FENCED)
    assert len(history.finish()) == found


@pytest.mark.parametrize(("seconds", "found"), [(22.0, 0), (23.0, 1)])
def test_who_is_kept_from_running_does_not_shake_hands_meanwhile(seconds: float, found: int) -> None:
    history = History(EndsWithinBounds)
    history.command(D0, receive([10, 11]))
    since = history.now
    history.see(FaultInjected(since, "stall_agent", f"{D0} for 31.0 s"))
    history.now = since + 31.0 + seconds - 1.0
    history.report(D0, FENCED)
    assert len(history.finish()) == found


def test_a_word_of_it_starts_the_wait_anew() -> None:
    history = waiting()
    for history.now in (15.0, 26.0, 37.0):
        history.say(P0, D0, status())
    history.now = 46.0
    history.report(D0, FENCED)
    assert history.finish() == []


def test_time_for_which_the_agent_could_not_run_does_not_count() -> None:
    history = waiting()
    history.see(FaultInjected(10.0, "stall_agent", f"{D0} for 40.000 s"))
    history.see(FaultInjected(12.0, "stall_agent", f"{D0} for 20.000 s"))
    history.now = 60.0
    history.report(D0, FENCED)
    assert history.finish() == []
    history = waiting()
    history.see(FaultInjected(10.0, "stall_agent", f"{D0} for 40.000 s"))
    history.see(Healed(20.0, 200.0))
    history.now = 62.0
    history.report(D0, FENCED)
    assert len(history.finish()) == 1, "it runs again when faults stop"


@pytest.mark.parametrize(("late_seconds", "found"), [(0.4, 0), (0.6, 1)])
@pytest.mark.parametrize("withdrawn", [False, True])
def test_quarantine_is_no_longer_than_permission_and_bound(
    late_seconds: float, found: int, withdrawn: bool
) -> None:
    history = waiting()
    if withdrawn:
        history.command(D0, Withdraw(T, C, SOURCE, "cancelled"))
    else:
        history.report(D0, UNFENCED)
    history.now += LAPSE_SECONDS + late_seconds - 1.0
    history.report(D0, FENCED if withdrawn else BlocksSafe(T, C))
    assert len(history.finish()) == found


def test_a_transfer_that_stays_unknown_is_not_asked_for_for_ever() -> None:
    history = waiting()
    history.say(D0, P0, register())
    for history.now in (12.0, 22.0, 32.0):
        history.say(P0, D0, status("unknown"))
        history.say(D0, P0, register())
    assert history.finish() == [], "the limit is 30 s from 3 s on"
    history.say(P0, D0, status("unknown"))
    history.say(D0, P0, register())
    assert len(history.finish()) == 1


@pytest.mark.parametrize(("seconds", "found"), [(29.0, 1), (30.0, 0), (30.4, 0), (31.0, 1)])
def test_a_lease_ends_at_its_time(seconds: float, found: int) -> None:
    history = History(EndsWithinBounds)
    history.command(P0, Expect(T, 8), Finish(T))
    history.now += seconds - 1.0
    history.report(P0, Released(T, "lease_expired"))
    assert len(history.finish()) == found


@pytest.mark.parametrize("message", [Announce(transfer=T, consumer=C), register()])
def test_a_sign_of_life_starts_the_lease_anew_and_only_its_own(message: AnyMessage) -> None:
    for spoken_of, found in ((message, 0), (Announce(transfer=PRODUCER, consumer=C), 1)):  # type: ignore[arg-type]
        history = History(EndsWithinBounds)
        history.command(P0, Expect(T, 8), Finish(T))
        history.now = 20.0
        history.say(D0, P0, spoken_of)
        history.now = 50.0
        history.report(P0, Released(T, "lease_expired"))
        assert len(history.finish()) == found, spoken_of


def test_what_is_abandoned_ends_with_its_last_write() -> None:
    history = History(EndsWithinBounds)
    history.command(P0, Expect(T, 8), advance([2, 3]))
    history.command(D0, receive([10, 11]))
    history.post(1, [2], [10])
    history.command(P0, Abandon(T, "abandoned"))
    history.now += 20.0
    history.end_post(1)
    history.now -= 0.8
    history.report(P0, Released(T, "abandoned"))
    assert history.finish() == []
    history.command(P0, Expect(T, 8), Abandon(T, "abandoned"))
    history.report(P0, Released(T, "abandoned"))
    assert len(history.finish()) == 1, "a second is too long for nothing"


# --- starvation ------------------------------------------------------------------------------------

STARVED = ReceiveFailed(T, C, "starved: others wait for the memory", 0, fenced=True)


def starving(
    *, begun_at: float | None = None, asked_at: tuple[float, ...] = (), moved_at: float = 0.0
) -> History:
    """A destination on D0, given up at 60 s; what is told of in 4 hops of 0.2 s or a renewal counts."""
    history = History(CalmSucceeds, calm=True)
    history.command(D0, receive([10, 11]))
    history.command(P0, Expect(T, 8))
    for at_seconds in sorted(
        {*asked_at, *([begun_at] if begun_at else []), *([moved_at] if moved_at else [])}
    ):
        history.now = at_seconds - 1.0
        if at_seconds in asked_at:
            history.command(D0, Relinquish(T, C))
        else:
            history.command(P0, advance([2, 3], 4 if at_seconds == begun_at else 8))
    history.now = 60.0
    history.report(D0, STARVED)
    return history


def test_what_has_not_begun_may_be_given_up() -> None:
    assert starving(asked_at=(58.0,)).finish() == []
    assert starving(asked_at=(58.0,), begun_at=56.0).finish() == [], "D0 cannot have heard of it"


def test_what_has_begun_may_be_given_up_when_it_stands_still() -> None:
    assert starving(asked_at=(48.0, 58.0), begun_at=10.0).finish() == []
    assert "had begun" in starving(asked_at=(58.0,), begun_at=10.0).finish()[0]
    assert "come further" in starving(asked_at=(48.0, 58.0), begun_at=10.0, moved_at=50.0).finish()[0]


def test_nothing_is_given_up_that_nobody_wants_back() -> None:
    assert "nobody wanted" in starving().finish()[0]
    history = History(CalmSucceeds, calm=True)
    history.report(P0, Released(T, "starved"))
    assert "nobody wanted" in history.finish()[0]


def test_an_engine_that_computes_gives_nothing_up() -> None:
    history = History(CalmSucceeds, calm=True)
    history.decode([10, 11], tokens=8, request="another")
    history.command(D0, Relinquish(T, C))
    assert "after it has computed" in history.finish()[0]
    history.now += 10.0
    history.command(D0, Relinquish(T, C))
    assert len(history.finish()) == 1


@pytest.mark.parametrize(("has_destination", "found"), [(False, 0), (True, 1)])
def test_a_lease_is_given_up_only_where_nobody_has_a_destination(has_destination: bool, found: int) -> None:
    history = History(CalmSucceeds, calm=True)
    history.command(P0, Expect(T, 8), advance([2, 3]), Finish(T))
    if has_destination:
        history.command(D0, receive([10, 11]))
    history.now = 60.0
    history.command(P0, Reclaim(T, "starved"))
    history.report(P0, Released(T, "starved"))
    assert len(history.finish()) == found


@pytest.mark.parametrize(("posted", "reason", "found"), [(True, "x", 1), (False, "x", 0), (True, "y", 0)])
def test_the_lease_of_what_travels_is_kept_whoever_wants_it_back(
    posted: bool, reason: str, found: int
) -> None:
    history = History(TravellingIsKept)
    history.command(P0, Expect(T, 8), advance([2, 3]), Finish(T))
    history.command(D0, receive([10, 11]))
    history.say(D0, P0, register())
    if posted:
        history.post(1, [2], [10])
    history.command(P0, Reclaim(T, "x"))
    history.say(P0, D0, Failed(transfer=T, consumer=C, attempt=1, reason=reason, valid_until=0))
    assert len(history.finish()) == found


def test_what_travels_to_one_rank_is_not_taken_from_another_one() -> None:
    """Ranks count their attempts each for itself, so that two of them may have the same number."""
    history = History(TravellingIsKept, tp=2)
    history.command(P0, Expect(T, 8), advance([2, 3]), Finish(T))
    for rank in (D0, D1):
        history.command(rank, receive([10, 11]))
        history.say(rank, P0, register())
    history.post(1, [2], [10], to=D1)
    history.command(P0, Reclaim(T, "x"))
    history.say(P0, D0, Failed(transfer=T, consumer=C, attempt=1, reason="x", valid_until=0))
    assert history.finish() == []
    history.say(P0, D1, Failed(transfer=T, consumer=C, attempt=1, reason="x", valid_until=0))
    assert len(history.finish()) == 1


@pytest.mark.parametrize(
    ("consumers", "outcome", "found"),
    [(1, "written", 0), (2, "written", 1), (2, "fetched", 1), (2, "lease_expired", 0), (2, "cancelled", 0)],
)
def test_a_lease_ends_well_only_when_every_consumer_was_served(
    consumers: int, outcome: str, found: int
) -> None:
    history = History(ServedToAll)
    history.command(P0, Expect(T, 8, consumers), advance([2, 3]), Finish(T))
    history.command(D0, receive([10, 11]))
    history.say(D0, P0, register())
    history.report(P0, Released(T, outcome))
    assert len(history.finish()) == found


def test_each_consumer_that_spoke_counts_once() -> None:
    history = History(ServedToAll)
    history.command(P0, Expect(T, 8, 2), advance([2, 3]), Finish(T))
    for _ in range(2):
        history.say(D0, P0, register())
    history.say(D0, P0, Cancel(transfer=T, consumer=ConsumerId("other"), attempt=1, reason="aborted"))
    history.report(P0, Released(T, "written"))
    assert history.finish() == []


def test_a_message_has_arrived_with_the_last_of_its_parts_wherever_it_was_sent() -> None:
    """A lease was counted from a Hello of which one part came a second later than the last one sent."""
    history = History(Letters)
    parts = Encoder(64).encode(register())
    assert len(parts) > 2
    assert all(is_part(part) for part in parts)
    for number, part in enumerate(parts, start=1):
        history.see(MessageSent(1.0, D0, P0, number, part))
    assert history.letters.message == register(), "sent whole"
    *others, first = reversed(range(1, len(parts) + 1))
    for number in others:
        history.see(MessageEnded(2.0, D0, P0, number, True))
        assert history.letters.message is None
    history.see(MessageEnded(3.0, D0, P0, first, True))
    assert history.letters.message == register()


def test_limits_are_those_of_the_rank() -> None:
    history = waiting()
    history.oracle.limits = Limits(silence_seconds=4.0, handshake_seconds=1.0)
    history.now = 13.0
    history.report(D0, ReceiveFailed(T, ConsumerId("other"), "peer_silent", 0, fenced=True))
    assert history.finish() == [], "of nobody that waits"
    history.report(D0, FENCED)
    assert len(history.finish()) == 1


def test_a_rank_of_no_life_is_nobody() -> None:
    history = History(EndsWithinBounds)
    history.say(PeerName("X"), D0, status())
    assert history.finish() == []
