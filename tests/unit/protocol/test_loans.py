"""Pull on the producer: what is offered to whom, for how long it is kept, and what ends it."""

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
    Drained,
    Expect,
    Finish,
    Preempt,
    Reclaim,
    Released,
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
    Fetched,
    Offer,
    Register,
    Renew,
    Status,
    TransferStatus,
)
from kvferry.protocol.outputs import Output, PeerFacts, Send
from kvferry.protocol.producer import ProducerCore

T, C = TransferId("t"), ConsumerId("c0")
D0, D1 = PeerName("d0"), PeerName("d1")
FENCE = Send(D0, Cancelled(transfer=T, consumer=C))
FETCHED = Fetched(transfer=T, consumer=C)
CANCEL = Cancel(transfer=T, consumer=C, reason="left")


class Rank:
    """A producer core, its clock, and what has come out of it."""

    def __init__(
        self, block_tokens: tuple[int, ...] = (4,), windows: tuple[int, ...] = (), **limits: Any
    ) -> None:
        self.core = ProducerCore(Limits(**limits), block_tokens)
        self.now = 0.0
        for peer in (D0, D1):
            self.core.handle_link(peer, PeerFacts(block_tokens, 8, windows=windows))

    def command(self, *commands: Any) -> list[Output]:
        for command in commands:
            self.core.handle_command(command, self.now)
        self.core.check_invariants()
        return self.outputs()

    def hear(self, message: AnyMessage, peer: PeerName = D0) -> list[Output]:
        self.core.handle_message(peer, message, self.now)
        self.core.check_invariants()
        return self.outputs()

    def outputs(self) -> list[Output]:
        return list(iter(self.core.poll_output, None))

    def results(self) -> list[Any]:
        return list(iter(self.core.poll_result, None))

    def at(self, now: float) -> list[Output]:
        self.now = now
        self.core.handle_timeout(now)
        self.core.check_invariants()
        return self.outputs()


def computed(tokens: int = 8, consumers: int = 1) -> tuple[Expect, Advance]:
    return Expect(T, tokens, consumers), Advance(T, tokens, 0, (((10, 2), (30, 1)),))


def held(tokens: int = 10, consumers: int = 1, **limits: Any) -> Rank:
    """Blocks 10, 11 and 30 under a lease since 0 s."""
    rank = Rank(**limits)
    rank.command(*computed(tokens, consumers), Finish(T))
    return rank


def fetch(stop: int = 10, start: int = 0, asked: float = 500.0, **fields: Any) -> Fetch:
    return Fetch(transfer=T, consumer=C, start=start, stop=stop, asked=asked, **fields)


def offer(
    *spans: tuple[int, int], stop: int = 10, start: int = 0, asked: float = 500.0, keep: float = 30.0
) -> Send:
    message = Offer(
        transfer=T, consumer=C, start=start, stop=stop, groups=(spans,), asked=asked, keep_seconds=keep
    )
    return Send(D0, message)


def failed(reason: str, valid_until: int = 0) -> Send:
    return Send(D0, Failed(transfer=T, consumer=C, reason=reason, valid_until=valid_until))


def renew(asked: float | None) -> Renew:
    return Renew(transfers=((T, C, 1),), write_seconds=10.0, asked=asked)


def status(state: str, frontier: int, keep: float = 0.0, *, asked: float | None, mark: float) -> Send:
    entry = TransferStatus(T, C, state, frontier, 1, keep)
    return Send(D0, Status(transfers=(entry,), mark=mark, asked=asked))


LENT = offer((10, 2), (30, 1))


# --- what is offered -----------------------------------------------------------------------------


def test_blocks_are_offered_for_exactly_the_tokens_that_are_asked_for() -> None:
    """P01: by position, whatever the consumer has already."""
    assert held().hear(fetch()) == [LENT]
    assert held().hear(fetch(start=4)) == [offer((11, 1), (30, 1), start=4)]
    assert held().hear(fetch(stop=5)) == [offer((10, 2), stop=5)]
    assert held().hear(fetch(stop=8, start=8)) == [offer(start=8, stop=8)]


def test_nothing_is_offered_before_prefill_has_ended() -> None:
    rank = Rank()
    assert rank.hear(fetch()) == [status("unknown", 0, asked=None, mark=0.0)]
    expected, advanced = computed(10)
    assert rank.command(expected) == []
    assert rank.command(advanced) == []
    assert rank.hear(fetch()) == [status("computing", 10, asked=None, mark=0.0)]
    rank.now = 2.0
    assert rank.hear(renew(502.0)) == [status("computing", 10, asked=502.0, mark=2.0)]
    rank.now = 3.0
    assert rank.command(Finish(T)) == [offer((10, 2), (30, 1), asked=502.0, keep=31.0)]


