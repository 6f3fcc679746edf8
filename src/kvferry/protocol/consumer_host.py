"""What the consumer's own engine says, and what the agent found out about producer engines."""

from __future__ import annotations

from kvferry.protocol import fences
from kvferry.protocol.commands import (
    AnnounceCommand,
    Receive,
    ReceiveFailed,
    Relinquish,
    Source,
    Withdraw,
)
from kvferry.protocol.limits import ID_CHARACTERS_MAX
from kvferry.protocol.outputs import Link, Resolve
from kvferry.protocol.reasons import CANCELLED, HANDSHAKE, MALFORMED, STARVED, TABLE_FULL, because, coded
from kvferry.protocol.receptions import SOURCES_MAX, ConsumerState, Part, Reception, SourceLinks
from kvferry.protocol.states import RECEPTION, ReceptionEvent, ReceptionState

_NOT_BEGUN = frozenset({"unknown", "queued"})


def announce(state: ConsumerState, command: AnnounceCommand, now: float) -> None:
    """A decode request waits for memory."""
    key = (command.transfer, command.consumer)
    too_long = max(len(command.transfer), len(command.consumer)) > ID_CHARACTERS_MAX
    if too_long or key in state.rows or len(state.rows) >= state.limits.transfers_max:
        # Without an announcement the lease may end earlier; the reception itself is not in doubt.
        state.count("announce_dropped")
        return
    row = state.open_row(command.transfer, command.consumer, command.source)
    _connect(state, row, now)


def receive(state: ConsumerState, command: Receive, now: float) -> None:
    """Destination memory is allocated."""
    key = (command.transfer, command.consumer)
    row = state.rows.get(key)
    if row is not None and row.state is not ReceptionState.ANNOUNCED:
        state.count("received_twice")
        if row.state is ReceptionState.QUARANTINED:
            # The earlier one's failure is told already, so this is no answer to that one; nobody knows of
            # these blocks.
            reason = because(MALFORMED, "its name is that of a request in quarantine")
            state.results.append(
                ReceiveFailed(command.transfer, command.consumer, reason, command.start, fenced=True)
            )
        return
    if len(command.consumer) > ID_CHARACTERS_MAX or len(command.transfer) > ID_CHARACTERS_MAX:
        reason = because(MALFORMED, f"an id of more than {ID_CHARACTERS_MAX} characters")
        state.results.append(
            ReceiveFailed(command.transfer, command.consumer, reason, command.start, fenced=True)
        )
        return
    if row is None:
        if len(state.rows) >= state.limits.transfers_max:
            state.count("table_full")
            state.results.append(
                ReceiveFailed(command.transfer, command.consumer, TABLE_FULL, command.start, fenced=True)
            )
            return
        row = state.open_row(command.transfer, command.consumer, command.source)
    row.state = RECEPTION.next(row.state, ReceptionEvent.RECEIVE)
    row.start, row.stop, row.groups = command.start, command.stop, command.groups
    row.mode, row.patient, row.recent = command.mode, command.patient, command.recent
    row.block_count = tuple(sum(count for _, count in spans) for spans in command.groups)
    row.waiting_since = now
    if row.reason:
        fences.fail(state, row, row.reason, now)
    elif row.parts is not None:
        fences.tell(state, row, now)
    elif not _is_looked_for(state, row):
        _connect(state, row, now)


def withdraw(state: ConsumerState, command: Withdraw, now: float) -> None:
    """The request needs nothing (any more). The producer is told even when it never heard of us."""
    key = (command.transfer, command.consumer)
    row = state.rows.get(key)
    if row is not None and row.state is ReceptionState.WAITING and row.parts is None:
        # Nobody was told of its blocks: it ends at once, and what follows is only for its producer to know.
        row.withdrawn = True
        fences.fail(state, row, command.reason or CANCELLED, now)
        row = None
    if row is None:
        if len(state.rows) >= state.limits.transfers_max:
            state.count("withdraw_dropped")
            return
        row = state.open_row(command.transfer, command.consumer, command.source)
        row.withdrawn, row.reason = True, command.reason or CANCELLED
        _connect(state, row, now)
        return
    row.withdrawn = True
    row.reason = row.reason or command.reason or CANCELLED
    if row.state is ReceptionState.WAITING:
        fences.fail(state, row, row.reason, now)
    elif row.state is not ReceptionState.ANNOUNCED:
        return
    elif row.parts is not None:
        fences.withdraw(state, row, now)
    elif not _is_looked_for(state, row):
        # Its producer fell silent meanwhile; it may be another incarnation that has to be told.
        _connect(state, row, now)


def relinquish(state: ConsumerState, command: Relinquish, now: float) -> None:
    """The engine needs the destination for something else, unless its KV is on the way."""
    row = state.rows.get((command.transfer, command.consumer))
    if row is None or row.state is not ReceptionState.WAITING:
        return
    if any(_stands_still(row, part) for part in row.open_parts()):
        fences.fail(state, row, because(STARVED, "others wait for the memory"), now)


def _stands_still(row: Reception, part: Part) -> bool:
    """Whether a rank has not begun, or has not come further since the last time that this was asked."""
    reached = part.landed.reach(row.start)
    if part.stands in _NOT_BEGUN and reached == row.start:
        return True
    before, part.noted = part.noted, (part.stands, part.frontier, reached)
    return before == part.noted


def _connect(state: ConsumerState, row: Reception, now: float) -> None:
    links = state.sources.get(row.source)
    if links is None:
        links = state.sources[row.source] = SourceLinks(row.source)
        state.outputs.append(Resolve(row.source))
    state.sources.move_to_end(row.source)
    if links.links is None:
        links.waiting.add(row.key)
        _trim(state)
    else:
        fences.join(state, row, links.links, now)


def _is_looked_for(state: ConsumerState, row: Reception) -> bool:
    """Whether a row's producer is being resolved and will be joined then."""
    links = state.sources.get(row.source)
    return links is not None and row.key in links.waiting


def _trim(state: ConsumerState) -> None:
    if len(state.sources) <= SOURCES_MAX:
        return
    for source, links in state.sources.items():
        if not links.waiting:
            del state.sources[source]
            return


def resolved(state: ConsumerState, source: Source, links: tuple[Link, ...], now: float) -> None:
    """The source's ranks are linked."""
    known = state.sources.get(source)
    if known is None:
        return
    if not links:
        unresolved(state, source, "none of its ranks holds any of our KV", now)
        return
    known.links = links
    waiting, known.waiting = known.waiting, set()
    for key in sorted(waiting):
        fences.join(state, state.rows[key], links, now)


def unresolved(state: ConsumerState, source: Source, reason: str, now: float) -> None:
    """The source could not be reached or cannot be joined. A later request tries again."""
    known = state.sources.pop(source, None)
    if known is None:
        return
    for key in sorted(known.waiting):
        row = state.rows[key]
        if row.state is ReceptionState.WAITING:
            fences.fail(state, row, coded(HANDSHAKE, reason), now)
        elif row.withdrawn:
            fences.drop(state, row)
        else:
            row.reason = row.reason or coded(HANDSHAKE, reason)
