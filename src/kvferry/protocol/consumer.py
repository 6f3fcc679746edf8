"""The consumer core: what one rank knows of the transfers that it waits for, and what it does about them.

Sans I/O. Feed it `handle_*`, each with `now` (monotonic seconds of this process, never going back); then
drain `poll_output` and `poll_result` until each gives None; call `handle_timeout` when `next_due` has
come, after all messages that have arrived by then. Belongs to one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvferry.ids import PeerName
from kvferry.protocol import consumer_host, consumer_peer, fences
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
from kvferry.protocol.messages import AnyMessage, Cancelled, Failed, Landed, Status, Written
from kvferry.protocol.outputs import Link, Output
from kvferry.protocol.reasons import CLOSED
from kvferry.protocol.receptions import ConsumerState
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
    Failed: consumer_peer.failed,
    Cancelled: consumer_peer.cancelled,
    Status: consumer_peer.status,
}
CONSUMER_COMMANDS = frozenset(_COMMANDS)
CONSUMER_MESSAGES = frozenset(_MESSAGES)


class ConsumerCore:
    """One rank's consumer side. `retry_bound_seconds` is the transport's: see `fences`."""

    def __init__(self, limits: Limits, retry_bound_seconds: float) -> None:
        self.state = ConsumerState(limits, retry_bound_seconds)

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
        due = (self.state.peer_timers.next_due(), self.state.lapse_timers.next_due())
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
            for name in row.parts or {}:
                assert key in state.peers[name].receptions, "who is waited for is watched"
            if row.state in (ReceptionState.FAILING, ReceptionState.QUARANTINED):
                assert row.open_parts(), "a fenced reception has ended"
                assert key in state.lapse_timers, "quarantine has an end"
                assert all(part.state is PartState.TOLD for part in row.open_parts())
        for name, peer in state.peers.items():
            assert peer.receptions, "nobody is watched for nothing"
            assert ("renew", name) in state.peer_timers
            assert ("silence", name) in state.peer_timers
            for key in peer.receptions:
                assert key in state.rows
