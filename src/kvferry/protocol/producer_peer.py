"""What consumer ranks say to a producer rank."""

from __future__ import annotations

import math

from kvferry.ids import PeerName, TransferId
from kvferry.protocol import loans, pump, settle
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
)
from kvferry.protocol.outputs import Send
from kvferry.protocol.producer_host import check_length
from kvferry.protocol.reasons import (
    CANCELLED,
    CLOSED,
    FETCHED,
    MALFORMED,
    PEER_LOST,
    TABLE_FULL,
    UNKNOWN,
    WRITTEN,
    because,
    code_of,
    coded,
)
from kvferry.protocol.slices import blocks_covering, blocks_due, expanded, first_token, listed_from
from kvferry.protocol.sources import (
    Delivery,
    DeliveryKey,
    Lane,
    ProducerState,
    SourceRow,
    Tombstone,
)
from kvferry.protocol.states import DELIVERY, DeliveryEvent, DeliveryState, SourceState

BLOCK_ID_MAX = (1 << 63) - 1
FORGOTTEN = "it is older than what was answered and forgotten"


def announce(state: ProducerState, peer: PeerName, message: Announce, now: float) -> None:
    """A consumer waits for memory: keep the lease."""
    delivery = delivery_of(state, peer, message, now)
    if delivery is None:
        return
    keep_lease(state, message.transfer, now)
    send_status(state, delivery, now)


def register(state: ProducerState, peer: PeerName, message: Register, now: float) -> None:
    """A consumer's destination is allocated."""
    lane = state.lanes[peer]
    problem = _malformed(state, lane, message) or _other_plan(lane, message)
    problem = problem or conflict(state, peer, message)
    if problem:
        state.count("malformed")
        refuse(state, peer, message, because(MALFORMED, problem), now)
        return
    delivery = delivery_of(state, peer, message, now)
    if delivery is None:
        return
    if delivery.ended and delivery.answer is not None:
        state.outputs.append(Send(peer, delivery.answer))
        return
    fresh = delivery.state is DeliveryState.ANNOUNCED
    if fresh and (problem := _too_many_blocks(state, peer, message)):
        state.count("table_full")
        refuse(state, peer, message, because(TABLE_FULL, problem), now)
        return
    delivery.state = DELIVERY.next(delivery.state, DeliveryEvent.REGISTER)
    keep_lease(state, message.transfer, now)
    _permit(state, delivery, message, now)
    if fresh:
        delivery.sharers = message.sharers
        delivery.start, delivery.stop = message.start, message.stop
        delivery.next_token = message.start
        state.hold_blocks(delivery, tuple(expanded(spans) for spans in message.groups))
        delivery.starts = _starts(lane, message)
        delivery.registration = digest(message)
        pump.stand_behind(state, delivery, now)
    row = state.rows[message.transfer]
    if row.state is not SourceState.UNKNOWN:
        check_length(state, row, delivery)
    if fresh and delivery.state is DeliveryState.REGISTERED and message.start == message.stop:
        delivery.state = DELIVERY.next(delivery.state, DeliveryEvent.COMPLETE)
        delivery.answer = pump.written(delivery)
        state.outputs.append(Send(peer, delivery.answer))
    elif delivery.state is DeliveryState.REGISTERED and delivery.permission_until <= now:
        # It has no mark of ours that is worth anything: give it one to renew with.
        send_status(state, delivery, now)
    pump.wake(state, delivery)
    settle.settle(state, row, now)


def renew(state: ProducerState, peer: PeerName, message: Renew, now: float) -> None:
    """A consumer still wants these: permissions and leases start anew, and it hears how each stands."""
    states = []
    for transfer, consumer, attempt in dict.fromkeys(message.transfers):
        row = state.rows.get(transfer)
        delivery = None if row is None else row.deliveries.get((peer, consumer, attempt))
        answer = _ended_answer(state, transfer, (peer, consumer, attempt), now)
        if answer is None and delivery is None and state.closing:
            # It would register now, and nobody would tell it of its end.
            answer = _failed(transfer, (peer, consumer, attempt), CLOSED, 0)
        if answer is not None:
            state.outputs.append(Send(peer, answer))
        elif row is not None:
            keep_lease(state, transfer, now)
        if delivery is None or delivery.state is DeliveryState.ANNOUNCED:
            # Whoever waits for our writes has to register (again): we have not heard of its blocks.
            states.append(TransferStatus(transfer, consumer, "unknown", 0, attempt))
            continue
        _permit(state, delivery, message, now)
        pump.wake(state, delivery)
        _serve_reader(state, delivery, message.asked, now)
        states.append(_status(state, delivery, now))
    status = Status(transfers=tuple(states), mark=now, asked=message.asked)
    state.outputs.append(Send(peer, status))


