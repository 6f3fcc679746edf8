"""Pull on the consumer: what is read when, what counts, and when it says that it is silent."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from kvferry.errors import PeerError
from kvferry.ids import ConsumerId, EngineId, PeerName, TransferId
from kvferry.protocol import farewells
from kvferry.protocol.commands import (
    AnnounceCommand,
    BlocksSafe,
    Receive,
    Received,
    ReceiveFailed,
    Relinquish,
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
    Fetch,
    Fetched,
    Landed,
    Offer,
    Renew,
    Status,
    TransferStatus,
    Written,
)
from kvferry.protocol.outputs import Disconnect, Link, Output, PostSlice, Resolve, Send

T, U, C = TransferId("t"), TransferId("u"), ConsumerId("c0")
P0, P1 = PeerName("p0"), PeerName("p1")
SOURCE = Source(EngineId("prefill"), "127.0.0.1", 5600)
ONE = (Link(P0, 1, (100,), block_tokens=(4,), slice_tokens=8),)
TWO = (*ONE, Link(P1, 2, (10,), block_tokens=(4,), slice_tokens=8))
FENCE = Cancelled(transfer=T, consumer=C)
KEPT = 30.0 / 1.01
"""By our clock a promise of thirty seconds is as long, whatever the other one's is."""


class Rank:
    """A consumer core, its clock, and what has come out of it."""

    def __init__(self, links: tuple[Link, ...] = ONE, **limits: Any) -> None:
        self.core = ConsumerCore(Limits(**limits), 3.0, (4,))
        self.links = links
        self.now = 0.0

    def command(self, *commands: Any) -> list[Output]:
        found: list[Output] = []
        for command in commands:
            self.core.handle_command(command, self.now)
            found += self.outputs()
        self.core.check_invariants()
        return found

    def outputs(self) -> list[Output]:
        """What the core asks for; a `Resolve` is answered at once."""
        found: list[Output] = []
        while (output := self.core.poll_output()) is not None:
            if isinstance(output, Resolve):
                self.core.handle_resolved(output.source, self.links, self.now)
            else:
                found.append(output)
        return found

    def hear(self, message: AnyMessage, peer: PeerName = P0) -> list[Output]:
        self.core.handle_message(peer, message, self.now)
        self.core.check_invariants()
        return self.outputs()

    def posts(self) -> list[PostSlice]:
        found = list(iter(lambda: self.core.reader.next_slice(self.now), None))
        self.core.check_invariants()
        return found

    def done(self, *numbers: int) -> list[Output]:
        for number in numbers:
            self.core.reader.handle_slice_done(number, self.now)
        self.core.check_invariants()
        return self.outputs()

    def fail(self, number: int, reason: str = "busy", *, retryable: bool = False) -> list[Output]:
        self.core.reader.handle_slice_failed(number, reason, self.now, retryable=retryable)
        self.core.check_invariants()
        return self.outputs()

    def results(self) -> list[Any]:
        return list(iter(self.core.poll_result, None))

    def at(self, now: float) -> list[Output]:
        """Let time pass, stopping at every deadline."""
        while (due := self.core.next_due()) is not None and due <= now:
            self.now = max(due, self.now)
            self.core.handle_timeout(self.now)
            self.core.check_invariants()
        self.now = now
        return self.outputs()


