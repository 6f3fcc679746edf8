"""How receptions come to their end on the consumer, and when their blocks are safe.

A block goes back to its engine only when every producer rank that was permitted to write it has ended its
part (`Written`, `Failed`, `Cancelled`), or is proven dead, or when the last permission has run out and the
transport's retry bound has passed after it, for a write that was accepted just in time. A permission
repeats a mark of the producer's own, so that it ends by the producer's clock before it does by ours, however
late it is read. The connection is torn down then, so that a later post fails. Silence alone frees nothing.

A part that we read is its own fence, see `farewells`.
"""

from __future__ import annotations

from kvferry.ids import PeerName
from kvferry.protocol import farewells
from kvferry.protocol.commands import BlocksSafe, Received, ReceiveFailed
from kvferry.protocol.messages import Announce, Register
from kvferry.protocol.outputs import Disconnect, Link, Send
from kvferry.protocol.reasons import PEER_SILENT, because
from kvferry.protocol.receptions import ConsumerState, Part, Peer, Reception
from kvferry.protocol.states import (
    PART,
    PART_COMPLETE,
    PART_READ,
    RECEPTION,
    PartEvent,
    PartState,
    ReceptionEvent,
    ReceptionState,
)

CLOCK_DRIFT_MAX = 0.01
"""By so much of a duration two machines' clocks may differ in how fast they run."""


def join(state: ConsumerState, row: Reception, links: tuple[Link, ...], now: float) -> None:
    """The producer's ranks are known: wait for them, and tell them what we have got so far."""
    before = row.granted_before
    row.parts = {link.peer: Part(link, granted_at=before.get(link.peer), heard_at=now) for link in links}
    for link in links:
        _watch(state, link.peer, row, now)
    if row.withdrawn:
        withdraw(state, row, now)
    elif row.state is ReceptionState.WAITING:
        tell(state, row, now)
    else:
        for peer in row.parts:
            announce = Announce(transfer=row.transfer, consumer=row.consumer, attempt=row.attempt)
            state.outputs.append(Send(peer, announce))


def withdraw(state: ConsumerState, row: Reception, now: float) -> None:
    """End a reception that never told anyone of its blocks; its producer's lease ends by the `Cancel`."""
    _cancel_parts(state, row, now)
    drop(state, row)


def tell(state: ConsumerState, row: Reception, now: float) -> None:
    """Send the registration to every producer rank."""
    for part in row.open_parts():
        tell_part(state, row, part, now)


def tell_part(state: ConsumerState, row: Reception, part: Part, now: float) -> None:
    """Send the registration to one producer rank, again if need be: repeating it does no harm."""
    if row.mode == "pull":
        farewells.ask(state, row, part, now)
        return
    part.state = PART.next(part.state, PartEvent.TELL)
    stop, groups = row.asked_of(part)
    register = Register(
        transfer=row.transfer,
        consumer=row.consumer,
        attempt=row.attempt,
        start=row.start,
        stop=stop,
        groups=groups,
        write_seconds=state.limits.write_seconds,
        mark=grant(state, part, now),
        sharers=part.link.sharers,
        block_bytes=part.link.block_bytes,
    )
    state.outputs.append(Send(part.link.peer, register))


def grant(state: ConsumerState, part: Part, now: float) -> float | None:
    """The mark to send with a permission for this part; None when there is none to permit anything with."""
    mark = state.usable_mark(part.link.peer, now)
    if mark is None:
        return None
    part.granted_at = mark.heard_at
    return mark.value


def fail(state: ConsumerState, row: Reception, reason: str, now: float) -> None:
    """A reception that waits will not be completed: ask every producer rank for its fence."""
    row.reason = row.reason or reason
    before = row.state
    row.state = RECEPTION.next(row.state, ReceptionEvent.FAIL)
    if before is not ReceptionState.WAITING:
        return
    _cancel_parts(state, row, now)
    told = [part for part in row.open_parts() if part.state is PartState.TOLD]
    granted = [part.granted_at for part in told if part.granted_at is not None]
    if granted:
        bound = (state.limits.write_seconds + state.retry_bound_seconds) * (1 + CLOCK_DRIFT_MAX)
        state.lapse_timers.set(row.key, max(granted) + bound)
    check(state, row, now)


def _cancel_parts(state: ConsumerState, row: Reception, now: float) -> None:
    for part in row.open_parts():
        if part.state in PART_READ:
            farewells.stop(state, row, part, now)
            continue
        ask_for_fence(state, row, part)
        if part.state is PartState.UNTOLD or part.granted_at is None:
            # It was never permitted to write to our blocks, so there is nothing to wait for.
            part.state = PART.next(part.state, PartEvent.CANCELLED)


def ask_for_fence(state: ConsumerState, row: Reception, part: Part) -> None:
    """Tell a rank to stop; repeating it does no harm. One that we read has nothing to be asked."""
    if part.state not in PART_READ:
        state.outputs.append(Send(part.link.peer, farewells.cancel_of(row, part)))


