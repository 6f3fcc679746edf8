"""The producer core by itself: what it answers, posts and releases."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from kvferry.errors import PeerError
from kvferry.ids import ConsumerId, PeerName, TransferId
from kvferry.protocol.commands import (
    Abandon,
    Advance,
    DeliveryEnded,
    Drained,
    Expect,
    Finish,
    Preempt,
    Reclaim,
    Released,
    Result,
    absent,
)
from kvferry.protocol.limits import Limits
from kvferry.protocol.messages import (
    Announce,
    AnyMessage,
    Cancel,
    Cancelled,
    Failed,
    Fetch,
    Register,
    Renew,
    Status,
    TransferStatus,
    Written,
)
from kvferry.protocol.outputs import Disconnect, Output, PeerFacts, PostSlice, Send
from kvferry.protocol.producer import ProducerCore
from kvferry.protocol.producer_peer import FORGOTTEN as FORGOTTEN_TEXT
from kvferry.protocol.reasons import TABLE_FULL, because
from kvferry.protocol.sources import FORGOTTEN_PEERS_MAX

T, U, C = TransferId("t"), TransferId("u"), ConsumerId("c0")
D0, D1 = PeerName("d0"), PeerName("d1")
FACTS = PeerFacts((4,), 8)


class Rank:
    """A producer core, its clock, and what has come out of it."""

    def __init__(self, facts: PeerFacts = FACTS, block_tokens: tuple[int, ...] = (4,), **limits: Any) -> None:
        self.core = ProducerCore(Limits(**limits), block_tokens)
        self.now = 0.0
        self.core.handle_link(D0, facts)
        self.core.handle_link(D1, facts)

    def command(self, *commands: Any) -> None:
        for command in commands:
            self.core.handle_command(command, self.now)
        self.core.check_invariants()

    def hear(self, message: AnyMessage, peer: PeerName = D0) -> list[Output]:
        """A grant of permission that names no mark repeats one which the rank has just made."""
        if isinstance(message, Register | Renew) and message.mark is None:
            message = msgspec.structs.replace(message, mark=self.now)
        return self.hear_as_it_is(message, peer)

    def hear_as_it_is(self, message: AnyMessage, peer: PeerName = D0) -> list[Output]:
        self.core.handle_message(peer, message, self.now)
        self.core.check_invariants()
        return self.outputs()

    def outputs(self) -> list[Output]:
        return list(iter(self.core.poll_output, None))

    def results(self) -> list[Result]:
        """Without the metrics of single deliveries."""
        found = iter(self.core.poll_result, None)
        return [result for result in found if not isinstance(result, DeliveryEnded)]

    def posts(self) -> list[PostSlice]:
        return list(iter(lambda: self.core.next_slice(self.now), None))

    def done(self, *numbers: int) -> list[Output]:
        for number in numbers:
            self.core.handle_slice_done(number, self.now)
        self.core.check_invariants()
        return self.outputs()

    def refused(self, number: int, *, retryable: bool = True) -> list[Output]:
        self.core.handle_slice_failed(number, "busy", self.now, retryable=retryable)
        self.core.check_invariants()
        return self.outputs()

    def at(self, now: float) -> list[Output]:
        self.now = now
        self.core.handle_timeout(now)
        self.core.check_invariants()
        return self.outputs()


def register(
    stop: int, start: int = 0, first: int = 0, transfer: TransferId = T, consumer: ConsumerId = C, **more: Any
) -> Register:
    count = -(-stop // 4) - start // 4
    groups = more.pop("groups", (((first, count),) if count else (),))
    seconds = more.pop("write_seconds", 10.0)
    return Register(
        transfer=transfer,
        consumer=consumer,
        start=start,
        stop=stop,
        groups=groups,
        write_seconds=seconds,
        **more,
    )


FORGOTTEN = because(TABLE_FULL, FORGOTTEN_TEXT)


def renew(attempt: int = 1, **more: Any) -> Renew:
    return Renew(transfers=((T, C, attempt),), write_seconds=10.0, **more)


def computed(tokens: int, transfer: TransferId = T, first: int = 100, consumers: int = 1) -> tuple[Any, ...]:
    advance = Advance(transfer, tokens, 0, (((first, -(-tokens // 4)),),))
    return Expect(transfer, tokens, consumers), advance


def failed(
    reason: str,
    valid_until: int = 0,
    transfer: TransferId = T,
    consumer: ConsumerId = C,
    attempt: int = 1,
) -> Failed:
    return Failed(
        transfer=transfer, consumer=consumer, attempt=attempt, reason=reason, valid_until=valid_until
    )


def cancel(transfer: TransferId = T, consumer: ConsumerId = C, sharers: int = 1, attempt: int = 1) -> Cancel:
    return Cancel(transfer=transfer, consumer=consumer, attempt=attempt, reason="left", sharers=sharers)


def fence(attempt: int) -> Cancelled:
    return Cancelled(transfer=T, consumer=C, attempt=attempt)


FENCE = Cancelled(transfer=T, consumer=C)


# --- what is posted ------------------------------------------------------------------------------


@pytest.mark.parametrize("cached", range(8))
def test_blocks_are_paired_by_token_position(cached: int) -> None:
    """P01: the consumer has `cached` of 8 blocks and registers the rest."""
    rank = Rank(PeerFacts((4,), 400))
    rank.command(*computed(32, first=10))
    rank.hear(register(32, start=4 * cached, first=3))
    (piece,) = rank.posts()
    pairs = list(zip(piece.source_blocks[0], piece.target_blocks[0], strict=True))
    assert pairs == [(10 + cached + at, 3 + at) for at in range(8 - cached)]
    assert isinstance(piece.notify, Written)


def test_asking_for_more_than_the_prompt_has_fails_in_either_order() -> None:
    """P01, P40: 9 blocks of 8 are a failure, and nothing is written."""
    reason = "too_short: asked for 36 tokens, the prompt has 32"
    rank = Rank()
    rank.command(*computed(32))
    assert rank.hear(register(36)) == [Send(D0, failed(reason))]
    assert rank.posts() == []
    rank = Rank()
    assert rank.hear(register(36)) == []
    rank.command(*computed(32))
    assert rank.outputs() == [Send(D0, failed(reason))]
    assert rank.posts() == []


@pytest.mark.parametrize("tokens", [1, 3, 4, 5])
def test_short_prompts_complete(tokens: int) -> None:
    """P56: a prompt shorter than a block, or than a slice."""
    rank = Rank()
    rank.command(*computed(tokens), Finish(T))
    rank.hear(register(tokens))
    (piece,) = rank.posts()
    assert (piece.start, piece.stop, type(piece.notify)) == (0, tokens, Written)
    rank.done(piece.slice)
    assert rank.results() == [Released(T, "written")]


def test_nothing_to_write_is_complete_at_once() -> None:
    """P22, P56: an empty registration is answered without a write."""
    rank = Rank()
    rank.command(*computed(8), Finish(T))
    answer = Written(transfer=T, consumer=C, start=8, stop=8)
    assert rank.hear(register(8, start=8)) == [Send(D0, answer)]
    assert rank.posts() == []
    assert rank.results() == [Released(T, "written")]


def test_a_slice_says_whether_prefill_was_still_running() -> None:
    rank = Rank()
    rank.command(Expect(T, 16))
    rank.hear(register(16))
    rank.command(Advance(T, 8, 0, (((0, 2),),)))
    rank.command(Advance(T, 16, 2, (((2, 2),),)))
    assert [piece.early for piece in rank.posts()] == [False, False]
    rank = Rank()
    rank.command(Expect(T, 16))
    rank.hear(register(16))
    rank.command(Advance(T, 8, 0, (((0, 2),),)))
    assert [piece.early for piece in rank.posts()] == [True]


def test_only_whole_blocks_leave_before_the_end() -> None:
    rank = Rank()
    rank.command(Expect(T, 20), Advance(T, 7, 0, (((0, 2),),)))
    rank.hear(register(20))
    assert [(piece.start, piece.stop) for piece in rank.posts()] == [(0, 4)]
    rank.command(Advance(T, 9, 2, (((2, 1),),)))
    assert [(piece.start, piece.stop) for piece in rank.posts()] == [(4, 8)]


def test_the_registration_may_end_before_the_prompt() -> None:
    rank = Rank()
    rank.command(*computed(32))
    rank.hear(register(6))
    assert [(piece.start, piece.stop, type(piece.notify)) for piece in rank.posts()] == [(0, 6, Written)]


def test_slices_end_on_blocks_of_both_sides() -> None:
    """Producer blocks of 8 tokens, consumer blocks of 4, the first in the middle of one of ours."""
    rank = Rank(PeerFacts((4,), 8), block_tokens=(8,))
    rank.command(Expect(T, 24), Advance(T, 24, 0, (((50, 3),),)))
    rank.hear(register(24, start=4, first=7))
    first, second = rank.posts()
    assert (first.start, first.stop, list(first.source_blocks[0]), list(first.target_blocks[0])) == (
        4,
        8,
        [50],
        [7],
    )
    assert (second.start, second.stop) == (8, 16)
    assert list(second.source_blocks[0]) == [51]
    assert list(second.target_blocks[0]) == [8, 9]


def test_nothing_leaves_before_a_block_of_the_consumer_is_whole() -> None:
    """Consumer blocks of 8 tokens are filled from ours of 4, and never in halves but for the prompt's end."""
    rank = Rank(PeerFacts((8,), 8))
    rank.command(Expect(T, 20), Advance(T, 12, 0, (((50, 3),),)))
    rank.hear(register(20, groups=(((7, 3),),)))
    (piece,) = rank.posts()
    assert (piece.start, piece.stop, list(piece.target_blocks[0])) == (0, 8, [7])
    rank.done(piece.slice)
    rank.command(Advance(T, 20, 3, (((53, 2),),)))
    (piece,) = rank.posts()
    assert (piece.start, piece.stop, list(piece.target_blocks[0])) == (8, 16, [8])


def test_every_cache_group_has_blocks_of_its_own() -> None:
    rank = Rank(PeerFacts((4, 8), 4), block_tokens=(4, 8))
    rank.command(Expect(T, 16), Advance(T, 16, 0, (((0, 4),), ((20, 2),))))
    rank.hear(register(16, groups=(((5, 4),), ((9, 1), (11, 1)))))
    (piece,) = rank.posts()
    assert (piece.start, piece.stop) == (0, 8), "a slice of at least one block of each group"
    assert [list(blocks) for blocks in piece.source_blocks] == [[0, 1], [20]]
    assert [list(blocks) for blocks in piece.target_blocks] == [[5, 6], [9]]


def test_of_a_window_only_its_own_blocks_are_written() -> None:
    """V14: 22 tokens in blocks of 4, a window of the last 6; blocks before it may not even exist."""
    rank = Rank(PeerFacts((4, 4), 8, windows=(0, 6)), block_tokens=(4, 4))
    rank.command(Expect(T, 22), Advance(T, 22, 0, (((0, 6),), ((-1, 1), (-1, 1), (-1, 1), (-1, 1), (40, 2)))))
    rank.hear(register(22, groups=(((5, 6),), ((9, 1), (11, 1)))))
    first, second, third = rank.posts()
    assert [list(blocks) for blocks in first.source_blocks] == [[0, 1], []]
    assert [list(blocks) for blocks in second.target_blocks] == [[7, 8], []]
    assert [list(blocks) for blocks in third.source_blocks] == [[4], [40]]
    rank.done(first.slice, second.slice, third.slice)
    (last,) = rank.posts()
    assert (last.start, last.stop) == (20, 22)
    assert [list(blocks) for blocks in last.source_blocks] == [[5], [41]]
    assert [list(blocks) for blocks in last.target_blocks] == [[10], [11]]
    assert [last.group_start(group) for group in (0, 1)] == [20, 20]


