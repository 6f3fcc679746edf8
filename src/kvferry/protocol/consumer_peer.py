"""What producer ranks say to a consumer rank."""

from __future__ import annotations

import math

from kvferry.ids import ConsumerId, PeerName, TransferId
from kvferry.protocol import fences
from kvferry.protocol.messages import Cancel, Cancelled, Failed, Landed, Renew, Status, Written
from kvferry.protocol.outputs import Send
from kvferry.protocol.reasons import (
    DETAIL_CHARACTERS_MAX,
    MALFORMED,
    OTHER,
    PEER_LOST,
    PEER_SILENT,
    UNKNOWN,
    because,
    coded,
)
from kvferry.protocol.receptions import ConsumerState, Part, Reception
from kvferry.protocol.states import PART, PartEvent, PartState, ReceptionState

_UNENDED = frozenset({ReceptionState.ANNOUNCED, ReceptionState.WAITING})


def heard(state: ConsumerState, name: PeerName, now: float) -> None:
    """Any message is a sign of life."""
    peer = state.peers.get(name)
    if peer is not None:
        peer.last_heard = now


def landed(state: ConsumerState, name: PeerName, message: Landed, now: float) -> None:
    """A slice is in place."""
    found = _find(state, name, message.transfer, message.consumer, now)
    if found is not None:
        row, part = found
        part.landed.add(max(message.start, row.start), min(message.stop, row.stop))


def written(state: ConsumerState, name: PeerName, message: Written, now: float) -> None:
    """Everything is in place, from this rank."""
    found = _find(state, name, message.transfer, message.consumer, now)
    if found is None:
        return
    row, part = found
    if part.state is PartState.UNTOLD:
        state.count("late_message")
        return
    if (message.start, message.stop) != (row.start, row.stop):
        # Whatever it wrote, it is not what we registered.
        state.count("malformed")
        part.state = PART.next(part.state, PartEvent.FAILED)
        text = f"wrote [{message.start}, {message.stop}), registered [{row.start}, {row.stop})"
        _fail(state, row, because(MALFORMED, text), now)
        fences.check(state, row, now)
        return
    part.state = PART.next(part.state, PartEvent.WRITTEN)
    fences.check(state, row, now)


def failed(state: ConsumerState, name: PeerName, message: Failed, now: float) -> None:
    """This rank will write no more, and writes nothing now."""
    found = _find(state, name, message.transfer, message.consumer, now)
    if found is None:
        return
    row, part = found
    if part.state is PartState.TOLD:
        part.valid_until = message.valid_until
    part.state = PART.next(part.state, PartEvent.FAILED)
    if part.state is PartState.FAILED:
        _fail(state, row, message.reason[:DETAIL_CHARACTERS_MAX] or OTHER, now)
    fences.check(state, row, now)


def cancelled(state: ConsumerState, name: PeerName, message: Cancelled, now: float) -> None:
    """The fence."""
    found = _find(state, name, message.transfer, message.consumer, now)
    if found is None:
        return
    row, part = found
    part.state = PART.next(part.state, PartEvent.CANCELLED)
    if row.state in _UNENDED and part.state is PartState.CANCELLED:
        _fail(state, row, because(MALFORMED, "cancelled without being asked"), now)
    fences.check(state, row, now)


def status(state: ConsumerState, name: PeerName, message: Status, now: float) -> None:
    """How each transfer stands. `unknown` is normal for a while: the prefill leg may be on its way."""
    for entry in message.transfers:
        row = state.rows.get((entry.transfer, entry.consumer))
        part = None if row is None else (row.parts or {}).get(name)
        if row is None or part is None or part.ended:
            continue
        part.heard_at = now
        if row.state is not ReceptionState.WAITING or entry.state != "unknown":
            continue
        if now >= row.waiting_since + state.limits.unknown_seconds:
            fences.fail(state, row, UNKNOWN, now)
        else:
            # Its prefill leg may be on its way, or our registration was lost.
            fences.tell_part(state, row, part, now)


