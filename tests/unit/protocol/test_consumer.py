"""The consumer core by itself: whom it tells what, when it calls blocks good, and when safe."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from kvferry.ids import ConsumerId, EngineId, PeerName, TransferId
from kvferry.protocol.commands import (
    AnnounceCommand,
    BlocksSafe,
    Receive,
    Received,
    ReceiveFailed,
    Relinquish,
    Result,
    Source,
    Withdraw,
)
from kvferry.protocol.consumer import ConsumerCore
from kvferry.protocol.limits import Limits
from kvferry.protocol.messages import (
    Announce,
    AnyMessage,
    Cancel,
    Cancelled,
    Failed,
    Landed,
    Register,
    Renew,
    Status,
    TransferStatus,
    Written,
)
from kvferry.protocol.outputs import Disconnect, Inquire, Link, Output, Resolve, Send
from kvferry.protocol.receptions import MARKS_MAX, SOURCES_MAX

T, U, C = TransferId("t"), TransferId("u"), ConsumerId("c0")
P0, P1 = PeerName("p0"), PeerName("p1")
SOURCE = Source(EngineId("prefill"), "127.0.0.1", 5600)
ONE = (Link(P0, 1, (100,)),)
TWO = (Link(P0, 1, (100,)), Link(P1, 1, (10,)))
GROUPS = (((3, 2),),)
RETRY_BOUND = 3.0
MARK = 7000.0
"""A reading of a producer rank's clock; a consumer only repeats it."""
LAPSE = (10.0 + RETRY_BOUND) * 1.01
"""So long after a mark came in, nobody writes any more by the permission that repeats it."""


class Rank:
    """A consumer core, its clock, and what has come out of it."""

    def __init__(
        self,
        links: tuple[Link, ...] | None = ONE,
        now: float = 0.0,
        mark: float | None = MARK,
        **limits: Any,
    ) -> None:
        """`mark` is what each producer rank has just sent, about something else; None if it has not."""
        self.core = ConsumerCore(Limits(**limits), RETRY_BOUND, (4,))
        self.links = links
        self.now = now
        for name in {P0, P1, *(link.peer for link in links or ())}:
            self.core.handle_message(name, Status(transfers=(), mark=mark), now)

    def command(self, *commands: Any) -> list[Output]:
        found: list[Output] = []
        for command in commands:
            self.core.handle_command(command, self.now)
            found += self.outputs()
        self.core.check_invariants()
        return found

    def outputs(self) -> list[Output]:
        """What the core asks for; a `Resolve` is answered at once when the rank has links."""
        found: list[Output] = []
        while (output := self.core.poll_output()) is not None:
            if isinstance(output, Resolve) and self.links is not None:
                self.core.handle_resolved(output.source, self.links, self.now)
            else:
                found.append(output)
        return found

    def hear(self, message: AnyMessage, peer: PeerName = P0) -> list[Output]:
        self.core.handle_message(peer, message, self.now)
        self.core.check_invariants()
        return self.outputs()

    def results(self) -> list[Result]:
        return list(iter(self.core.poll_result, None))

    def at(self, now: float) -> list[Output]:
        """Let time pass, stopping at every deadline."""
        while (due := self.core.next_due()) is not None and due <= now:
            self.now = max(due, self.now)
            self.core.handle_timeout(self.now)
            self.core.check_invariants()
        self.now = now
        return self.outputs()


def receive(stop: int = 8, transfer: TransferId = T, source: Source = SOURCE, start: int = 0) -> Receive:
    return Receive(transfer, C, source, start, stop, GROUPS)


def announce(transfer: TransferId = T, source: Source = SOURCE) -> AnnounceCommand:
    return AnnounceCommand(transfer, C, source)


def withdraw(transfer: TransferId = T, source: Source = SOURCE, reason: str = "left") -> Withdraw:
    return Withdraw(transfer, C, source, reason)


def registered(
    peer: PeerName = P0,
    transfer: TransferId = T,
    *,
    attempt: int = 1,
    mark: float | None = MARK,
    block_bytes: int = 0,
) -> Send:
    message = Register(
        transfer=transfer,
        consumer=C,
        attempt=attempt,
        start=0,
        stop=8,
        groups=GROUPS,
        write_seconds=10.0,
        mark=mark,
        sharers=1,
        block_bytes=(block_bytes or {link.peer: link.block_bytes[0] for link in TWO}[peer],),
    )
    return Send(peer, message)


def renewed(*transfers: tuple[TransferId, int], peer: PeerName = P0, mark: float | None = MARK) -> Send:
    names = tuple((transfer, C, attempt) for transfer, attempt in transfers)
    return Send(peer, Renew(transfers=names, write_seconds=10.0, mark=mark))


def cancelling(peer: PeerName = P0, reason: str = "left", transfer: TransferId = T, attempt: int = 1) -> Send:
    return Send(peer, Cancel(transfer=transfer, consumer=C, reason=reason, attempt=attempt))


def written(start: int = 0, stop: int = 8, transfer: TransferId = T, attempt: int = 1) -> Written:
    return Written(transfer=transfer, consumer=C, start=start, stop=stop, attempt=attempt)


def landed(start: int, stop: int) -> Landed:
    return Landed(transfer=T, consumer=C, start=start, stop=stop)


def failed(reason: str = "abandoned: x", valid_until: int = 0, attempt: int = 1) -> Failed:
    return Failed(transfer=T, consumer=C, reason=reason, valid_until=valid_until, attempt=attempt)


def status(state: str, transfer: TransferId = T, *, attempt: int = 1, mark: float | None = MARK) -> Status:
    return Status(transfers=(TransferStatus(transfer, C, state, 0, attempt),), mark=mark)


def failure(
    reason: str, valid_until: int = 0, *, fenced: bool = True, cancelled: bool = False
) -> ReceiveFailed:
    return ReceiveFailed(T, C, reason, valid_until, fenced=fenced, cancelled=cancelled)


FENCE = Cancelled(transfer=T, consumer=C)
SILENT = "peer_silent: nothing heard for 10 s"


# --- success -------------------------------------------------------------------------------------


def test_every_producer_rank_must_have_written_each_once() -> None:
    """P42, P51: ranks are a set; a doubled message is no second rank."""
    links = tuple(Link(PeerName(f"p{number}"), 1, (100,)) for number in range(4))
    rank = Rank(links)
    assert rank.command(receive()) == [registered(link.peer, block_bytes=100) for link in links]
    for link in links[:3]:
        rank.hear(written(), link.peer)
        rank.hear(written(), link.peer)
    assert rank.results() == []
    rank.hear(written(), links[3].peer)
    assert rank.results() == [Received(T, C, 4 * 2 * 100)]
    rank.hear(written(), links[3].peer)
    assert rank.results() == []
    assert rank.core.state.counts == {"late_message": 1}
    assert not rank.core.expecting


def test_bytes_received_are_those_of_every_rank() -> None:
    rank = Rank(TWO)
    rank.command(receive())
    rank.hear(written())
    rank.hear(written(), P1)
    assert rank.results() == [Received(T, C, 220)]


def test_a_rank_that_has_nothing_for_us_is_told_so_and_not_waited_for_longer_than_its_answer() -> None:
    """MLA: a replica that another rank serves us from would hold its blocks for nobody."""
    rank = Rank((ONE[0], Link(P1, 2, (0,), writes=False)))
    told, spared = rank.command(receive())
    assert told == registered()
    assert spared == Send(
        P1,
        Register(
            transfer=T,
            consumer=C,
            start=0,
            stop=0,
            groups=((),),
            write_seconds=10.0,
            mark=MARK,
            sharers=2,
            block_bytes=(0,),
        ),
    )
    rank.hear(Written(transfer=T, consumer=C, start=0, stop=0), P1)
    assert rank.results() == []
    rank.hear(written())
    assert rank.results() == [Received(T, C, 200)]


