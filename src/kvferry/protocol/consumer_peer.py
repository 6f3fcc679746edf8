"""What producer ranks say to a consumer rank."""

from __future__ import annotations

import math

from kvferry.errors import PeerError
from kvferry.ids import ConsumerId, PeerName, TransferId
from kvferry.protocol import farewells, fences, reads
from kvferry.protocol.messages import Cancelled, Failed, Landed, Offer, Renew, Status, Written
from kvferry.protocol.outputs import Inquire, Send
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
from kvferry.protocol.receptions import ConsumerState, Part, Peer, Reception
from kvferry.protocol.states import PART, PART_READ, PartEvent, PartState, ReceptionState

Renewed = tuple[TransferId, ConsumerId, int]
"""Transfer, consumer and attempt of a registration that is renewed."""

_UNENDED = frozenset({ReceptionState.ANNOUNCED, ReceptionState.WAITING})


def heard(state: ConsumerState, name: PeerName, now: float) -> None:
    """Any message is a sign of life."""
    peer = state.peers.get(name)
    if peer is not None:
        peer.last_heard = now


def landed(state: ConsumerState, name: PeerName, message: Landed, now: float) -> None:
    """A slice is in place."""
    found = _find(state, name, message, now)
    if found is not None:
        row, part = found
        if row.mode == "pull":
            raise PeerError("landed is not possible where we read ourselves")
        part.landed.add(max(message.start, row.start), min(message.stop, row.stop))


def written(state: ConsumerState, name: PeerName, message: Written, now: float) -> None:
    """Everything is in place, from this rank."""
    found = _find(state, name, message, now)
    if found is None:
        return
    row, part = found
    if part.state is PartState.UNTOLD:
        state.count("late_message")
        return
    stop, _ = row.asked_of(part)
    if (message.start, message.stop) != (row.start, stop):
        # Whatever it wrote, it is not what we registered.
        state.count("malformed")
        part.state = PART.next(part.state, PartEvent.FAILED)
        text = f"wrote [{message.start}, {message.stop}), registered [{row.start}, {stop})"
        _fail(state, row, because(MALFORMED, text), now)
        fences.check(state, row, now)
        return
    part.state = PART.next(part.state, PartEvent.WRITTEN)
    fences.check(state, row, now)


def offer(state: ConsumerState, name: PeerName, message: Offer, now: float) -> None:
    """Pull: this rank lends us its blocks."""
    found = _find(state, name, message, now)
    if found is not None:
        reads.offered(state, *found, message, now)


def failed(state: ConsumerState, name: PeerName, message: Failed, now: float) -> None:
    """This rank will write no more, and writes nothing now."""
    found = _find(state, name, message, now)
    if found is None:
        return
    row, part = found
    if part.state is PartState.TOLD:
        part.valid_until = message.valid_until
    part.state = PART.next(part.state, PartEvent.FAILED)
    if part.state in (PartState.FAILED, PartState.DRAINING):
        _fail(state, row, message.reason[:DETAIL_CHARACTERS_MAX] or OTHER, now)
    fences.check(state, row, now)


def cancelled(state: ConsumerState, name: PeerName, message: Cancelled, now: float) -> None:
    """The fence, or the answer to our own."""
    farewell = (name, message.transfer, message.consumer, message.attempt)
    if farewells.answered(state, farewell):
        return
    found = _find(state, name, message, now)
    if found is None:
        return
    row, part = found
    part.state = PART.next(part.state, PartEvent.CANCELLED)
    if row.state in _UNENDED and part.state in (PartState.CANCELLED, PartState.DRAINING):
        _fail(state, row, because(MALFORMED, "cancelled without being asked"), now)
    fences.check(state, row, now)


def status(state: ConsumerState, name: PeerName, message: Status, now: float) -> None:
    """How each transfer stands. `unknown` is normal for a while: the prefill leg may be on its way."""
    if message.mark is not None:
        state.take_mark(name, message.mark, now)
    wanted: list[Renewed] = []
    # Once each, however often it is named: the answer may be a registration, which is far longer.
    entries = {(entry.transfer, entry.consumer, entry.attempt): entry for entry in message.transfers}
    for entry in entries.values():
        row = state.rows.get((entry.transfer, entry.consumer))
        part = None if row is None else (row.parts or {}).get(name)
        if row is None or part is None or part.ended or row.attempt != entry.attempt:
            continue
        part.heard_at, part.stands, part.frontier = now, entry.state, entry.frontier
        if row.state is not ReceptionState.WAITING:
            continue
        if row.mode == "pull":
            reads.stands(state, row, part, entry, message.asked, now)
        elif entry.state != "unknown":
            if _is_idle(state, part, now) and fences.grant(state, part, now) is not None:
                wanted.append((*row.key, row.attempt))
        elif now >= row.waiting_since + state.limits.unknown_seconds:
            fences.fail(state, row, UNKNOWN, now)
        elif not row.patient and now >= row.waiting_since + state.limits.renew_seconds:
            # One such answer may be older than our registration; by now there were two.
            fences.fail(state, row, UNKNOWN, now)
        else:
            # Its prefill leg may be on its way, or our registration was lost.
            fences.tell_part(state, row, part, now)
    _send_renewal(state, name, wanted, now)


def _is_idle(state: ConsumerState, part: Part, now: float) -> bool:
    """Whether the part's rank may be waiting for a permission, and not only for the next renewal."""
    return part.granted_at is None or now - part.granted_at > state.limits.write_seconds / 2