def test_a_consumer_may_have_more_of_a_window_than_is_needed() -> None:
    """Its blocks count from the range's end, whatever of them is written."""
    rank = Rank(PeerFacts((4, 4), 8, windows=(0, 6)), block_tokens=(4, 4))
    rank.command(Expect(T, 22), Advance(T, 22, 0, (((0, 6),), ((-1, 1), (-1, 1), (-1, 1), (-1, 1), (40, 2)))))
    rank.hear(register(22, groups=(((5, 6),), ((9, 3),))))
    *_, third = rank.posts()
    assert (third.start, third.stop) == (16, 20)
    assert [list(blocks) for blocks in third.target_blocks] == [[9], [10]]


def test_a_window_s_first_block_is_written_as_the_engine_counts_blocks() -> None:
    """V13 V14: the peer's engine has blocks of 8, two of its rank's; a window of 6 begins within one.

    Its prefix cache takes the whole block for received, and gives it to requests that look at all of it.
    """
    facts = PeerFacts((4, 4), 32, windows=(0, 6), whole_tokens=(4, 8))
    rank = Rank(facts, block_tokens=(4, 8))
    rank.command(Expect(T, 30), Advance(T, 30, 0, (((0, 8),), (*absent(3), (40, 1))), (0, 0)))
    rank.hear(register(29, groups=(((5, 8),), ((9, 2),))))
    (piece,) = rank.posts()
    assert (piece.group_start(1), piece.stop) == (24, 29)
    assert [list(blocks) for blocks in piece.target_blocks] == [[5, 6, 7, 8, 9, 10, 11, 12], [9, 10]]
    assert [list(blocks) for blocks in piece.source_blocks] == [[0, 1, 2, 3, 4, 5, 6, 7], [40]]


def test_a_window_of_which_no_whole_block_is_left_is_told_at_once() -> None:
    """The peer's engine has blocks of 16 and ours of 8: of a window of 6 we keep what is from token 24 on."""
    rank = Rank(PeerFacts((4, 16), 32, windows=(0, 6)), block_tokens=(4, 8))
    rank.command(Expect(T, 30), Advance(T, 30, 0, (((0, 8),), (*absent(3), (40, 1))), (0, 0)))
    (answer,) = rank.hear(register(29, groups=(((5, 8),), ((9, 1),))))
    assert isinstance(answer, Send)
    assert isinstance(answer.message, Failed)
    assert answer.message.reason.startswith("too_short: asked for a window of 6 tokens")


@pytest.mark.parametrize("blocks", [0, 1, 7])
def test_too_few_or_too_many_blocks_of_a_window_are_refused(blocks: int) -> None:
    rank = Rank(PeerFacts((4, 4), 8, windows=(0, 6)), block_tokens=(4, 4))
    (answer,) = rank.hear(register(22, groups=(((5, 6),), ((9, blocks),) if blocks else ())))
    assert isinstance(answer, Send)
    assert isinstance(answer.message, Failed)
    assert answer.message.reason.startswith("malformed: groups[1] does not have the ")


def test_a_window_may_begin_within_a_slice() -> None:
    rank = Rank(PeerFacts((4, 4), 16, windows=(0, 4)), block_tokens=(4, 4))
    rank.command(Expect(T, 12), Advance(T, 12, 0, (((0, 3),), ((40, 3),))))
    rank.hear(register(12, groups=(((5, 3),), ((9, 1),))))
    (piece,) = rank.posts()
    assert [list(blocks) for blocks in piece.source_blocks] == [[0, 1, 2], [42]]
    assert [list(blocks) for blocks in piece.target_blocks] == [[5, 6, 7], [9]]
    assert [piece.group_start(group) for group in (0, 1)] == [0, 8]


def test_transfers_take_turns_and_what_is_in_flight_is_bounded() -> None:
    """A request of two blocks never waits for the whole of a long one."""
    rank = Rank(in_flight_per_peer=2)
    rank.command(*computed(400), *computed(8, U, 300))
    rank.hear(register(400))
    rank.hear(register(8, first=200, transfer=U))
    first, second = rank.posts()
    assert (first.transfer, second.transfer) == (U, T), "the one with least left comes first"
    rank.done(first.slice)
    (third,) = rank.posts()
    assert third.transfer == T
    assert rank.core.in_flight() == 2


def test_peers_take_turns_where_each_slice_ends_at_once() -> None:
    """Otherwise the peer that was linked first has all of the agent's time for as long as it wants slices."""
    rank = Rank()
    rank.command(*computed(400), *computed(400, U, 300))
    rank.hear(register(400))
    rank.hear(register(400, transfer=U), D1)
    order = []
    for _ in range(6):
        piece = rank.core.next_slice(rank.now)
        assert piece is not None
        order.append(piece.peer)
        rank.done(piece.slice)
    assert order == [D0, D1] * 3


def test_a_turn_of_a_transfer_that_has_ended_meanwhile_is_skipped() -> None:
    """A renewal asks for a turn while the lane is full, and the last slice ends before the turn comes."""
    rank = Rank(in_flight_per_peer=1)
    rank.command(*computed(4), *computed(4, U, 300), Finish(T))
    rank.hear(register(4))
    (piece,) = rank.posts()
    rank.hear(Renew(transfers=((T, C, 1),), write_seconds=10.0))
    rank.hear(register(4, transfer=U))
    rank.done(piece.slice)
    assert rank.results() == [Released(T, "written")]
    assert [piece.transfer for piece in rank.posts()] == [U]


def test_a_waiting_transfer_holds_nobody_up() -> None:
    """G07: a consumer without memory costs the others nothing."""
    rank = Rank()
    rank.command(*computed(8), *computed(8, U, 300))
    rank.hear(Announce(transfer=T, consumer=C))
    rank.hear(register(8, transfer=U), D1)
    assert [piece.transfer for piece in rank.posts()] == [U]


def test_a_peer_with_a_full_lane_holds_no_other_peer_up() -> None:
    """P05: pushes to one consumer do not wait for those to another."""
    rank = Rank(in_flight_per_peer=1)
    rank.command(*computed(32), *computed(8, U, 300))
    rank.hear(register(32))
    rank.hear(register(8, transfer=U), D1)
    assert [(piece.peer, piece.transfer) for piece in rank.posts()] == [(D0, T), (D1, U)]


# --- refused and failed posts --------------------------------------------------------------------


def test_a_busy_transport_loses_nothing_and_the_last_slice_stays_last() -> None:
    """A22: refused again and again, everything is posted in the end, the last slice alone."""
    rank = Rank(in_flight_per_peer=8, retries_max=5)
    rank.command(*computed(40))
    rank.hear(register(40, write_seconds=1000.0))
    landed: set[tuple[int, int]] = set()
    for attempt in range(6):
        for piece in rank.posts():
            if attempt < 5:
                rank.refused(piece.slice)
            else:
                rank.done(piece.slice)
                landed.add((piece.start, piece.stop))
        rank.at(rank.now + 5.0)
    (last,) = rank.posts()
    assert isinstance(last.notify, Written)
    landed.add((last.start, last.stop))
    assert sorted(landed) == [(0, 8), (8, 16), (16, 24), (24, 32), (32, 36), (36, 40)]


def test_pauses_double_and_attempts_end() -> None:
    rank = Rank(retry_seconds=1.0, retries_max=2)
    rank.command(*computed(8))
    rank.hear(register(8))
    for pause in (1.0, 2.0):
        (piece,) = rank.posts()
        assert rank.refused(piece.slice) == []
        assert rank.core.next_due() == rank.now + pause
        assert rank.at(rank.now + pause - 0.1) == []
        assert rank.posts() == []
        rank.at(rank.now + 0.1)
    (piece,) = rank.posts()
    assert rank.refused(piece.slice) == [Send(D0, failed("post_failed: busy"))]


def test_a_refused_last_slice_is_posted_again() -> None:
    rank = Rank()
    rank.command(*computed(4))
    rank.hear(register(4))
    (piece,) = rank.posts()
    rank.refused(piece.slice)
    rank.at(1.0)
    (again,) = rank.posts()
    assert isinstance(again.notify, Written)
    assert again.slice != piece.slice


def test_each_delivery_of_a_transfer_has_a_pause_of_its_own() -> None:
    """A later pause of one consumer must not make the other wait for its next renewal."""
    rank = Rank(retry_seconds=1.0)
    rank.command(*computed(8, consumers=2))
    rank.hear(register(8))
    rank.hear(register(8, consumer=ConsumerId("c1")), D1)
    first, second = rank.posts()
    rank.refused(first.slice)
    rank.at(1.0)
    (first,) = rank.posts()
    rank.refused(first.slice)
    # d0 waits until 3.0. Now d1 fails for the first time and waits until 2.1.
    rank.now = 1.1
    rank.refused(second.slice)
    rank.at(2.1)
    assert [piece.peer for piece in rank.posts()] == [D1]
    rank.at(3.0)
    assert [piece.peer for piece in rank.posts()] == [D0]


def test_one_failed_write_of_many_fails_the_delivery_after_the_others() -> None:
    """A14, P11: the consumer hears of the failure when nothing is in flight any more, not before."""
    rank = Rank(in_flight_per_peer=16)
    rank.command(*computed(84), Finish(T))
    rank.hear(register(84))
    pieces = rank.posts()
    assert len(pieces) == 10
    assert rank.refused(pieces[6].slice, retryable=False) == []
    assert rank.done(*(piece.slice for piece in pieces[:6])) == []
    assert rank.results() == []
    assert rank.done(*(piece.slice for piece in pieces[7:])) == [Send(D0, failed("post_failed: busy", 48))]
    assert rank.results() == [Released(T, "post_failed: busy")]


def test_a_retry_of_a_stopped_delivery_is_dropped() -> None:
    rank = Rank()
    rank.command(*computed(8), Finish(T))
    rank.hear(register(8))
    (piece,) = rank.posts()
    assert rank.hear(cancel()) == []
    assert rank.refused(piece.slice) == [Send(D0, FENCE)]
    assert rank.results() == [Released(T, "cancelled")]
    assert rank.core.next_due() == rank.core.state.limits.tombstone_seconds


def test_a_slice_that_never_ends_has_its_connection_torn_down() -> None:
    """P46: the time limit ends the connection, not the slice; the source stays until that has ended."""
    rank = Rank(slice_seconds=5.0)
    rank.command(*computed(8), Finish(T))
    rank.hear(register(8))
    (piece,) = rank.posts()
    assert rank.at(4.9) == []
    (torn,) = rank.at(5.0)
    assert torn == Disconnect(D0, "a slice has not ended after 5 s")
    rank.core.handle_peer_lost(D0, torn.reason, rank.now)
    assert rank.results() == []
    assert rank.refused(piece.slice, retryable=False) == []
    assert rank.results() == [Released(T, "peer_lost: a slice has not ended after 5 s")]