def test_a_lost_offer_is_made_again() -> None:
    """P16: the same blocks, with a newer promise."""
    rank = held()
    rank.hear(fetch())
    rank.now = 4.0
    assert rank.hear(fetch(asked=504.0)) == [offer((10, 2), (30, 1), asked=504.0)]
    assert rank.core.lent() == 1


def test_asking_for_more_than_there_is_fails_whenever_it_is_known() -> None:
    """P01, P40."""
    reason = "too_short: asked for 11 tokens, the prompt has 10"
    assert held().hear(fetch(11)) == [failed(reason)]
    rank = Rank()
    rank.hear(fetch(11))
    assert rank.command(Expect(T, 10)) == [failed(reason)]


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (fetch(4, 8), "tokens [8, 4) are not a range"),
        (fetch(8, -4), "tokens [-4, 8) are not a range"),
        (fetch(8, 2), "start 2 is no multiple of the block size 4"),
        (fetch(asked=math.nan), "asked nan must be a time, and sharers 1 positive"),
        (fetch(asked=math.inf), "asked inf must be a time, and sharers 1 positive"),
        (fetch(sharers=0), "asked 500.0 must be a time, and sharers 0 positive"),
    ],
)
def test_a_malformed_question_is_refused_and_stays_so(message: Fetch, text: str) -> None:
    """X21."""
    rank = held()
    assert rank.hear(message) == [failed(f"malformed: {text}", message.start)]
    assert rank.hear(fetch()) == [failed(f"malformed: {text}", message.start)]
    assert rank.core.lent() == 0


def test_the_same_name_with_other_tokens_is_a_conflict() -> None:
    rank = held()
    rank.hear(fetch())
    assert rank.hear(fetch(8)) == [failed("malformed: registered before, with other blocks")]
    assert rank.core.lent() == 1, "its reader has not come back"
    assert rank.hear(CANCEL) == [FENCE]


def test_who_reads_is_not_written_and_the_other_way_round() -> None:
    """X21: one registration has one mode."""
    register = Register(
        transfer=T, consumer=C, start=0, stop=10, groups=(((0, 3),),), write_seconds=10.0, mark=0.0
    )
    rank = held()
    rank.hear(fetch())
    assert rank.hear(register) == [failed("malformed: registered before, with other blocks")]
    assert rank.core.next_slice(rank.now) is None
    rank = Rank()
    rank.command(*computed(10))
    rank.hear(register)
    assert rank.core.next_slice(rank.now) is not None
    assert rank.hear(fetch()) == [], "the write in flight drains first"
    assert rank.core.lent() == 0


# --- how long it is kept -------------------------------------------------------------------------


def test_a_promise_reaches_as_far_as_the_lease() -> None:
    """P14: counted from the reader's mark, which was made before it came in."""
    rank = held()
    rank.now = 7.0
    assert rank.hear(fetch(asked=507.0)) == [offer((10, 2), (30, 1), asked=507.0)]
    rank.now = 9.0
    assert rank.hear(renew(509.0)) == [status("held", 10, 30.0, asked=509.0, mark=9.0)]
    assert rank.at(38.9) == []
    assert rank.at(39.0) == [failed("lease_expired")]
    assert rank.results() == [Released(T, "lease_expired")]
    assert rank.core.lent() == 0


def test_a_promise_is_cut_where_a_lease_may_not_be_renewed_any_more() -> None:
    rank = held(held_seconds=40.0)
    rank.hear(fetch())
    rank.now = 25.0
    assert rank.hear(renew(525.0)) == [status("held", 10, 15.0, asked=525.0, mark=25.0)]
    assert rank.hear(fetch(asked=526.0)) == [offer((10, 2), (30, 1), asked=526.0, keep=15.0)]


def test_a_renewal_without_a_mark_or_with_an_older_one_promises_nothing_new() -> None:
    rank = held()
    rank.hear(fetch())
    rank.now = 3.0
    rank.hear(renew(503.0))
    for asked in (None, 501.0, math.nan):
        rank.hear(renew(asked))
    assert rank.hear(fetch(asked=502.0)) == [offer((10, 2), (30, 1), asked=503.0)]


def test_who_is_not_lent_anything_is_promised_nothing() -> None:
    rank = held()
    rank.hear(Announce(transfer=T, consumer=C))
    assert rank.hear(renew(501.0)) == [status("unknown", 0, asked=501.0, mark=0.0)]


# --- what ends it --------------------------------------------------------------------------------


