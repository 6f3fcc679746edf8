"""What the producer's own engine says: requests arrive, the frontier moves, prefill ends or breaks off."""

from __future__ import annotations

from array import array

from kvferry.ids import TransferId
from kvferry.protocol import loans, pump, settle
from kvferry.protocol.commands import (
    Abandon,
    Advance,
    Drained,
    Expect,
    Finish,
    Preempt,
    Reclaim,
    Released,
)
from kvferry.protocol.reasons import ABANDONED, INCOMPLETE, TABLE_FULL, TOO_SHORT, because
from kvferry.protocol.slices import expanded, first_token
from kvferry.protocol.sources import Delivery, ProducerState, SourceRow
from kvferry.protocol.states import SOURCE, DeliveryEvent, DeliveryState, SourceEvent, SourceState

_WANTED = frozenset({DeliveryState.REGISTERED, DeliveryState.ASKED})
"""Its consumer has memory for it, and has been given nothing yet."""


def expect(state: ProducerState, command: Expect, now: float) -> None:
    """A prefill request has reached the engine."""
    row = state.rows.get(command.transfer)
    if row is not None and row.state is not SourceState.UNKNOWN:
        # The connector refuses a second request under an active id; the first one keeps its transfer.
        state.count("expected_twice")
        return
    if row is None:
        if state.closing or len(state.rows) >= state.limits.transfers_max:
            state.count("table_full")
            _owe_release(state, command.transfer)
            return
        row = SourceRow(command.transfer)
        state.rows[command.transfer] = row
    tombstone = state.tombstones.pop(command.transfer, None)
    state.timers.cancel(("tombstone", command.transfer))
    if tombstone is not None:
        row.past = tombstone.answers
    state.timers.cancel(("unknown", command.transfer))
    state.early.discard(command.transfer)
    row.state = SOURCE.next(row.state, SourceEvent.EXPECT)
    row.tokens, row.consumers = command.tokens, command.consumers
    row.blocks = [array("q") for _ in state.block_tokens]
    for delivery in row.open_deliveries():
        check_length(state, row, delivery)
    settle.settle(state, row, now)


def _owe_release(state: ProducerState, transfer: TransferId) -> None:
    """An id has come again and found the table full: what peers were told of it before stays true."""
    tombstone = state.tombstones.get(transfer)
    if tombstone is not None:
        tombstone.released = False


def check_length(state: ProducerState, row: SourceRow, delivery: Delivery) -> None:
    """Having less than the consumer asks for is a failure, not a shorter write."""
    if delivery.state in _WANTED and (problem := _lacking(state, row, delivery)):
        reason = because(TOO_SHORT, problem)
        settle.stop(state, delivery, DeliveryEvent.STOP, DeliveryEvent.DRAINED_FAILED, reason)