def test_a_slice_that_ends_has_no_deadline_left() -> None:
    rank = Rank(slice_seconds=5.0)
    rank.command(*computed(8))
    rank.hear(register(8))
    (piece,) = rank.posts()
    rank.done(piece.slice)
    assert rank.at(6.0) == []


def test_an_unknown_slice_is_counted_and_ignored() -> None:
    """P07, P64: completions of something that was forgotten."""
    rank = Rank()
    rank.done(77)
    rank.refused(78)
    assert rank.core.state.counts == {"late_slice": 2}


# --- permission ----------------------------------------------------------------------------------


def test_nothing_is_posted_once_the_permission_has_run_out() -> None:
    """P02, P08, promise 2: checked before each slice, against a fresh clock."""
    rank = Rank(in_flight_per_peer=1)
    rank.command(*computed(64))
    rank.hear(register(64, write_seconds=3.0))
    (piece,) = rank.posts()
    rank.now = 2.9
    rank.done(piece.slice)
    assert len(rank.posts()) == 1
    rank.now = 3.0
    rank.done(2)
    assert rank.posts() == []
    assert rank.hear(Renew(transfers=((T, C, 1),), write_seconds=3.0)) == [
        Send(D0, Status(transfers=(TransferStatus(T, C, "computing", 64),), mark=3.0))
    ]
    assert len(rank.posts()) == 1


@pytest.mark.parametrize("seconds", [-1.0, 0.0, math.nan])
def test_a_permission_that_is_none_permits_nothing(seconds: float) -> None:
    rank = Rank()
    rank.hear_as_it_is(register(8))
    rank.hear(Renew(transfers=((T, C, 1),), write_seconds=seconds))
    rank.command(*computed(8))
    assert rank.posts() == []


def test_a_registration_without_a_mark_permits_nothing_and_is_given_one() -> None:
    """Promise 2: nobody's clock but ours may say how long a permission lasts."""
    rank = Rank()
    rank.now = 50.0
    rank.command(*computed(8))
    answer = Status(transfers=(TransferStatus(T, C, "computing", 8, 3),), mark=50.0)
    assert rank.hear_as_it_is(register(8, attempt=3)) == [Send(D0, answer)]
    assert rank.posts() == []
    rank.now = 51.0
    rank.hear(Renew(transfers=((T, C, 3),), write_seconds=10.0, mark=50.0))
    assert len(rank.posts()) == 1


@pytest.mark.parametrize("kind", ["registration", "renewal"])
def test_a_permission_counts_from_its_mark_however_late_it_is_read(kind: str) -> None:
    """Promise 2, P08: a frozen producer reads a grant nine seconds late: one second of it is left."""
    rank = Rank(in_flight_per_peer=1)
    rank.command(*computed(64))
    if kind == "renewal":
        rank.hear_as_it_is(register(64))
    rank.now = 9.0
    late = register(64, mark=0.0) if kind == "registration" else renew(mark=0.0)
    rank.hear(late)
    (piece,) = rank.posts()
    rank.now = 9.99
    rank.done(piece.slice)
    (piece,) = rank.posts()
    rank.now = 10.0
    rank.done(piece.slice)
    assert rank.posts() == []


@pytest.mark.parametrize("kind", ["registration", "renewal"])
@pytest.mark.parametrize("mark", [0.0, -1e300, -math.inf, 100.1, 1e300, math.inf, math.nan])
def test_a_grant_that_is_over_or_was_never_ours_permits_nothing(kind: str, mark: float) -> None:
    """Promise 2, S01: too old, of the future, or no number at all; now and whenever the clock gets there."""
    rank = Rank(lease_seconds=1e9)
    rank.command(*computed(8))
    rank.now = 100.0
    if kind == "renewal":
        rank.hear_as_it_is(register(8))
    message = register(8, mark=mark) if kind == "registration" else renew(mark=mark)
    assert rank.hear(message) == [
        Send(D0, Status(transfers=(TransferStatus(T, C, "computing", 8),), mark=100.0))
    ]
    for now in (100.0, 100.2, 105.0):
        rank.now = now
        assert rank.posts() == []
    rank.hear(renew())
    assert len(rank.posts()) == 1, "and the next true grant does"


@pytest.mark.parametrize("kind", ["registration", "renewal"])
def test_an_earlier_grant_that_is_read_later_takes_nothing_back(kind: str) -> None:
    """P34: messages overtake each other; a permission only ever grows."""
    rank = Rank()
    rank.now = 8.0
    rank.hear(register(8))
    older = register(8, mark=1.0) if kind == "registration" else renew(mark=1.0)
    rank.hear(older)
    rank.now = 17.9
    rank.command(*computed(8))
    assert len(rank.posts()) == 1


def test_a_renewal_of_what_was_only_announced_permits_nothing_later() -> None:
    """The renewal overtakes its registration, which brings no mark: both are asked for again."""
    rank = Rank()
    rank.command(*computed(8))
    rank.hear(Announce(transfer=T, consumer=C))
    unknown = Status(transfers=(TransferStatus(T, C, "unknown", 0),), mark=0.0)
    assert rank.hear(renew()) == [Send(D0, unknown)]
    assert len(rank.hear_as_it_is(register(8))) == 1
    assert rank.posts() == []


def test_a_renewal_that_its_registration_has_overtaken_permits_it() -> None:
    """The consumer has counted on this: it renews what it has only announced, and remembers that it did."""
    rank = Rank()
    rank.command(*computed(8))
    rank.now = 7.0
    rank.hear_as_it_is(register(8))
    rank.hear(renew(mark=2.0))
    assert len(rank.posts()) == 1


def test_what_has_stopped_is_not_asked_to_be_permitted() -> None:
    """A mark would be of no use to it: its slice ends, and then its consumer is told."""
    rank = Rank()
    rank.command(*computed(8))
    rank.hear(register(8))
    (piece,) = rank.posts()
    rank.now = 11.0
    assert rank.hear(cancel()) == []
    assert rank.hear_as_it_is(register(8)) == []
    assert rank.done(piece.slice) == [Send(D0, FENCE)]


def test_renewals_answer_how_each_transfer_stands() -> None:
    """A consumer can tell a slow producer from one that has lost the request, or its registration."""
    rank = Rank()
    lost, announced = TransferId("lost"), TransferId("announced")
    rank.hear(register(8))
    rank.hear(Announce(transfer=announced, consumer=C))
    rank.command(Expect(announced, 8), Expect(lost, 8))

    def states() -> list[tuple[str, str, int]]:
        names = tuple((name, C, 1) for name in (T, announced, lost, U))
        (answer,) = rank.hear(Renew(transfers=names, write_seconds=9.0))
        assert isinstance(answer, Send)
        assert isinstance(answer.message, Status)
        return [(entry.transfer, entry.state, entry.frontier) for entry in answer.message.transfers]

    unheard = [(announced, "unknown", 0), (lost, "unknown", 0), (U, "unknown", 0)]
    assert states() == [(T, "unknown", 0), *unheard]
    rank.command(Expect(T, 8))
    assert states() == [(T, "queued", 0), *unheard]
    rank.command(Advance(T, 6, 0, (((0, 2),),)))
    assert states() == [(T, "computing", 6), *unheard]
    rank.posts()
    assert states() == [(T, "writing", 6), *unheard]
    rank.done(1)
    rank.command(Advance(T, 8, 2, ((),)), Finish(T))
    assert states() == [(T, "held", 8), *unheard]
    assert rank.core.states() == {"held": 1, "queued": 2}


def test_an_announcement_is_answered_by_how_the_transfer_stands() -> None:
    rank = Rank()
    rank.command(*computed(8))
    answer = Status(transfers=(TransferStatus(T, C, "computing", 8),), mark=0.0)
    assert rank.hear(Announce(transfer=T, consumer=C)) == [Send(D0, answer)]


# --- leases --------------------------------------------------------------------------------------


def test_renewals_keep_the_lease_and_silence_ends_it() -> None:
    """P09, P13, P47: 120 s of waiting with a sign of life every 5 s; then none."""
    rank = Rank()
    rank.command(*computed(8))
    rank.hear(Announce(transfer=T, consumer=C))
    rank.command(Finish(T))
    for tick in range(5, 121, 5):
        assert rank.at(float(tick)) == []
        rank.hear(Renew(transfers=((T, C, 1),), write_seconds=10.0))
    assert rank.at(149.9) == []
    assert rank.results() == []
    assert rank.at(150.0) == [Send(D0, failed("lease_expired"))]
    assert rank.results() == [Released(T, "lease_expired")]


def test_a_renewal_keeps_the_lease_though_the_announcement_was_lost() -> None:
    rank = Rank()
    rank.command(*computed(8), Finish(T))
    rank.at(29.0)
    rank.hear(Renew(transfers=((T, C, 1),), write_seconds=10.0))
    rank.at(31.0)
    assert rank.results() == []
    rank.at(59.0)
    assert rank.results() == [Released(T, "lease_expired")]


@pytest.mark.parametrize("consumer", [C, ConsumerId("made up")])
def test_a_lease_is_not_renewed_for_ever_by_whoever_it_is(consumer: ConsumerId) -> None:
    """Nobody proves with a renewal that it will ever take the KV."""
    rank = Rank(held_seconds=100.0)
    rank.command(*computed(8), Finish(T))
    rank.hear(Announce(transfer=T, consumer=C))
    for now in range(10, 100, 10):
        rank.at(float(now))
        rank.hear(Renew(transfers=((T, consumer, 1),), write_seconds=10.0))
    assert rank.results() == []
    assert rank.at(100.0) == [Send(D0, failed("lease_expired"))]
    assert rank.results() == [Released(T, "lease_expired")]


def test_a_lease_that_is_longer_than_any_renewal_may_last_runs_its_time() -> None:
    rank = Rank(held_seconds=10.0, lease_seconds=30.0)
    rank.command(*computed(8), Finish(T))
    rank.at(29.0)
    rank.hear(Announce(transfer=T, consumer=C))
    assert rank.results() == []
    rank.at(30.0)
    assert rank.results() == [Released(T, "lease_expired")]


@pytest.mark.parametrize("sign", ["announcement", "registration", "repeated registration"])
def test_every_sign_of_life_keeps_the_lease(sign: str) -> None:
    """P09, P13: what a consumer says first in the last second of a lease starts it anew."""
    rank = Rank()
    rank.command(*computed(8), Finish(T))
    if sign == "repeated registration":
        rank.hear(register(8, write_seconds=math.nextafter(0.0, 1.0)))
    rank.at(29.0)
    if sign == "announcement":
        rank.hear(Announce(transfer=T, consumer=C))
    else:
        rank.hear(register(8))
    rank.at(58.9)
    assert rank.results() == []
    rank.at(59.0)
    assert rank.results() == [Released(T, "lease_expired")]


def test_leases_end_each_at_its_own_time() -> None:
    """P12: the first one is renewed for ever and hides none of the others."""
    rank = Rank()
    names = [TransferId(f"t{number}") for number in range(5)]
    for number, name in enumerate(names):
        rank.now = float(number)
        rank.command(*computed(8, name, 100 + 2 * number), Finish(name))
    released: dict[str, float] = {}
    while rank.now < 60.0:
        rank.at(rank.now + 0.5)
        if rank.now % 1 == 0:
            rank.hear(Renew(transfers=((names[0], C, 1),), write_seconds=10.0))
        released |= {result.transfer: rank.now for result in rank.results() if isinstance(result, Released)}
    assert released == {name: 30.0 + number for number, name in enumerate(names) if number}