def test_fetched_releases_the_source_and_is_answered_as_often_as_it_is_said() -> None:
    rank = held()
    rank.hear(fetch())
    assert rank.hear(FETCHED) == [FENCE]
    assert rank.results() == [Released(T, "fetched")]
    assert rank.hear(FETCHED) == [FENCE]
    assert rank.hear(fetch()) == [FENCE], "what is late is not lent again"
    assert rank.results() == []
    assert rank.at(200.0) == []
    assert rank.hear(FETCHED) == [FENCE], "nobody here knows of it any more"


@pytest.mark.parametrize("farewell", [FETCHED, CANCEL])
def test_what_is_late_is_not_lent_again_while_others_read(farewell: Fetched | Cancel) -> None:
    """P42: the source is still held, for another consumer."""
    rank = held(consumers=2)
    rank.hear(fetch())
    assert rank.hear(farewell) == [FENCE]
    assert rank.hear(fetch()) == [FENCE]
    assert rank.hear(renew(501.0))[0] == FENCE
    assert rank.core.lent() == 0
    assert rank.results() == []


def test_every_rank_that_shares_us_has_to_have_read() -> None:
    """P42."""
    rank = held()
    rank.hear(fetch(sharers=2))
    rank.hear(fetch(sharers=2), D1)
    rank.hear(msgspec.structs.replace(FETCHED, sharers=2))
    assert rank.results() == []
    rank.hear(msgspec.structs.replace(FETCHED, sharers=2), D1)
    assert rank.results() == [Released(T, "fetched")]


def test_a_readers_cancel_is_its_fence() -> None:
    """P02."""
    rank = held()
    rank.hear(fetch())
    assert rank.hear(CANCEL) == [FENCE]
    assert rank.results() == [Released(T, "cancelled")]


def test_who_has_only_asked_is_fenced_at_once() -> None:
    rank = Rank()
    rank.command(*computed(10))
    rank.hear(fetch())
    assert rank.hear(CANCEL) == [FENCE]
    assert rank.command(Finish(T)) == []
    assert rank.results() == [Released(T, "cancelled")]


def test_fetched_of_what_was_never_lent_is_an_error_of_the_peer() -> None:
    """X21: the wrong type of message for the state; nothing changes."""
    rank = Rank()
    rank.command(*computed(10))
    rank.hear(fetch())
    with pytest.raises(PeerError, match="fetched is not possible in state asked"):
        rank.hear(FETCHED)
    assert rank.command(Finish(T)) == [LENT]


def test_another_incarnation_has_no_part_in_a_loan() -> None:
    """A forged or late word of another rank ends nothing that is lent to this one."""
    rank = held()
    rank.hear(fetch())
    assert rank.hear(FETCHED, D1) == [Send(D1, FENCE.message)]
    rank.hear(CANCEL, D1)
    assert rank.core.lent() == 1


def test_a_lost_connection_of_ours_ends_no_loan() -> None:
    """Its reader has one of its own, and what it says arrives when it is linked again."""
    rank = held()
    rank.hear(fetch())
    rank.core.handle_peer_lost(D0, "peer_lost: reset", rank.now)
    rank.core.check_invariants()
    assert (rank.outputs(), rank.results(), rank.core.lent()) == ([], [], 1)
    rank.core.handle_link(D0, PeerFacts((4,), 8))
    assert rank.hear(FETCHED) == [FENCE]
    assert rank.results() == [Released(T, "fetched")]


def test_who_cannot_be_reached_is_called_back_when_it_speaks_again() -> None:
    rank = held()
    rank.hear(fetch())
    rank.core.handle_peer_lost(D0, "peer_lost: reset", rank.now)
    assert rank.command(Preempt((T,), 7)) == []
    rank.core.handle_link(D0, PeerFacts((4,), 8))
    assert rank.hear(renew(501.0))[0] == failed("incomplete: its blocks were taken back")


def test_a_question_that_finds_no_room_is_refused() -> None:
    rank = Rank(transfers_max=1)
    rank.command(Expect(TransferId("u"), 8))
    assert rank.hear(fetch(start=4)) == [failed("table_full", 4)]


def test_who_cannot_be_reached_is_offered_it_when_it_speaks_again() -> None:
    rank = Rank()
    rank.command(*computed(10))
    rank.hear(fetch())
    rank.core.state.lanes.pop(D0)
    assert rank.command(Finish(T)) == []
    rank.core.handle_link(D0, PeerFacts((4,), 8))
    rank.now = 2.0
    renewed = rank.hear(renew(502.0))
    assert renewed[0] == offer((10, 2), (30, 1), asked=502.0)


def test_blocks_that_are_taken_back_wait_for_their_reader() -> None:
    """X25: neither `Drained` nor `Released` before it is silent; it is told again until it is."""
    rank = held()
    rank.hear(fetch())
    told = failed("incomplete: its blocks were taken back")
    assert rank.command(Preempt((T,), 7)) == [told]
    assert rank.results() == []
    assert rank.hear(fetch()) == [told]
    assert rank.hear(renew(501.0))[0] == told
    assert rank.hear(CANCEL) == [FENCE]
    assert rank.results() == [Drained(7), Released(T, "incomplete: its blocks were taken back")]


