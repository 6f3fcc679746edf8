"""How deliveries and sources come to their end on the producer.

A delivery that must stop waits for its slices in flight, then its peer is told (`Failed` or
`Cancelled`: both mean that nothing is in flight and nothing will be posted). A source ends when its host
has finished with it, nothing is in flight, and its consumers are served, gone or expired.
"""

from __future__ import annotations

from kvferry.ids import TransferId
from kvferry.protocol import loans
from kvferry.protocol.commands import DeliveryEnded, Drained, Released
from kvferry.protocol.messages import AnyMessage, Cancelled, Failed
from kvferry.protocol.outputs import Send
from kvferry.protocol.reasons import (
    CANCELLED,
    FETCHED,
    LEASE_EXPIRED,
    UNKNOWN,
    WRITTEN,
)
from kvferry.protocol.sources import Delivery, ProducerState, SourceRow, Tombstone
from kvferry.protocol.states import (
    DELIVERY,
    SOURCE,
    DeliveryEvent,
    DeliveryState,
    SourceEvent,
    SourceState,
)


def stop(
    state: ProducerState, delivery: Delivery, event: DeliveryEvent, drained: DeliveryEvent, reason: str
) -> None:
    """Post nothing more for this delivery. It ends in `settle`, once nothing is in flight.

    A `CANCEL` may follow a failure that is still draining: the peer then gets the fence that it asked for.
    What is lent is called back instead: it ends when its reader says so, or with the lease.
    """
    before = delivery.state
    delivery.state = DELIVERY.next(delivery.state, event)
    if delivery.state is DeliveryState.RECALLED:
        if before is not DeliveryState.RECALLED:
            delivery.stop_reason = reason
            loans.recall(state, delivery)
        return
    assert delivery.state is DeliveryState.STOPPING, "what has ended is not stopped"
    if before is not DeliveryState.STOPPING or event is DeliveryEvent.CANCEL:
        delivery.stop_event = drained
    if before is not DeliveryState.STOPPING:
        delivery.stop_reason = reason
    delivery.retries.clear()
    lane = state.lanes.get(delivery.peer)
    if lane is not None:
        lane.turns.ready.pop(delivery.name, None)


def fail_open(state: ProducerState, row: SourceRow, reason: str) -> None:
    """Stop every delivery of a source; each peer is told `Failed`, those that only announced too."""
    for delivery in row.open_deliveries():
        stop(state, delivery, DeliveryEvent.STOP, DeliveryEvent.DRAINED_FAILED, reason)


def settle(state: ProducerState, row: SourceRow, now: float) -> None:
    """Draw the consequences of whatever changed: end what can end, answer who waits for it."""
    for delivery in row.deliveries.values():
        if delivery.state is DeliveryState.STOPPING and not delivery.in_flight:
            _drained(state, delivery)
        if delivery.state is DeliveryState.RECALLED and row.expired:
            answer_tickets(state, loans.end(state, delivery, DeliveryEvent.LAPSE, loans.failure(delivery)))
        if delivery.ended and delivery.first_post_at is not None:
            _observe(state, row, delivery, now)
    if row.in_flight == 0 and _may_end(row):
        _end(state, row, now)


def _drained(state: ProducerState, delivery: Delivery) -> None:
    delivery.state = DELIVERY.next(delivery.state, delivery.stop_event)
    answer: AnyMessage
    if delivery.state is DeliveryState.CANCELLED:
        answer = Cancelled(transfer=delivery.transfer, consumer=delivery.consumer, attempt=delivery.attempt)
    else:
        answer = Failed(
            transfer=delivery.transfer,
            consumer=delivery.consumer,
            attempt=delivery.attempt,
            reason=delivery.stop_reason,
            valid_until=delivery.good_until,
        )
    delivery.answer = answer
    state.free_blocks(delivery)
    if delivery.peer in state.lanes:
        state.outputs.append(Send(delivery.peer, answer))