def test_what_has_landed_is_good_whatever_a_rank_without_a_part_says() -> None:
    rank = Rank((ONE[0], Link(P1, 1, (0,), writes=False)))
    rank.command(receive())
    rank.hear(Landed(transfer=T, consumer=C, start=0, stop=4))
    rank.hear(Failed(transfer=T, consumer=C, reason="abandoned", valid_until=0), P1)
    rank.hear(Failed(transfer=T, consumer=C, reason="abandoned", valid_until=4))
    assert rank.results() == [ReceiveFailed(T, C, "abandoned", 4, fenced=True)]


def test_a_rank_that_writes_what_it_was_not_asked_for_fails_the_request() -> None:
    rank = Rank((Link(P0, 1, (0,), writes=False),))
    rank.command(receive())
    rank.hear(written())
    (failed,) = rank.results()
    assert isinstance(failed, ReceiveFailed)
    assert failed.reason == "malformed: wrote [0, 8), registered [0, 0)"


def test_arrived_in_time_is_arrived_though_the_clock_is_past_the_deadline() -> None:
    """P37: what was there before the time-out was judged counts."""
    rank = Rank()
    rank.command(receive())
    rank.now = 11.0
    rank.hear(written())
    rank.core.handle_timeout(11.0)
    assert rank.results() == [Received(T, C, 200)]


def test_a_slow_producer_that_answers_is_not_a_dead_one() -> None:
    """P04: alive and slow for ten times the limit."""
    rank = Rank()
    rank.command(receive())
    for tick in range(1, 101):
        (renewal,) = rank.at(2.0 * tick) if rank.core.next_due() == 2.0 * tick else (None,)
        assert renewal is None or renewal == renewed((T, 1), mark=MARK + tick - 1)
        rank.hear(status("computing", mark=MARK + tick))
        rank.at(2.0 * tick + 0.5)
    assert rank.results() == []
    assert rank.core.states() == {"waiting": 1}


def test_a_rank_that_has_written_may_be_silent_while_another_one_computes() -> None:
    """P42: one rank has little to write, or nothing, and owes no sign of life for it."""
    rank = Rank(TWO)
    rank.command(receive())
    rank.hear(written())
    assert rank.core.state.peers.keys() == {P1}
    for tick in range(1, 16):
        rank.at(2.0 * tick)
        rank.hear(status("computing", mark=MARK + tick), P1)
    assert rank.results() == []
    rank.hear(written(), P1)
    assert rank.results() == [Received(T, C, 220)]
    assert rank.core.next_due() is None


def test_a_rank_is_given_its_time_anew_when_it_is_asked_again() -> None:
    """Its last words may be long ago, and were its last duty."""
    rank = Rank(TWO)
    rank.command(receive())
    rank.hear(written())
    rank.now = 9.0
    rank.hear(status("computing"), P1)
    rank.now = 18.0
    rank.hear(status("computing"), P1)
    rank.command(receive(U))
    rank.at(27.0)
    assert rank.results() == []


def test_one_renewal_per_peer_and_interval_whatever_waits() -> None:
    """P09: by the one id that both sides know the transfer by."""
    rank = Rank(TWO)
    rank.command(receive(), announce(U))
    rank.hear(written())
    assert rank.at(2.0) == [
        renewed((U, 2)),
        renewed((T, 1), (U, 2), peer=P1),
    ]


def test_an_announcement_goes_to_every_rank_and_the_registration_follows() -> None:
    """P13: the producer keeps its lease through the consumer's queue."""
    rank = Rank(TWO)
    message = Announce(transfer=T, consumer=C)
    assert rank.command(announce()) == [Send(P0, message), Send(P1, message)]
    assert rank.hear(status("unknown")) == []
    assert rank.command(receive()) == [registered(), registered(P1)]


# --- failure, and what of it is good -----------------------------------------------------------------


@pytest.mark.parametrize("first", [P0, P1])
def test_a_rank_that_fails_ends_the_request_after_the_others_are_silent(first: PeerName) -> None:
    """P03, P11: told at once, freed when every rank has answered."""
    second = P1 if first == P0 else P0
    rank = Rank(TWO)
    rank.command(receive())
    assert rank.hear(failed("post_failed: x", 4), first) == [cancelling(second, "post_failed: x")]
    assert rank.results() == []
    assert rank.hear(failed("post_failed: again", 8), first) == []
    rank.hear(landed(0, 6), second)
    rank.hear(FENCE, second)
    assert rank.results() == [failure("post_failed: x", 4)]


def test_what_is_good_is_what_every_rank_has_written() -> None:
    """P14, P46: the first reason counts, success afterwards does not undo it."""
    rank = Rank(TWO)
    rank.command(receive(stop=32))
    rank.hear(landed(8, 16))
    rank.hear(landed(0, 8))
    rank.hear(landed(20, 28))
    rank.hear(failed("lease_expired", 28), P1)
    rank.hear(failed("abandoned", 12))
    assert rank.results() == [failure("lease_expired", 16)]
    rank.hear(written(stop=32))
    assert rank.results() == []


def test_a_rank_that_has_written_all_does_not_limit_what_is_good() -> None:
    rank = Rank(TWO)
    rank.command(receive(stop=32))
    rank.hear(written(stop=32))
    rank.hear(failed(valid_until=20), P1)
    assert rank.results() == [failure("abandoned: x", 20)]


@pytest.mark.parametrize(("claimed", "good"), [(-5, 4), (0, 4), (6, 6), (999, 8)])
def test_a_claim_beyond_the_registration_is_cut(claimed: int, good: int) -> None:
    rank = Rank()
    rank.command(receive(start=4))
    rank.hear(failed(valid_until=claimed))
    assert rank.results() == [failure("abandoned: x", good)]


def test_slices_outside_the_registration_do_not_count() -> None:
    rank = Rank()
    rank.command(receive(start=4))
    rank.hear(landed(0, 4))
    rank.hear(landed(0, 5))
    rank.hear(failed())
    assert rank.results() == [failure("abandoned: x", 5)]


def test_a_reason_from_a_peer_has_a_bounded_length() -> None:
    rank = Rank()
    rank.command(receive())
    rank.hear(failed("x" * 100_000))
    (result,) = rank.results()
    assert isinstance(result, ReceiveFailed)
    assert len(result.reason) == 300
    rank.command(receive())
    rank.hear(failed("", attempt=2))
    assert rank.results() == [failure("other")]


@pytest.mark.parametrize("ranks", [ONE, TWO])
def test_written_of_something_else_is_never_a_success(ranks: tuple[Link, ...]) -> None:
    """P40, promise 5: the announced tokens are compared with the registered ones."""
    rank = Rank(ranks)
    rank.command(receive())
    rank.hear(written(stop=4))
    if len(ranks) > 1:
        rank.hear(written(), P1)
    assert rank.results() == [failure("malformed: wrote [0, 4), registered [0, 8)")]
    assert rank.core.state.counts == {"malformed": 1}


def test_written_of_something_else_while_failing_ends_the_part() -> None:
    rank = Rank()
    rank.command(receive(), withdraw())
    rank.hear(written(stop=4))
    assert rank.results() == [failure("left", cancelled=True)]


