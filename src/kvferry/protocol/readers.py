"""What consumer ranks that read the KV themselves say to a producer rank; see `loans`."""

from __future__ import annotations

import math

from kvferry.ids import PeerName
from kvferry.protocol import loans, producer_peer, settle
from kvferry.protocol.messages import Cancelled, Fetch, Fetched
from kvferry.protocol.outputs import Send
from kvferry.protocol.producer_host import check_length
from kvferry.protocol.reasons import MALFORMED, because
from kvferry.protocol.sources import Lane, ProducerState
from kvferry.protocol.states import DELIVERY, DeliveryEvent, DeliveryState, SourceState


def fetch(state: ProducerState, peer: PeerName, message: Fetch, now: float) -> None:
    """A consumer wants to read: it is offered the blocks as soon as prefill has ended."""
    problem = _malformed(state.lanes[peer], message) or producer_peer.conflict(state, peer, message)
    if problem:
        state.count("malformed")
        producer_peer.refuse(state, peer, message, because(MALFORMED, problem), now)
        return
    delivery = producer_peer.delivery_of(state, peer, message, now)
    if delivery is None:
        return
    if delivery.ended and delivery.answer is not None:
        state.outputs.append(Send(peer, delivery.answer))
        return
    fresh = delivery.state is DeliveryState.ANNOUNCED
    delivery.state = DELIVERY.next(delivery.state, DeliveryEvent.ASK)
    row = state.rows[message.transfer]
    producer_peer.keep_lease(state, message.transfer, now)
    loans.note_asked(delivery, message.asked, now)
    if fresh:
        delivery.sharers = message.sharers
        delivery.start, delivery.stop = message.start, message.stop
        delivery.registration = producer_peer.digest(message)
        if row.state is not SourceState.UNKNOWN:
            check_length(state, row, delivery)
    if delivery.state is DeliveryState.RECALLED:
        loans.recall(state, delivery)
    elif delivery.state is not DeliveryState.STOPPING and not loans.offer(state, row, delivery):
        producer_peer.send_status(state, delivery, now)
    settle.settle(state, row, now)


def fetched(state: ProducerState, peer: PeerName, message: Fetched, now: float) -> None:
    """A consumer has read everything. It says so until it is answered, whatever is known of it here."""
    fence = Cancelled(transfer=message.transfer, consumer=message.consumer, attempt=message.attempt)
    row = state.rows.get(message.transfer)
    delivery = None if row is None else row.deliveries.get((peer, message.consumer, message.attempt))
    if row is None or delivery is None or delivery.ended:
        state.count("late_message")
        state.outputs.append(Send(peer, fence))
        return
    # Raises before anything has changed when there was nothing to be read.
    DELIVERY.next(delivery.state, DeliveryEvent.FETCHED)
    delivery.sharers = message.sharers
    settle.returned(state, row, delivery, DeliveryEvent.FETCHED, fence, now)


def _malformed(lane: Lane, message: Fetch) -> str:
    if not 0 <= message.start <= message.stop:
        return f"tokens [{message.start}, {message.stop}) are not a range"
    if not math.isfinite(message.asked) or message.sharers < 1:
        return f"asked {message.asked} must be a time, and sharers {message.sharers} positive"
    for tokens in lane.facts.block_tokens:
        if message.start % tokens:
            return f"start {message.start} is no multiple of the block size {tokens}"
    return ""