def test_the_lease_counts_from_the_end_of_prefill_not_of_the_wait() -> None:
    rank = Rank()
    rank.hear(Announce(transfer=T, consumer=C))
    rank.now = 25.0
    rank.command(*computed(8), Finish(T))
    rank.at(54.9)
    assert rank.results() == []
    rank.at(55.0)
    assert rank.results() == [Released(T, "lease_expired")]


def test_a_lease_that_ends_under_a_write_waits_for_it() -> None:
    """P14, P44: the consumer hears that it failed, and the source is released after the write."""
    rank = Rank(slice_seconds=100.0)
    rank.command(*computed(16), Finish(T))
    rank.hear(register(16))
    pieces = rank.posts()
    rank.done(pieces[0].slice)
    assert rank.at(30.0) == []
    assert rank.results() == []
    assert rank.hear(register(16, consumer=ConsumerId("c1")), D1) == [
        Send(D1, failed("lease_expired", consumer=ConsumerId("c1")))
    ]
    assert rank.posts() == []
    assert rank.done(pieces[1].slice) == [Send(D0, failed("lease_expired", 12))]
    assert rank.results() == [Released(T, "lease_expired")]


def test_deadlines_of_one_transfer_that_are_due_together() -> None:
    """The lease ends the transfer; the pause of its refused slice is due in the same moment."""
    rank = Rank(lease_seconds=30.0, retry_seconds=1.0)
    rank.command(*computed(8), Finish(T))
    rank.hear(register(8, write_seconds=100.0))
    (piece,) = rank.posts()
    rank.now = 29.5
    rank.refused(piece.slice)
    assert rank.at(31.0) == [Send(D0, failed("lease_expired"))]
    assert rank.results() == [Released(T, "lease_expired")]


def test_a_registration_after_the_lease_writes_nothing_and_the_id_can_be_used_again() -> None:
    """P08: late hand-shake; the blocks may be another's by then. A tombstone does not block a new life."""
    rank = Rank()
    rank.command(*computed(8), Finish(T))
    rank.at(30.0)
    assert rank.hear(register(8)) == [Send(D0, failed("lease_expired"))]
    assert rank.posts() == []
    assert rank.hear(Renew(transfers=((T, C, 1),), write_seconds=10.0))[0] == Send(
        D0, failed("lease_expired")
    )
    rank.at(630.0)
    assert rank.core.state.tombstones == {}
    rank.command(*computed(8))
    rank.hear(register(8, attempt=2))
    assert len(rank.posts()) == 1


def test_the_same_id_again_before_its_tombstone_is_gone() -> None:
    """P39: an id can be used again after its end."""
    rank = Rank()
    rank.command(Expect(T, 8), Abandon(T, "abandoned: x"))
    rank.command(*computed(8))
    rank.hear(register(8))
    assert len(rank.posts()) == 1
    rank.at(200.0)
    assert rank.core.knows(T)


# --- ends ----------------------------------------------------------------------------------------


def test_finish_then_abort_is_nothing_new() -> None:
    """P16: the client leaves just as prefill has ended. Released once, whatever follows."""
    rank = Rank()
    rank.command(*computed(8), Finish(T), Abandon(T, "abandoned: client left"), Finish(T))
    assert rank.results() == []
    rank.at(30.0)
    assert rank.results() == [Released(T, "lease_expired")]
    rank.command(Abandon(T, "abandoned: client left"), Finish(T))
    assert rank.results() == []
    assert rank.core.state.counts["finished_twice"] == 4


def test_a_failure_reaches_who_has_registered_and_who_does_so_later() -> None:
    """P36: each is told once per question, at once, also while slices drain."""
    rank = Rank()
    rank.command(*computed(16, consumers=3))
    rank.hear(register(16))
    first, second = rank.posts()
    rank.done(first.slice)
    rank.command(Abandon(T, "abandoned: aborted"))
    assert rank.outputs() == []
    late = ConsumerId("c1")
    assert rank.hear(register(16, consumer=late), D1) == [
        Send(D1, failed("abandoned: aborted", consumer=late))
    ]
    assert rank.hear(register(16)) == [], "not before the write has ended"
    assert rank.done(second.slice) == [Send(D0, failed("abandoned: aborted", 12))]
    assert rank.results() == [Released(T, "abandoned: aborted")]
    assert rank.hear(register(16)) == [Send(D0, failed("abandoned: aborted", 12))]
    assert rank.hear(register(16, consumer=ConsumerId("c2"))) == [
        Send(D0, failed("abandoned: aborted", consumer=ConsumerId("c2")))
    ]


def test_an_abandoned_transfer_has_a_reason_even_if_its_host_gave_none() -> None:
    rank = Rank()
    rank.hear(register(8))
    rank.command(Expect(T, 8), Abandon(T, ""))
    assert rank.outputs() == [Send(D0, failed("abandoned"))]


def test_prefill_that_ended_before_its_last_chunk_is_incomplete() -> None:
    """P28: never an empty success."""
    rank = Rank()
    rank.command(Expect(T, 12), Advance(T, 8, 0, (((0, 2),),)))
    rank.hear(register(12))
    rank.command(Finish(T))
    assert rank.posts() == []
    assert rank.outputs() == [Send(D0, failed("incomplete: 8 of 12 tokens computed"))]
    assert rank.results() == [Released(T, "incomplete: 8 of 12 tokens computed")]


def test_nobody_asks_for_it() -> None:
    rank = Rank()
    rank.command(Expect(T, 8), Abandon(T, "abandoned: x"))
    assert rank.results() == [Released(T, "abandoned: x")]
    assert rank.outputs() == []


def test_the_source_is_released_when_every_rank_of_every_consumer_has_ended() -> None:
    """P19, P42, P51: two consumers, of which one has two ranks here; a doubled end counts once."""
    rank = Rank()
    rank.command(*computed(4, consumers=2), Finish(T))
    other = ConsumerId("c1")
    rank.hear(register(4, sharers=2))
    rank.hear(register(4, consumer=other), D0)
    one, two = rank.posts()
    rank.done(one.slice, two.slice)
    rank.done(two.slice)
    rank.hear(register(4, consumer=other), D0)
    assert rank.results() == [], "a rank of the first consumer is missing"
    rank.hear(register(4, sharers=2), D1)
    rank.done(3, *(piece.slice for piece in rank.posts()))
    assert rank.results() == [Released(T, "written")]


def test_a_consumer_beyond_the_announced_number_is_served_before_the_release() -> None:
    """P19: a registration that stands is never dropped without an answer."""
    rank = Rank()
    late = ConsumerId("c1")
    rank.command(*computed(8), Finish(T))
    rank.hear(register(8))
    rank.hear(register(8, consumer=late, first=20), D1)
    first, second = rank.posts()
    rank.done(first.slice)
    assert rank.results() == []
    rank.done(second.slice)
    assert rank.results() == [Released(T, "written")]


@pytest.mark.parametrize("posted", [False, True])
def test_a_consumer_that_never_got_its_turn_keeps_the_source_too(posted: bool) -> None:
    rank = Rank(in_flight_per_peer=1)
    rank.command(*computed(8), Finish(T))
    rank.hear(register(8))
    (piece,) = rank.posts()
    rank.hear(register(8, consumer=ConsumerId("c1"), first=20))
    if posted:
        rank.done(piece.slice)
        (piece,) = rank.posts()
        assert list(piece.target_blocks[0]) == [20, 21]
    assert rank.results() == []
    rank.done(piece.slice)
    assert rank.results() == ([Released(T, "written")] if posted else [])


def test_one_transfer_and_three_withdrawals() -> None:
    """P19: n=4, one child needs the KV; no lease runs out."""
    rank = Rank()
    for number in (1, 2, 3):
        assert len(rank.hear(cancel(consumer=ConsumerId(f"c{number}")))) == 1
    rank.command(*computed(4, consumers=4), Finish(T))
    rank.hear(register(4))
    rank.done(*(piece.slice for piece in rank.posts()))
    assert rank.results() == [Released(T, "written")]


def test_metrics_of_a_delivery() -> None:
    rank = Rank()
    rank.command(*computed(8))
    rank.now = 1.0
    rank.hear(register(8))
    (piece,) = rank.posts()
    rank.now = 1.5
    rank.done(piece.slice)
    assert rank.core.poll_result() == DeliveryEnded(T, C, True, 0.5, 1.5)
    assert rank.core.poll_result() is None


def test_a_lease_is_taken_back_unless_somebody_has_a_destination_for_it() -> None:
    """The engine needs the blocks more than a consumer that waits for memory, or than nobody."""
    rank = Rank()
    rank.command(*computed(8), Reclaim(T, "starved: x"))
    assert rank.results() == [], "it is being computed"
    rank.command(Finish(T))
    rank.hear(Announce(transfer=T, consumer=C))
    rank.hear(register(8, consumer=ConsumerId("c1")), D1)
    rank.command(Reclaim(T, "starved: x"))
    assert rank.outputs() == []
    rank.done(*(piece.slice for piece in rank.posts()))
    rank.command(Reclaim(T, "starved: x"), Reclaim(U, "starved: x"))
    assert rank.outputs() == [Send(D0, failed("starved: x"))]
    assert rank.results() == [Released(T, "starved: x")]


# --- fences --------------------------------------------------------------------------------------


def test_each_rank_that_cancels_gets_its_own_fence_after_the_drain() -> None:
    """P34, P33: two ranks, two answers; asked again, answered again, also after the end."""
    rank = Rank(in_flight_per_peer=1)
    rank.command(*computed(16), Finish(T))
    rank.hear(register(16, sharers=2))
    rank.hear(register(16, sharers=2), D1)
    first, second = rank.posts()
    assert rank.hear(cancel(sharers=2)) == []
    assert rank.hear(cancel(sharers=2)) == []
    assert rank.hear(cancel(sharers=2), D1) == []
    assert rank.posts() == []
    assert rank.done(first.slice) == [Send(D0, FENCE)]
    assert rank.results() == []
    assert rank.hear(cancel(sharers=2)) == [Send(D0, FENCE)]
    assert rank.refused(second.slice) == [Send(D1, FENCE)]
    assert rank.results() == [Released(T, "cancelled")]
    assert rank.hear(cancel(sharers=2), D1) == [Send(D1, FENCE)]


@pytest.mark.parametrize("end", ["closed", "lease", "abandoned", "peer lost"])
def test_what_was_stopped_under_its_last_slice_is_written_when_that_has_landed(end: str) -> None:
    """P14: its notification has said so, and both sides call it what it is."""
    rank = Rank(slice_seconds=100.0)
    rank.command(*computed(8), *(() if end == "abandoned" else (Finish(T),)))
    rank.hear(register(8))
    (piece,) = rank.posts()
    if end == "closed":
        rank.core.handle_close(rank.now)
    elif end == "lease":
        assert rank.at(30.0) == []
    elif end == "peer lost":
        rank.core.handle_peer_lost(D0, "reset", rank.now)
    else:
        rank.command(Abandon(T, "abandoned: x"))
    assert rank.done(piece.slice) == []
    assert rank.core.state.counts["written"] == 1
    assert rank.results() == [Released(T, "abandoned: x" if end == "abandoned" else "written")]