def test_a_fence_that_nobody_asked_for_fails_the_request() -> None:
    rank = Rank(TWO)
    rank.command(receive())
    assert rank.hear(FENCE) == [cancelling(P1, "malformed: cancelled without being asked")]
    rank.hear(FENCE, P1)
    assert rank.results() == [failure("malformed: cancelled without being asked")]


@pytest.mark.parametrize(
    ("message", "reason"), [(failed("lease_expired", 8), "lease_expired"), (FENCE, "malformed")]
)
def test_a_transfer_that_failed_while_it_was_announced_fails_as_soon_as_it_is_asked_for(
    message: AnyMessage, reason: str
) -> None:
    """P36: nothing is registered any more; what a rank claims about blocks that it never knew is not good."""
    rank = Rank(TWO)
    rank.command(announce())
    rank.hear(message)
    assert rank.results() == []
    assert rank.command(receive()) == [
        cancelling(P1, reason if reason == "lease_expired" else "malformed: cancelled without being asked")
    ]
    (result,) = rank.results()
    assert isinstance(result, ReceiveFailed)
    assert (result.reason.partition(":")[0], result.valid_until, result.fenced) == (reason, 0, True)


def test_written_before_anything_was_registered_is_not_believed() -> None:
    """P19: an early completion cannot be of these blocks."""
    rank = Rank()
    rank.command(announce())
    rank.hear(written())
    rank.command(receive())
    assert rank.results() == []
    rank.hear(written())
    assert rank.results() == [Received(T, C, 200)]


# --- unknown -----------------------------------------------------------------------------------------


def test_unknown_is_tolerated_while_the_prefill_leg_may_be_on_its_way() -> None:
    rank = Rank(TWO, unknown_seconds=5.0)
    rank.command(receive())
    rank.now = 4.9
    again = registered(mark=MARK + 1)
    assert rank.hear(status("unknown", mark=MARK + 1)) == [again], "only the rank that does not know it"
    rank.now = 5.0
    rank.hear(status("queued"))
    assert rank.results() == []
    assert rank.hear(status("unknown"), P1) == [
        cancelling(P0, "unknown_transfer"),
        cancelling(P1, "unknown_transfer"),
    ]


def test_after_prefill_unknown_is_tolerated_once_and_not_for_long() -> None:
    """V01: no other leg is on its way; a first answer may be older than the registration."""
    rank = Rank(unknown_seconds=30.0, renew_seconds=2.0)
    rank.command(msgspec.structs.replace(receive(), patient=False))
    rank.now = 1.9
    assert rank.hear(status("unknown", mark=MARK + 1)) == [registered(mark=MARK + 1)]
    rank.now = 2.0
    assert rank.hear(status("unknown")) == [cancelling(P0, "unknown_transfer")]


def test_a_status_that_names_one_transfer_many_times_is_answered_with_one_registration() -> None:
    """A registration is far longer than the entry that asks for it."""
    rank = Rank()
    rank.command(receive())
    entry = TransferStatus(T, C, "unknown", 0, 1)
    assert rank.hear(Status(transfers=(entry,) * 1000, mark=MARK)) == [registered()]


def test_unknown_counts_only_from_a_rank_that_still_owes_something() -> None:
    rank = Rank(TWO, unknown_seconds=5.0)
    rank.command(receive())
    rank.hear(written())
    rank.now = 6.0
    assert rank.hear(status("unknown")) == [], "it has written, and forgotten since"
    assert rank.hear(status("unknown"), PeerName("stranger")) == []
    assert rank.hear(status("unknown", U)) == []
    rank.hear(written(), P1)
    assert rank.results() == [Received(T, C, 220)]


def test_unknown_while_failing_changes_nothing() -> None:
    rank = Rank()
    rank.command(receive(), withdraw())
    assert rank.hear(status("unknown")) == []


# --- silence, quarantine, lapse --------------------------------------------------------------------


@pytest.mark.parametrize("now", [0.0, 0.1, 1e5 / 3, 1e9 / 7])
def test_a_silent_producer_fails_its_transfers_at_the_limit_and_frees_nothing(now: float) -> None:
    """P04, P47: at the limit, not before, whatever the clock's digits."""
    rank = Rank(now=now)
    rank.command(receive())
    rank.at(now + 9.99)
    assert rank.results() == []
    rank.at(now + 10.001)
    assert rank.results() == [failure(SILENT, fenced=False)]
    assert rank.core.states() == {"quarantined": 1}


def test_quarantine_ends_when_the_permission_and_the_retry_bound_have_passed() -> None:
    """P07, promise 2: the last mark came in at 3 s; what repeats it permits writes for 10 s from when it was
    made, and the last of them ends within a retry bound. Clocks differ by one percent at most."""
    rank = Rank()
    rank.command(receive())
    rank.at(3.0)
    rank.hear(status("computing", mark=MARK + 3))
    rank.at(13.0)
    assert rank.results() == [failure(SILENT, fenced=False)]
    bound = 3.0 + LAPSE
    rank.at(bound - 0.01)
    assert rank.results() == []
    assert Disconnect(P0, "peer_silent: the write permission has run out") in rank.at(bound)
    assert rank.results() == [BlocksSafe(T, C)]
    assert rank.core.next_due() is None


def test_a_registration_that_is_repeated_moves_the_bound() -> None:
    """Every permission counts from when the mark came in that it repeats."""
    rank = Rank(renew_seconds=4.0, silence_seconds=8.0)
    rank.command(receive())
    rank.now = 1.0
    rank.hear(status("unknown", mark=MARK + 1))
    rank.command(withdraw())
    rank.at(1.0 + LAPSE - 0.1)
    assert BlocksSafe(T, C) not in rank.results()
    rank.at(1.0 + LAPSE)
    assert BlocksSafe(T, C) in rank.results()


def test_the_bound_counts_from_the_latest_permission_of_any_rank() -> None:
    """Promise 2: one of two ranks was permitted later than the other; both blocks wait for it."""
    rank = Rank((Link(P0, 1, (1000,)), Link(P1, 1, (1000,))), renew_seconds=4.0, silence_seconds=8.0)
    rank.command(receive())
    rank.now = 3.0
    rank.hear(status("unknown", mark=MARK + 3), P1)
    rank.command(withdraw())
    rank.at(3.0 + LAPSE - 0.1)
    assert BlocksSafe(T, C) not in rank.results()
    rank.at(3.0 + LAPSE)
    assert BlocksSafe(T, C) in rank.results()


def test_a_hundred_aborted_requests_of_a_dead_producer() -> None:
    """P07: bounded quarantine, and late answers change nothing."""
    rank = Rank()
    names = [TransferId(f"t{number}") for number in range(100)]
    for name in names:
        rank.command(receive(transfer=name), withdraw(name))
    rank.at(10.0)
    ends = rank.results()
    assert len(ends) == 100
    assert all(isinstance(end, ReceiveFailed) and not end.fenced and end.cancelled for end in ends)
    rank.at(LAPSE)
    assert rank.results() == [BlocksSafe(name, C) for name in names]
    for attempt, name in enumerate(names, 1):
        rank.hear(written(transfer=name, attempt=attempt))
        rank.hear(Cancelled(transfer=name, consumer=C, attempt=attempt))
    assert rank.results() == []
    assert rank.core.state.counts == {"lapsed": 100, "late_message": 200}


def test_a_fence_ends_the_quarantine_early() -> None:
    rank = Rank()
    rank.command(receive())
    rank.at(12.0)
    assert rank.results() == [failure(SILENT, fenced=False)]
    rank.hear(written())
    assert rank.results() == [BlocksSafe(T, C)]
    rank.at(100.0)
    assert rank.results() == []


