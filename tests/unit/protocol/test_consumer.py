"""The consumer core by itself: whom it tells what, when it calls blocks good, and when safe."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.ids import ConsumerId, EngineId, PeerName, TransferId
from kvferry.protocol.commands import (
    AnnounceCommand,
    BlocksSafe,
    Receive,
    Received,
    ReceiveFailed,
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
from kvferry.protocol.outputs import Disconnect, Link, Output, Resolve, Send
from kvferry.protocol.receptions import SOURCES_MAX

T, U, C = TransferId("t"), TransferId("u"), ConsumerId("c0")
P0, P1 = PeerName("p0"), PeerName("p1")
SOURCE = Source(EngineId("prefill"), "127.0.0.1", 5600)
ONE = (Link(P0, 1, (100,)),)
TWO = (Link(P0, 1, (100,)), Link(P1, 1, (10,)))
GROUPS = (((3, 2),),)
RETRY_BOUND = 3.0


class Rank:
    """A consumer core, its clock, and what has come out of it."""

    def __init__(self, links: tuple[Link, ...] | None = ONE, now: float = 0.0, **limits: Any) -> None:
        self.core = ConsumerCore(Limits(**limits), RETRY_BOUND)
        self.links = links
        self.now = now

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


def registered(peer: PeerName = P0, transfer: TransferId = T, start: int = 0, stop: int = 8) -> Send:
    message = Register(
        transfer=transfer, consumer=C, start=start, stop=stop, groups=GROUPS, write_seconds=10.0, sharers=1
    )
    return Send(peer, message)


def cancelling(peer: PeerName = P0, reason: str = "left", transfer: TransferId = T) -> Send:
    return Send(peer, Cancel(transfer=transfer, consumer=C, reason=reason))


def written(start: int = 0, stop: int = 8, transfer: TransferId = T) -> Written:
    return Written(transfer=transfer, consumer=C, start=start, stop=stop)


def landed(start: int, stop: int) -> Landed:
    return Landed(transfer=T, consumer=C, start=start, stop=stop)


def failed(reason: str = "abandoned: x", valid_until: int = 0) -> Failed:
    return Failed(transfer=T, consumer=C, reason=reason, valid_until=valid_until)


def status(state: str, transfer: TransferId = T) -> Status:
    return Status(transfers=(TransferStatus(transfer, C, state, 0),))


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
    assert rank.command(receive()) == [registered(link.peer) for link in links]
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
        assert renewal is None or renewal == Send(P0, Renew(transfers=((T, C),), write_seconds=10.0))
        rank.hear(status("computing"))
        rank.at(2.0 * tick + 0.5)
    assert rank.results() == []
    assert rank.core.states() == {"waiting": 1}


def test_one_renewal_per_peer_and_interval_whatever_waits() -> None:
    """P09: by the one id that both sides know the transfer by."""
    rank = Rank(TWO)
    rank.command(receive(), announce(U))
    rank.hear(written())
    assert rank.at(2.0) == [
        Send(P0, Renew(transfers=((U, C),), write_seconds=10.0)),
        Send(P1, Renew(transfers=((T, C), (U, C)), write_seconds=10.0)),
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
    rank.hear(failed(""))
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
    assert rank.hear(status("unknown")) == [registered()], "only the rank that does not know it"
    rank.now = 5.0
    rank.hear(status("queued"))
    assert rank.results() == []
    assert rank.hear(status("unknown"), P1) == [
        cancelling(P0, "unknown_transfer"),
        cancelling(P1, "unknown_transfer"),
    ]


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
    """P07, promise 2: the last renewal went out at 8 s and permits writes for 10 s; a retry bound before
    and after."""
    rank = Rank()
    rank.command(receive())
    rank.at(10.0)
    rank.results()
    bound = 8.0 + 10.0 + 2 * RETRY_BOUND
    rank.at(bound - 0.01)
    assert rank.results() == []
    assert Disconnect(P0, "peer_silent: the write permission has run out") in rank.at(bound)
    assert rank.results() == [BlocksSafe(T, C)]
    assert rank.core.next_due() is None


def test_a_registration_that_is_repeated_moves_the_bound() -> None:
    """Every permission counts from when it was sent."""
    rank = Rank(renew_seconds=4.0, silence_seconds=8.0)
    rank.command(receive())
    rank.now = 1.0
    rank.hear(status("unknown"))
    rank.command(withdraw())
    rank.at(16.9)
    assert BlocksSafe(T, C) not in rank.results()
    rank.at(17.0)
    assert BlocksSafe(T, C) in rank.results()


def test_the_bound_counts_from_the_latest_permission_of_any_rank() -> None:
    """Promise 2: one of two ranks was permitted later than the other; both blocks wait for it."""
    rank = Rank((Link(P0, 1, (1000,)), Link(P1, 1, (1000,))), renew_seconds=4.0, silence_seconds=8.0)
    rank.command(receive())
    rank.now = 3.0
    rank.hear(status("unknown"), P1)
    rank.command(withdraw())
    rank.at(18.9)
    assert BlocksSafe(T, C) not in rank.results()
    rank.at(19.0)
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
    rank.at(16.0)
    assert rank.results() == [BlocksSafe(name, C) for name in names]
    for name in names:
        rank.hear(written(transfer=name))
        rank.hear(Cancelled(transfer=name, consumer=C))
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
    rank = Rank(TWO)
    rank.command(receive())
    for tick in (4.0, 8.0):
        rank.at(tick)
        rank.hear(status("computing"), P1)
    rank.at(10.0)
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


# --- connections -----------------------------------------------------------------------------------


def test_a_dead_producer_can_write_no_more() -> None:
    """P47: proven death is a fence. What has landed is good."""
    rank = Rank()
    rank.command(receive())
    rank.hear(landed(0, 4))
    rank.core.handle_peer_lost(P0, "peer_lost: reset", 1.0)
    rank.core.check_invariants()
    assert rank.results() == [failure("peer_lost: reset", 4)]
    assert rank.core.state.sources == {}


def test_the_death_of_one_rank_waits_for_the_others() -> None:
    """P11."""
    rank = Rank(TWO)
    rank.command(receive())
    rank.core.handle_peer_lost(P0, "reset", 1.0)
    assert rank.outputs() == [cancelling(P1, "peer_lost: reset")]
    rank.core.handle_peer_lost(P0, "reset", 1.0)
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
    rank.core.handle_peer_lost(P0, "reset", 1.0)
    rank.core.handle_peer_lost(PeerName("stranger"), "reset", 1.0)
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
    rank.at(15.9)
    assert rank.results() == []
    rank.at(16.0)
    assert set(rank.results()) == {BlocksSafe(T, C), BlocksSafe(U, C)}


@pytest.mark.parametrize("end", ["lost", "silent", "disconnected"])
@pytest.mark.parametrize("then", ["receive", "withdraw"])
def test_an_announced_request_looks_for_its_producer_again(end: str, then: str) -> None:
    """A restarted producer is another peer under the same address."""
    rank = Rank()
    rank.command(announce())
    if end == "lost":
        rank.core.handle_peer_lost(P0, "reset", 1.0)
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
        assert rank.command(receive()) == [registered(P1)]
    else:
        assert rank.command(withdraw()) == [cancelling(P1)]
        assert not rank.core.expecting


def test_an_announced_request_whose_ranks_all_fall_silent_at_once() -> None:
    rank = Rank(TWO)
    rank.command(announce())
    rank.at(12.0)
    assert rank.core.next_due() is None
    assert rank.core.state.peers == {}
    assert rank.command(receive()) == [registered(), registered(P1)]


def test_links_of_other_producers_are_kept_when_one_is_lost() -> None:
    other = Source(EngineId("other"), "127.0.0.1", 5601)
    rank = Rank()
    rank.command(receive())
    rank.links = (Link(P1, 1, (100,)),)
    rank.command(receive(transfer=U, source=other))
    rank.core.handle_peer_lost(P0, "reset", 1.0)
    assert list(rank.core.state.sources) == [other]


# --- resolving -------------------------------------------------------------------------------------


def test_one_resolve_serves_every_request_that_waits_for_it() -> None:
    rank = Rank(links=None)
    assert rank.command(receive(), receive(transfer=U), announce(TransferId("v"))) == [Resolve(SOURCE)]
    rank.core.handle_resolved(SOURCE, ONE, 1.0)
    assert rank.outputs() == [
        registered(),
        registered(transfer=U),
        Send(P0, Announce(transfer=TransferId("v"), consumer=C)),
    ]
    rank.links = ONE
    assert rank.command(receive(transfer=TransferId("w"))) == [registered(transfer=TransferId("w"))]


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
    assert rank.outputs() == [cancelling()]
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


def test_children_of_one_transfer_end_each_by_itself() -> None:
    """P19."""
    rank = Rank()
    other = ConsumerId("c1")
    rank.command(receive(), Receive(T, other, SOURCE, 0, 8, GROUPS))
    rank.hear(written())
    assert rank.results() == [Received(T, C, 200)]
    rank.hear(Failed(transfer=T, consumer=other, reason="abandoned", valid_until=0))
    assert rank.results() == [ReceiveFailed(T, other, "abandoned", 0, fenced=True)]


def test_closing_withdraws_everything() -> None:
    rank = Rank()
    rank.command(receive(), announce(U))
    rank.core.handle_close(0.0)
    assert rank.outputs() == [cancelling(reason="closed"), cancelling(reason="closed", transfer=U)]
    rank.hear(FENCE)
    assert rank.results() == [failure("closed", cancelled=True)]
    assert not rank.core.expecting