def peer_lost(state: ConsumerState, name: PeerName, reason: str, now: float) -> None:
    """The connection to a producer rank is gone: nothing more of it can land."""
    forget_links(state, name)
    peer = state.peers.get(name)
    if peer is None:
        return
    for key in sorted(peer.receptions):
        row = state.rows[key]
        part = (row.parts or {})[name]
        if row.state is ReceptionState.ANNOUNCED:
            fences.leave(state, row)
            row.parts = None
            continue
        if not part.ended:
            part.state = PART.next(part.state, PartEvent.LOST)
            _fail(state, row, coded(PEER_LOST, reason), now)
        fences.check(state, row, now)


def disconnected(state: ConsumerState, name: PeerName, reason: str, now: float) -> None:
    """We tore the connection down, but the peer may live and write: its parts stay open until they lapse."""
    forget_links(state, name)
    peer = state.peers.get(name)
    if peer is None:
        return
    peer.last_heard = -math.inf
    _give_up(state, name, coded(PEER_SILENT, reason), now)


def silent(state: ConsumerState, name: PeerName, now: float) -> None:
    """The silence timer of a peer has fired; it counts only if nothing was heard meanwhile."""
    peer = state.peers.get(name)
    if peer is None:
        return
    due = peer.last_heard + state.limits.silence_seconds
    if due > now:
        state.peer_timers.set(("silence", name), due)
        return
    state.peer_timers.set(("silence", name), now + state.limits.silence_seconds)
    forget_links(state, name)
    reason = because(PEER_SILENT, f"nothing heard for {state.limits.silence_seconds:g} s")
    _give_up(state, name, reason, now)


def _give_up(state: ConsumerState, name: PeerName, reason: str, now: float) -> None:
    for key in sorted(state.peers[name].receptions):
        _give_up_one(state, state.rows[key], reason, now)


def _give_up_one(state: ConsumerState, row: Reception, reason: str, now: float) -> None:
    if row.state is ReceptionState.WAITING:
        fences.fail(state, row, reason, now)
    elif row.state is ReceptionState.ANNOUNCED:
        fences.leave(state, row)
        row.parts = None
    else:
        fences.check(state, row, now)


def forget_links(state: ConsumerState, name: PeerName) -> None:
    """A later request resolves this peer's engine afresh; it may have restarted."""
    for source, known in list(state.sources.items()):
        if known.links is not None and any(link.peer == name for link in known.links):
            del state.sources[source]


def renew(state: ConsumerState, name: PeerName, now: float) -> None:
    """Renew what waits for a peer, in one message, and repeat what was cancelled."""
    peer = state.peers.get(name)
    if peer is None:
        return
    state.peer_timers.set(("renew", name), now + state.limits.renew_seconds)
    wanted: list[tuple[TransferId, ConsumerId]] = []
    for key in sorted(peer.receptions):
        row = state.rows[key]
        part = (row.parts or {}).get(name)
        if part is None or part.ended:
            continue
        if row.state not in _UNENDED:
            cancel = Cancel(
                transfer=row.transfer,
                consumer=row.consumer,
                reason=row.reason,
                sharers=part.link.sharers,
            )
            state.outputs.append(Send(name, cancel))
            fences.check(state, row, now)
        elif fences.is_unanswered(state, part, now):
            # It may talk of other things and not know our link: a later request says Hello again.
            forget_links(state, name)
            seconds = state.limits.silence_seconds
            reason = because(PEER_SILENT, f"nothing heard of this transfer for {seconds:g} s")
            _give_up_one(state, row, reason, now)
        else:
            wanted.append(key)
            part.granted_at = now
    if wanted:
        message = Renew(transfers=tuple(wanted), write_seconds=state.limits.write_seconds)
        state.outputs.append(Send(name, message))


def _fail(state: ConsumerState, row: Reception, reason: str, now: float) -> None:
    if row.state is ReceptionState.ANNOUNCED:
        row.reason = row.reason or reason
    else:
        fences.fail(state, row, reason, now)


def _find(
    state: ConsumerState, name: PeerName, transfer: TransferId, consumer: ConsumerId, now: float
) -> tuple[Reception, Part] | None:
    row = state.rows.get((transfer, consumer))
    part = None if row is None else (row.parts or {}).get(name)
    if row is None or part is None:
        state.count("late_message")
        return None
    part.heard_at = now
    return row, part