def test_what_fails_while_a_producer_is_silent_is_given_up_at_once() -> None:
    rank = Rank(TWO, silence_seconds=4.0)
    rank.command(receive())
    rank.at(2.0)
    rank.hear(status("computing"), P1)
    rank.at(4.0)
    rank.results()
    rank.command(receive(transfer=U))
    rank.command(withdraw(U))
    assert rank.results() == [ReceiveFailed(U, C, "left", 0, fenced=False, cancelled=True)]


def test_a_request_that_is_failing_is_given_up_when_a_rank_falls_silent() -> None:
    rank = Rank()
    rank.command(receive(), withdraw())
    rank.at(9.9)
    assert rank.results() == []
    rank.at(10.0)
    assert rank.results() == [failure("left", fenced=False, cancelled=True)]


def test_what_was_asked_for_is_asked_again_until_it_is_answered() -> None:
    """P34: a lost Cancel, or a lost answer to it."""
    rank = Rank()
    rank.command(receive())
    assert rank.command(withdraw()) == [cancelling()]
    assert rank.at(2.0) == [cancelling()]
    assert rank.command(withdraw()) == []
    assert rank.at(4.0) == [cancelling()]
    rank.hear(FENCE)
    assert rank.results() == [failure("left", cancelled=True)]
    assert rank.at(6.0) == []


def test_what_a_peer_says_of_other_things_is_no_answer() -> None:
    """P04: a producer that talks but never of this transfer may not know our link."""
    rank = Rank()
    rank.command(receive())
    for second in range(1, 10):
        rank.core.handle_heard(P0, float(second))
        rank.at(float(second))
    assert rank.results() == []
    rank.core.handle_heard(P0, 10.0)
    rank.at(10.0)
    [failed] = rank.results()
    assert failed.reason == "peer_silent: nothing heard of this transfer for 10 s"
    assert not failed.fenced


# --- marks ------------------------------------------------------------------------------------------


def test_nothing_is_permitted_without_a_mark_and_at_once_with_one() -> None:
    """Promise 2: the first registration of a link costs one exchange more; the mark comes with its answer."""
    rank = Rank(mark=None)
    assert rank.command(receive()) == [registered(mark=None)]
    assert rank.hear(status("queued", mark=None)) == [], "a producer that sends no mark gets nothing for it"
    assert rank.hear(status("queued", mark=MARK + 9)) == [renewed((T, 1), mark=MARK + 9)]
    assert rank.hear(status("queued", mark=MARK + 9)) == [], "the answer to that is no reason to renew again"
    assert rank.hear(status("queued", mark=MARK + 10)) == []


def test_what_was_never_permitted_is_fenced_at_once() -> None:
    """P33: its registration may be on its way, and permits nothing when it is read."""
    rank = Rank(mark=None)
    rank.command(receive())
    assert rank.command(withdraw()) == [cancelling()]
    assert rank.results() == [failure("left", cancelled=True)]
    assert rank.core.next_due() is None


def test_only_ranks_that_were_permitted_are_waited_for() -> None:
    rank = Rank(TWO, mark=None)
    rank.command(receive())
    rank.hear(status("queued"), P1)
    assert rank.command(withdraw()) == [cancelling(), cancelling(P1)]
    assert rank.results() == []
    rank.hear(FENCE, P1)
    assert rank.results() == [failure("left", cancelled=True)]


def test_an_idle_link_is_permitted_again_by_a_fresh_mark_only() -> None:
    """A mark that is older than half a permission is of little use: the next answer brings a newer one."""
    rank = Rank()
    rank.at(5.0)
    assert rank.command(receive()) == [registered()]
    rank.at(5.1)
    assert rank.command(receive(transfer=U)) == [registered(transfer=U, attempt=2, mark=None)]
    rank.command(withdraw(U))
    (ended,) = rank.results()
    assert isinstance(ended, ReceiveFailed)
    assert ended.fenced


def test_a_permission_that_is_half_over_is_renewed_by_the_next_answer() -> None:
    """Not with every answer: that would be two messages for nothing."""
    rank = Rank(renew_seconds=5.0)
    rank.command(receive())
    rank.at(4.9)
    assert rank.hear(status("computing")) == []
    assert rank.at(5.1) == [renewed((T, 1))]
    assert rank.hear(status("computing", mark=MARK + 5)) == [renewed((T, 1), mark=MARK + 5)]


def test_a_mark_is_replaced_by_a_newer_one_only() -> None:
    """P34: an older answer may arrive later. It says nothing of how long ago the newer one was made."""
    rank = Rank()
    rank.now = 3.0
    rank.hear(Status(transfers=(), mark=MARK - 5))
    assert rank.command(receive()) == [registered()]
    rank.command(withdraw())
    rank.at(LAPSE - 0.01)
    assert rank.results() == [failure("left", fenced=False, cancelled=True)]
    rank.at(LAPSE)
    assert rank.results() == [BlocksSafe(T, C)]


@pytest.mark.parametrize("mark", [math.nan, math.inf, -math.inf, -1.0, 1e300])
def test_a_mark_that_is_no_reading_of_a_clock_harms_nobody_else(mark: float) -> None:
    """S01: it is repeated to its maker, which judges it; our own waits are by our own clock."""
    rank = Rank(TWO, mark=None)
    rank.hear(Status(transfers=(), mark=mark))
    rank.hear(Status(transfers=(), mark=MARK), P1)
    told = rank.command(receive())
    assert isinstance(told[0], Send)
    assert isinstance(told[0].message, Register)
    assert told[0].message.mark is not None
    assert math.isnan(told[0].message.mark) if math.isnan(mark) else told[0].message.mark == mark
    assert told[1] == registered(P1)
    rank.command(withdraw())
    rank.hear(FENCE, P1)
    rank.at(LAPSE - 0.01)
    assert rank.results() == [failure("left", fenced=False, cancelled=True)]
    rank.at(LAPSE)
    assert rank.results() == [BlocksSafe(T, C)]


def test_marks_that_are_remembered_are_bounded_and_the_longest_unheard_is_forgotten() -> None:
    rank = Rank()
    for number in range(MARKS_MAX - 2):
        rank.hear(Status(transfers=(), mark=1.0), PeerName(f"other{number}"))
    rank.hear(Status(transfers=(), mark=MARK + 1), P0)
    for number in range(2):
        rank.hear(Status(transfers=(), mark=1.0), PeerName(f"more{number}"))
    marks = rank.core.state.marks
    assert len(marks) == MARKS_MAX
    assert P0 in marks
    assert P1 not in marks
    assert PeerName("other0") not in marks


def test_a_lapse_that_is_over_when_the_request_fails_ends_it_with_the_next_time_out() -> None:
    """P07: nobody has heard of a permission for long; the connection is torn down all the same."""
    rank = Rank(silence_seconds=60.0)
    rank.command(receive())
    rank.at(20.0)
    rank.command(withdraw())
    assert rank.results() == []
    assert Disconnect(P0, "peer_silent: the write permission has run out") in rank.at(20.0)
    assert rank.results() == [failure("left", cancelled=True)]