def _serve_reader(state: ProducerState, delivery: Delivery, asked: float | None, now: float) -> None:
    """What a renewal may bring a reader: a newer promise, or what it could not be told before."""
    if delivery.state not in loans.READS:
        return
    if asked is not None and math.isfinite(asked):
        loans.note_asked(delivery, asked, now)
    if delivery.state is DeliveryState.RECALLED:
        loans.recall(state, delivery)
    elif delivery.state is DeliveryState.ASKED:
        loans.offer(state, state.rows[delivery.transfer], delivery)


def _permit(state: ProducerState, delivery: Delivery, message: Register | Renew, now: float) -> None:
    """Let the permission run on from our own mark; a grant without one, or a late one, changes nothing.

    It ends before what was said after its mark can be forgotten, or a fence could be.
    """
    if message.mark is not None and message.mark <= now:
        seconds = min(message.write_seconds, state.limits.tombstone_seconds)
        delivery.permission_until = max(delivery.permission_until, message.mark + seconds)


def send_status(state: ProducerState, delivery: Delivery, now: float) -> None:
    """Tell a consumer how its transfer stands, with a mark."""
    state.outputs.append(Send(delivery.peer, Status(transfers=(_status(state, delivery, now),), mark=now)))


def cancel(state: ProducerState, peer: PeerName, message: Cancel, now: float) -> None:
    """A consumer needs nothing (any more): the fence follows when nothing is in flight to it."""
    fence = _fence(message)
    tombstone = state.tombstones.get(message.transfer)
    if message.transfer not in state.rows and tombstone is not None:
        _remember(state, tombstone.answers, _key(peer, message), fence)
        settle.bury(state, message.transfer, tombstone, now)
        state.outputs.append(Send(peer, fence))
        return
    delivery = delivery_of(state, peer, message, now)
    if delivery is None:
        return
    delivery.sharers = message.sharers
    if delivery.ended:
        # From now on its blocks may be another request's: never again say that they are written.
        delivery.answer = fence
        state.outputs.append(Send(peer, fence))
        return
    if delivery.state in loans.LOANS:
        settle.returned(state, state.rows[message.transfer], delivery, DeliveryEvent.CANCEL, fence, now)
        return
    settle.stop(
        state,
        delivery,
        DeliveryEvent.CANCEL,
        DeliveryEvent.DRAINED_CANCELLED,
        because(CANCELLED, message.reason),
    )
    settle.settle(state, state.rows[message.transfer], now)


def peer_lost(state: ProducerState, peer: PeerName, reason: str, now: float) -> None:
    """The connection to a consumer rank is gone: its deliveries end as soon as nothing is in flight.

    But a reader has a connection of its own: what is lent to it stays so until it returns or the lease ends.
    """
    state.lanes.pop(peer, None)
    for row in list(state.rows.values()):
        touched = False
        for delivery in row.open_deliveries():
            if delivery.peer == peer and delivery.state not in loans.LOANS:
                touched = True
                settle.stop(
                    state,
                    delivery,
                    DeliveryEvent.STOP,
                    DeliveryEvent.DRAINED_FAILED,
                    coded(PEER_LOST, reason),
                )
        if touched:
            settle.settle(state, row, now)


def delivery_of(
    state: ProducerState, peer: PeerName, message: Announce | Register | Fetch | Cancel, now: float
) -> Delivery | None:
    """The delivery that a message is about, made when it is the first; None when it was answered instead."""
    if _was_forgotten(state, peer, message):
        return None
    key = _key(peer, message)
    row = state.rows.get(message.transfer)
    if row is None:
        tombstone = state.tombstones.get(message.transfer)
        if tombstone is not None and (key in tombstone.answers or not tombstone.only_denials):
            _answer_late(state, peer, message, tombstone, now)
            return None
        if (reason := _no_room(state, full=state.is_full_for_peers)) is not None:
            _deny(state, peer, message, reason, now)
            return None
        row = SourceRow(message.transfer)
        if tombstone is not None:
            row.past = state.tombstones.pop(message.transfer).answers
            state.timers.cancel(("tombstone", message.transfer))
        state.rows[message.transfer] = row
        state.early.add(message.transfer)
        state.timers.set(("unknown", message.transfer), now + state.limits.unknown_seconds)
    if key in row.past:
        # It was told that we are silent, so whatever it said before that is void.
        answer = _fence(message) if isinstance(message, Cancel) else row.past[key]
        state.outputs.append(Send(peer, answer))
        return None
    if key not in row.deliveries:
        full = len(row.deliveries) >= state.limits.consumers_max
        if (reason := _no_room(state, full=full)) is not None:
            _deny(state, peer, message, reason, now)
            return None
        row.deliveries[key] = Delivery(message.transfer, message.consumer, peer, message.attempt)
        if row.abandon_reason or row.expired:
            settle.fail_open(state, row, settle.outcome(row))
            settle.settle(state, row, now)
            return None
    return row.deliveries[key]


