"""Which slice is posted next, and what follows when one ends.

Deliveries towards one peer take turns, one slice each (`turns`); a delivery stands in its lane's `ready`
queue from the moment when something changed that may let it post, until it was asked and had nothing. So
nothing is scanned while nothing changes, however many transfers wait.
"""

from __future__ import annotations

from functools import partial

from kvferry.ids import PeerName
from kvferry.protocol import settle
from kvferry.protocol.messages import Landed, Written
from kvferry.protocol.outputs import BlockArray, Disconnect, PostSlice
from kvferry.protocol.reasons import POST_FAILED, coded
from kvferry.protocol.slices import Posted, covering, cut_last, slice_size
from kvferry.protocol.sources import Delivery, Lane, ProducerState, RegistrationName, SourceRow
from kvferry.protocol.states import DELIVERY, DeliveryEvent, DeliveryState, SourceState

_POSTING = frozenset({SourceState.COMPUTING, SourceState.HELD})


def wake(state: ProducerState, delivery: Delivery) -> None:
    """Something changed: ask this delivery for a slice at its next turn."""
    lane = state.lanes.get(delivery.peer)
    if lane is not None and delivery.state is DeliveryState.REGISTERED:
        lane.turns.ready.setdefault(delivery.name)


def wake_source(state: ProducerState, row: SourceRow) -> None:
    """Something changed for every delivery of a transfer."""
    for delivery in row.deliveries.values():
        wake(state, delivery)


def next_slice(state: ProducerState, now: float) -> PostSlice | None:
    """The next slice to post. The permission is checked against `now`: ask with a fresh clock each time."""
    for peer, lane in state.lanes.items():
        turns = lane.turns
        while turns.ready and turns.in_flight < state.limits.in_flight_per_peer:
            name = turns.choose(partial(_left, state, peer))
            row, delivery = _named(state, peer, name)
            if row is not None and delivery is not None:
                posted = _postable(state, row, delivery, lane, now)
                if posted is not None:
                    # Peers take turns, too.
                    state.lanes[peer] = state.lanes.pop(peer)
                    return _post(state, row, delivery, posted, lane, now)
            del turns.ready[name]
    return None


def _named(
    state: ProducerState, peer: PeerName, name: RegistrationName
) -> tuple[SourceRow | None, Delivery | None]:
    row = state.rows.get(name[0])
    return row, None if row is None else row.deliveries.get((peer, *name[1:]))


def _left(state: ProducerState, peer: PeerName, name: RegistrationName) -> int:
    """Tokens that were never posted; one that is gone has none, and is forgotten at its turn."""
    _, delivery = _named(state, peer, name)
    return 0 if delivery is None else delivery.stop - delivery.next_token


def _postable(
    state: ProducerState, row: SourceRow, delivery: Delivery, lane: Lane, now: float
) -> Posted | None:
    if delivery.state is not DeliveryState.REGISTERED or row.paused or row.state not in _POSTING:
        return None
    if not now < delivery.permission_until or now < delivery.retry_at:
        return None
    if delivery.behind:
        return None
    stop = min(row.frontier, delivery.stop)

    def blocks(longer: Posted) -> tuple[BlockArray, ...]:
        return *_source_blocks(state, row, delivery, longer), *_target_blocks(lane, delivery, longer)

    size = slice_size(lane.facts, state.block_tokens, delivery.next_token, stop, blocks)
    return delivery.next_range(row.frontier, *size)


def stand_behind(state: ProducerState, delivery: Delivery, now: float) -> None:
    """Let a new delivery wait for slices that are still in flight into blocks which have become its own.

    Its peer has got these blocks back by the transport's retry bound, and is right to. Yet a write that has
    outlived the bound and a new one must not be in flight together.
    """
    doubtful = []
    for number, (transfer, key) in state.slices.items():
        other = state.rows[transfer].deliveries[key]
        standing = other.state is DeliveryState.REGISTERED and now < other.permission_until
        if key[0] == delivery.peer and other is not delivery and not standing:
            doubtful.append((number, other))
    if not doubtful:
        return
    # Cache groups may lie over each other, block by block; of unlike numbers of blocks nobody knows here how.
    alike = len(set(state.lanes[delivery.peer].facts.block_counts)) <= 1
    blocks = {block for group in delivery.target_blocks for block in group}
    for number, other in doubtful:
        if not alike or any(not blocks.isdisjoint(group) for group in other.target_blocks):
            delivery.behind.add(number)
            state.hindered.setdefault(number, []).append((delivery.transfer, delivery.key))


def _go_on_behind(state: ProducerState, number: int) -> None:
    """A slice has ended: deliveries that waited for it may be written."""
    for transfer, key in state.hindered.pop(number, ()):
        row = state.rows.get(transfer)
        delivery = None if row is None else row.deliveries.get(key)
        if delivery is not None:
            delivery.behind.discard(number)
            wake(state, delivery)