@pytest.mark.parametrize("end", ["broken", "disconnected"])
def test_what_an_announced_request_was_granted_is_remembered_when_its_links_go(end: str) -> None:
    """Promise 2: the renewal is still on its way, and permits the registration that has overtaken it."""
    rank = Rank()
    rank.command(announce())
    assert rank.at(2.0) == [renewed((T, 1))]
    rank.now = 3.0
    if end == "broken":
        rank.core.handle_link_broken(P0, "reset", 3.0)
    else:
        rank.core.handle_disconnected(P0, "slice overdue", 3.0)
    assert rank.outputs() == []
    rank.at(5.5)
    assert rank.command(receive()) == [registered(mark=None)]
    rank.command(withdraw())
    rank.at(LAPSE - 0.01)
    assert all(isinstance(end, ReceiveFailed) and not end.fenced for end in rank.results())
    rank.at(LAPSE)
    ends = rank.results()
    assert ends[-1] in (BlocksSafe(T, C), failure("left", cancelled=True))


# --- the same ids again ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "late",
    [
        written(),
        failed("abandoned: x", 8),
        FENCE,
        landed(0, 8),
        status("unknown", mark=None),
    ],
)
def test_late_messages_of_an_earlier_attempt_are_counted_and_nothing_else(late: AnyMessage) -> None:
    """P39, P64: a client or a router uses the same ids again; twice each, for messages are doubled."""
    rank = Rank(unknown_seconds=1.0)
    rank.command(receive(), withdraw())
    rank.hear(FENCE)
    assert rank.results() == [failure("left", cancelled=True)]
    assert rank.command(receive()) == [registered(attempt=2)]
    rank.now = 1.5
    assert rank.hear(late) == []
    assert rank.hear(late) == []
    assert rank.results() == []
    assert rank.core.state.counts.get("late_message", 0) == (0 if isinstance(late, Status) else 2)
    rank.hear(failed(attempt=2))
    assert rank.results() == [failure("abandoned: x")], "nothing had landed"


def test_attempts_are_numbered_over_all_ids() -> None:
    """No number is used twice, also not for what is only announced or withdrawn."""
    rank = Rank()
    assert rank.command(withdraw(), withdraw()) == [cancelling(), cancelling(attempt=2)]
    rank.command(announce())
    assert rank.command(receive()) == [registered(attempt=3)], "an announced request keeps its number"
    assert rank.command(receive(transfer=U)) == [registered(transfer=U, attempt=4)]
    assert rank.at(2.0) == [renewed((T, 3), (U, 4))]
    rank.command(withdraw())
    assert rank.at(4.0) == [cancelling(attempt=3), renewed((U, 4))]


# --- connections that break, and what is known then ------------------------------------------------

ASKING = Inquire(P0, SOURCE)


ORPHANS = Limits().orphan_seconds
SILENT_AT = Limits().silence_seconds


def dead(rank: Rank, peer: PeerName = P0, reason: str = "peer_lost: nobody listens") -> None:
    rank.core.handle_peer_dead(peer, reason, rank.now)
    rank.core.check_invariants()
    assert rank.results() == [], "its ranks may outlive it for a moment"


def broken(rank: Rank, peer: PeerName = P0, reason: str = "peer_lost: reset") -> list[Output]:
    rank.core.handle_link_broken(peer, reason, rank.now)
    rank.core.check_invariants()
    return rank.outputs()


def test_a_connection_that_broke_proves_nothing() -> None:
    """Promise 2: the producer may live and write. It is asked for its fence; its engine, whether it lives."""
    rank = Rank(TWO)
    rank.command(receive())
    rank.hear(landed(0, 4))
    reason = "peer_lost: reset"
    assert broken(rank) == [cancelling(P0, reason), cancelling(P1, reason), ASKING]
    rank.hear(FENCE, P1)
    assert rank.results() == []
    assert rank.core.states() == {"failing": 1}
    assert rank.core.state.sources == {}, "a later request looks for its engine afresh"


@pytest.mark.parametrize("first", ["evidence", "fence of the other"])
def test_a_peer_that_is_proven_dead_writes_no_more(first: str) -> None:
    """P47, P11: what had landed from it is kept; the other rank's fence is waited for all the same."""
    rank = Rank(TWO)
    rank.command(receive())
    rank.hear(landed(0, 4))
    rank.hear(landed(0, 6), P1)
    broken(rank)
    if first == "evidence":
        dead(rank)
        assert rank.at(ORPHANS) == [], "the others have been told already"
        assert rank.results() == []
        rank.hear(FENCE, P1)
    else:
        rank.hear(FENCE, P1)
        dead(rank)
        rank.at(ORPHANS - 0.01)
        assert rank.results() == []
        rank.at(ORPHANS)
    assert rank.results() == [failure("peer_lost: reset", 4)]
    assert not rank.core.expecting


def test_death_counts_from_its_first_evidence_and_after_the_orphans_time() -> None:
    """P47, promise 2: the ranks of a dead engine may go on for a moment. What lands until then is good."""
    rank = Rank(orphan_seconds=0.5)
    rank.command(receive(), receive(transfer=U))
    rank.now = 1.0
    dead(rank, reason="peer_lost: nobody listens")
    assert rank.core.states() == {"waiting": 2}
    rank.now = 1.25
    dead(rank, reason="peer_lost: found again")
    rank.hear(landed(0, 4))
    rank.hear(written(transfer=U, attempt=2))
    assert rank.results() == [Received(U, C, 200)], "it had come before"
    rank.at(1.49)
    assert rank.results() == []
    rank.at(1.5)
    assert rank.results() == [failure("peer_lost: nobody listens", 4)]
    assert rank.core.next_due() is None


def test_nobody_asks_about_a_peer_that_is_dead_and_only_waited_for() -> None:
    """P05: the renewal finds a broken connection, and the answer known."""
    rank = Rank()
    rank.command(receive())
    broken(rank)
    rank.now = 1.5
    dead(rank)
    assert rank.at(2.0) == [cancelling(reason="peer_lost: reset")]
    assert broken(rank) == []


def test_who_is_not_waited_for_any_more_is_not_declared_dead() -> None:
    """The fence comes after the evidence, from a rank that outlives its engine. Then it is met again."""
    rank = Rank()
    rank.command(receive())
    broken(rank)
    dead(rank)
    rank.now = 0.5
    rank.hear(FENCE)
    assert rank.results() == [failure("peer_lost: reset")]
    assert rank.core.next_due() is None
    rank.command(receive(transfer=U))
    rank.at(ORPHANS + 0.1)
    assert rank.core.states() == {"waiting": 1}
    rank.hear(written(transfer=U, attempt=2))
    assert rank.results() == [Received(U, C, 200)]


@pytest.mark.parametrize(
    ("found", "told", "safe"),
    [
        (9.5, SILENT_AT, 9.5 + ORPHANS),
        (11.0, SILENT_AT, 11.0 + ORPHANS),
        (LAPSE - ORPHANS / 2, SILENT_AT, LAPSE),
    ],
    ids=["before the silence limit", "in quarantine", "just before the lapse"],
)
def test_evidence_of_death_and_quarantine(found: float, told: float, safe: float) -> None:
    """P07, P47: the host hears at the silence limit all the same; the blocks are safe by what comes first."""
    rank = Rank()
    rank.command(receive())
    broken(rank)
    events: list[tuple[float, Result]] = []
    for moment in sorted({found, told, safe - 0.01, safe, 20.0}):
        rank.at(moment)
        events += [(moment, result) for result in rank.results()]
        if moment == found:
            rank.core.handle_peer_dead(P0, "peer_lost: nobody listens", rank.now)
    assert events == [(told, failure("peer_lost: reset", fenced=False)), (safe, BlocksSafe(T, C))]
    assert rank.core.next_due() is None