def _lacking(state: ProducerState, row: SourceRow, delivery: Delivery) -> str:
    if row.tokens < delivery.stop:
        return f"asked for {delivery.stop} tokens, the prompt has {row.tokens}"
    lane = state.lanes.get(delivery.peer)
    if lane is None:
        return ""
    for index, tokens in enumerate(state.whole_tokens):
        window = lane.facts.window_of(index)
        needed = first_token(delivery.start, delivery.stop, window, lane.facts.whole_of(index))
        # Our engine gives blocks back as the window moves on, up to the last token.
        if window and needed < min((row.tokens - window) // tokens * tokens, delivery.stop):
            return f"asked for a window of {window} tokens up to {delivery.stop}, the prompt has {row.tokens}"
    return ""


def advance(state: ProducerState, command: Advance, now: float) -> None:
    """More KV is computed, or a preempted request starts again in other blocks."""
    row = _admitted(state, command.transfer)
    if row is None:
        state.count("late_command")
        return
    row.state = SOURCE.next(row.state, SourceEvent.ADVANCE)
    if row.state is not SourceState.COMPUTING:
        return
    for index, (blocks, spans) in enumerate(zip(row.blocks, command.blocks, strict=True)):
        first = command.first_of(index)
        assert first <= len(blocks), "blocks are appended without a gap"
        del blocks[first:]
        blocks.extend(expanded(spans))
    row.frontier = min(command.frontier, row.tokens)
    if command.first_block == 0:
        row.paused = False
    if row.frontier >= row.tokens and row.complete_at is None:
        row.complete_at = now
    pump.wake_source(state, row)


def finish(state: ProducerState, command: Finish, now: float) -> None:
    """Prefill ended; from now on the lease decides how long the blocks are kept."""
    row = _admitted(state, command.transfer)
    if row is None or row.host_done:
        _end_again(state, command.transfer, now)
        return
    row.host_done = True
    if row.paused or row.frontier < row.tokens:
        # It was preempted in its last step, or ended before its last chunk: the KV is not all there.
        detail = f"{row.frontier} of {row.tokens} tokens computed" + (", preempted" if row.paused else "")
        _give_up(state, row, because(INCOMPLETE, detail), now)
        return
    row.state = SOURCE.next(row.state, SourceEvent.FINISH)
    seconds = state.limits.lease_seconds if command.keep_seconds is None else command.keep_seconds
    row.held_until = now + max(state.limits.held_seconds, state.limits.lease_seconds, seconds)
    row.lease_until = max(row.lease_until, now + seconds)
    state.timers.set(("lease", row.transfer), row.lease_until)
    loans.offer_all(state, row)
    settle.settle(state, row, now)


def abandon(state: ProducerState, command: Abandon, now: float) -> None:
    """The request ended without its KV."""
    row = _admitted(state, command.transfer)
    if row is None or row.host_done:
        _end_again(state, command.transfer, now)
        return
    row.host_done = True
    _give_up(state, row, command.reason or ABANDONED, now)


def reclaim(state: ProducerState, command: Reclaim, now: float) -> None:
    """Nobody seems to come for these blocks, or the engine needs them more."""
    row = _admitted(state, command.transfer)
    if row is None or row.state is not SourceState.HELD:
        return
    if all(delivery.state not in _WANTED | loans.READS for delivery in row.open_deliveries()):
        _give_up(state, row, command.reason, now)


def _give_up(state: ProducerState, row: SourceRow, reason: str, now: float) -> None:
    row.state = SOURCE.next(row.state, SourceEvent.ABANDON)
    row.abandon_reason = reason
    settle.fail_open(state, row, reason)
    settle.settle(state, row, now)


def _admitted(state: ProducerState, transfer: TransferId) -> SourceRow | None:
    """The row that the host's `Expect` was accepted for, not one that only peers speak of."""
    row = state.rows.get(transfer)
    return None if row is None or row.state is SourceState.UNKNOWN else row


def _end_again(state: ProducerState, transfer: TransferId, now: float) -> None:
    tombstone = state.tombstones.get(transfer)
    if _admitted(state, transfer) is not None or (tombstone is not None and tombstone.released):
        state.count("finished_twice")
        return
    # Its `Expect` found the table full: nothing was offered to anyone, so nothing reads the blocks.
    state.results.append(Released(transfer, TABLE_FULL))
    row = state.rows.get(transfer)
    if row is not None:
        row.expired = True
        settle.fail_open(state, row, TABLE_FULL)
        settle.settle(state, row, now)


def preempt(state: ProducerState, command: Preempt, now: float) -> None:
    """The blocks go back to the engine: post nothing more from them and say when nothing reads them."""
    rows = [row for transfer in command.transfers if (row := _admitted(state, transfer)) is not None]
    waiting: set[int] = set()
    for row in rows:
        row.paused = True
        for delivery in row.deliveries.values():
            waiting.update(delivery.in_flight)
            if delivery.loan is not None:
                waiting.add(delivery.loan)
    if waiting:
        state.tickets[command.ticket] = waiting
    else:
        state.results.append(Drained(command.ticket))
    for row in rows:
        if row.state is SourceState.HELD:
            # Nobody computes it again, so it cannot be completed.
            _give_up(state, row, because(INCOMPLETE, "its blocks were taken back"), now)
