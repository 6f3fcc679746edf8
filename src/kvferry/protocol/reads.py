"""What a consumer rank reads itself: pull. Which slice is read next, and what follows when one ends.

A READ is posted only while the producer has promised to keep the source blocks, and counts only if its end
was seen by then: one that is seen later may have read what another request has put there. The promise is
counted from a mark of our own, so that it has ended here before it ends at the producer.

Parts of one peer take turns, as deliveries do in `pump`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from kvferry.ids import ConsumerId, PeerName, TransferId
from kvferry.protocol import farewells, fences
from kvferry.protocol.messages import Fetched, Offer, TransferStatus
from kvferry.protocol.outputs import BlockArray, Disconnect, PostSlice
from kvferry.protocol.reasons import MALFORMED, POST_FAILED, UNKNOWN, because, coded
from kvferry.protocol.receptions import ConsumerState, Part, Reading, Reception, ReceptionKey
from kvferry.protocol.slices import (
    Posted,
    blocks_due,
    cut_last,
    expanded,
    first_token,
    listed_from,
    slice_size,
)
from kvferry.protocol.states import PART, PartEvent, PartState
from kvferry.protocol.turns import Turns

LATE = "its end was seen after the source's lease"


class Reader:
    """What the host of a consumer core posts for it, and tells it of that: as a producer core's slices."""

    def __init__(self, state: ConsumerState) -> None:
        self._state = state

    def next_slice(self, now: float) -> PostSlice | None:
        """The next slice to read; answered by exactly one `handle_slice_done` or `handle_slice_failed`."""
        return next_slice(self._state, now)

    def handle_slice_done(self, number: int, now: float) -> None:
        """Every byte of a slice is in our memory."""
        done(self._state, number, now)

    def handle_slice_failed(self, number: int, reason: str, now: float, *, retryable: bool) -> None:
        """A slice could not be posted, or ended in an error; it is not in flight any more."""
        failed(self._state, number, reason, now, retry=retryable)

    def in_flight(self) -> int:
        """Slices that have been given out and have not ended."""
        return len(self._state.reads)


@dataclass(frozen=True, slots=True)
class _Ended:
    """A READ that has ended, and what it belonged to."""

    row: Reception
    part: Part
    reading: Reading
    posted: Posted


def offered(state: ConsumerState, row: Reception, part: Part, message: Offer, now: float) -> None:
    """A producer rank says in which blocks the tokens are."""
    following = PART.next(part.state, PartEvent.OFFER)
    if part.state is PartState.ASKED:
        if problem := _unfit(state, row, part, message, now):
            state.count("malformed")
            fences.fail(state, row, because(MALFORMED, problem), now)
            return
        part.state = following
        source = tuple(expanded(spans) for spans in message.groups)
        stop, groups = row.asked_of(part)
        target = tuple(expanded(spans) for spans in groups)
        starts = _starts(state, row, part, (source, target))
        part.reading = Reading(source, target, stop, row.start, starts, offered_at=now)
        _check_end(state, row, part, now)
    if part.state is PartState.OFFERED:
        extend(state, row, part, message.asked, message.keep_seconds, now)


def _starts(
    state: ConsumerState, row: Reception, part: Part, sides: tuple[tuple[BlockArray, ...], ...]
) -> tuple[int, ...]:
    """The first token of each group to read: before a window there may be no blocks on either side."""
    stop, _ = row.asked_of(part)
    starts = []
    for index, (theirs, ours) in enumerate(zip(part.link.block_tokens, state.block_tokens, strict=True)):
        start = first_token(row.start, stop, state.window_of(index), state.whole_tokens[index])
        listed = [
            listed_from(stop, len(blocks[index]), tokens)
            for blocks, tokens in zip(sides, (theirs, ours), strict=True)
        ]
        starts.append(max(start, *listed))
    return tuple(starts)


def _unfit(state: ConsumerState, row: Reception, part: Part, message: Offer, now: float) -> str:
    stop, _ = row.asked_of(part)
    if (message.start, message.stop) != (row.start, stop):
        return f"offered [{message.start}, {message.stop}), asked for [{row.start}, {stop})"
    if not (message.asked <= now and math.isfinite(message.keep_seconds)):
        return f"offered for {message.keep_seconds} s after {message.asked}, which is no promise"
    if len(message.groups) != len(part.link.block_tokens):
        return f"{len(message.groups)} cache groups, it has {len(part.link.block_tokens)}"
    for index, (spans, tokens) in enumerate(zip(message.groups, part.link.block_tokens, strict=True)):
        if any(start < 0 or count < 1 for start, count in spans):
            return f"groups[{index}] has a span that is not (first >= 0, count >= 1)"
        count = sum(count for _, count in spans)
        due = blocks_due(count, row.start, stop, tokens, state.window_of(index))
        if count != due:
            return f"groups[{index}] does not have the {due} blocks of its tokens"
        start = first_token(row.start, stop, state.window_of(index), state.whole_tokens[index])
        if start < stop and (offered_from := listed_from(stop, count, tokens)) > start:
            return f"groups[{index}] is offered from token {offered_from} on, and needed from {start} on"
    return ""