def _send_renewal(state: ConsumerState, name: PeerName, wanted: list[Renewed], now: float) -> None:
    if wanted:
        mark = state.usable_mark(name, now)
        message = Renew(
            transfers=tuple(wanted),
            write_seconds=state.limits.write_seconds,
            mark=None if mark is None else mark.value,
            asked=now if any(state.rows[key[:2]].mode == "pull" for key in wanted) else None,
        )
        state.outputs.append(Send(name, message))


def link_broken(state: ConsumerState, name: PeerName, reason: str, now: float) -> None:
    """Our connection to a producer rank has broken. It may live and write, so its parts stay open."""
    forget_links(state, name)
    peer = state.peers.get(name)
    if peer is None:
        return
    peer.broken = True
    for key in sorted(peer.receptions):
        row = state.rows[key]
        if row.state is ReceptionState.ANNOUNCED:
            fences.part_ways(state, row)
        elif not (row.parts or {})[name].ended:
            fences.fail(state, row, coded(PEER_LOST, reason), now)
    if now - peer.asked_at >= state.limits.renew_seconds:
        _inquire(state, name, now)


def _inquire(state: ConsumerState, name: PeerName, now: float) -> None:
    """Ask the peer's engine, if anything hangs on the answer and nobody is asking already."""
    peer = state.peers.get(name)
    if peer is None or peer.asked:
        return
    for key in sorted(peer.receptions):
        row = state.rows[key]
        part = (row.parts or {})[name]
        if not part.ended and part.state not in PART_READ:
            peer.asked, peer.asked_at = True, now
            state.outputs.append(Inquire(name, row.source))
            return


def peer_dead(state: ConsumerState, name: PeerName, reason: str, now: float) -> None:
    """The engine of a producer rank is proven dead. The rank may outlive it for a moment, as orphans do.

    Of a rank that may outlive it for longer, nothing is proven by that.
    """
    peer = state.peers.get(name)
    if peer is not None and _may_outlive(state, name, peer):
        no_evidence(state, name)
    elif peer is not None and ("dead", name) not in state.peer_timers:
        peer.reason = reason
        state.peer_timers.set(("dead", name), now + state.limits.orphan_seconds)


def _may_outlive(state: ConsumerState, name: PeerName, peer: Peer) -> bool:
    links = [(state.rows[key].parts or {})[name].link for key in peer.receptions]
    return not all(link.ends_with_engine for link in links)


def orphans_ended(state: ConsumerState, name: PeerName, now: float) -> None:
    """The time that a dead engine's rank may outlive it is over."""
    peer = state.peers.get(name)
    if peer is not None:
        peer_silenced(state, name, peer.reason, now)


def peer_silenced(state: ConsumerState, name: PeerName, reason: str, now: float) -> None:
    """Nothing of a producer rank is under way to us, and nothing will be."""
    forget_links(state, name)
    peer = state.peers.get(name)
    if peer is None:
        return
    peer.asked = False
    for key in sorted(peer.receptions):
        row = state.rows[key]
        part = (row.parts or {})[name]
        if row.state is ReceptionState.ANNOUNCED:
            fences.part_ways(state, row)
            continue
        if part.state in PART_READ:
            _fail(state, row, coded(PEER_LOST, reason), now)
        elif not part.ended:
            part.state = PART.next(part.state, PartEvent.LOST)
            _fail(state, row, coded(PEER_LOST, reason), now)
        fences.check(state, row, now)


def peer_alive(state: ConsumerState, name: PeerName, now: float) -> None:
    """A producer rank whose connection had broken lives, and knows us again: ask it for its fences."""
    peer = state.peers.get(name)
    if peer is None:
        return
    peer.broken = peer.asked = False
    for key in sorted(peer.receptions):
        row = state.rows[key]
        part = (row.parts or {})[name]
        if not part.ended and row.state not in _UNENDED:
            fences.ask_for_fence(state, row, part)


def no_evidence(state: ConsumerState, name: PeerName) -> None:
    """It could not be found out whether a producer rank lives; the next renewal asks again."""
    peer = state.peers.get(name)
    if peer is not None:
        peer.asked = False


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
        fences.part_ways(state, row)
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
    wanted: list[Renewed] = []
    for key in sorted(peer.receptions):
        row = state.rows[key]
        part = (row.parts or {}).get(name)
        if part is None or part.ended:
            continue
        if row.state not in _UNENDED:
            fences.ask_for_fence(state, row, part)
            fences.check(state, row, now)
        elif fences.is_unanswered(state, part, now):
            # It may talk of other things and not know our link: a later request says Hello again.
            forget_links(state, name)
            seconds = state.limits.silence_seconds
            reason = because(PEER_SILENT, f"nothing heard of this transfer for {seconds:g} s")
            _give_up_one(state, row, reason, now)
        else:
            wanted.append((*key, row.attempt))
            # Granted to an announced one too: read late, the renewal permits a registration that overtook it.
            if row.mode == "push":
                fences.grant(state, part, now)
    _send_renewal(state, name, wanted, now)
    if peer.broken:
        _inquire(state, name, now)


def _fail(state: ConsumerState, row: Reception, reason: str, now: float) -> None:
    if row.state is ReceptionState.ANNOUNCED:
        row.reason = row.reason or reason
    else:
        fences.fail(state, row, reason, now)


def _find(
    state: ConsumerState, name: PeerName, message: Landed | Written | Offer | Failed | Cancelled, now: float
) -> tuple[Reception, Part] | None:
    row = state.rows.get((message.transfer, message.consumer))
    part = None if row is None else (row.parts or {}).get(name)
    if row is None or part is None or row.attempt != message.attempt:
        state.count("late_message")
        return None
    part.heard_at = now
    return row, part