def pull(stop: int = 16, start: int = 0, transfer: TransferId = T, first: int = 40) -> Receive:
    """Blocks from `first` on, one every other, so that no two touch."""
    count = -(-stop // 4) - start // 4
    spans = tuple((first + 2 * at, 1) for at in range(count))
    return Receive(transfer, C, SOURCE, start, stop, (spans,), "pull")


def asked(stop: int = 16, start: int = 0, *, now: float = 0.0, peer: PeerName = P0, **fields: Any) -> Send:
    return Send(peer, Fetch(transfer=T, consumer=C, start=start, stop=stop, asked=now, **fields))


def offer(stop: int = 16, start: int = 0, *, asked: float = 0.0, keep: float = 30.0, **fields: Any) -> Offer:
    count = -(-stop // 4) - start // 4
    values: dict[str, Any] = {
        "transfer": T,
        "consumer": C,
        "start": start,
        "stop": stop,
        "groups": (((10, count),) if count else (),),
        "asked": asked,
        "keep_seconds": keep,
    }
    return Offer(**values | fields)


def failed(reason: str = "lease_expired") -> Failed:
    return Failed(transfer=T, consumer=C, reason=reason, valid_until=0)


def status(state: str, keep: float = 0.0, *, asked: float | None) -> Status:
    return Status(transfers=(TransferStatus(T, C, state, 16, 1, keep),), mark=7000.0, asked=asked)


def cancelled(reason: str, peer: PeerName = P0) -> Send:
    return Send(peer, Cancel(transfer=T, consumer=C, reason=reason))


def fetched(peer: PeerName = P0, sharers: int = 1) -> Send:
    return Send(peer, Fetched(transfer=T, consumer=C, sharers=sharers))


def not_received(reason: str, valid_until: int = 0, *, fenced: bool = True, by_us: bool = False) -> Any:
    return ReceiveFailed(T, C, reason, valid_until, fenced=fenced, cancelled=by_us)


def reading(stop: int = 16, start: int = 0, **limits: Any) -> tuple[Rank, list[PostSlice]]:
    """A rank that reads, and its READs in flight."""
    rank = Rank(**limits)
    rank.command(pull(stop, start))
    rank.hear(offer(stop, start))
    return rank, rank.posts()


def ranges(posts: list[PostSlice]) -> list[tuple[int, int]]:
    return [(piece.start, piece.stop) for piece in posts]


# --- asking --------------------------------------------------------------------------------------


def test_it_asks_each_producer_rank_for_its_tokens() -> None:
    rank = Rank(TWO)
    assert rank.command(pull()) == [asked(), asked(peer=P1, sharers=2)]


def test_it_asks_again_when_its_question_or_the_offer_is_lost() -> None:
    """P16: by what the answer to a renewal says; whoever computes will offer by itself."""
    rank = Rank()
    rank.command(pull())
    renewal = Renew(transfers=((T, C, 1),), write_seconds=10.0, asked=2.0)
    assert rank.at(2.0) == [Send(P0, renewal)]
    assert rank.hear(status("computing", asked=2.0)) == []
    assert rank.hear(status("held", asked=2.0)) == []
    assert rank.hear(status("unknown", asked=None)) == [], "that answers the question itself"
    assert rank.hear(status("unknown", asked=2.0)) == [asked(now=2.0)]
    assert rank.hear(status("held", 30.0, asked=2.0)) == [asked(now=2.0)]
    assert rank.posts() == [], "no blocks are known"


def test_an_unknown_transfer_is_given_up_when_the_other_leg_is_overdue() -> None:
    rank = Rank(unknown_seconds=3.0)
    rank.command(pull())
    rank.at(4.0)
    assert rank.hear(status("unknown", asked=4.0)) == [cancelled("unknown_transfer")]
    assert rank.results() == [not_received("unknown_transfer")]


def test_who_knows_that_prefill_has_ended_does_not_wait_for_its_leg() -> None:
    """V01: an id that is forged, or forgotten: the answer to the question says so, a renewal's does not."""
    rank = Rank()
    rank.command(msgspec.structs.replace(pull(), patient=False))
    assert rank.hear(status("unknown", asked=0.0)) == [asked()]
    assert rank.hear(status("unknown", asked=None)) == [cancelled("unknown_transfer")]
    assert rank.results() == [not_received("unknown_transfer")]


@pytest.mark.parametrize("reason", ["lease_expired", "too_short: x", "unknown_transfer"])
def test_a_refusal_ends_it_behind_the_fence(reason: str) -> None:
    """P14, V01: nothing is read, and nobody has to be told."""
    rank = Rank()
    rank.command(pull())
    assert rank.hear(failed(reason)) == []
    assert rank.results() == [not_received(reason)]
    assert rank.posts() == []
    assert rank.core.next_due() is None


# --- offers --------------------------------------------------------------------------------------


def test_blocks_are_paired_by_position() -> None:
    """P01: D has two blocks already, and the prompt ends within a block."""
    rank = Rank()
    rank.command(pull(18, 8, first=40))
    rank.hear(offer(18, 8))
    first, last = rank.posts()
    assert (list(first.source_blocks[0]), list(first.target_blocks[0])) == ([10, 11], [40, 42])
    assert (list(last.source_blocks[0]), list(last.target_blocks[0])) == ([12], [44])
    assert ranges([first, last]) == [(8, 16), (16, 18)]
    assert all(piece.read and piece.notify is None and piece.peer == P0 for piece in (first, last))


@pytest.mark.parametrize(
    "forged",
    [
        offer(12),
        offer(16, 4),
        offer(groups=()),
        offer(groups=(((10, 3),),)),
        offer(groups=(((10, 5),),)),
        offer(groups=(((10, 1 << 40),),)),
        offer(groups=(((-1, 4),),)),
        offer(groups=(((10, 5), (20, -1)),)),
        offer(asked=0.5),
        offer(asked=math.inf),
        offer(keep=math.nan),
        offer(keep=math.inf),
    ],
)
def test_an_offer_that_does_not_fit_what_was_asked_is_not_read(forged: Offer) -> None:
    """V01: other tokens, other numbers of blocks, no blocks at all, or no promise."""
    rank = Rank()
    rank.command(pull())
    [sent] = rank.hear(forged)
    assert isinstance(sent, Send)
    assert isinstance(sent.message, Cancel)
    [result] = rank.results()
    assert result.reason.startswith("malformed: ")
    assert result.fenced
    assert rank.posts() == []


def test_an_offer_of_another_rank_attempt_or_transfer_is_nobodys() -> None:
    """X21, V01: another incarnation has another name; what is late has another number."""
    rank = Rank()
    rank.command(pull())
    for message, peer in ((offer(), P1), (offer(attempt=2), P0), (offer(transfer=U), P0)):
        assert rank.hear(message, peer) == []
    assert rank.posts() == []
    assert rank.core.state.counts == {"late_message": 3}


def test_an_offer_to_who_has_not_asked_is_an_error_of_the_peer() -> None:
    rank = Rank()
    rank.command(AnnounceCommand(T, C, SOURCE))
    with pytest.raises(PeerError, match="offer is not possible in state untold"):
        rank.hear(offer())
    rank = Rank()
    rank.command(msgspec.structs.replace(pull(), mode="push"))
    with pytest.raises(PeerError, match="offer is not possible in state told"):
        rank.hear(offer())


@pytest.mark.parametrize("message", [Written, Landed])
def test_who_reads_is_not_told_what_has_landed(message: type[Written | Landed]) -> None:
    """A producer that says so has not written our blocks, since it was not told of them."""
    rank, _ = reading()
    with pytest.raises(PeerError, match="not possible"):
        rank.hear(message(transfer=T, consumer=C, start=0, stop=16))
    assert rank.results() == []


def test_an_offer_that_is_repeated_changes_no_block() -> None:
    rank, posts = reading()
    assert rank.hear(offer(groups=(((80, 4),),), asked=0.0)) == []
    assert rank.posts() == []
    assert rank.done(*(piece.slice for piece in posts)) == [fetched()]


def test_nothing_to_read_is_read_at_once() -> None:
    rank = Rank()
    rank.command(pull(8, 8))
    assert rank.hear(offer(8, 8)) == [fetched()]
    assert rank.results() == [Received(T, C, 0)]


# --- reading -------------------------------------------------------------------------------------


def test_slices_are_read_in_any_order_and_several_at_once() -> None:
    rank, posts = reading(40, in_flight_per_peer=3)
    assert ranges(posts) == [(0, 8), (8, 16), (16, 24)]
    rank.done(posts[2].slice)
    [fourth] = rank.posts()
    rank.done(posts[1].slice, fourth.slice)
    [fifth] = rank.posts()
    assert rank.done(fifth.slice) == []
    assert rank.results() == []
    assert rank.done(posts[0].slice) == [fetched()]
    assert rank.results() == [Received(T, C, 1000)]


def test_a_slice_is_longer_where_blocks_follow_each_other_on_both_sides() -> None:
    """Such a slice takes few descriptors, so that only its bytes bound it."""
    joined = (Link(P0, 1, (100,), block_tokens=(4,), slice_tokens=8, joined_tokens=24),)
    for spans, lengths in ((((40, 10),), [24, 16]), (((40, 4), (60, 6)), [8, 8, 24])):
        rank = Rank(joined)
        rank.command(msgspec.structs.replace(pull(40), groups=(spans,)))
        rank.hear(offer(40))
        assert [stop - start for start, stop in ranges(rank.posts())] == lengths


def test_receptions_from_one_peer_take_turns() -> None:
    """A short request does not wait for the whole of a long one."""
    rank = Rank(in_flight_per_peer=1)
    rank.command(pull(40), pull(8, transfer=U, first=200))
    rank.hear(offer(40))
    rank.hear(offer(8, transfer=U, attempt=2))
    order = []
    while posts := rank.posts():
        [piece] = posts
        order.append(piece.transfer)
        rank.done(piece.slice)
    assert order == [U, T, T, T, T, T], "the one with least left comes first"


def test_producer_ranks_take_turns_where_each_slice_ends_at_once() -> None:
    rank = Rank(TWO)
    rank.command(pull(40))
    rank.hear(offer(40))
    rank.hear(offer(40), P1)
    order = []
    for _ in range(6):
        piece = rank.core.reader.next_slice(rank.now)
        assert piece is not None
        order.append(piece.peer)
        rank.done(piece.slice)
    assert order == [P0, P1] * 3


def test_every_producer_rank_has_to_be_read() -> None:
    """P42: each is let go as soon as it was."""
    rank = Rank(TWO)
    rank.command(pull(8))
    rank.hear(offer(8))
    [first] = rank.posts()
    assert rank.done(first.slice) == [fetched()]
    assert rank.results() == []
    rank.hear(offer(8), P1)
    [second] = rank.posts()
    assert rank.done(second.slice) == [fetched(P1, 2)]
    assert rank.results() == [Received(T, C, 220)]


def test_a_part_that_was_read_is_not_asked_for_more() -> None:
    rank = Rank(TWO)
    rank.command(pull())
    rank.hear(offer())
    assert rank.done(*(piece.slice for piece in rank.posts())) == [fetched()]
    assert rank.posts() == []
    assert rank.hear(offer(), P0) == []
    assert rank.core.state.turns == {}


def test_nothing_is_posted_without_a_running_promise() -> None:
    """P14: it is counted from when we asked, by our own clock, less a hundredth."""
    rank, posts = reading(24, in_flight_per_peer=1)
    rank.now = KEPT - 0.001
    rank.done(posts[0].slice)
    [second] = rank.posts()
    rank.now = KEPT
    rank.fail(second.slice, retryable=True)
    rank.now = KEPT + 1
    assert rank.posts() == []
    rank.hear(status("held", 30.0, asked=20.0))
    assert ranges(rank.posts()) == [(8, 16)]


def test_what_is_seen_to_end_after_the_promise_is_read_again() -> None:
    """P14: it may be another request's KV by then."""
    rank, posts = reading(8)
    rank.now = KEPT
    assert rank.done(posts[0].slice) == []
    assert rank.results() == []
    assert rank.core.state.counts == {"read_late": 1}
    rank.hear(status("held", 30.0, asked=25.0))
    rank.now += 0.05
    [again] = rank.posts()
    assert rank.done(again.slice) == [fetched()]
    assert rank.results() == [Received(T, C, 200)]


def test_a_renewal_prolongs_the_promise_of_what_is_in_flight() -> None:
    rank, posts = reading(8)
    rank.now = 20.0
    rank.hear(status("held", 30.0, asked=18.0))
    rank.now = KEPT + 10
    assert rank.done(posts[0].slice) == [fetched()]


def test_a_loan_that_its_producer_has_forgotten_has_ended() -> None:
    """P16: its `Failed` was lost. What was said before the offer came in does not count."""
    rank = Rank()
    rank.command(pull())
    rank.now = 3.0
    rank.hear(offer(asked=0.0))
    posts = rank.posts()
    assert rank.hear(status("unknown", asked=3.0)) == []
    rank.done(posts[0].slice)
    assert rank.hear(status("unknown", asked=3.5)) == []
    assert rank.done(posts[1].slice) == [cancelled("unknown_transfer")]
    assert rank.results() == [not_received("unknown_transfer", 16)]


@pytest.mark.parametrize(
    "promise", [status("held", 0.0, asked=5.0), status("held", 30.0, asked=50.0), status("held", asked=None)]
)
def test_an_older_promise_or_one_of_the_future_prolongs_nothing(promise: Status) -> None:
    rank, posts = reading(8)
    rank.now = 20.0
    rank.hear(promise)
    rank.now = KEPT
    assert rank.done(posts[0].slice) == []


def test_a_read_that_fails_for_now_is_tried_again_a_few_times() -> None:
    rank, posts = reading(16, retries_max=2, in_flight_per_peer=2)
    rank.done(posts[0].slice)
    number = posts[1].slice
    for seconds in (0.05, 0.1):
        assert rank.fail(number, retryable=True) == []
        assert rank.posts() == []
        rank.at(rank.now + seconds)
        [again] = rank.posts()
        assert ranges([again]) == [(8, 16)]
        number = again.slice
    assert rank.fail(number, retryable=True) == [cancelled("post_failed: busy")]
    assert rank.results() == [not_received("post_failed: busy", 8)]


def test_a_failure_keeps_what_lies_before_the_first_gap() -> None:
    """P40: and waits for the other READs, since they still write our blocks."""
    rank, posts = reading(32)
    rank.done(posts[0].slice, posts[3].slice)
    assert rank.fail(posts[2].slice, "out of descriptors") == []
    assert rank.results() == []
    assert rank.done(posts[1].slice) == [cancelled("post_failed: out of descriptors")]
    assert rank.results() == [not_received("post_failed: out of descriptors", 16)]


# --- giving up -----------------------------------------------------------------------------------


def test_a_withdrawal_waits_for_our_own_reads_and_tells_then() -> None:
    """P02, A11."""
    rank, posts = reading()
    assert rank.command(Withdraw(T, C, SOURCE, "client left")) == []
    assert rank.posts() == []
    assert rank.results() == []
    rank.done(posts[1].slice)
    assert rank.done(posts[0].slice) == [cancelled("client left")]
    assert rank.results() == [not_received("client left", 16, by_us=True)]


def test_who_has_not_been_offered_anything_ends_at_once() -> None:
    """Its offer may be under way, so that the producer is told until it answers."""
    rank = Rank()
    rank.command(pull())
    assert rank.command(Withdraw(T, C, SOURCE, "left")) == [cancelled("left")]
    assert rank.results() == [not_received("left", by_us=True)]
    assert rank.hear(offer()) == []
    assert rank.at(2.0) == [cancelled("left")]
    rank.hear(FENCE)
    assert rank.core.next_due() is None


def test_a_producer_that_calls_its_blocks_back_is_obeyed() -> None:
    rank, posts = reading()
    assert rank.hear(failed("incomplete: x")) == []
    assert rank.hear(failed("incomplete: x")) == [], "it says so until we are silent"
    assert rank.posts() == []
    rank.done(posts[0].slice)
    assert rank.done(posts[1].slice) == [cancelled("incomplete: x")]
    assert rank.results() == [not_received("incomplete: x", 16)]


@pytest.mark.parametrize("how", ["broken", "dead", "disconnected"])
def test_the_destination_is_safe_when_our_reads_have_ended_whoever_lives(how: str) -> None:
    """P11, P13: nobody is asked, and nothing lapses."""
    rank, posts = reading()
    rank.done(posts[0].slice)
    if how == "dead":
        rank.core.handle_peer_dead(P0, "peer_lost: gone", rank.now)
        assert rank.at(1.0) == []
        reason = "peer_lost: gone"
    elif how == "broken":
        rank.core.handle_link_broken(P0, "reset", rank.now)
        assert rank.outputs() == [], "no evidence is needed"
        reason = "peer_lost: reset"
    else:
        rank.core.handle_disconnected(P0, "slow", rank.now)
        reason = "peer_silent: slow"
    assert rank.results() == []
    assert rank.fail(posts[1].slice, "remote disconnect") == [cancelled(reason)]
    assert rank.results() == [not_received(reason, 8)]


def test_a_silent_producer_is_given_up() -> None:
    """What is read meanwhile counts; what is not read is recomputed."""
    rank, posts = reading()
    rank.done(posts[0].slice)
    rank.at(9.9)
    assert rank.results() == []
    rank.at(10.0)
    reason = "peer_silent: nothing heard for 10 s"
    assert rank.results() == [not_received(reason, 8, fenced=False)]
    rank.done(posts[1].slice)
    assert rank.results() == [BlocksSafe(T, C)]


def test_a_read_that_does_not_end_is_told_and_then_torn_down() -> None:
    """P46."""
    rank, posts = reading(8)
    rank.at(5.0)
    rank.hear(status("held", 30.0, asked=5.0))
    rank.command(Withdraw(T, C, SOURCE, "left"))
    rank.at(14.0)
    assert rank.results() == []
    rank.hear(status("held", 0.0, asked=None))
    outputs = rank.at(30.0)
    assert rank.results() == [not_received("left", fenced=False, by_us=True)]
    assert outputs == [Disconnect(P0, "a slice has not ended after 30 s")]
    rank.fail(posts[0].slice, "disconnected")
    assert rank.results() == [BlocksSafe(T, C)]


def test_an_engine_that_needs_the_destination_gets_it_when_nothing_moves() -> None:
    rank = Rank()
    rank.command(pull())
    assert rank.command(Relinquish(T, C)) == [cancelled("starved: others wait for the memory")]
    assert rank.results() == [not_received("starved: others wait for the memory")]


def test_closing_drains_what_is_read() -> None:
    rank, posts = reading(8)
    rank.core.handle_close(rank.now)
    assert rank.outputs() == []
    assert rank.done(posts[0].slice) == [cancelled("closed")]


def test_what_is_reported_of_a_read_twice_is_late() -> None:
    rank, posts = reading(8)
    rank.done(posts[0].slice)
    assert rank.done(posts[0].slice) == []
    assert rank.fail(posts[0].slice) == []
    assert rank.core.state.counts == {"late_slice": 2}


# --- farewells -----------------------------------------------------------------------------------


def test_fetched_is_repeated_until_it_is_answered() -> None:
    """P16: the host has its result long before."""
    rank, posts = reading()
    assert rank.done(*(piece.slice for piece in posts)) == [fetched()]
    assert rank.results() == [Received(T, C, 400)]
    assert rank.at(2.0) == [fetched()]
    assert rank.at(4.0) == [fetched()]
    assert rank.core.peers() == {P0}
    assert rank.hear(msgspec.structs.replace(FENCE, attempt=2)) == []
    assert rank.hear(FENCE, P1) == []
    assert rank.at(6.0) == [fetched()]
    rank.hear(FENCE)
    assert rank.at(8.0) == []
    assert rank.core.peers() == set()
    assert rank.core.next_due() is None


def test_a_farewell_that_nobody_answers_ends_with_the_lease() -> None:
    rank, posts = reading(8, lease_seconds=5.0)
    rank.done(posts[0].slice)
    assert rank.at(60.0) == [fetched(), fetched()]
    assert rank.core.next_due() is None


def test_farewells_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(farewells, "FAREWELLS_MAX", 5)
    rank = Rank()
    for number in range(8):
        transfer = TransferId(f"t{number}")
        rank.command(pull(8, transfer=transfer), Withdraw(transfer, C, SOURCE, "left"))
    assert len(rank.core.state.farewells) == 5
    assert rank.core.state.counts == {"farewell_dropped": 3}


def test_announced_is_as_with_push() -> None:
    """Which mode it will be is known when the destination is."""
    rank = Rank()
    announce = Send(P0, Announce(transfer=T, consumer=C))
    assert rank.command(AnnounceCommand(T, C, SOURCE)) == [announce]
    assert rank.command(pull()) == [asked()]


def windowed(links: tuple[Link, ...], window: int = 6) -> Rank:
    rank = Rank(links)
    rank.core = ConsumerCore(Limits(), 3.0, (4, 4), (0, window))
    return rank


TWO_GROUPS = (Link(P0, 1, (100, 100), block_tokens=(4, 4), slice_tokens=16),)


def test_of_a_window_only_its_own_blocks_are_read() -> None:
    """V14: 22 tokens in blocks of 4 and a window of the last 6: two blocks of it on either side."""
    rank = windowed(TWO_GROUPS)
    rank.command(Receive(T, C, SOURCE, 0, 22, (((5, 6),), ((9, 1), (11, 1))), "pull"))
    rank.hear(offer(22, groups=(((20, 6),), ((40, 2),))))
    first, second = rank.posts()
    assert [list(blocks) for blocks in first.source_blocks] == [[20, 21, 22, 23], []]
    assert [list(blocks) for blocks in second.source_blocks] == [[24, 25], [40, 41]]
    assert [list(blocks) for blocks in second.target_blocks] == [[9, 10], [9, 11]]
    assert [second.group_start(group) for group in (0, 1)] == [16, 16]
    rank.done(first.slice, second.slice)
    assert [type(result) for result in rank.results()] == [Received]


def test_blocks_of_a_window_count_from_its_end_on_either_side() -> None:
    """A producer with larger blocks: both have what is needed, and each something more."""
    rank = windowed((Link(P0, 1, (100, 100), block_tokens=(8, 8), slice_tokens=32),))
    rank.command(Receive(T, C, SOURCE, 0, 22, (((5, 6),), ((9, 3),)), "pull"))
    rank.hear(offer(22, groups=(((20, 3),), ((40, 1),))))
    (piece,) = rank.posts()
    assert [list(blocks) for blocks in piece.source_blocks] == [[20, 21, 22], [40]]
    assert [list(blocks) for blocks in piece.target_blocks] == [[5, 6, 7, 8, 9, 10], [10, 11]]
    assert [piece.group_start(group) for group in (0, 1)] == [0, 16]


def test_a_window_s_first_block_is_read_as_the_engine_counts_blocks() -> None:
    """V13 V14: our engine's blocks are two of ours, and a window of 6 begins within one of them."""
    rank = windowed(TWO_GROUPS)
    rank.core.state.whole_tokens = (4, 8)
    rank.command(Receive(T, C, SOURCE, 0, 29, (((5, 8),), ((9, 2),)), "pull"))
    rank.hear(offer(29, groups=(((20, 8),), ((40, 2),))))
    first, second = rank.posts()
    assert [list(blocks) for blocks in second.target_blocks] == [[9, 10, 11, 12], [9, 10]]
    assert [second.group_start(group) for group in (0, 1)] == [16, 24]
    rank.done(first.slice, second.slice)
    assert [type(result) for result in rank.results()] == [Received]


def test_an_offer_that_begins_within_a_window_s_first_block_is_refused() -> None:
    """What is left of that block would be somebody else's KV in our engine's prefix cache."""
    rank = windowed(TWO_GROUPS)
    rank.core.state.whole_tokens = (4, 16)
    rank.command(Receive(T, C, SOURCE, 0, 29, (((5, 8),), ((9, 4),)), "pull"))
    rank.hear(offer(29, groups=(((20, 8),), ((40, 2),))))
    (result,) = rank.results()
    assert isinstance(result, ReceiveFailed)
    assert result.reason == "malformed: groups[1] is offered from token 24 on, and needed from 16 on"


@pytest.mark.parametrize("blocks", [0, 1, 7])
def test_an_offer_without_the_window_is_refused(blocks: int) -> None:
    rank = windowed(TWO_GROUPS)
    rank.command(Receive(T, C, SOURCE, 0, 22, (((5, 6),), ((9, 2),)), "pull"))
    rank.hear(offer(22, groups=(((20, 6),), ((40, blocks),) if blocks else ())))
    (result,) = rank.results()
    assert isinstance(result, ReceiveFailed)
    assert result.reason.startswith("malformed: groups[1] does not have the ")
