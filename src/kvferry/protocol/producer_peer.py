"""What consumer ranks say to a producer rank."""

from __future__ import annotations

from kvferry.ids import ConsumerId, PeerName, TransferId
from kvferry.protocol import pump, settle
from kvferry.protocol.messages import (
    Announce,
    AnyMessage,
    Cancel,
    Cancelled,
    Failed,
    Fetched,
    Register,
    Renew,
    Status,
    TransferStatus,
    Written,
)
from kvferry.protocol.outputs import Send
from kvferry.protocol.producer_host import check_length
from kvferry.protocol.reasons import CANCELLED, MALFORMED, PEER_LOST, TABLE_FULL, because, coded
from kvferry.protocol.sources import (
    Delivery,
    DeliveryKey,
    Lane,
    ProducerState,
    SourceRow,
    Tombstone,
    blocks_covering,
    expanded,
)
from kvferry.protocol.states import DELIVERY, DeliveryEvent, DeliveryState, SourceState

BLOCK_ID_MAX = (1 << 63) - 1


def announce(state: ProducerState, peer: PeerName, message: Announce, now: float) -> None:
    """A consumer waits for memory: keep the lease."""
    delivery = _delivery(state, peer, message, now)
    if delivery is None:
        return
    _keep_lease(state, message.transfer, now)
    states = (_status(state, delivery.transfer, delivery.consumer),)
    state.outputs.append(Send(peer, Status(transfers=states)))


def register(state: ProducerState, peer: PeerName, message: Register, now: float) -> None:
    """A consumer's destination is allocated."""
    problem = _malformed(state, state.lanes[peer], message) or _conflict(state, peer, message)
    if problem:
        state.count("malformed")
        _refuse(state, peer, message, because(MALFORMED, problem), now)
        return
    delivery = _delivery(state, peer, message, now)
    if delivery is None:
        return
    if delivery.ended and delivery.answer is not None:
        state.outputs.append(Send(peer, delivery.answer))
        return
    fresh = delivery.state is DeliveryState.ANNOUNCED
    delivery.state = DELIVERY.next(delivery.state, DeliveryEvent.REGISTER)
    _keep_lease(state, message.transfer, now)
    delivery.permission_until = now + message.write_seconds
    if fresh:
        delivery.sharers = message.sharers
        delivery.start, delivery.stop = message.start, message.stop
        delivery.next_token = message.start
        delivery.target_blocks = tuple(expanded(spans) for spans in message.groups)
        delivery.registration = _digest(message)
    row = state.rows[message.transfer]
    if row.state is not SourceState.UNKNOWN:
        check_length(state, row, delivery)
    if fresh and delivery.state is DeliveryState.REGISTERED and message.start == message.stop:
        delivery.state = DELIVERY.next(delivery.state, DeliveryEvent.COMPLETE)
        delivery.answer = Written(
            transfer=message.transfer, consumer=message.consumer, start=message.start, stop=message.stop
        )
        state.outputs.append(Send(peer, delivery.answer))
    pump.wake(state, delivery)
    settle.settle(state, row, now)


def renew(state: ProducerState, peer: PeerName, message: Renew, now: float) -> None:
    """A consumer still wants these: permissions and leases start anew, and it hears how each stands."""
    states = []
    for transfer, consumer in message.transfers:
        row = state.rows.get(transfer)
        delivery = None if row is None else row.deliveries.get((peer, consumer))
        answer = _ended_answer(state, transfer, peer, consumer)
        if answer is not None:
            state.outputs.append(Send(peer, answer))
        elif row is not None:
            _keep_lease(state, transfer, now)
        if delivery is None or delivery.state is DeliveryState.ANNOUNCED:
            # Whoever waits for our writes has to register (again): we have not heard of its blocks.
            states.append(TransferStatus(transfer, consumer, "unknown", 0))
            continue
        delivery.permission_until = now + message.write_seconds
        pump.wake(state, delivery)
        states.append(_status(state, transfer, consumer))
    state.outputs.append(Send(peer, Status(transfers=tuple(states))))


def cancel(state: ProducerState, peer: PeerName, message: Cancel, now: float) -> None:
    """A consumer needs nothing (any more): the fence follows when nothing is in flight to it."""
    fence = Cancelled(transfer=message.transfer, consumer=message.consumer)
    tombstone = state.tombstones.get(message.transfer)
    if message.transfer not in state.rows and tombstone is not None:
        _remember(state, tombstone, (peer, message.consumer), fence)
        state.outputs.append(Send(peer, fence))
        return
    delivery = _delivery(state, peer, message, now)
    if delivery is None:
        return
    delivery.sharers = message.sharers
    if delivery.ended:
        # From now on its blocks may be another request's: never again say that they are written.
        delivery.answer = fence
        state.outputs.append(Send(peer, fence))
        return
    settle.stop(
        state,
        delivery,
        DeliveryEvent.CANCEL,
        DeliveryEvent.DRAINED_CANCELLED,
        because(CANCELLED, message.reason),
    )
    settle.settle(state, state.rows[message.transfer], now)


def fetched(state: ProducerState, peer: PeerName, message: Fetched, now: float) -> None:
    """Pull mode: a consumer has read everything."""
    if message.transfer not in state.rows:
        state.count("late_message")
        return
    delivery = _delivery(state, peer, message, now)
    if delivery is None:
        return
    delivery.sharers = message.sharers
    delivery.state = DELIVERY.next(delivery.state, DeliveryEvent.FETCHED)
    settle.settle(state, state.rows[message.transfer], now)


