"""Source blocks that are lent to a reader: pull, on the producer.

A loan begins with an `Offer` and ends when the reader says that it is silent (`Fetched`, `Cancel`), or with
the lease. What is promised to a reader is never more than what is left of the lease, counted from a mark of
the reader's own that came in before. So no promise outlives the lease, and nobody has to be asked then.
"""

from __future__ import annotations

from kvferry.protocol.commands import Groups
from kvferry.protocol.messages import AnyMessage, Failed, Offer
from kvferry.protocol.outputs import Send
from kvferry.protocol.slices import blocks_covering, first_token, spanned
from kvferry.protocol.sources import Delivery, ProducerState, SourceRow
from kvferry.protocol.states import DELIVERY, DeliveryEvent, DeliveryState, SourceState

LOANS = frozenset({DeliveryState.LENT, DeliveryState.RECALLED})
READS = frozenset({DeliveryState.ASKED, *LOANS})
"""States of a delivery that is pulled and has not ended."""


def note_asked(delivery: Delivery, asked: float, now: float) -> None:
    """Remember a reader's newest mark, and when it came in."""
    if delivery.asked is None or asked > delivery.asked:
        delivery.asked, delivery.asked_at = asked, now


def offer_all(state: ProducerState, row: SourceRow) -> None:
    """Prefill has ended: whoever has asked to read may."""
    for delivery in row.deliveries.values():
        if delivery.state is DeliveryState.ASKED:
            offer(state, row, delivery)


def offer(state: ProducerState, row: SourceRow, delivery: Delivery) -> bool:
    """Lend the blocks, or say again which they are; False while there are none to be lent."""
    if row.state is not SourceState.HELD or row.expired or delivery.peer not in state.lanes:
        return False
    if delivery.state is DeliveryState.ASKED:
        delivery.state = DELIVERY.next(delivery.state, DeliveryEvent.OFFER)
        state.slice_count += 1
        delivery.loan = state.slice_count
        state.loans.add(delivery.loan)
    assert delivery.state is DeliveryState.LENT, "only who has asked, and may read, is offered anything"
    assert delivery.asked is not None, "whoever reads has sent its mark"
    message = Offer(
        transfer=row.transfer,
        consumer=delivery.consumer,
        attempt=delivery.attempt,
        start=delivery.start,
        stop=delivery.stop,
        groups=_offered(state, row, delivery),
        asked=delivery.asked,
        keep_seconds=row.lease_until - delivery.asked_at,
    )
    state.outputs.append(Send(delivery.peer, message))
    return True


def _offered(state: ProducerState, row: SourceRow, delivery: Delivery) -> Groups:
    """The blocks that the reader has asked for; of a window those of our engine's that it needs a part of."""
    facts = state.lanes[delivery.peer].facts
    groups = []
    for index, (blocks, tokens) in enumerate(zip(row.blocks, state.block_tokens, strict=True)):
        whole = state.whole_tokens[index]
        start = first_token(delivery.start, delivery.stop, facts.window_of(index), whole)
        first, past = blocks_covering(min(start, delivery.stop), delivery.stop, tokens)
        groups.append(spanned(blocks[first:past]))
    return tuple(groups)


def keep_seconds(row: SourceRow, delivery: Delivery, now: float) -> float:
    """How long what is lent will be kept, from a mark on that came in just now or before."""
    return max(row.lease_until - now, 0.0) if delivery.state is DeliveryState.LENT else 0.0


def recall(state: ProducerState, delivery: Delivery) -> None:
    """Tell a reader to stop, again if it has not heard; its `Cancel` is what ends the loan."""
    if delivery.peer in state.lanes:
        state.outputs.append(Send(delivery.peer, failure(delivery)))


def end(state: ProducerState, delivery: Delivery, event: DeliveryEvent, answer: AnyMessage) -> int:
    """The reader is silent, or the lease has ended; returns the number that the loan had."""
    assert delivery.loan is not None, "only what is lent comes back"
    delivery.state = DELIVERY.next(delivery.state, event)
    delivery.answer = answer
    number, delivery.loan = delivery.loan, None
    state.loans.discard(number)
    return number


def failure(delivery: Delivery) -> Failed:
    """What a reader is told of a loan that is called back; it knows itself what it has read."""
    return Failed(
        transfer=delivery.transfer,
        consumer=delivery.consumer,
        attempt=delivery.attempt,
        reason=delivery.stop_reason,
        valid_until=delivery.start,
    )
