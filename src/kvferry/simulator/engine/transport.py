"""A rank's memory transport, which can break under its agent, or refuse to join peers."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.errors import TransportError
from kvferry.ids import PeerName
from kvferry.layout.runs import Runs
from kvferry.transport.base import Handle, Notification, PostState
from kvferry.transport.memory import MemoryFabric, MemoryTransport

CALLS: Sequence[str] = ("receive", "write", "poll")
"""Where it may break; reading does where writing does."""


class BrokenError(Exception):
    """Nobody expects it of a transport, so it ends the agent."""


class RankTransport(MemoryTransport):
    """As sound as any until `breaks_at` names a call, or `refuses_until` a time."""

    def __init__(self, fabric: MemoryFabric, name: PeerName) -> None:
        super().__init__(fabric, name)
        self._clock = fabric.exchange.clock
        self.breaks_at: str | None = None
        """The call that raises what no agent is prepared for."""
        self.refuses_until = 0.0
        """Peers are joined until then, and found unusable."""

    def connect(self, peer: PeerName, metadata: bytes) -> None:
        """Load a peer's metadata.

        Raises:
            TransportError: it cannot be used.
        """
        super().connect(peer, metadata)
        if self._clock() < self.refuses_until:
            raise TransportError(f"the memory of {peer} cannot be used")

    def receive(self) -> list[Notification]:
        """Messages that have arrived."""
        self._break("receive")
        return super().receive()

    def write(self, peer: PeerName, runs: Runs, notify: bytes | None = None) -> Handle:
        """Post a WRITE."""
        self._break("write")
        return super().write(peer, runs, notify)

    def read(self, peer: PeerName, runs: Runs, notify: bytes | None = None) -> Handle:
        """Post a READ."""
        self._break("write")
        return super().read(peer, runs, notify)

    def poll(self, handle: Handle) -> PostState:
        """Make progress and tell the state."""
        self._break("poll")
        return super().poll(handle)

    def _break(self, call: str) -> None:
        if self.breaks_at == call:
            raise BrokenError(f"the transport breaks in {call}")