def test_a_cancel_during_a_failing_drain_gets_the_fence_it_asks_for() -> None:
    rank = Rank()
    rank.command(*computed(8))
    rank.hear(register(8))
    (piece,) = rank.posts()
    rank.command(Abandon(T, "abandoned: x"))
    assert rank.hear(cancel()) == []
    assert rank.done(piece.slice) == [Send(D0, FENCE)]


def test_a_registration_after_its_cancel_writes_nothing() -> None:
    """P02: the two were reordered on the way."""
    rank = Rank()
    assert rank.hear(cancel()) == [Send(D0, FENCE)]
    assert rank.hear(register(8)) == [Send(D0, FENCE)]
    rank.command(*computed(8))
    assert rank.posts() == []


def test_after_a_fence_nothing_is_called_written_any_more() -> None:
    """P64: the blocks may be another request's by the time when a registration is repeated."""
    rank = Rank()
    rank.command(*computed(4))
    rank.hear(register(4))
    rank.done(*(piece.slice for piece in rank.posts()))
    assert rank.hear(register(4)) == [Send(D0, Written(transfer=T, consumer=C, start=0, stop=4))]
    assert rank.hear(cancel()) == [Send(D0, FENCE)]
    assert rank.hear(register(4)) == [Send(D0, FENCE)]
    rank.command(Finish(T))
    assert rank.hear(register(4)) == [Send(D0, FENCE)]


def test_after_the_end_a_fence_replaces_the_answer_too() -> None:
    rank = Rank()
    rank.command(*computed(4), Finish(T))
    rank.hear(register(4))
    rank.done(*(piece.slice for piece in rank.posts()))
    assert rank.hear(register(4)) == [Send(D0, Written(transfer=T, consumer=C, start=0, stop=4))]
    assert rank.hear(cancel()) == [Send(D0, FENCE)]
    assert rank.hear(register(4)) == [Send(D0, FENCE)]
    stranger = ConsumerId("c9")
    assert rank.hear(cancel(consumer=stranger)) == [Send(D0, Cancelled(transfer=T, consumer=stranger))]


@pytest.mark.parametrize("ended", [False, True])
def test_the_same_name_with_other_blocks_is_refused(ended: bool) -> None:
    """P39, P64: what was written for the first says nothing of the second."""
    rank = Rank()
    rank.command(*computed(4))
    rank.hear(register(4))
    rank.done(*(piece.slice for piece in rank.posts()))
    if ended:
        rank.command(Finish(T))
    assert rank.hear(register(4, first=50)) == [
        Send(D0, failed("malformed: registered before, with other blocks"))
    ]
    assert rank.posts() == []


def test_a_second_registration_in_flight_stops_the_first_and_waits_for_it() -> None:
    """P64: `Failed` is a fence, so it does not overtake the write."""
    rank = Rank()
    rank.command(*computed(12))
    rank.hear(register(12))
    (piece,) = rank.posts()
    assert rank.hear(register(12, first=50)) == []
    assert rank.posts() == []
    reason = "malformed: registered before, with other blocks"
    assert rank.done(piece.slice) == [Send(D0, failed(reason, 8))]


def test_a_repeated_registration_starts_the_permission_anew_and_nothing_else() -> None:
    """P39: a doubled message."""
    rank = Rank()
    rank.command(*computed(8))
    rank.hear(register(8, write_seconds=3.0))
    (piece,) = rank.posts()
    assert rank.hear(register(8)) == []
    assert rank.posts() == []
    assert len(rank.done(piece.slice)) == 0
    assert rank.core.state.counts["written"] == 1


def test_a_lost_peer_is_written_to_no_more_and_its_slices_are_awaited() -> None:
    rank = Rank(in_flight_per_peer=1)
    rank.command(*computed(16), Finish(T), *computed(8, U, 300))
    rank.hear(register(16))
    rank.hear(register(8, transfer=U), D1)
    first, other = rank.posts()
    rank.core.handle_peer_lost(D0, "peer_lost: reset", rank.now)
    assert rank.posts() == []
    assert rank.results() == []
    assert rank.done(other.slice) == []
    assert rank.refused(first.slice, retryable=False) == []
    assert rank.results() == [Released(T, "peer_lost: reset")]
    with pytest.raises(PeerError, match="Register before Hello"):
        rank.hear(register(8))


def test_a_peer_that_comes_back_while_its_old_slices_end() -> None:
    """The lane counts what was in flight before, so that the bound holds and never goes below nothing."""
    rank = Rank(in_flight_per_peer=2)
    rank.command(*computed(32), *computed(32, U, 300))
    rank.hear(register(32))
    first, second = rank.posts()
    rank.core.handle_peer_lost(D0, "reset", rank.now)
    rank.core.handle_link(D0, FACTS)
    rank.hear(register(32, first=50, transfer=U))
    assert rank.posts() == []
    rank.refused(first.slice, retryable=False)
    assert len(rank.posts()) == 1
    rank.refused(second.slice, retryable=False)
    assert len(rank.posts()) == 1


def test_linking_twice_changes_nothing() -> None:
    rank = Rank()
    rank.command(*computed(32))
    rank.hear(register(32))
    rank.posts()
    rank.core.handle_link(D0, FACTS)
    rank.core.check_invariants()


# --- the same ids again --------------------------------------------------------------------------


def test_what_ends_an_earlier_attempt_does_not_touch_a_later_one() -> None:
    """P39: an aborted request comes again under the same ids, before its fence; the abort is repeated."""
    rank = Rank()
    rank.command(*computed(8), Finish(T))
    rank.hear(register(8))
    (first,) = rank.posts()
    assert rank.hear(cancel()) == []
    assert rank.hear(register(8, first=50, attempt=2)) == []
    (second,) = rank.posts()
    assert (first.notify.attempt, second.notify.attempt) == (1, 2)
    assert list(second.target_blocks[0]) == [50, 51]
    assert rank.done(first.slice) == [Send(D0, fence(1))]
    assert rank.hear(cancel()) == [Send(D0, fence(1))]
    assert rank.results() == []
    assert rank.done(second.slice) == []
    assert rank.results() == [Released(T, "written")]


def test_late_messages_of_an_earlier_attempt_get_its_own_answer() -> None:
    """P39, P64: a registration after its abort writes nothing, and a renewal of it permits nothing."""
    rank = Rank()
    rank.command(*computed(8))
    rank.hear(cancel())
    rank.hear_as_it_is(register(8, first=50, attempt=2))
    assert rank.hear(register(8)) == [Send(D0, fence(1))]
    answers = rank.hear(renew())
    assert answers[0] == Send(D0, fence(1))
    assert rank.posts() == []
    rank.hear(renew(attempt=2))
    assert [list(piece.target_blocks[0]) for piece in rank.posts()] == [[50, 51]]


def test_other_blocks_are_a_conflict_within_one_attempt_only() -> None:
    """P39, P40."""
    rank = Rank()
    rank.command(*computed(8))
    rank.hear(register(8))
    reason = "malformed: registered before, with other blocks"
    assert rank.hear(register(8, first=50, attempt=2)) == []
    assert rank.hear(register(8, first=60, attempt=2)) == [Send(D0, failed(reason, attempt=2))]
    assert [piece.notify.attempt for piece in rank.posts()] == [1]


def test_each_attempt_has_its_answer_after_the_end_and_in_another_life() -> None:
    """P39, P64: what was said stays true; what was not asked yet is answered anew."""
    rank = Rank()
    rank.command(*computed(4), Finish(T))
    rank.hear(register(4))
    rank.done(*(piece.slice for piece in rank.posts()))
    assert rank.results() == [Released(T, "written")]
    answer = Written(transfer=T, consumer=C, start=0, stop=4)
    assert rank.hear(register(4)) == [Send(D0, answer)]
    assert rank.hear(register(4, first=50, attempt=2)) == [
        Send(D0, failed("unknown_transfer: ended before: written", attempt=2))
    ]
    assert rank.hear(cancel(attempt=3)) == [Send(D0, fence(3))]
    rank.command(*computed(4))
    assert rank.hear(register(4)) == [Send(D0, answer)]
    assert rank.hear(register(4, attempt=2)) == [
        Send(D0, failed("unknown_transfer: ended before: written", attempt=2))
    ]
    assert rank.hear(register(4, attempt=3)) == [Send(D0, fence(3))]
    assert rank.posts() == []
    rank.hear(register(4, first=70, attempt=4))
    assert [list(piece.target_blocks[0]) for piece in rank.posts()] == [[70]]


def test_a_source_waits_for_the_newest_attempt_of_a_consumer() -> None:
    """P42: one consumer was announced; the end of its first attempt is not its end."""
    rank = Rank()
    rank.command(*computed(8))
    rank.hear(register(8))
    rank.hear(cancel())
    rank.hear(Announce(transfer=T, consumer=C, attempt=2))
    rank.command(Finish(T))
    assert rank.results() == []
    rank.hear(register(8, attempt=2))
    rank.done(*(piece.slice for piece in rank.posts()))
    assert rank.results() == [Released(T, "written")]


def test_attempts_are_bounded_as_registrations_are() -> None:
    rank = Rank(consumers_max=2)
    rank.command(*computed(8))
    rank.hear(cancel())
    rank.hear(cancel(attempt=2))
    assert rank.hear(register(8, attempt=3)) == [Send(D0, failed("table_full", attempt=3))]


def test_a_renewal_of_what_has_ended_unheard_is_told_how_it_ended_and_stays_told() -> None:
    """P64: also of an attempt that only the renewal speaks of. What had to be forgotten permits nothing."""
    rank = Rank(consumers_max=1)
    rank.command(*computed(8), Finish(T))
    rank.at(30.0)
    assert rank.hear(renew(attempt=5))[0] == Send(D0, failed("lease_expired", attempt=5))
    assert rank.hear(renew(attempt=6))[0] == Send(D0, failed("lease_expired", attempt=6))
    rank.command(*computed(8))
    assert rank.hear(register(8, attempt=6)) == [Send(D0, failed("lease_expired", attempt=6))]
    assert rank.hear(register(8, attempt=5)) == [Send(D0, failed(FORGOTTEN, attempt=5))]
    assert rank.posts() == []


def test_a_fence_that_had_to_be_forgotten_is_not_broken() -> None:
    """P02, P64: so much ended meanwhile that its tombstone is gone; a doubled registration is read late."""
    rank = Rank(tombstones_max=4)
    rank.command(*computed(8))
    rank.hear(register(8))
    for piece in rank.posts():
        rank.core.handle_slice_failed(piece.slice, "x", rank.now, retryable=False)
    rank.hear(cancel())
    rank.command(Abandon(T, "x"))
    for number in range(8):
        name = TransferId(f"other-{number}")
        rank.command(Expect(name, 8), Abandon(name, "x"))
    assert T not in rank.core.state.tombstones
    rank.command(*computed(8))
    assert rank.hear(register(8)) == [Send(D0, failed(FORGOTTEN))]
    assert rank.hear(announce()) == [Send(D0, failed(FORGOTTEN))]
    assert rank.hear(cancel()) == [Send(D0, fence(1))]
    assert rank.core.state.rows[T].deliveries == {}
    rank.hear(register(8, attempt=2))
    assert rank.posts() != [], "another attempt has other blocks"