def _post(
    state: ProducerState, row: SourceRow, delivery: Delivery, posted: Posted, lane: Lane, now: float
) -> PostSlice:
    last = posted.stop == delivery.stop
    assert not (last and delivery.in_flight), "the last slice is posted alone"
    state.slice_count += 1
    number = state.slice_count
    delivery.in_flight[number] = posted
    if delivery.first_post_at is None:
        delivery.first_post_at = now
    state.slices[number] = (row.transfer, delivery.key)
    state.slice_timers.set(number, now + state.limits.slice_seconds)
    lane.turns.take()
    notify: Written | Landed
    if last:
        notify = written(delivery)
    else:
        notify = Landed(
            transfer=row.transfer,
            consumer=delivery.consumer,
            attempt=delivery.attempt,
            start=posted.start,
            stop=posted.stop,
        )
    return PostSlice(
        slice=number,
        peer=delivery.peer,
        transfer=row.transfer,
        consumer=delivery.consumer,
        start=posted.start,
        stop=posted.stop,
        source_blocks=_source_blocks(state, row, delivery, posted),
        target_blocks=_target_blocks(lane, delivery, posted),
        notify=notify,
        early=row.frontier < row.tokens,
        starts=delivery.starts,
    )


def written(delivery: Delivery) -> Written:
    """What a peer is told of a delivery that is complete."""
    return Written(
        transfer=delivery.transfer,
        consumer=delivery.consumer,
        attempt=delivery.attempt,
        start=delivery.start,
        stop=delivery.stop,
    )


def _source_blocks(
    state: ProducerState, row: SourceRow, delivery: Delivery, posted: Posted
) -> tuple[BlockArray, ...]:
    cuts = []
    for blocks, tokens, start in zip(row.blocks, state.block_tokens, delivery.starts, strict=True):
        first, past = covering(posted, start, tokens)
        assert first == past or past <= len(blocks), "the frontier is covered by blocks"
        cuts.append(blocks[first:past])
    return tuple(cuts)


def _target_blocks(lane: Lane, delivery: Delivery, posted: Posted) -> tuple[BlockArray, ...]:
    tokens = lane.facts.block_tokens
    return cut_last(delivery.target_blocks, tokens, delivery.stop, delivery.starts, posted)


def slice_ended(state: ProducerState, number: int, now: float, failure: str | None, *, retry: bool) -> None:
    """A posted slice reached a terminal state: done when `failure` is None."""
    found = state.slices.pop(number, None)
    if found is None:
        state.count("late_slice")
        return
    state.slice_timers.cancel(number)
    transfer, key = found
    row = state.rows[transfer]
    delivery = row.deliveries[key]
    posted = delivery.in_flight.pop(number)
    lane = state.lanes.get(delivery.peer)
    if lane is not None:
        lane.turns.in_flight -= 1
    if failure is None:
        delivery.landed.add(posted.start, posted.stop)
        if posted.stop == delivery.stop:
            _complete(state, delivery)
    elif retry and posted.attempt < state.limits.retries_max:
        _retry_later(state, row, delivery, posted, now)
    else:
        settle.stop(
            state, delivery, DeliveryEvent.STOP, DeliveryEvent.DRAINED_FAILED, coded(POST_FAILED, failure)
        )
    wake(state, delivery)
    _go_on_behind(state, number)
    settle.answer_tickets(state, number)
    settle.settle(state, row, now)


def _complete(state: ProducerState, delivery: Delivery) -> None:
    if delivery.state is DeliveryState.STOPPING and delivery.stop_event is DeliveryEvent.DRAINED_CANCELLED:
        # The bytes are there and the peer has heard so, yet it asked for a fence and gets one.
        return
    delivery.state = DELIVERY.next(delivery.state, DeliveryEvent.COMPLETE)
    delivery.answer = written(delivery)
    state.free_blocks(delivery)
    state.count("written")


def _retry_later(
    state: ProducerState, row: SourceRow, delivery: Delivery, posted: Posted, now: float
) -> None:
    if delivery.state is not DeliveryState.REGISTERED:
        return
    delivery.retries.append(Posted(posted.start, posted.stop, posted.attempt + 1))
    delivery.retry_at = now + state.limits.retry_seconds * 2**posted.attempt
    _arm_retry(state, row, now)


def _arm_retry(state: ProducerState, row: SourceRow, now: float) -> None:
    """One timer per transfer, for whichever of its deliveries may try again first."""
    later = [d.retry_at for d in row.deliveries.values() if d.retries and d.retry_at > now]
    if later:
        state.timers.set(("retry", row.transfer), min(later))


def retry(state: ProducerState, row: SourceRow, now: float) -> None:
    """The pause after a failed slice is over, for one delivery at least."""
    wake_source(state, row)
    _arm_retry(state, row, now)


def slice_overdue(state: ProducerState, number: int) -> None:
    """A slice never ended: have its connection torn down, which ends it."""
    peer: PeerName = state.slices[number][1][0]
    state.count("slice_overdue")
    state.outputs.append(Disconnect(peer, f"a slice has not ended after {state.limits.slice_seconds:g} s"))
