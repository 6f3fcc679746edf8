"""The consumer core: what one rank knows of the transfers that it waits for, and what it does about them.

Sans I/O. Feed it `handle_*`, each with `now` (monotonic seconds of this process, never going back); then
drain `poll_output`, `poll_result` and `reader.next_slice` until each gives None; call `handle_timeout` when
`next_due` has come, after all messages that have arrived by then. Belongs to one thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from kvferry.ids import PeerName
from kvferry.protocol import consumer_host, consumer_peer, farewells, fences, reads
from kvferry.protocol.commands import (
    AnnounceCommand,
    Command,
    Receive,
    Relinquish,
    Result,
    Source,
    Withdraw,
)
from kvferry.protocol.limits import Limits
from kvferry.protocol.messages import AnyMessage, Cancelled, Failed, Landed, Offer, Status, Written
from kvferry.protocol.outputs import Link, Output
from kvferry.protocol.reasons import CLOSED
from kvferry.protocol.receptions import ConsumerState, Reception, ReceptionKey
from kvferry.protocol.states import PartState, ReceptionState

_COMMANDS: dict[type[Command], Callable[[ConsumerState, Any, float], None]] = {
    AnnounceCommand: consumer_host.announce,
    Receive: consumer_host.receive,
    Withdraw: consumer_host.withdraw,
    Relinquish: consumer_host.relinquish,
}
_MESSAGES: dict[type[AnyMessage], Callable[[ConsumerState, PeerName, Any, float], None]] = {
    Landed: consumer_peer.landed,
    Written: consumer_peer.written,
    Offer: consumer_peer.offer,
    Failed: consumer_peer.failed,
    Cancelled: consumer_peer.cancelled,
    Status: consumer_peer.status,
}
CONSUMER_COMMANDS = frozenset(_COMMANDS)
CONSUMER_MESSAGES = frozenset(_MESSAGES)


class ConsumerCore:
    """One rank's consumer side. `retry_bound_seconds` is the transport's: see `fences`.

    `block_tokens[g]` is our own block size of cache group g in tokens, `windows[g]` its window, 0 for none,
    and `whole_tokens[g]` our engine's block size, of which ours may be a part; none where they are the same.
    """

    def __init__(
        self,
        limits: Limits,
        retry_bound_seconds: float,
        block_tokens: tuple[int, ...],
        windows: tuple[int, ...] = (),
        whole_tokens: tuple[int, ...] = (),
    ) -> None:
        self.state = ConsumerState(
            limits, retry_bound_seconds, block_tokens, windows, whole_tokens or block_tokens
        )
        self.reader = reads.Reader(self.state)

    # --- in ------------------------------------------------------------------------------------

    def handle_command(self, command: Command, now: float) -> None:
        """Take one of `CONSUMER_COMMANDS` from the host."""
        _COMMANDS[type(command)](self.state, command, now)

    def handle_message(self, peer: PeerName, message: AnyMessage, now: float) -> None:
        """Take one of `CONSUMER_MESSAGES` from a peer.

        Raises:
            PeerError: the message is impossible in its transfer's state.
        """
        consumer_peer.heard(self.state, peer, now)
        _MESSAGES[type(message)](self.state, peer, message, now)

    def handle_heard(self, peer: PeerName, now: float) -> None:
        """A peer has said something that is not for this core: it lives."""
        consumer_peer.heard(self.state, peer, now)

    def handle_resolved(self, source: Source, links: tuple[Link, ...], now: float) -> None:
        """Answer to `Resolve`: these producer ranks hold our KV, and each knows us."""
        consumer_host.resolved(self.state, source, links, now)

    def handle_unresolved(self, source: Source, reason: str, now: float) -> None:
        """Answer to `Resolve`: it cannot be reached or joined; `reason` may start with one of our codes."""
        consumer_host.unresolved(self.state, source, reason, now)

    def handle_link_broken(self, peer: PeerName, reason: str, now: float) -> None:
        """Our connection to a peer has broken; it may live. `Inquire` follows where that matters."""
        consumer_peer.link_broken(self.state, peer, reason, now)

    def handle_peer_dead(self, peer: PeerName, reason: str, now: float) -> None:
        """Answer to `Inquire`: the peer's engine is dead. Nothing of it lands after `orphan_seconds`."""
        consumer_peer.peer_dead(self.state, peer, reason, now)

    def handle_peer_alive(self, peer: PeerName, now: float) -> None:
        """Answer to `Inquire`: the peer lives, and a new link to it is up."""
        consumer_peer.peer_alive(self.state, peer, now)

    def handle_no_evidence(self, peer: PeerName) -> None:
        """Answer to `Inquire`: it could not be found out."""
        consumer_peer.no_evidence(self.state, peer)

    def handle_disconnected(self, peer: PeerName, reason: str, now: float) -> None:
        """We tore the connection down without proof of the peer's death; it may still write for a while."""
        consumer_peer.disconnected(self.state, peer, reason, now)

    def handle_timeout(self, now: float) -> None:
        """Draw the consequences of every deadline at or before `now`."""
        state = self.state
        for number in state.read_timers.pop_due(now):
            reads.overdue(state, number)
        for key, peer in state.retry_timers.pop_due(now):
            reads.retry(state, key, peer)
        for farewell in state.farewell_timers.pop_due(now):
            farewells.repeat(state, farewell, now)
        for kind, name in self.state.peer_timers.pop_due(now):
            if kind == "renew":
                consumer_peer.renew(self.state, name, now)
            elif kind == "dead":
                consumer_peer.orphans_ended(self.state, name, now)
            else:
                consumer_peer.silent(self.state, name, now)
        for key in self.state.lapse_timers.pop_due(now):
            fences.lapse(self.state, self.state.rows[key], now)

    def handle_close(self, now: float) -> None:
        """The rank shuts down: withdraw everything."""
        for key, row in list(self.state.rows.items()):
            consumer_host.withdraw(self.state, Withdraw(*key, row.source, CLOSED), now)

    # --- out -----------------------------------------------------------------------------------

    def next_due(self) -> float | None:
        """When `handle_timeout` must be called next."""
        state = self.state
        timers = (state.read_timers, state.retry_timers, state.farewell_timers)
        due = [state.peer_timers.next_due(), state.lapse_timers.next_due()]
        due += [one.next_due() for one in timers]
        return min((when for when in due if when is not None), default=None)

    def poll_output(self) -> Output | None:
        """The next thing to do for the host of this core."""
        return self.state.outputs.popleft() if self.state.outputs else None

    def poll_result(self) -> Result | None:
        """The next thing to tell the engine."""
        return self.state.results.popleft() if self.state.results else None

    # --- looking in ----------------------------------------------------------------------------

    @property
    def expecting(self) -> bool:
        """Whether something may arrive soon, so that polling fast is worth it."""
        return bool(self.state.rows)

    def peers(self) -> set[PeerName]:
        """Peers that a reception waits for, or that have not answered our farewell."""
        return self.state.peers.keys() | {key[0] for key in self.state.farewells}

    def states(self) -> dict[str, int]:
        """How many receptions are in which state."""
        found: dict[str, int] = {}
        for row in self.state.rows.values():
            found[row.state.value] = found.get(row.state.value, 0) + 1
        return found

    def check_invariants(self) -> None:
        """Assert what must hold between any two calls."""
        state = self.state
        for key, row in state.rows.items():
            assert row.key == key
            assert row.state is not ReceptionState.ENDED
            for part in row.open_parts():
                assert key in state.peers[part.link.peer].receptions, "who is waited for is watched"
            if row.state in (ReceptionState.FAILING, ReceptionState.QUARANTINED):
                assert row.open_parts(), "a fenced reception has ended"
                _check_failing(state, row)
        for name, peer in state.peers.items():
            assert peer.receptions, "nobody is watched for nothing"
            assert ("renew", name) in state.peer_timers
            assert ("silence", name) in state.peer_timers
            for key in peer.receptions:
                parts = state.rows[key].parts or {}
                assert not parts[name].ended, "who owes nothing is not waited for"
        _check_reads(state)