def check(state: ConsumerState, row: Reception, now: float) -> None:
    """Draw the consequences of a part's end."""
    for name, part in (row.parts or {}).items():
        if part.ended:
            # It owes nothing more, so that its silence means nothing while other ranks go on.
            _stop_watching(state, name, row)
    if row.state is ReceptionState.WAITING:
        if row.parts and all(part.state in PART_COMPLETE for part in row.parts.values()):
            row.state = RECEPTION.next(row.state, ReceptionEvent.COMPLETE)
            state.results.append(Received(row.transfer, row.consumer, _bytes(row)))
            _end(state, row)
        return
    if row.state not in (ReceptionState.FAILING, ReceptionState.QUARANTINED):
        return
    if not row.open_parts():
        quarantined = row.state is ReceptionState.QUARANTINED
        row.state = RECEPTION.next(row.state, ReceptionEvent.FENCED)
        if quarantined:
            state.results.append(BlocksSafe(row.transfer, row.consumer))
        else:
            _report(state, row, fenced=True)
        _end(state, row)
    elif row.state is ReceptionState.FAILING and any(
        _is_stuck(state, part, now) for part in row.open_parts()
    ):
        row.state = RECEPTION.next(row.state, ReceptionEvent.GIVE_UP)
        _report(state, row, fenced=False)


def _report(state: ConsumerState, row: Reception, *, fenced: bool) -> None:
    state.results.append(
        ReceiveFailed(
            row.transfer,
            row.consumer,
            row.reason,
            row.good_until(),
            fenced=fenced,
            cancelled=row.withdrawn,
        )
    )


def _bytes(row: Reception) -> int:
    return sum(
        count * size
        for part in (row.parts or {}).values()
        for count, size in zip(row.block_count, part.link.block_bytes, strict=True)
    )


def drop(state: ConsumerState, row: Reception) -> None:
    """End a reception that the host has no result to expect from."""
    row.state = RECEPTION.next(row.state, ReceptionEvent.END)
    _end(state, row)


def _end(state: ConsumerState, row: Reception) -> None:
    row.state = ReceptionState.ENDED
    del state.rows[row.key]
    state.lapse_timers.cancel(row.key)
    links = state.sources.get(row.source)
    if links is not None:
        links.waiting.discard(row.key)
    leave(state, row)


def leave(state: ConsumerState, row: Reception) -> None:
    """Stop waiting for the row's producer ranks."""
    for name in row.parts or {}:
        _stop_watching(state, name, row)


def _stop_watching(state: ConsumerState, name: PeerName, row: Reception) -> None:
    peer = state.peers.get(name)
    if peer is None:
        return
    peer.receptions.discard(row.key)
    if not peer.receptions:
        del state.peers[name]
        for kind in ("renew", "silence", "dead"):
            state.peer_timers.cancel((kind, name))


def part_ways(state: ConsumerState, row: Reception) -> None:
    """The links of an announced request are lost: they are opened afresh when it gets its memory."""
    for name, part in (row.parts or {}).items():
        if part.granted_at is not None:
            row.granted_before[name] = part.granted_at
    leave(state, row)
    row.parts = None


def _watch(state: ConsumerState, name: PeerName, row: Reception, now: float) -> None:
    peer = state.peers.get(name)
    if peer is None:
        peer = state.peers[name] = Peer(now)
        state.peer_timers.set(("renew", name), now + state.limits.renew_seconds)
        state.peer_timers.set(("silence", name), now + state.limits.silence_seconds)
    peer.receptions.add(row.key)


def is_silent(state: ConsumerState, name: PeerName, now: float) -> bool:
    """Whether a peer that receptions wait for has said nothing for too long."""
    peer = state.peers.get(name)
    return peer is not None and now >= peer.last_heard + state.limits.silence_seconds


def is_unanswered(state: ConsumerState, part: Part, now: float) -> bool:
    """Whether a rank says nothing of this reception, whatever else it says: it may not know our link."""
    return now - part.heard_at >= state.limits.silence_seconds


def _is_stuck(state: ConsumerState, part: Part, now: float) -> bool:
    """Whether the host shall not wait longer for a part. Our own READs end without their peer's help."""
    silent = part.state not in PART_READ and is_silent(state, part.link.peer, now)
    return silent or is_unanswered(state, part, now)


def lapse(state: ConsumerState, row: Reception, now: float) -> None:
    """Permission and retry bounds are over: whoever has not answered can no longer write to us."""
    for part in row.open_parts():
        state.count("lapsed")
        state.outputs.append(
            Disconnect(part.link.peer, because(PEER_SILENT, "the write permission has run out"))
        )
        part.state = PART.next(part.state, PartEvent.LOST)
    check(state, row, now)