def test_deadlines_of_a_dead_peer_that_are_due_together() -> None:
    """A10: the thread stood still; the silence limit leaves nothing that the death could end."""
    rank = Rank()
    rank.command(announce())
    rank.now = 9.5
    dead(rank)
    rank.core.handle_timeout(11.0)
    rank.core.check_invariants()
    assert rank.core.states() == {"announced": 1}
    assert rank.core.next_due() is None


def test_a_peer_that_lives_is_asked_for_its_fence_again() -> None:
    """Promise 2: what was sent before went over the connection that had broken."""
    rank = Rank(TWO)
    rank.command(receive())
    broken(rank)
    rank.core.handle_peer_alive(P0, rank.now)
    assert rank.outputs() == [cancelling(P0, "peer_lost: reset")], "and no other rank is"
    assert ASKING not in rank.at(2.0), "it is known that it lives"
    rank.hear(FENCE, P1)
    assert rank.results() == []
    rank.hear(FENCE)
    assert rank.results() == [failure("peer_lost: reset")]


def test_what_cannot_be_found_out_is_asked_again_and_ends_with_the_lapse() -> None:
    """P04, P07: the host is told at the silence limit; the blocks stay until nobody can write any more."""
    rank = Rank()
    rank.command(receive())
    rank.now = 1.0
    assert ASKING in broken(rank)
    asked = [1.0]
    while rank.now < 20.0:
        rank.core.handle_no_evidence(P0)
        if ASKING in rank.at(rank.now + 0.25):
            asked.append(rank.now)
        assert (rank.results() == [failure("peer_lost: reset", fenced=False)]) is (rank.now == 10.0)
        if rank.now + 0.25 > LAPSE:
            break
    assert asked == [1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0]
    rank.at(LAPSE)
    assert rank.results() == [BlocksSafe(T, C)]
    rank.core.handle_no_evidence(P0)
    assert rank.core.next_due() is None


def test_nobody_asks_twice_while_an_answer_is_awaited() -> None:
    rank = Rank()
    rank.command(receive())
    assert broken(rank).count(ASKING) == 1
    outputs = broken(rank)
    for tick in range(1, 6):
        outputs += rank.at(2.0 * tick) + broken(rank)
    assert ASKING not in outputs


@pytest.mark.parametrize("answer", ["alive", "unknown"])
def test_a_connection_that_breaks_again_at_once_is_no_busy_loop(answer: str) -> None:
    """P05: at most one question per renewal interval, and the one when it broke first."""
    rank = Rank()
    rank.command(receive())
    asked = 0
    for tick in range(1000):
        outputs = rank.at(tick / 100) + broken(rank)
        asked += outputs.count(ASKING)
        if ASKING in outputs:
            if answer == "alive":
                rank.core.handle_peer_alive(P0, rank.now)
            else:
                rank.core.handle_no_evidence(P0)
            rank.outputs()
    assert 2 <= asked <= 1 + 10 / 2


def test_nothing_is_asked_about_a_rank_of_which_nothing_can_come() -> None:
    """Never permitted, or written already: the end of the request does not hang on whether it lives."""
    rank = Rank(mark=None)
    rank.command(receive())
    assert broken(rank) == [cancelling(reason="peer_lost: reset")]
    assert rank.results() == [failure("peer_lost: reset")]
    rank = Rank(TWO)
    rank.command(receive())
    rank.hear(written())
    assert broken(rank) == []
    assert broken(rank, PeerName("stranger")) == []
    rank.at(2.0)
    rank.hear(written(), P1)
    assert rank.results() == [Received(T, C, 220)]


def test_evidence_ends_what_is_in_quarantine_and_leaves_what_waits_elsewhere() -> None:
    """P07, P47: one in quarantine, one failing, one announced, and one that waits for another engine."""
    other = Source(EngineId("other"), "127.0.0.1", 5601)
    rank = Rank(silence_seconds=4.0)
    rank.command(receive())
    rank.at(4.0)
    assert [end.fenced for end in rank.results() if isinstance(end, ReceiveFailed)] == [False]
    rank.hear(Status(transfers=(), mark=MARK + 1))
    failing, queued, elsewhere = TransferId("failing"), TransferId("queued"), TransferId("elsewhere")
    rank.command(receive(transfer=failing), withdraw(failing), announce(queued))
    rank.links = (Link(P1, 1, (100,)),)
    rank.command(receive(transfer=elsewhere, source=other))
    assert rank.core.states() == {"quarantined": 1, "failing": 1, "announced": 1, "waiting": 1}
    assert broken(rank) == [ASKING]
    dead(rank)
    rank.at(4.0 + ORPHANS)
    assert set(rank.results()) == {
        BlocksSafe(T, C),
        ReceiveFailed(failing, C, "left", 0, fenced=True, cancelled=True),
    }
    assert rank.core.states() == {"announced": 1, "waiting": 1}
    assert P0 not in rank.core.state.peers


def test_a_request_that_waits_when_its_peer_turns_out_to_live_is_left_alone() -> None:
    """It was linked meanwhile: only what has failed is asked for a fence."""
    rank = Rank()
    rank.command(receive())
    broken(rank)
    rank.command(receive(transfer=U))
    rank.core.handle_peer_alive(P0, rank.now)
    assert rank.outputs() == [cancelling(reason="peer_lost: reset")]
    rank.hear(written(transfer=U, attempt=2))
    assert rank.results() == [Received(U, C, 200)]


def test_a_request_that_waits_when_its_peer_turns_out_to_be_dead_fails() -> None:
    rank = Rank()
    rank.command(receive())
    broken(rank)
    rank.command(receive(transfer=U))
    dead(rank)
    rank.at(ORPHANS)
    assert rank.results() == [
        failure("peer_lost: reset"),
        ReceiveFailed(U, C, "peer_lost: nobody listens", 0, fenced=True),
    ]


def test_answers_about_a_peer_that_nothing_is_expected_from_any_more() -> None:
    rank = Rank()
    rank.command(receive())
    broken(rank)
    rank.hear(FENCE)
    rank.results()
    rank.core.handle_peer_alive(P0, rank.now)
    rank.core.handle_no_evidence(P0)
    dead(rank)
    assert rank.core.next_due() is None
    assert rank.outputs() == []
    assert rank.results() == []


# --- connections -----------------------------------------------------------------------------------


def test_a_dead_producer_can_write_no_more() -> None:
    """P47: proven death is a fence, once its orphans are gone. What has landed is good."""
    rank = Rank()
    rank.command(receive())
    rank.hear(landed(0, 4))
    dead(rank, reason="peer_lost: reset")
    rank.at(ORPHANS)
    assert rank.results() == [failure("peer_lost: reset", 4)]
    assert rank.core.state.sources == {}


def test_the_death_of_one_rank_waits_for_the_others() -> None:
    """P11."""
    rank = Rank(TWO)
    rank.command(receive())
    dead(rank, reason="reset")
    assert rank.at(ORPHANS) == [cancelling(P1, "peer_lost: reset")]
    dead(rank, reason="reset")
    assert rank.results() == []
    rank.hear(FENCE, P1)
    assert rank.results() == [failure("peer_lost: reset")]


def test_a_failure_of_a_rank_that_has_written_everything_is_late() -> None:
    rank = Rank(TWO)
    rank.command(receive())
    rank.hear(written())
    rank.hear(failed())
    rank.hear(written(), P1)
    assert rank.results() == [Received(T, C, 220)]
    rank.hear(failed())
    rank.hear(landed(0, 8))
    assert rank.core.state.counts == {"late_message": 2}