def peer_lost(state: ProducerState, peer: PeerName, reason: str, now: float) -> None:
    """The connection to a consumer rank is gone: its deliveries end as soon as nothing is in flight."""
    state.lanes.pop(peer, None)
    for row in list(state.rows.values()):
        touched = False
        for delivery in row.open_deliveries():
            if delivery.peer == peer:
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


def _delivery(
    state: ProducerState, peer: PeerName, message: Announce | Register | Cancel | Fetched, now: float
) -> Delivery | None:
    """The delivery that a message is about, made when it is the first; None when it was answered instead."""
    row = state.rows.get(message.transfer)
    if row is None:
        tombstone = state.tombstones.get(message.transfer)
        if tombstone is not None:
            _answer_late(state, peer, message, tombstone)
            return None
        if len(state.rows) >= state.limits.transfers_max:
            state.count("table_full")
            _send_failed(state, peer, message, TABLE_FULL)
            return None
        row = SourceRow(message.transfer)
        state.rows[message.transfer] = row
        state.timers.set(("unknown", message.transfer), now + state.limits.unknown_seconds)
    key = (peer, message.consumer)
    if key in row.past:
        # It was told that we are silent, so whatever it said before that is void. Ids are used once.
        fence = Cancelled(transfer=message.transfer, consumer=message.consumer)
        state.outputs.append(Send(peer, fence if isinstance(message, Cancel) else row.past[key]))
        return None
    if key not in row.deliveries:
        if len(row.deliveries) >= state.limits.consumers_max:
            state.count("table_full")
            _send_failed(state, peer, message, TABLE_FULL)
            return None
        row.deliveries[key] = Delivery(message.transfer, message.consumer, peer)
        if row.abandon_reason or row.expired:
            settle.fail_open(state, row, settle.outcome(row))
            settle.settle(state, row, now)
            return None
    return row.deliveries[key]


def _answer_late(
    state: ProducerState,
    peer: PeerName,
    message: Announce | Register | Cancel | Fetched,
    tombstone: Tombstone,
) -> None:
    state.count("late_message")
    key = (peer, message.consumer)
    answer = tombstone.answers.get(key)
    if answer is None:
        start = message.start if isinstance(message, Register) else 0
        answer = _failed(message.transfer, message.consumer, tombstone.outcome, start)
        _remember(state, tombstone, key, answer)
    state.outputs.append(Send(peer, answer))


def _remember(state: ProducerState, tombstone: Tombstone, key: DeliveryKey, answer: AnyMessage) -> None:
    """What a consumer was told stays true: its blocks may be another request's from now on."""
    if key in tombstone.answers or len(tombstone.answers) < state.limits.consumers_max:
        tombstone.answers[key] = answer


def _ended_answer(
    state: ProducerState, transfer: TransferId, peer: PeerName, consumer: ConsumerId
) -> AnyMessage | None:
    row = state.rows.get(transfer)
    if row is not None:
        delivery = row.deliveries.get((peer, consumer))
        if delivery is None:
            return row.past.get((peer, consumer))
        return delivery.answer if delivery.ended else None
    tombstone = state.tombstones.get(transfer)
    if tombstone is None:
        return None
    if (peer, consumer) not in tombstone.answers:
        late = _failed(transfer, consumer, tombstone.outcome, 0)
        _remember(state, tombstone, (peer, consumer), late)
        return late
    return tombstone.answers[(peer, consumer)]


def _keep_lease(state: ProducerState, transfer: TransferId, now: float) -> None:
    row = state.rows[transfer]
    row.lease_until = now + state.limits.lease_seconds
    if row.state is SourceState.HELD:
        state.timers.set(("lease", transfer), row.lease_until)


def _status(state: ProducerState, transfer: TransferId, consumer: ConsumerId) -> TransferStatus:
    row = state.rows[transfer]
    writing = any(d.in_flight for d in row.deliveries.values() if d.consumer == consumer)
    name = "writing" if writing else row.state.value
    return TransferStatus(transfer, consumer, name, row.frontier)


def _send_failed(
    state: ProducerState, peer: PeerName, message: Announce | Register | Cancel | Fetched, reason: str
) -> None:
    start = message.start if isinstance(message, Register) else 0
    state.outputs.append(Send(peer, _failed(message.transfer, message.consumer, reason, start)))


def _failed(transfer: TransferId, consumer: ConsumerId, reason: str, valid_until: int) -> Failed:
    return Failed(transfer=transfer, consumer=consumer, reason=reason, valid_until=valid_until)


def _refuse(state: ProducerState, peer: PeerName, message: Register, reason: str, now: float) -> None:
    """Fail a registration; one that already stands under its name drains first, for `Failed` is a fence."""
    row = state.rows.get(message.transfer)
    delivery = None if row is None else row.deliveries.get((peer, message.consumer))
    if row is None or delivery is None or delivery.ended:
        _send_failed(state, peer, message, reason)
        return
    settle.stop(state, delivery, DeliveryEvent.STOP, DeliveryEvent.DRAINED_FAILED, reason)
    settle.settle(state, row, now)


def _digest(message: Register) -> int:
    return hash((message.start, message.stop, message.groups))


def _conflict(state: ProducerState, peer: PeerName, message: Register) -> str:
    """Whether other blocks were registered under the same name before."""
    key = (peer, message.consumer)
    row, tombstone = state.rows.get(message.transfer), state.tombstones.get(message.transfer)
    known = None
    if row is not None and key in row.deliveries:
        known = row.deliveries[key].registration
    elif row is None and tombstone is not None:
        known = tombstone.registrations.get(key)
    return "registered before, with other blocks" if known not in (None, _digest(message)) else ""


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
        if sum(count for _, count in spans) != past_block - first_block:
            return f"groups[{index}] does not have the {past_block - first_block} blocks of its tokens"
    return ""