def _was_forgotten(
    state: ProducerState, peer: PeerName, message: Announce | Register | Fetch | Cancel
) -> bool:
    """Answer what may have had its end told already, with nobody here to know: nothing of it is in flight."""
    if not state.may_be_forgotten(message.transfer, _key(peer, message)):
        return False
    state.count("late_message")
    state.outputs.append(Send(peer, _denial(peer, message, because(TABLE_FULL, FORGOTTEN))))
    return True


def _no_room(state: ProducerState, *, full: bool) -> str | None:
    """Why nothing more can be admitted, if so."""
    if state.closing:
        return CLOSED
    if full:
        state.count("table_full")
    return TABLE_FULL if full else None


def _answer_late(
    state: ProducerState,
    peer: PeerName,
    message: Announce | Register | Fetch | Cancel,
    tombstone: Tombstone,
    now: float,
) -> None:
    state.count("late_message")
    key = _key(peer, message)
    answer = tombstone.answers.get(key) or _denial(peer, message, _too_late(tombstone))
    _remember(state, tombstone.answers, key, answer)
    settle.bury(state, message.transfer, tombstone, now)
    state.outputs.append(Send(peer, answer))


def _too_late(tombstone: Tombstone) -> str:
    """Why who comes late gets nothing: a good end for others is no reason that it could be counted under."""
    good = code_of(tombstone.outcome) in (WRITTEN, FETCHED, CANCELLED)
    return because(UNKNOWN, f"ended before: {tombstone.outcome}") if good else tombstone.outcome


def _deny(
    state: ProducerState,
    peer: PeerName,
    message: Announce | Register | Fetch | Cancel,
    reason: str,
    now: float,
) -> None:
    """Refuse what a message asks for, for good: `Failed` is a fence, so nothing may be written later."""
    row = state.rows.get(message.transfer)
    if row is not None:
        answers = row.past
    else:
        tombstone = state.tombstones.get(message.transfer)
        tombstone = tombstone or Tombstone(reason, {}, {}, released=False, only_denials=True)
        settle.bury(state, message.transfer, tombstone, now)
        answers = tombstone.answers
    answer = _denial(peer, message, reason)
    _remember(state, answers, _key(peer, message), answer)
    state.outputs.append(Send(peer, answer))


def _remember(
    state: ProducerState,
    answers: dict[DeliveryKey, AnyMessage],
    key: DeliveryKey,
    answer: AnyMessage,
) -> None:
    """Keep what a consumer is told true: its blocks may be another request's from now on.

    Without room the oldest answer is forgotten.
    """
    if key not in answers and len(answers) >= state.limits.consumers_max:
        state.count("table_full")
        oldest = next(iter(answers))
        del answers[oldest]
        state.forget(oldest)
    answers[key] = answer


def _ended_answer(
    state: ProducerState, transfer: TransferId, key: DeliveryKey, now: float
) -> AnyMessage | None:
    row = state.rows.get(transfer)
    if row is not None:
        delivery = row.deliveries.get(key)
        if delivery is None:
            return row.past.get(key)
        return delivery.answer if delivery.ended else None
    tombstone = state.tombstones.get(transfer)
    if tombstone is None:
        return None
    if key in tombstone.answers or tombstone.only_denials:
        return tombstone.answers.get(key)
    late = _failed(transfer, key, _too_late(tombstone), 0)
    _remember(state, tombstone.answers, key, late)
    settle.bury(state, transfer, tombstone, now)
    return late


def keep_lease(state: ProducerState, transfer: TransferId, now: float) -> None:
    """A consumer has given a sign of life."""
    row = state.rows[transfer]
    row.lease_until = min(now + state.limits.lease_seconds, row.held_until)
    if row.state is SourceState.HELD:
        state.timers.set(("lease", transfer), row.lease_until)


def _status(state: ProducerState, delivery: Delivery, now: float) -> TransferStatus:
    row = state.rows[delivery.transfer]
    writing = any(d.in_flight for d in row.deliveries.values() if d.consumer == delivery.consumer)
    name = "writing" if writing else row.state.value
    keep_seconds = loans.keep_seconds(row, delivery, now)
    return TransferStatus(
        delivery.transfer, delivery.consumer, name, row.frontier, delivery.attempt, keep_seconds
    )


def _denial(peer: PeerName, message: Announce | Register | Fetch | Cancel, reason: str) -> Failed | Cancelled:
    if isinstance(message, Cancel):
        return _fence(message)
    start = message.start if isinstance(message, Register | Fetch) else 0
    return _failed(message.transfer, _key(peer, message), reason, start)