def test_what_was_written_and_forgotten_is_not_written_again() -> None:
    """P02, P64: `Written` is under way for long, and its consumer registers anew, with the newest mark."""
    rank = Rank(tombstones_max=1)
    rank.command(*computed(8), Finish(T))
    rank.hear(register(8))
    for piece in rank.posts():
        rank.done(piece.slice)
    rank.command(Expect(U, 8), Abandon(U, "x"))
    assert T not in rank.core.state.tombstones
    rank.now = 1.0
    rank.command(*computed(8))
    assert rank.hear(register(8, mark=1.0)) == [Send(D0, failed(FORGOTTEN))]
    assert rank.posts() == []
    rank.hear(register(8), D1)
    assert rank.posts() != [], "another rank counts for itself"


def test_what_is_forgotten_in_its_time_is_not_taken_for_new_either() -> None:
    rank = Rank()
    rank.command(*computed(8), Finish(T))
    rank.hear(register(8))
    for piece in rank.posts():
        rank.done(piece.slice)
    rank.at(120.0)
    assert rank.core.state.tombstones == {}
    assert rank.hear(register(8)) == [Send(D0, failed(FORGOTTEN))]


def test_of_how_many_ranks_it_is_known_what_was_forgotten_is_bounded() -> None:
    state = Rank().core.state
    for number in range(FORGOTTEN_PEERS_MAX + 1):
        state.forget((PeerName(f"D{number}"), C, 7))
    state.forget((PeerName("D1"), C, 3))
    assert len(state.forgotten) == FORGOTTEN_PEERS_MAX
    assert not state.may_be_forgotten(T, (PeerName("D0"), C, 7)), "the one of longest ago"
    assert state.may_be_forgotten(T, (PeerName("D1"), C, 7))
    assert not state.may_be_forgotten(T, (PeerName("D1"), C, 8))


def test_an_id_that_is_used_for_ever_is_remembered_within_bounds() -> None:
    """S01, P64: each life has its answer, and the newest ones are kept."""
    rank = Rank(consumers_max=4)
    for attempt in range(1, 20):
        rank.command(*computed(8))
        rank.hear(register(8, attempt=attempt))
        rank.hear(cancel(attempt=attempt))
        rank.command(Abandon(T, "x"))
        for piece in rank.posts():
            rank.core.handle_slice_failed(piece.slice, "x", rank.now, retryable=False)
        assert len(rank.core.state.tombstones[T].answers) <= 4
    assert (D0, C, 19) in rank.core.state.tombstones[T].answers


# --- preemption ----------------------------------------------------------------------------------


def test_preemption_is_answered_at_once_when_nothing_reads_the_blocks() -> None:
    rank = Rank()
    rank.command(*computed(8), Preempt((T, TransferId("never heard of")), 7))
    assert rank.results() == [Drained(7)]
    rank.hear(register(8))
    assert rank.posts() == [], "the blocks are another's"


def test_preemption_waits_for_the_slices_that_read_the_blocks_and_for_no_later_ones() -> None:
    """G08, G12: one ticket for two transfers; the first resumes and writes on while the second drains."""
    rank = Rank(in_flight_per_peer=8)
    rank.command(Expect(T, 16), Advance(T, 8, 0, (((0, 2),),)), *computed(8, U, 300))
    rank.hear(register(16))
    rank.hear(register(8, transfer=U), D1)
    first, other = rank.posts()
    rank.command(Preempt((T, U), 1), Preempt((U,), 2))
    rank.command(Advance(T, 16, 0, (((50, 4),),)))
    (piece,) = rank.posts()
    assert (piece.start, piece.stop, list(piece.source_blocks[0])) == (8, 12, [52])
    rank.done(other.slice)
    assert rank.results() == [Drained(2)]
    rank.done(first.slice)
    assert rank.results() == [Drained(1)]


def test_a_slice_that_failed_is_posted_again_only_when_its_tokens_are_there_again() -> None:
    """G08, promise 5: the request restarts with fewer tokens than the failed slice had."""
    rank = Rank()
    rank.command(Expect(T, 16), Advance(T, 12, 0, (((0, 3),),)))
    rank.hear(register(16))
    first, second = rank.posts()
    rank.command(Preempt((T,), 1))
    rank.refused(first.slice)
    rank.refused(second.slice)
    assert rank.results() == [Drained(1)]
    rank.command(Advance(T, 10, 0, (((50, 3),),)))
    rank.at(1.0)
    (again,) = rank.posts()
    assert (again.start, again.stop, list(again.source_blocks[0])) == (0, 8, [50, 51])
    rank.command(Advance(T, 12, 3, ((),)))
    (again,) = rank.posts()
    assert (again.start, again.stop, list(again.source_blocks[0])) == (8, 12, [52])


def test_only_a_restart_from_the_first_block_gives_a_preempted_request_blocks_again() -> None:
    """P08, P28: a late advance of the life before names blocks that are another request's by now."""
    rank = Rank()
    rank.command(Expect(T, 16), Advance(T, 8, 0, (((0, 2),),)), Preempt((T,), 1))
    rank.hear(register(16))
    rank.command(Advance(T, 12, 2, (((2, 1),),)))
    assert rank.posts() == []
    rank.command(Advance(T, 8, 0, (((50, 2),),)))
    assert [list(piece.source_blocks[0]) for piece in rank.posts()] == [[50, 51]]


def test_a_request_that_was_preempted_in_its_last_step_hands_nothing_over() -> None:
    """P28: every token was computed, and then its blocks were taken: an empty success is no success."""
    rank = Rank()
    rank.command(*computed(8), Preempt((T,), 1), Finish(T))
    reason = "incomplete: 8 of 8 tokens computed, preempted"
    assert rank.results() == [Drained(1), Released(T, reason)]
    assert rank.hear(register(8)) == [Send(D0, failed(reason))]
    assert rank.posts() == []


def test_a_leased_transfer_whose_blocks_are_taken_back_fails() -> None:
    """P28: nobody computes it again."""
    rank = Rank()
    rank.command(*computed(12), Finish(T))
    rank.hear(register(12))
    (piece,) = rank.posts()
    rank.command(Preempt((T,), 3))
    assert rank.results() == []
    reason = "incomplete: its blocks were taken back"
    assert rank.done(piece.slice) == [Send(D0, failed(reason, 8))]
    assert rank.results() == [Drained(3), Released(T, reason)]


def test_a_late_advance_changes_nothing() -> None:
    rank = Rank()
    rank.command(*computed(8), Finish(T), Advance(T, 4, 0, (((90, 1),),)))
    rank.hear(register(8))
    (piece,) = rank.posts()
    assert list(piece.source_blocks[0]) == [100, 101]
    rank.command(Advance(U, 4, 0, (((90, 1),),)))
    assert rank.core.state.counts == {"late_command": 1}


# --- limits --------------------------------------------------------------------------------------


def test_a_full_table_refuses_and_its_host_is_still_answered() -> None:
    rank = Rank(transfers_max=1)
    rank.command(*computed(8), *computed(8, U, 300), Finish(U))
    assert rank.results() == [Released(U, "table_full")]
    assert rank.hear(register(8, transfer=U)) == [Send(D0, failed("table_full", transfer=U))]
    assert rank.core.state.counts == {"table_full": 2, "late_command": 1}


@pytest.mark.parametrize("end", [Finish(T), Abandon(T, "abandoned: x")])
def test_a_transfer_that_was_refused_ends_though_peers_speak_of_it(end: Any) -> None:
    """The table was full at its `Expect` and had room when its consumer registered."""
    rank = Rank(transfers_max=1)
    rank.command(Expect(U, 8), *computed(8), Abandon(U, "abandoned: x"))
    assert rank.results() == [Released(U, "abandoned: x")]
    assert rank.hear(register(8)) == []
    rank.command(Advance(T, 8, 0, (((0, 2),),)), Preempt((T,), 1))
    assert rank.results() == [Drained(1)]
    rank.command(end)
    assert rank.results() == [Released(T, "table_full")]
    assert rank.outputs() == [Send(D0, failed("table_full"))]


def test_a_refused_transfer_is_answered_though_its_consumers_gave_up() -> None:
    rank = Rank(transfers_max=1, unknown_seconds=5.0)
    rank.command(Expect(U, 8), Expect(T, 8), Abandon(U, "abandoned: x"))
    rank.hear(register(8))
    assert rank.at(5.0) == [Send(D0, failed("unknown_transfer"))]
    rank.command(Finish(T))
    assert Released(T, "table_full") in rank.results()


def test_registrations_per_transfer_are_bounded() -> None:
    rank = Rank(consumers_max=1)
    rank.command(*computed(8))
    rank.hear(register(8))
    late = ConsumerId("c1")
    assert rank.hear(register(8, consumer=late)) == [Send(D0, failed("table_full", consumer=late))]
    fenced = Send(D0, Cancelled(transfer=T, consumer=late))
    assert rank.hear(cancel(consumer=late)) == [fenced], "who asks for the fence gets it"
    assert [piece.consumer for piece in rank.posts()] == [C]


# --- refusals ------------------------------------------------------------------------------------


def announce(consumer: ConsumerId = C, transfer: TransferId = T, attempt: int = 1) -> Announce:
    return Announce(transfer=transfer, consumer=consumer, attempt=attempt)


def full() -> Rank:
    """A core whose only place is taken, until `Abandon(U)`."""
    rank = Rank(transfers_max=1)
    rank.command(*computed(8, U, 300))
    return rank


LEAVE = Abandon(U, "abandoned: x")
REFUSED = Send(D0, failed("table_full"))
OTHER = ConsumerId("c1")


@pytest.mark.parametrize("kind", ["announcement", "registration", "malformed", "cancel", "fetch"])
def test_what_was_refused_stays_refused_when_there_is_room(kind: str) -> None:
    """Promises 1 and 2: `Failed` is a fence: the consumer's blocks may be another's from then on."""
    malformed = "malformed: tokens [8, 4) are not a range"
    messages: dict[str, tuple[AnyMessage, Send]] = {
        "announcement": (announce(), REFUSED),
        "registration": (register(8, start=4), Send(D0, failed("table_full", 4))),
        "malformed": (register(4, start=8, groups=()), Send(D0, failed(malformed, 8))),
        "cancel": (cancel(), Send(D0, FENCE)),
        "fetch": (
            Fetch(transfer=T, consumer=C, start=4, stop=8, asked=7.0),
            Send(D0, failed("table_full", 4)),
        ),
    }
    message, answer = messages[kind]
    rank = full()
    assert rank.hear(message) == [answer]
    rank.command(LEAVE, *computed(8))
    assert rank.hear(register(8)) == [answer]
    assert rank.hear(renew())[0] == answer
    assert rank.posts() == []
    rank.hear(register(8, consumer=OTHER))
    assert [piece.consumer for piece in rank.posts()] == [OTHER], "another consumer was refused nothing"


@pytest.mark.parametrize("first", ["this", "another"])
def test_a_refusal_outlives_a_source_that_only_peers_speak_of(first: str) -> None:
    """The prefill leg comes last: after the refused one's registration, or another consumer's."""
    rank = full()
    assert rank.hear(announce()) == [REFUSED]
    rank.command(LEAVE)
    if first == "another":
        assert rank.hear(register(8, consumer=OTHER)) == []
    assert rank.hear(register(8)) == [REFUSED]
    assert rank.core.knows(T) is (first == "another"), "it takes no place that others could have"
    assert rank.hear(announce(attempt=2)) == [
        Send(D0, Status(transfers=(TransferStatus(T, C, "unknown", 0, 2),), mark=0.0))
    ]
    rank.command(*computed(8))
    assert rank.hear(register(8)) == [REFUSED]
    assert {piece.consumer for piece in rank.posts()} <= {OTHER}
    rank.hear(register(8, first=50, attempt=2))
    assert rank.posts() != []