def _check_failing(state: ConsumerState, row: Reception) -> None:
    for part in row.open_parts():
        if part.state is PartState.TOLD:
            assert row.key in state.lapse_timers, "quarantine has an end"
        else:
            assert part.state is PartState.DRAINING, "who fails reads nothing more"
            assert part.reading is not None
            assert part.reading.in_flight, "what is silent has drained"


def _check_reads(state: ConsumerState) -> None:
    in_flight: dict[PeerName, int] = {}
    ranges: dict[tuple[ReceptionKey, PeerName], list[tuple[int, int]]] = {}
    for number, (key, peer) in state.reads.items():
        part = (state.rows[key].parts or {})[peer]
        assert part.state in (PartState.OFFERED, PartState.DRAINING), "what has ended is silent"
        assert part.reading is not None
        posted = part.reading.in_flight[number]
        ranges.setdefault((key, peer), []).append((posted.start, posted.stop))
        in_flight[peer] = in_flight.get(peer, 0) + 1
    for found in ranges.values():
        for before, after in itertools.pairwise(sorted(found)):
            assert before[1] <= after[0], "no two reads into the same bytes are in flight"
    for peer, turns in state.turns.items():
        assert turns.ready or turns.in_flight, "nobody takes turns for nothing"
        assert turns.in_flight == in_flight.get(peer, 0) <= state.limits.in_flight_per_peer
    assert in_flight.keys() <= state.turns.keys()
    for farewell in state.farewells:
        assert farewell in state.farewell_timers, "a farewell has an end"