def test_blocks_that_are_taken_back_are_free_when_the_lease_ends() -> None:
    rank = held()
    rank.hear(fetch())
    rank.command(Preempt((T,), 7))
    rank.now = 20.0
    rank.hear(renew(520.0))
    assert rank.at(29.9) == []
    assert rank.results() == []
    assert rank.at(30.0) == [], "it was told, and promised nothing since"
    assert rank.results() == [Drained(7), Released(T, "incomplete: its blocks were taken back")]


def test_who_had_read_everything_before_it_heard_has_it() -> None:
    rank = held()
    rank.hear(fetch())
    rank.command(Preempt((T,), 7))
    assert rank.hear(FETCHED) == [FENCE]
    assert rank.results()[0] == Drained(7)


def test_an_engine_that_needs_memory_leaves_readers_alone() -> None:
    """But not those that have no memory for it yet."""
    rank = held()
    rank.hear(Announce(transfer=T, consumer=C))
    rank.hear(fetch())
    assert rank.command(Reclaim(T, "starved: x")) == []
    assert rank.core.lent() == 1
    rank = held()
    rank.hear(Announce(transfer=T, consumer=C))
    assert rank.command(Reclaim(T, "starved: x")) == [failed("starved: x")]


def test_prefill_that_breaks_off_is_told_to_who_has_asked() -> None:
    rank = Rank()
    rank.command(Expect(T, 10))
    rank.hear(fetch())
    assert rank.command(Abandon(T, "abandoned: left")) == [failed("abandoned: left")]
    assert rank.results() == [Released(T, "abandoned: left")]


def test_closing_calls_back_what_is_lent_and_offers_nothing_more() -> None:
    """P66."""
    rank = held(consumers=2)
    rank.hear(fetch())
    rank.core.handle_close(rank.now)
    assert rank.outputs() == [failed("closed")]
    assert rank.core.lent() == 1
    assert rank.hear(fetch(), D1) == [Send(D1, failed("closed").message)]
    assert rank.hear(CANCEL) == [FENCE]
    assert rank.core.lent() == 0


def test_everything_of_a_finished_request_can_be_handed_out_at_once() -> None:
    """Both directions: an engine that has decoded a request is a producer like any other."""
    rank = Rank()
    rank.hear(fetch())
    assert rank.command(*computed(10), Finish(T)) == [LENT]


def test_caches_of_several_groups_offer_blocks_of_each() -> None:
    rank = Rank(block_tokens=(4, 8))
    groups = (((10, 3),), ((70, 2),))
    rank.command(Expect(T, 10), Advance(T, 10, 0, groups), Finish(T))
    [sent] = rank.hear(fetch(start=8))
    assert isinstance(sent, Send)
    assert isinstance(sent.message, Offer)
    assert sent.message.groups == (((12, 1),), ((71, 1),))


def test_of_a_window_only_what_is_needed_is_offered() -> None:
    """V14: a window of 5 tokens: whoever computes token 21 next looks at the four before it."""
    rank = Rank(block_tokens=(4, 4), windows=(0, 5))
    rank.command(Expect(T, 22), Advance(T, 22, 0, (((10, 6),), (*absent(4), (70, 2)))), Finish(T))
    [sent] = rank.hear(fetch(stop=21))
    assert isinstance(sent, Send)
    assert isinstance(sent.message, Offer)
    assert sent.message.groups == (((10, 6),), ((70, 2),))


def test_of_a_window_whole_blocks_of_the_engine_are_offered() -> None:
    """V14: our engine's blocks are four of ours; a window of 5 tokens begins in the second one."""
    rank = Rank(block_tokens=(4, 4), windows=(0, 5))
    rank.core.state.whole_tokens = (4, 16)
    rank.command(Expect(T, 26), Advance(T, 26, 0, (((10, 7),), (*absent(4), (70, 4)))), Finish(T))
    [sent] = rank.hear(fetch(stop=25))
    assert isinstance(sent, Send)
    assert isinstance(sent.message, Offer)
    assert sent.message.groups == (((10, 7),), ((70, 3),))


def test_a_window_that_has_moved_on_is_not_offered() -> None:
    rank = Rank(block_tokens=(4, 4), windows=(0, 5))
    rank.command(Expect(T, 22), Advance(T, 22, 0, (((10, 6),), (*absent(4), (70, 2)))), Finish(T))
    text = "too_short: asked for a window of 5 tokens up to 12, the prompt has 22"
    assert rank.hear(fetch(stop=12)) == [failed(text)]
