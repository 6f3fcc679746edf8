"""The interface between the agent and whatever moves bytes.

One thread owns a transport: every method is called from it, and implementations assert so. Nothing here
blocks for longer than the work of posting; `poll` and `receive` are what makes progress.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvferry.errors import TransportError
from kvferry.ids import PeerName
from kvferry.layout.runs import Region, Runs


class PostState(enum.Enum):
    """What has become of a posted transfer. FAILED and DONE are terminal."""

    IN_FLIGHT = "in_flight"
    DONE = "done"
    FAILED = "failed"


Handle = int
"""Names a posted transfer until it is released; never reused within one transport."""


@dataclass(frozen=True, slots=True)
class Notification:
    """A message as it arrived. `peer` is the name under which the sender's transport runs."""

    peer: PeerName
    payload: bytes


class Transport(Protocol):
    """Moves bytes and messages to peers. See the module's text for threads."""

    @property
    def name(self) -> PeerName:
        """Our own name, as peers see it."""
        ...

    @property
    def notification_bytes_max(self) -> int:
        """The longest payload that `send`, and the notification of a post, accept."""
        ...

    @property
    def retry_bound_seconds(self) -> float:
        """After so long the backend itself has given up on anything it had accepted."""
        ...

    def register(self, regions: Sequence[Region]) -> None:
        """Make memory readable and writable by peers. Called once, before `local_metadata`."""
        ...

    def local_metadata(self) -> bytes:
        """What a peer needs for `connect`."""
        ...

    def connect(self, peer: PeerName, metadata: bytes) -> None:
        """Load a peer's metadata. Idempotent for the same bytes.

        Raises:
            TransportError: the metadata is not of this transport or not of this peer.
        """
        ...

    def disconnect(self, peer: PeerName) -> None:
        """Forget a peer: nothing new is sent, and what is in flight to it must come to its end by polling.

        It is no fence: a peer that lives can still write into our memory. Unknown peers are ignored.
        """
        ...

    def send(self, peer: PeerName, payload: bytes) -> None:
        """Send a message. Reaches peers that have not loaded our metadata.

        Raises:
            PeerLostError: the peer is known to be gone.
            TransportError: not connected, too long, or refused for now (`retryable`).
        """
        ...

    def receive(self) -> list[Notification]:
        """Messages that have arrived since the last call, those of finished posts included."""
        ...

    def write(self, peer: PeerName, runs: Runs, notify: bytes | None = None) -> Handle:
        """Post a WRITE of local sources into the peer's targets; `notify` arrives after its last byte.

        Raises:
            PeerLostError: the peer is known to be gone.
            TransportError: refused; nothing was posted.
        """
        ...

    def read(self, peer: PeerName, runs: Runs, notify: bytes | None = None) -> Handle:
        """Post a READ of the peer's sources into local targets. Errors as for `write`."""
        ...

    def poll(self, handle: Handle) -> PostState:
        """Make progress and tell the state."""
        ...

    def failure(self, handle: Handle) -> TransportError | None:
        """Why a FAILED handle failed."""
        ...

    def release(self, handle: Handle) -> None:
        """Forget a handle in a terminal state. Releasing one in flight is a programming error."""
        ...

    def close(self) -> None:
        """Deregister and stop. Idempotent; handles in flight are an error (drain first)."""
        ...