def test_the_death_of_a_rank_that_has_written_everything_changes_nothing() -> None:
    rank = Rank(TWO)
    rank.command(receive())
    rank.hear(written())
    dead(rank)
    dead(rank, PeerName("stranger"))
    rank.at(ORPHANS)
    rank.hear(written(), P1)
    assert rank.results() == [Received(T, C, 220)]


def test_a_connection_that_we_tore_down_proves_nothing() -> None:
    """Promise 2: the peer may live and write; only the bound ends it."""
    rank = Rank()
    rank.command(receive(), receive(transfer=U), withdraw(U))
    rank.core.handle_disconnected(P0, "slice overdue", 0.5)
    rank.core.handle_disconnected(PeerName("stranger"), "slice overdue", 0.5)
    rank.core.check_invariants()
    assert rank.results() == [
        failure("peer_silent: slice overdue", fenced=False),
        ReceiveFailed(U, C, "left", 0, fenced=False, cancelled=True),
    ]
    rank.at(LAPSE - 0.1)
    assert rank.results() == []
    rank.at(LAPSE)
    assert set(rank.results()) == {BlocksSafe(T, C), BlocksSafe(U, C)}


@pytest.mark.parametrize("end", ["broken", "dead", "silent", "disconnected"])
@pytest.mark.parametrize("then", ["receive", "withdraw"])
def test_an_announced_request_looks_for_its_producer_again(end: str, then: str) -> None:
    """A restarted producer is another peer under the same address."""
    rank = Rank()
    rank.command(announce())
    if end == "broken":
        rank.core.handle_link_broken(P0, "reset", 1.0)
        assert rank.outputs() == [], "nothing hangs on whether it lives"
    elif end == "dead":
        dead(rank)
        rank.at(ORPHANS)
    elif end == "disconnected":
        rank.core.handle_disconnected(P0, "slice overdue", 1.0)
    else:
        rank.at(10.0)
    rank.core.check_invariants()
    rank.outputs()
    assert rank.results() == []
    assert rank.core.next_due() is None
    rank.links = (Link(P1, 1, (100,)),)
    if then == "receive":
        mark = None if end == "silent" else MARK
        assert rank.command(receive()) == [registered(P1, mark=mark, block_bytes=100)]
    else:
        assert rank.command(withdraw()) == [cancelling(P1)]
        assert not rank.core.expecting


def test_an_announced_request_whose_ranks_all_fall_silent_at_once() -> None:
    rank = Rank(TWO)
    rank.command(announce())
    rank.at(12.0)
    assert rank.core.next_due() is None
    assert rank.core.state.peers == {}
    assert rank.command(receive()) == [registered(mark=None), registered(P1, mark=None)]


def test_links_of_other_producers_are_kept_when_one_is_lost() -> None:
    other = Source(EngineId("other"), "127.0.0.1", 5601)
    rank = Rank()
    rank.command(receive())
    rank.links = (Link(P1, 1, (100,)),)
    rank.command(receive(transfer=U, source=other))
    rank.core.handle_link_broken(P0, "reset", 1.0)
    assert list(rank.core.state.sources) == [other]


# --- resolving -------------------------------------------------------------------------------------


def test_one_resolve_serves_every_request_that_waits_for_it() -> None:
    rank = Rank(links=None)
    assert rank.command(receive(), receive(transfer=U), announce(TransferId("v"))) == [Resolve(SOURCE)]
    rank.core.handle_resolved(SOURCE, ONE, 1.0)
    assert rank.outputs() == [
        registered(),
        registered(transfer=U, attempt=2),
        Send(P0, Announce(transfer=TransferId("v"), consumer=C, attempt=3)),
    ]
    rank.links = ONE
    (told,) = rank.command(receive(transfer=TransferId("w")))
    assert told == registered(transfer=TransferId("w"), attempt=4)


@pytest.mark.parametrize(
    ("reason", "told"),
    [("no answer", "handshake: no answer"), ("geometry: block size differs", "geometry: block size differs")],
)
def test_a_producer_that_cannot_be_reached(reason: str, told: str) -> None:
    """Requests that wait fail fenced, those that queue fail when they are asked for, others are forgotten."""
    rank = Rank(links=None)
    queued, gone = TransferId("queued"), TransferId("gone")
    rank.command(receive(), announce(queued), withdraw(gone))
    rank.core.handle_unresolved(SOURCE, reason, 1.0)
    rank.core.check_invariants()
    assert rank.results() == [failure(told)]
    assert rank.core.states() == {"announced": 1}
    assert rank.command(receive(transfer=queued)) == []
    assert rank.results() == [ReceiveFailed(queued, C, told, 0, fenced=True)]
    assert rank.command(receive()) == [Resolve(SOURCE)], "a later request tries again"


def test_answers_that_nobody_waits_for_are_ignored() -> None:
    rank = Rank(links=None)
    rank.core.handle_resolved(SOURCE, ONE, 1.0)
    rank.core.handle_unresolved(SOURCE, "no answer", 1.0)
    assert rank.outputs() == []
    assert rank.results() == []


def test_a_producer_without_any_of_our_kv_is_a_failure() -> None:
    rank = Rank(links=())
    rank.command(receive())
    assert rank.results() == [failure("handshake: none of its ranks holds any of our KV")]


def test_aborted_while_its_producer_is_looked_for() -> None:
    """P02, P17: nobody was told of the blocks; the producer hears of the abort as soon as it can."""
    rank = Rank(links=None)
    rank.command(receive(), withdraw())
    assert rank.results() == [failure("left", cancelled=True)]
    rank.core.handle_resolved(SOURCE, ONE, 1.0)
    assert rank.outputs() == [cancelling(attempt=2)]
    assert not rank.core.expecting
    assert rank.results() == []


def test_announced_then_withdrawn_while_its_producer_is_looked_for() -> None:
    rank = Rank(links=None)
    rank.command(announce(), withdraw())
    rank.core.handle_resolved(SOURCE, ONE, 1.0)
    assert rank.outputs() == [cancelling()]
    assert not rank.core.expecting


def test_announced_then_received_while_its_producer_is_looked_for() -> None:
    rank = Rank(links=None)
    assert rank.command(announce(), receive()) == [Resolve(SOURCE)]
    rank.core.handle_resolved(SOURCE, ONE, 1.0)
    assert rank.outputs() == [registered()]


@pytest.mark.parametrize("reason", ["left", ""])
def test_received_after_it_was_withdrawn_ends_once(reason: str) -> None:
    rank = Rank(links=None)
    rank.command(withdraw(reason=reason), receive())
    assert rank.results() == [failure(reason or "cancelled", cancelled=True)]
    rank.core.handle_resolved(SOURCE, ONE, 1.0)
    rank.core.check_invariants()
    assert not rank.core.expecting


def test_sources_that_nobody_waits_for_are_forgotten_oldest_first() -> None:
    rank = Rank()
    sources = [Source(EngineId("e"), "127.0.0.1", port) for port in range(SOURCES_MAX + 1)]
    for source in sources:
        rank.command(withdraw(source=source))
    assert list(rank.core.state.sources) == sources[1:]


def test_sources_that_are_waited_for_are_never_forgotten() -> None:
    rank = Rank(links=None)
    for port in range(SOURCES_MAX + 2):
        rank.command(receive(transfer=TransferId(str(port)), source=Source(EngineId("e"), "127.0.0.1", port)))
    assert len(rank.core.state.sources) == SOURCES_MAX + 2


# --- the host --------------------------------------------------------------------------------------