def test_a_refusal_outlives_the_end_of_its_source_and_its_next_life() -> None:
    """P39: the answers of one life are those of the next."""
    rank = full()
    rank.hear(announce())
    rank.command(LEAVE, *computed(8), Abandon(T, "abandoned: y"))
    assert rank.hear(register(8)) == [REFUSED]
    assert rank.hear(register(8, consumer=OTHER)) == [Send(D0, failed("abandoned: y", consumer=OTHER))]
    rank.command(*computed(8))
    assert rank.hear(register(8)) == [REFUSED]
    assert rank.posts() == []


def test_a_refusal_outlives_an_expect_that_finds_no_room_either() -> None:
    rank = full()
    rank.hear(announce())
    rank.command(*computed(8), LEAVE, Finish(T), *computed(8))
    assert Released(T, "table_full") in rank.results()
    assert rank.hear(register(8)) == [REFUSED]
    assert rank.posts() == []


def test_an_id_that_comes_again_and_finds_no_room_is_released_again() -> None:
    """P39: the host waits for it, though the first life of the id was released before."""
    rank = Rank(transfers_max=1)
    rank.command(*computed(8))
    rank.hear(cancel())
    rank.command(Finish(T))
    assert rank.results() == [Released(T, "cancelled")]
    rank.command(*computed(8, U, 300), *computed(8), Finish(T))
    assert rank.results() == [Released(T, "table_full")]
    rank.command(LEAVE, *computed(8))
    assert rank.hear(register(8)) == [Send(D0, FENCE)], "and what was told in that life is true"
    assert rank.posts() == []


def test_a_transfer_of_which_only_refusals_are_known_has_not_ended() -> None:
    """A renewal or an abort of another consumer: the one is unknown, the other is fenced, for good."""
    rank = full()
    rank.hear(announce())
    other = Renew(transfers=((T, OTHER, 1),), write_seconds=10.0)
    unknown = TransferStatus(T, OTHER, "unknown", 0, 1)
    assert rank.hear(other) == [Send(D0, Status(transfers=(unknown,), mark=0.0))]
    fenced = Send(D0, Cancelled(transfer=T, consumer=OTHER))
    assert rank.hear(cancel(consumer=OTHER)) == [fenced]
    rank.command(LEAVE, *computed(8))
    assert rank.hear(register(8, consumer=OTHER)) == [fenced]
    assert rank.posts() == []


@pytest.mark.parametrize("lives", ["full table", "full source", "ended"])
def test_however_many_are_refused_each_is_told_and_none_is_written(lives: str) -> None:
    """S03: answers are bounded; the oldest goes, and marks from before that permit nothing new."""
    rank = Rank(transfers_max=1, consumers_max=2)
    if lives == "full table":
        rank.command(*computed(8, U, 300))
    elif lives == "full source":
        rank.command(*computed(8))
    else:
        rank.command(*computed(8), Abandon(T, "abandoned: x"))
    for number in range(4):
        assert len(rank.hear(announce(ConsumerId(f"x{number}")))) == 1
    for late in (announce(), register(8), register(4, start=8, groups=()), cancel()):
        assert len(rank.hear(late)) == 1
    assert rank.posts() == []
    row, tombstone = rank.core.state.rows.get(T), rank.core.state.tombstones.get(T)
    assert len(tombstone.answers if row is None else row.past) <= 2


def test_refusals_are_forgotten_as_tombstones_are() -> None:
    """Bounded in number and in time."""
    rank = Rank(transfers_max=1, tombstones_max=2)
    rank.command(*computed(8, U, 300))
    for name in ("a", "b", "c"):
        rank.hear(announce(transfer=TransferId(name)))
    assert list(rank.core.state.tombstones) == ["b", "c"]
    rank.hear(announce(OTHER, TransferId("b")))
    rank.at(120.0)
    assert rank.core.state.tombstones == {}


# --- writes that outlive their bounds ----------------------------------------------------------------


def doubtful(rank: Rank, how: str) -> list[PostSlice]:
    """Two slices in flight into blocks 0 to 2 of D0, by a registration that does not stand any more."""
    rank.command(*computed(16), *computed(16, U, 300))
    rank.hear(register(16))
    pieces = rank.posts()
    assert [list(piece.target_blocks[0]) for piece in pieces] == [[0, 1], [2]]
    if how == "cancelled":
        rank.hear(cancel())
    elif how == "lost":
        rank.core.handle_peer_lost(D0, "reset", rank.now)
        rank.core.handle_link(D0, FACTS)
    elif how == "expired":
        rank.at(10.0)
    return pieces


DOUBTS = pytest.mark.parametrize("how", ["cancelled", "lost", "expired"])


@DOUBTS
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_write_waits_for_every_write_that_has_outlived_its_right_to_the_same_blocks(
    how: str, order: tuple[int, int]
) -> None:
    """P07, promise 4: the consumer has got the blocks back by the bound of the transport, and gives them
    to another request; the transport has not kept its bound."""
    rank = Rank()
    pieces = doubtful(rank, how)
    first, second = (pieces[at].slice for at in order)
    assert rank.hear(register(16, transfer=U)) == []
    assert rank.posts() == []
    rank.command(Advance(U, 16, 0, (((300, 4),),)))
    rank.done(first)
    assert rank.posts() == []
    rank.refused(second, retryable=False)
    assert [(piece.transfer, piece.start) for piece in rank.posts()] == [(U, 0), (U, 8)]
    assert rank.core.state.hindered == {}


@DOUBTS
def test_blocks_that_no_doubtful_write_goes_to_are_written_at_once(how: str) -> None:
    """Nobody waits for nothing: other blocks, and the same numbers of another consumer rank."""
    rank = Rank(in_flight_per_peer=8)
    doubtful(rank, how)
    rank.hear(register(16, first=4, transfer=U))
    rank.hear(register(16, first=0, transfer=U), D1)
    assert {(piece.transfer, piece.peer) for piece in rank.posts()} == {(U, D0), (U, D1)}


def test_a_write_that_is_permitted_holds_nobody_back() -> None:
    """Who registers blocks twice at a time gets what it asks for."""
    rank = Rank(in_flight_per_peer=8)
    doubtful(rank, "not at all")
    rank.hear(register(16, transfer=U))
    assert {piece.transfer for piece in rank.posts()} == {U}


def test_one_block_in_common_is_enough_to_wait_and_only_that_write_is_waited_for() -> None:
    rank = Rank(in_flight_per_peer=8)
    rank.command(*computed(8), *computed(8, U, 300), *computed(8, TransferId("v"), 400))
    rank.hear(register(8, first=0))
    rank.hear(register(8, first=10, transfer=U))
    mine, others = rank.posts()
    rank.hear(cancel())
    rank.hear(cancel(transfer=U))
    rank.hear(register(8, first=1, transfer=TransferId("v")))
    rank.done(others.slice)
    assert rank.posts() == []
    rank.done(mine.slice)
    assert len(rank.posts()) == 1


def test_a_later_attempt_waits_for_the_writes_of_an_earlier_one() -> None:
    """P39: the same request again, in the same blocks."""
    rank = Rank()
    rank.command(*computed(8))
    rank.hear(register(8))
    (first,) = rank.posts()
    rank.hear(cancel())
    rank.hear(register(8, attempt=2))
    assert rank.posts() == []
    rank.done(first.slice)
    assert [piece.notify.attempt for piece in rank.posts()] == [2]


@pytest.mark.parametrize("counts", [(), (64, 64), (64, 32)])
def test_a_block_may_change_its_cache_group_while_an_old_write_is_in_flight(counts: tuple[int, ...]) -> None:
    """V14: groups lie over each other in memory; where blocks are of unlike sizes, any may be the one."""
    rank = Rank(PeerFacts((4, 4), 8, counts), (4, 4), in_flight_per_peer=8)
    for name, first in ((T, 0), (U, 50), (TransferId("v"), 100)):
        rank.command(Expect(name, 8), Advance(name, 8, 0, (((first, 2),), ((first, 2),))))
    rank.hear(register(8, groups=(((0, 2),), ((4, 2),))))
    (first,) = rank.posts()
    rank.hear(cancel())
    rank.hear(register(8, transfer=U, groups=(((8, 2),), ((12, 2),))))
    at_once = [piece.transfer for piece in rank.posts()]
    assert at_once == ([] if counts == (64, 32) else [U])
    rank.hear(register(8, transfer=TransferId("v"), groups=(((5, 2),), ((16, 2),))))
    assert rank.posts() == []
    rank.done(first.slice)
    assert sorted(at_once + [piece.transfer for piece in rank.posts()]) == [U, "v"]


@pytest.mark.parametrize("again", [False, True])
def test_who_waited_for_a_write_and_has_left_is_not_missed(again: bool) -> None:
    """P02: its transfer has ended, or the id has come again without it."""
    rank = Rank()
    first, second = doubtful(rank, "cancelled")
    rank.hear(register(16, transfer=U))
    assert rank.hear(cancel(transfer=U)) == [Send(D0, Cancelled(transfer=U, consumer=C))]
    rank.command(Finish(U))
    assert rank.results() == [Released(U, "cancelled")]
    if again:
        rank.command(*computed(16, U, 300))
    rank.done(first.slice)
    assert rank.done(second.slice) == [Send(D0, FENCE)]
    assert rank.posts() == []


# --- bounds --------------------------------------------------------------------------------------


def test_tombstones_are_bounded_and_the_oldest_goes_first() -> None:
    rank = Rank(tombstones_max=2)
    for name in ("a", "b", "c"):
        rank.command(Expect(TransferId(name), 8), Abandon(TransferId(name), "abandoned: x"))
    assert list(rank.core.state.tombstones) == ["b", "c"]
    assert rank.at(120.0) == []
    assert rank.core.state.tombstones == {}
    assert rank.core.next_due() is None


def test_a_request_id_that_is_active_keeps_its_transfer() -> None:
    """P39: the second is refused, the first is not disturbed."""
    rank = Rank()
    rank.command(*computed(8), Expect(T, 400))
    rank.hear(register(8))
    assert len(rank.posts()) == 1
    assert rank.core.state.counts == {"expected_twice": 1}


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (register(4, start=8), r"tokens \[8, 4\) are not a range"),
        (register(4, start=-4), r"tokens \[-4, 4\) are not a range"),
        (register(8, write_seconds=0.0), "must be positive"),
        (register(8, write_seconds=math.nan), "must be positive"),
        (register(8, sharers=0), "must be positive"),
        (register(8, groups=()), "0 cache groups, ours are 1"),
        (register(8, groups=(((0, 2),), ((0, 2),))), "2 cache groups, ours are 1"),
        (register(8, start=2), "start 2 is no multiple of the block size 4"),
        (register(8, groups=(((-1, 2),),)), "span that is not"),
        (register(8, groups=(((0, 0), (0, 2)),)), "span that is not"),
        (register(8, groups=((((1 << 63) - 1, 2),),)), "span that is not"),
        (register(8, groups=(((0, 3),),)), "does not have the 2 blocks of its tokens"),
        (register(8, groups=((),)), "does not have the 2 blocks of its tokens"),
        (register(1 << 40, groups=(((0, 1 << 38),),)), "274877906944 blocks, the limit is 100"),
        (register(8, block_bytes=(64,)), r"\(64,\) bytes expected per block, we would write \(32,\)"),
    ],
)
def test_registrations_that_cannot_be(message: Register, problem: str) -> None:
    """S01: sizes from a peer are checked before anything is built from them."""
    rank = Rank(PeerFacts((4,), 8, block_bytes=(32,)), blocks_max=100)
    (answer,) = rank.hear(message)
    assert isinstance(answer, Send)
    assert isinstance(answer.message, Failed)
    assert answer.message.reason.startswith("malformed: ")
    with pytest.raises(AssertionError, match=problem):
        raise AssertionError(answer.message.reason)
    assert rank.core.state.rows == {}