def stands(
    state: ConsumerState, row: Reception, part: Part, entry: TransferStatus, asked: float | None, now: float
) -> None:
    """How a transfer stands at a producer rank that we read from; `asked` says that it answers a renewal.

    What answers our question itself is not due to one that was lost.
    """
    if asked is None:
        asked_in_vain = part.state is PartState.ASKED and entry.state == "unknown"
        if asked_in_vain and not row.is_waited_for(state.limits, now):
            fences.fail(state, row, UNKNOWN, now)
        return
    reading = part.reading
    if reading is not None and entry.state == "unknown" and asked > reading.offered_at:
        # The loan has ended there, and its end was told and forgotten.
        fences.fail(state, row, UNKNOWN, now)
    elif reading is not None:
        extend(state, row, part, asked, entry.keep_seconds, now)
    elif entry.state != "unknown" and not entry.keep_seconds:
        # It will offer when prefill has ended.
        return
    elif entry.state == "unknown" and now >= row.waiting_since + state.limits.unknown_seconds:
        fences.fail(state, row, UNKNOWN, now)
    else:
        # Our question was lost, or its offer.
        farewells.ask(state, row, part, now)


def extend(
    state: ConsumerState, row: Reception, part: Part, asked: float, keep_seconds: float, now: float
) -> None:
    """The source is kept until so long after our own mark; no promise takes back an earlier one."""
    if asked <= now and math.isfinite(keep_seconds):
        part.keep_until = max(part.keep_until, asked + keep_seconds / (1 + fences.CLOCK_DRIFT_MAX))
    wake(state, row, part)


# --- reading -------------------------------------------------------------------------------------


def wake(state: ConsumerState, row: Reception, part: Part) -> None:
    """Something changed: ask this part for a slice at its next turn."""
    if part.state is PartState.OFFERED:
        state.turns.setdefault(part.link.peer, Turns()).ready.setdefault(row.key)


def next_slice(state: ConsumerState, now: float) -> PostSlice | None:
    """The next slice to read. The promise is checked against `now`: ask with a fresh clock each time."""
    for peer, turns in list(state.turns.items()):
        while turns.ready and turns.in_flight < state.limits.in_flight_per_peer:
            key = turns.choose(partial(_left, state, peer))
            row, part = _named(state, peer, key)
            posted = None if row is None or part is None else _readable(state, row, part, now)
            if row is not None and part is not None and posted is not None:
                # Peers take turns, too.
                state.turns[peer] = state.turns.pop(peer)
                return _post(state, row, part, posted, turns, now)
            del turns.ready[key]
        farewells.tidy(state, peer)
    return None


def _named(state: ConsumerState, peer: PeerName, key: ReceptionKey) -> tuple[Reception | None, Part | None]:
    row = state.rows.get(key)
    return row, None if row is None else (row.parts or {}).get(peer)


def _left(state: ConsumerState, peer: PeerName, key: ReceptionKey) -> int:
    """Tokens that were never asked for; one that is gone has none, and is forgotten at its turn."""
    _, part = _named(state, peer, key)
    reading = None if part is None else part.reading
    return 0 if reading is None else reading.stop - reading.next_token


def _readable(state: ConsumerState, row: Reception, part: Part, now: float) -> Posted | None:
    reading = part.reading
    if part.state is not PartState.OFFERED or reading is None:
        return None
    if not now < part.keep_until or now < reading.retry_at:
        return None

    def blocks(longer: Posted) -> tuple[BlockArray, ...]:
        source = _cut(reading, reading.source_blocks, part.link.block_tokens, longer)
        return *source, *_cut(reading, reading.target_blocks, state.block_tokens, longer)

    size = slice_size(part.link, state.block_tokens, reading.next_token, reading.stop, blocks)
    return reading.next_range(*size)