def _failed(transfer: TransferId, key: DeliveryKey, reason: str, valid_until: int) -> Failed:
    _, consumer, attempt = key
    return Failed(
        transfer=transfer, consumer=consumer, attempt=attempt, reason=reason, valid_until=valid_until
    )


def _fence(message: Cancel) -> Cancelled:
    return Cancelled(transfer=message.transfer, consumer=message.consumer, attempt=message.attempt)


def _key(peer: PeerName, message: Announce | Register | Fetch | Cancel) -> DeliveryKey:
    return (peer, message.consumer, message.attempt)


def refuse(state: ProducerState, peer: PeerName, message: Register | Fetch, reason: str, now: float) -> None:
    """Fail a registration; one that already stands under its name drains first, for `Failed` is a fence."""
    row = state.rows.get(message.transfer)
    delivery = None if row is None else row.deliveries.get(_key(peer, message))
    if row is None or delivery is None or delivery.ended:
        _deny(state, peer, message, reason, now)
        return
    settle.stop(state, delivery, DeliveryEvent.STOP, DeliveryEvent.DRAINED_FAILED, reason)
    settle.settle(state, row, now)


def digest(message: Register | Fetch) -> int:
    """What a registration says, so that another one under its name is noticed."""
    groups = message.groups if isinstance(message, Register) else None
    return hash((message.start, message.stop, groups))


def conflict(state: ProducerState, peer: PeerName, message: Register | Fetch) -> str:
    """Whether other blocks were registered under the same name before."""
    key = _key(peer, message)
    row, tombstone = state.rows.get(message.transfer), state.tombstones.get(message.transfer)
    known = None
    if row is not None and key in row.deliveries:
        known = row.deliveries[key].registration
    elif row is None and tombstone is not None:
        known = tombstone.registrations.get(key)
    return "registered before, with other blocks" if known not in (None, digest(message)) else ""


def _starts(lane: Lane, message: Register) -> tuple[int, ...]:
    """The first token of each group to write: before a window its producer may have no blocks.

    The first block of a window is written from its beginning: the engine takes all of it for received, and
    its prefix cache will hand it to requests that look at more of it than this one.
    """
    starts = []
    for index, (spans, tokens) in enumerate(zip(message.groups, lane.facts.block_tokens, strict=True)):
        needed = first_token(
            message.start, message.stop, lane.facts.window_of(index), lane.facts.whole_of(index)
        )
        count = sum(count for _, count in spans)
        starts.append(max(needed, listed_from(message.stop, count, tokens)))
    return tuple(starts)


def _too_many_blocks(state: ProducerState, peer: PeerName, message: Register) -> str:
    """Whether the peer's open registrations would have more blocks together than one peer may have."""
    blocks = sum(count for spans in message.groups for _, count in spans)
    blocks += state.registered.get(peer, 0)
    most = state.lanes[peer].blocks_max(state.limits)
    return f"{blocks} blocks of one rank registered, the limit is {most}" if blocks > most else ""


def _other_plan(lane: Lane, message: Register) -> str:
    """Whether the consumer expects other bytes of us than those that we would write."""
    ours, theirs = lane.facts.block_bytes, message.block_bytes
    if ours and theirs and ours != theirs:
        return f"{theirs} bytes expected per block, we would write {ours}"
    return ""


def _malformed(state: ProducerState, lane: Lane, message: Register) -> str:
    if not 0 <= message.start <= message.stop:
        return f"tokens [{message.start}, {message.stop}) are not a range"
    if not message.write_seconds > 0 or message.sharers < 1:
        return f"write_seconds {message.write_seconds} and sharers {message.sharers} must be positive"
    if len(message.groups) != len(state.block_tokens):
        return f"{len(message.groups)} cache groups, ours are {len(state.block_tokens)}"
    for index, (spans, tokens) in enumerate(zip(message.groups, lane.facts.block_tokens, strict=True)):
        if message.start % tokens:
            return f"start {message.start} is no multiple of the block size {tokens}"
        if any(first < 0 or count < 1 or first + count > BLOCK_ID_MAX for first, count in spans):
            return f"groups[{index}] has a span that is not (first >= 0, count >= 1)"
        first_block, past_block = blocks_covering(message.start, message.stop, tokens)
        blocks_max = min((state.limits.blocks_max, *lane.facts.block_counts[index : index + 1]))
        if past_block - first_block > blocks_max:
            return f"{past_block - first_block} blocks, the limit is {blocks_max}"
        count = sum(count for _, count in spans)
        due = blocks_due(count, message.start, message.stop, tokens, lane.facts.window_of(index))
        if count != due:
            return f"groups[{index}] does not have the {due} blocks of its tokens"
    return ""