def test_the_last_block_id_that_there_is() -> None:
    rank = Rank()
    rank.command(*computed(4))
    rank.hear(register(4, first=(1 << 63) - 2))
    (piece,) = rank.posts()
    assert list(piece.target_blocks[0]) == [(1 << 63) - 2]


def test_a_malformed_repetition_stops_what_was_registered() -> None:
    rank = Rank()
    rank.command(*computed(12))
    rank.hear(register(12))
    (piece,) = rank.posts()
    assert rank.hear(register(12, sharers=0)) == []
    (answer,) = rank.done(piece.slice)
    assert isinstance(answer, Send)
    assert answer.message == failed("malformed: write_seconds 10.0 and sharers 0 must be positive", 8)


# --- strangers, late comers, pull ----------------------------------------------------------------


@pytest.mark.parametrize("kind", [register, renew])
def test_an_id_of_a_peer_that_is_too_long_is_an_error_of_the_peer(kind: Any) -> None:
    """S01: the notification of a write names both ids and must fit one payload."""
    rank = Rank()
    long = ConsumerId("x" * 4097)
    message = (
        register(8, consumer=long)
        if kind is register
        else Renew(transfers=((T, long, 1),), write_seconds=1.0)
    )
    with pytest.raises(PeerError, match="an id of more than 4096 characters"):
        rank.hear(message)
    assert rank.core.state.rows == {}


def test_a_peer_is_needed_until_its_delivery_has_ended() -> None:
    rank = Rank()
    rank.command(*computed(8))
    assert rank.core.peers() == set()
    rank.hear(register(8))
    (piece,) = rank.posts()
    assert rank.core.peers() == {D0}
    rank.done(piece.slice)
    assert rank.core.peers() == set()


@pytest.mark.parametrize(
    "message",
    [register(8), cancel(), Announce(transfer=T, consumer=C), Renew(transfers=(), write_seconds=1.0)],
)
def test_messages_before_hello_are_refused(message: AnyMessage) -> None:
    """X21: an error of that peer; nothing changes."""
    rank = Rank()
    with pytest.raises(PeerError, match="before Hello"):
        rank.core.handle_message(PeerName("stranger"), message, 0.0)
    assert rank.core.state.rows == {}


def test_a_prefill_leg_that_never_comes() -> None:
    """P17: the consumer is told, and nothing is kept."""
    rank = Rank()
    rank.hear(register(8))
    rank.hear(Announce(transfer=T, consumer=ConsumerId("c1")))
    assert rank.core.expecting
    assert rank.at(29.9) == []
    assert rank.at(30.0) == [
        Send(D0, failed("unknown_transfer")),
        Send(D0, failed("unknown_transfer", consumer=ConsumerId("c1"))),
    ]
    assert rank.results() == []
    assert not rank.core.expecting
    assert rank.hear(Announce(transfer=T, consumer=ConsumerId("c2"))) == [
        Send(D0, failed("unknown_transfer", consumer=ConsumerId("c2")))
    ]


def test_closing_tells_every_consumer_and_posts_nothing_more() -> None:
    """P66: what is in flight ends first."""
    rank = Rank()
    rank.command(*computed(12), *computed(8, U, 300))
    rank.hear(register(12))
    rank.hear(register(8, transfer=U), D1)
    piece, _ = rank.posts()
    rank.core.handle_close(rank.now)
    assert rank.outputs() == []
    assert rank.done(piece.slice) == [Send(D0, failed("closed", 8))]


def test_a_registration_has_no_more_blocks_than_its_peer() -> None:
    """S01: a few bytes on the wire must not make the producer allocate for millions of blocks."""
    core = ProducerCore(Limits(), (16,))
    core.handle_link(PeerName("d"), PeerFacts((16,), 1024, (4,)))
    for blocks, refused in ((4, False), (5, True)):
        transfer = TransferId(f"transfer-{blocks}")
        message = Register(
            transfer=transfer,
            consumer=ConsumerId("c"),
            start=0,
            stop=16 * blocks,
            groups=(((0, blocks),),),
            write_seconds=1.0,
            mark=0.0,
        )
        core.handle_message(PeerName("d"), message, 0.0)
        output = core.poll_output()
        assert (output is not None) is refused
        assert core.knows(transfer) is not refused


def blocks_refused(count: int, limit: int, transfer: TransferId) -> Send:
    text = f"table_full: {count} blocks of one rank registered, the limit is {limit}"
    return Send(D0, failed(text, transfer=transfer))


@pytest.mark.parametrize(
    ("facts", "limits"),
    [(PeerFacts((4,), 8, (2,)), {}), (PeerFacts((4,), 8, (100,)), {"registered_blocks_max": 4})],
)
def test_a_peer_has_only_so_many_blocks_registered_together(facts: PeerFacts, limits: dict[str, int]) -> None:
    """S01: twice what its cache has, or the limit; a refusal is for good, and room comes with every end."""
    rank = Rank(facts, **limits)
    rank.hear(register(8))
    rank.hear(register(8, transfer=U))
    late = TransferId("late")
    assert rank.hear(register(4, transfer=late)) == [blocks_refused(5, 4, late)]
    assert rank.core.state.counts["table_full"] == 1
    assert rank.hear(register(8)) == [], "what stands may be repeated"
    rank.hear(cancel())
    assert rank.hear(register(4, transfer=late)) == [blocks_refused(5, 4, late)]
    assert rank.hear(register(4, transfer=TransferId("next"))) == []
    rank.hear(register(8, transfer=TransferId("other")), D1)
    assert rank.core.state.registered == {D0: 3, D1: 2}, "each peer for itself"


def test_every_end_of_a_registration_gives_its_blocks_back() -> None:
    """What is written, failed or cancelled holds no destination, though it is remembered."""
    rank = Rank(PeerFacts((4,), 8, (3,)))
    rank.command(*computed(8, consumers=4), Finish(T))
    rank.hear(register(8))
    [piece] = rank.posts()
    rank.done(piece.slice)
    rank.hear(register(8, consumer=ConsumerId("c1")))
    rank.hear(cancel(consumer=ConsumerId("c1")))
    rank.hear(register(12, consumer=ConsumerId("c2")))
    assert rank.core.state.registered == {}
    assert len(rank.core.state.rows[T].deliveries) == 3


def test_a_renewal_that_names_one_transfer_many_times_is_answered_once() -> None:
    rank = Rank()
    rank.command(*computed(8))
    rank.hear(register(4))
    answers = rank.hear(Renew(transfers=((T, C, 1),) * 1000, write_seconds=10.0))
    [status] = [output.message for output in answers if isinstance(output, Send)]
    assert isinstance(status, Status)
    assert len(status.transfers) == 1


def test_transfers_that_only_peers_speak_of_leave_room_for_the_hosts() -> None:
    """S01: names that a peer makes up keep no prefill from being handed out."""
    rank = Rank(transfers_max=4)
    names = [TransferId(f"made up {number}") for number in range(3)]
    for name in names[:2]:
        assert rank.hear(Announce(transfer=name, consumer=C)) != [
            Send(D0, failed("table_full", transfer=name))
        ]
    assert rank.hear(Announce(transfer=names[2], consumer=C)) == [
        Send(D0, failed("table_full", transfer=names[2]))
    ]
    rank.command(*computed(8), *computed(8, U))
    assert rank.core.state.counts == {"table_full": 1}, "the host has room"
    rank.at(40.0)
    assert rank.core.state.early == set()
    rank.command(Finish(T), Finish(U))
    rank.hear(Announce(transfer=TransferId("real"), consumer=C))
    rank.command(Expect(TransferId("real"), 8))
    assert rank.core.state.early == set()
    assert len(rank.core.state.rows) == 3


@pytest.mark.parametrize("is_known", [False, True])
def test_a_rank_that_closes_admits_nothing_and_tells_who_asks(is_known: bool) -> None:
    """P66: whoever comes while the last slices drain hears the end at once, not when the connection ends."""
    rank = Rank()
    if is_known:
        rank.command(*computed(8))
    rank.core.handle_close(rank.now)
    late = ConsumerId("late")
    assert rank.hear(Announce(transfer=T, consumer=C)) == [Send(D0, failed("closed"))]
    assert rank.hear(register(8, consumer=late)) == [Send(D0, failed("closed", consumer=late))]
    assert rank.hear(register(8, consumer=late)) == [Send(D0, failed("closed", consumer=late))]
    assert rank.hear(cancel(attempt=2)) == [Send(D0, fence(2))]
    told, status = rank.hear(Renew(transfers=((T, C, 3),), write_seconds=10.0))
    assert told == Send(D0, failed("closed", attempt=3))
    assert isinstance(status, Send)
    assert isinstance(status.message, Status)
    rank.command(*computed(8, U), Finish(U))
    assert [result for result in rank.results() if isinstance(result, Released)] == [
        Released(U, "table_full")
    ]
    assert rank.posts() == []
    assert not any(row.open_deliveries() for row in rank.core.state.rows.values())


@pytest.mark.parametrize(("stop", "works"), [(22, True), (20, True), (19, False), (8, False)])
def test_windows_that_have_moved_on_are_told_at_once(stop: int, works: bool) -> None:
    """V14: of layers with a window the engine keeps what the last token looks at, and nothing before."""
    rank = Rank(PeerFacts((4, 4), 32, windows=(0, 5)), block_tokens=(4, 4))
    rank.command(Expect(T, 22), Advance(T, 22, 0, (((0, 6),), (*absent(4), (40, 2)))))
    told = rank.hear(register(stop, groups=(((5, -(-stop // 4)),), ((50, -(-stop // 4)),))))
    if works:
        assert rank.posts()
        return
    (answer,) = told
    assert isinstance(answer, Send)
    assert isinstance(answer.message, Failed)
    text = f"too_short: asked for a window of 5 tokens up to {stop}, the prompt has 22"
    assert answer.message.reason == text


def test_blocks_are_appended_to_each_group_from_its_own_first_on() -> None:
    rank = Rank(PeerFacts((4, 8), 32), block_tokens=(4, 8))
    rank.command(Expect(T, 24), Advance(T, 8, 0, (((0, 2),), ((20, 1),)), (0, 0)))
    rank.command(Advance(T, 24, 2, (((2, 4),), ((30, 2),)), (2, 1)))
    rank.hear(register(24, groups=(((5, 6),), ((9, 3),))))
    (piece,) = rank.posts()
    assert [list(blocks) for blocks in piece.source_blocks] == [[0, 1, 2, 3, 4, 5], [20, 30, 31]]