def returned(
    state: ProducerState,
    row: SourceRow,
    delivery: Delivery,
    event: DeliveryEvent,
    fence: AnyMessage,
    now: float,
) -> None:
    """A reader is silent: what was lent to it may be given away, and it hears that we know."""
    if event is DeliveryEvent.CANCEL and not delivery.stop_reason:
        delivery.stop_reason = CANCELLED
    number = loans.end(state, delivery, event, fence)
    state.outputs.append(Send(delivery.peer, fence))
    answer_tickets(state, number)
    settle(state, row, now)


def _observe(state: ProducerState, row: SourceRow, delivery: Delivery, now: float) -> None:
    first, delivery.first_post_at = delivery.first_post_at, None
    assert first is not None
    complete = row.complete_at
    state.results.append(
        DeliveryEnded(
            transfer=row.transfer,
            consumer=delivery.consumer,
            written=delivery.state is DeliveryState.WRITTEN,
            write_seconds=now - first,
            handover_seconds=None if complete is None else now - complete,
        )
    )


def answer_tickets(state: ProducerState, number: int) -> None:
    """A slice has ended: preemptions that waited for it and for no other are drained."""
    for ticket, waiting in list(state.tickets.items()):
        waiting.discard(number)
        if not waiting:
            del state.tickets[ticket]
            state.results.append(Drained(ticket))


def _may_end(row: SourceRow) -> bool:
    if row.state is SourceState.UNKNOWN:
        return row.expired and not row.open_deliveries()
    if not row.host_done or row.open_deliveries():
        return False
    return row.expired or row.state is SourceState.ABANDONED or row.served() >= row.consumers


def _end(state: ProducerState, row: SourceRow, now: float) -> None:
    row.state = SOURCE.next(row.state, SourceEvent.END)
    reason = outcome(row)
    if row.host_done:
        state.results.append(Released(row.transfer, reason))
    del state.rows[row.transfer]
    state.early.discard(row.transfer)
    for kind in ("lease", "unknown", "retry"):
        state.timers.cancel((kind, row.transfer))
    answers = row.past | {key: d.answer for key, d in row.deliveries.items() if d.answer is not None}
    for key in list(answers)[: -state.limits.consumers_max]:
        # An id that is used again and again: the oldest answers go first.
        del answers[key]
        state.forget(key)
    registrations = {key: d.registration for key, d in row.deliveries.items() if key in answers}
    bury(state, row.transfer, Tombstone(reason, answers, registrations, row.host_done), now)


def bury(state: ProducerState, transfer: TransferId, tombstone: Tombstone, now: float) -> None:
    """Remember an ended transfer for a while, from now on (again)."""
    state.tombstones[transfer] = tombstone
    state.tombstones.move_to_end(transfer)
    state.timers.set(("tombstone", transfer), now + state.limits.tombstone_seconds)
    while len(state.tombstones) > state.limits.tombstones_max:
        oldest = next(iter(state.tombstones))
        state.timers.cancel(("tombstone", oldest))
        forget(state, oldest)


def forget(state: ProducerState, transfer: TransferId) -> None:
    """An ended transfer is remembered no longer."""
    tombstone = state.tombstones.pop(transfer, None)
    for key in () if tombstone is None else tombstone.answers:
        state.forget(key)


def outcome(row: SourceRow) -> str:
    """The one reason that an ended source is counted under."""
    if row.abandon_reason:
        return row.abandon_reason
    states = {delivery.state for delivery in row.deliveries.values()}
    failures = [d.stop_reason for d in row.deliveries.values() if d.state is DeliveryState.FAILED]
    if failures:
        return failures[0]
    if row.expired and row.served() < row.consumers:
        return LEASE_EXPIRED if row.host_done else UNKNOWN
    if DeliveryState.WRITTEN in states:
        return WRITTEN
    if DeliveryState.FETCHED in states:
        return FETCHED
    return CANCELLED