def test_a_withdrawal_that_nothing_preceded_tells_the_producer() -> None:
    """P17, P22: full prefix hit, or rejected before it was scheduled."""
    rank = Rank(TWO)
    assert rank.command(withdraw(reason="full prefix hit")) == [
        cancelling(P0, "full prefix hit"),
        cancelling(P1, "full prefix hit"),
    ]
    assert rank.results() == []
    assert rank.core.next_due() is None


def test_a_withdrawn_announcement_is_cancelled_once() -> None:
    rank = Rank()
    rank.command(announce())
    assert rank.command(withdraw()) == [cancelling()]
    assert rank.results() == []
    assert rank.core.next_due() is None


def test_a_full_table_refuses_by_result() -> None:
    rank = Rank(transfers_max=1)
    rank.command(receive())
    assert rank.command(receive(transfer=U), announce(TransferId("v")), withdraw(TransferId("w"))) == []
    assert rank.results() == [ReceiveFailed(U, C, "table_full", 0, fenced=True)]
    assert rank.core.state.counts == {"table_full": 1, "announce_dropped": 1, "withdraw_dropped": 1}


def test_asked_for_twice_is_answered_once() -> None:
    """P39."""
    rank = Rank()
    rank.command(receive())
    assert rank.command(receive(), announce()) == []
    rank.hear(written())
    assert rank.results() == [Received(T, C, 200)]
    assert rank.core.state.counts == {"received_twice": 1, "announce_dropped": 1}


def test_asked_for_again_while_it_is_in_quarantine_is_answered_at_once() -> None:
    """P39, P64: no request waits for ever. Nobody knows of the new blocks; the old ones stay in doubt."""
    rank = Rank()
    rank.command(receive())
    rank.at(10.0)
    assert rank.results() == [failure(SILENT, fenced=False)]
    assert rank.command(announce(), receive()) == []
    reason = "malformed: its name is that of a request in quarantine"
    assert rank.results() == [ReceiveFailed(T, C, reason, 0, fenced=True)]
    rank.at(LAPSE)
    assert rank.results() == [BlocksSafe(T, C)]


def test_children_of_one_transfer_end_each_by_itself() -> None:
    """P19."""
    rank = Rank()
    other = ConsumerId("c1")
    rank.command(receive(), Receive(T, other, SOURCE, 0, 8, GROUPS))
    rank.hear(written())
    assert rank.results() == [Received(T, C, 200)]
    rank.hear(Failed(transfer=T, consumer=other, reason="abandoned", valid_until=0, attempt=2))
    assert rank.results() == [ReceiveFailed(T, other, "abandoned", 0, fenced=True)]


def test_an_id_that_is_too_long_fails_that_request_alone() -> None:
    rank = Rank()
    long = TransferId("x" * 4097)
    assert rank.command(receive(transfer=long), receive()) == [registered()]
    (ended,) = rank.results()
    assert isinstance(ended, ReceiveFailed)
    assert (ended.transfer, ended.fenced) == (long, True)
    assert ended.reason == "malformed: an id of more than 4096 characters"


@pytest.mark.parametrize("stands", ["unknown", "queued", "computing", "writing", "held"])
def test_a_destination_is_given_up_unless_its_producer_has_begun(stands: str) -> None:
    """It then ends as any failure does: with the fence of who was permitted to write."""
    rank = Rank()
    rank.command(receive(), announce(U))
    rank.hear(status(stands))
    outputs = rank.command(Relinquish(T, C), Relinquish(U, C), Relinquish(TransferId("v"), C))
    reason = "starved: others wait for the memory"
    assert outputs == ([cancelling(reason=reason)] if stands in ("unknown", "queued") else [])
    rank.hear(FENCE)
    (ended,) = rank.results()
    assert isinstance(ended, ReceiveFailed)
    assert (ended.reason == reason) is (stands in ("unknown", "queued"))


def test_a_destination_into_which_something_has_landed_is_kept() -> None:
    rank = Rank()
    rank.command(receive())
    rank.hear(status("queued"))
    rank.hear(landed(0, 4))
    assert rank.command(Relinquish(T, C)) == []


def stands(state: str, frontier: int = 0) -> Status:
    return Status(transfers=(TransferStatus(T, C, state, frontier, 1),), mark=MARK)


STARVED = cancelling(reason="starved: others wait for the memory")


@pytest.mark.parametrize(
    "progress",
    [stands("computing", 12), stands("writing", 8), landed(0, 4)],
    ids=["computed", "begun to write", "landed"],
)
def test_a_destination_is_given_up_when_its_prefill_stands_still_from_one_time_to_the_next(
    progress: AnyMessage,
) -> None:
    """G07: a prefill that was preempted says `computing`, and waits for what others hold, for ever."""
    rank = Rank()
    rank.command(receive(12))
    rank.hear(stands("computing", 8))
    assert rank.command(Relinquish(T, C)) == [], "it may be going on"
    rank.hear(progress)
    assert rank.command(Relinquish(T, C)) == [], "and has"
    rank.hear(progress if isinstance(progress, Status) else stands("computing", 8))
    assert rank.command(Relinquish(T, C)) == [STARVED], "a sign of life is no progress"
    rank.hear(FENCE)
    (ended,) = rank.results()
    assert isinstance(ended, ReceiveFailed)
    assert ended.fenced


def test_a_destination_without_any_progress_is_given_up_at_the_second_time() -> None:
    rank = Rank()
    rank.command(receive())
    rank.hear(stands("computing", 4))
    assert rank.command(Relinquish(T, C)) == []
    assert rank.command(Relinquish(T, C)) == [STARVED]


def test_one_rank_that_stands_still_is_enough_to_give_up() -> None:
    """P42: a request needs all of its ranks; the other one has written everything, or goes on."""
    for other in (written(), stands("computing", 8)):
        rank = Rank(TWO)
        rank.command(receive())
        rank.hear(stands("computing", 4))
        rank.hear(stands("computing", 4), P1)
        assert rank.command(Relinquish(T, C)) == []
        rank.hear(other, P1)
        assert STARVED in rank.command(Relinquish(T, C))


def test_closing_withdraws_everything() -> None:
    rank = Rank()
    rank.command(receive(), announce(U))
    rank.core.handle_close(0.0)
    assert rank.outputs() == [cancelling(reason="closed"), cancelling(reason="closed", transfer=U, attempt=2)]
    rank.hear(FENCE)
    assert rank.results() == [failure("closed", cancelled=True)]
    assert not rank.core.expecting


def test_the_end_of_an_engine_proves_nothing_of_ranks_that_may_outlive_it() -> None:
    """P46: a rank that does not watch its engine may still write; only the lapse frees the blocks."""
    rank = Rank((Link(P0, 1, (100,), ends_with_engine=False),))
    rank.command(receive())
    rank.core.handle_link_broken(P0, "reset", rank.now)
    rank.outputs()
    rank.core.handle_peer_dead(P0, "refused", rank.now)
    rank.core.check_invariants()
    assert Inquire(P0, SOURCE) in rank.at(2.5), "it is asked again"
    rank.core.handle_peer_dead(P0, "refused", rank.now)
    rank.at(9.0)
    assert rank.results() == []
    rank.at(10.0)
    [failed] = rank.results()
    assert isinstance(failed, ReceiveFailed)
    assert not failed.fenced
    rank.core.handle_peer_dead(P0, "refused", rank.now)
    rank.at(LAPSE - 0.1)
    assert rank.results() == []
    rank.at(LAPSE + 0.1)
    assert rank.results() == [BlocksSafe(T, C)]