def _cut(
    reading: Reading, groups: tuple[BlockArray, ...], block_tokens: tuple[int, ...], posted: Posted
) -> tuple[BlockArray, ...]:
    return cut_last(groups, block_tokens, reading.stop, reading.starts, posted)


def _post(
    state: ConsumerState, row: Reception, part: Part, posted: Posted, turns: Turns[ReceptionKey], now: float
) -> PostSlice:
    reading, number = part.reading, state.read_count + 1
    assert reading is not None, "what is read was offered"
    state.read_count = number
    reading.in_flight[number] = posted
    state.reads[number] = (row.key, part.link.peer)
    state.read_timers.set(number, now + state.limits.slice_seconds)
    turns.take()
    return PostSlice(
        slice=number,
        peer=part.link.peer,
        transfer=row.transfer,
        consumer=row.consumer,
        start=posted.start,
        stop=posted.stop,
        source_blocks=_cut(reading, reading.source_blocks, part.link.block_tokens, posted),
        target_blocks=_cut(reading, reading.target_blocks, state.block_tokens, posted),
        notify=None,
        early=False,
        read=True,
        starts=reading.starts,
    )


def done(state: ConsumerState, number: int, now: float) -> None:
    """Every byte of a slice is in our memory."""
    ended = _take(state, number)
    if ended is None:
        return
    if now < ended.part.keep_until:
        ended.part.landed.add(ended.posted.start, ended.posted.stop)
    else:
        state.count("read_late")
        _try_again(state, ended, LATE, now, retry=True)
    _go_on(state, ended, now)


def failed(state: ConsumerState, number: int, reason: str, now: float, *, retry: bool) -> None:
    """A slice could not be posted, or ended in an error; it is not in flight any more."""
    ended = _take(state, number)
    if ended is not None:
        _try_again(state, ended, reason, now, retry=retry)
        _go_on(state, ended, now)


def _take(state: ConsumerState, number: int) -> _Ended | None:
    found = state.reads.pop(number, None)
    if found is None:
        state.count("late_slice")
        return None
    state.read_timers.cancel(number)
    key, peer = found
    row = state.rows[key]
    part = (row.parts or {})[peer]
    assert part.reading is not None, "what was read was offered"
    state.turns[peer].in_flight -= 1
    return _Ended(row, part, part.reading, part.reading.in_flight.pop(number))


def _try_again(state: ConsumerState, ended: _Ended, reason: str, now: float, *, retry: bool) -> None:
    posted, reading, part = ended.posted, ended.reading, ended.part
    if part.state is not PartState.OFFERED:
        return
    if not retry or posted.attempt >= state.limits.retries_max:
        fences.fail(state, ended.row, coded(POST_FAILED, reason), now)
        return
    reading.retries.append(Posted(posted.start, posted.stop, posted.attempt + 1))
    reading.retry_at = now + state.limits.retry_seconds * 2**posted.attempt
    state.retry_timers.set((ended.row.key, part.link.peer), reading.retry_at)


def _go_on(state: ConsumerState, ended: _Ended, now: float) -> None:
    _check_end(state, ended.row, ended.part, now)
    wake(state, ended.row, ended.part)
    farewells.tidy(state, ended.part.link.peer)


def _check_end(state: ConsumerState, row: Reception, part: Part, now: float) -> None:
    """Draw the consequences when nothing is in flight: all is read, or nothing more shall be."""
    reading = part.reading
    if reading is None or reading.in_flight:
        return
    if part.state is PartState.OFFERED and part.landed.reach(row.start) >= reading.stop:
        part.state = PART.next(part.state, PartEvent.FETCHED)
        state.retry_timers.cancel((row.key, part.link.peer))
        message = Fetched(
            transfer=row.transfer, consumer=row.consumer, attempt=row.attempt, sharers=part.link.sharers
        )
        farewells.say(state, part.link.peer, message, now)
    elif part.state is PartState.DRAINING:
        part.state = PART.next(part.state, PartEvent.DRAINED)
        farewells.say(state, part.link.peer, farewells.cancel_of(row, part), now)
    else:
        return
    fences.check(state, row, now)


def retry(state: ConsumerState, key: tuple[TransferId, ConsumerId], peer: PeerName) -> None:
    """The pause after a failed slice is over."""
    row = state.rows[key]
    wake(state, row, (row.parts or {})[peer])


def overdue(state: ConsumerState, number: int) -> None:
    """A slice never ended: have its connection torn down, which ends it."""
    state.count("slice_overdue")
    reason = f"a slice has not ended after {state.limits.slice_seconds:g} s"
    state.outputs.append(Disconnect(state.reads[number][1], reason))
