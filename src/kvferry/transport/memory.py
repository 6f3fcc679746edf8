"""A transport whose peers live in the same process; real bytes move, and everything can fail on request.

`MemoryFabric` joins the transports and holds the levers; see its module for what lands when.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.errors import TransportError, UsageError
from kvferry.ids import PeerName
from kvferry.layout.runs import Region, Runs
from kvferry.transport.base import Handle, Notification, PostState
from kvferry.transport.checks import check_payload, check_runs
from kvferry.transport.fabric import MemoryFabric
from kvferry.transport.faults import Link, MessageFault, PostFault
from kvferry.transport.nodes import FabricLimits, Post
from kvferry.transport.owner import ThreadOwner
from kvferry.transport.regions import Envelope, RegionIndex, decode_envelope, peer_regions
from kvferry.transport.seen import Landing, Posted
from kvferry.transport.wire import Traffic

__all__ = [
    "FabricLimits",
    "Landing",
    "Link",
    "MemoryFabric",
    "MemoryTransport",
    "MessageFault",
    "PostFault",
    "Posted",
    "Traffic",
]

TRANSPORT_NAME = "memory"


class MemoryTransport:
    """One node of a fabric. It implements `transport.base.Transport`."""

    def __init__(self, fabric: MemoryFabric, name: PeerName) -> None:
        """Join `fabric` as `name`.

        Raises:
            UsageError: a living node has this name.
        """
        self._fabric = fabric
        self._exchange = fabric.exchange
        with fabric.lock:
            self._node = self._exchange.join(name)
        self._owner = ThreadOwner(f"transport {name}")
        self._registered = False
        self._closed = False

    @property
    def name(self) -> PeerName:
        """Our own name, as peers see it."""
        return self._node.name

    @property
    def notification_bytes_max(self) -> int:
        """The longest payload that `send`, and the notification of a post, accept."""
        return self._exchange.limits.notification_bytes_max

    @property
    def retry_bound_seconds(self) -> float:
        """After so long a transfer to a peer that cannot be reached has failed."""
        return self._exchange.limits.retry_bound_seconds

    def register(self, regions: Sequence[Region]) -> None:
        """Make memory readable and writable by peers; it must live until the node has ended.

        Raises:
            UsageError: called twice, or the regions are not sound.
        """
        self._enter()
        if self._registered:
            raise UsageError("register may be called once; pass all regions in that call")
        with self._fabric.lock:
            self._node.regions = RegionIndex(regions)
        self._registered = True

    def local_metadata(self) -> bytes:
        """What a peer needs for `connect`."""
        self._enter()
        generation = self._node.generation.to_bytes(8, "big")
        regions = tuple(self._node.regions.regions)
        return Envelope(transport=TRANSPORT_NAME, name=self.name, regions=regions, blob=generation).encoded()

    def connect(self, peer: PeerName, metadata: bytes) -> None:
        """Load a peer's metadata; over that of an earlier life, or a broken connection, it starts anew.

        Raises:
            TransportError: the metadata is damaged, not of this transport or not of this peer.
        """
        self._enter()
        envelope = decode_envelope(metadata, transport=TRANSPORT_NAME, peer=peer)
        regions = peer_regions(envelope)
        generation = int.from_bytes(envelope.blob, "big")
        with self._fabric.lock:
            self._exchange.connect(self._node, peer, generation, regions, metadata)

    def disconnect(self, peer: PeerName) -> None:
        """Forget a peer; transfers under way go on and can be polled, unless the fabric says otherwise."""
        self._enter()
        with self._fabric.lock:
            self._exchange.disconnect(self._node, peer)

    def send(self, peer: PeerName, payload: bytes) -> None:
        """Send a message.

        Raises:
            PeerLostError: the peer is known to be gone.
            TransportError: not connected, too long, or the peer's inbox is full (`retryable`).
        """
        self._enter()
        check_payload(payload, self.notification_bytes_max)
        with self._fabric.lock:
            self._exchange.send(self._exchange.connection(self._node, peer), payload)

    def receive(self) -> list[Notification]:
        """Messages that have arrived since the last call, those of finished posts included."""
        self._enter()
        self._fabric.progress()
        with self._fabric.lock:
            arrived = list(self._node.inbox)
            self._node.inbox.clear()
            self._node.messages_pending -= len(arrived)
        return arrived

    def write(self, peer: PeerName, runs: Runs, notify: bytes | None = None) -> Handle:
        """Post a WRITE of local sources into the peer's targets; `notify` arrives after its last byte.

        Raises:
            PeerLostError: the peer is known to be gone.
            TransportError: a run leaves registered memory, or the post was refused; nothing was posted.
        """
        return self._post(peer, runs, notify, read=False)

    def read(self, peer: PeerName, runs: Runs, notify: bytes | None = None) -> Handle:
        """Post a READ of the peer's sources into local targets. Errors as for `write`."""
        return self._post(peer, runs, notify, read=True)

    def poll(self, handle: Handle) -> PostState:
        """Make progress and tell the state."""
        self._enter()
        self._fabric.progress()
        with self._fabric.lock:
            return self._exchange.poll(self._known(handle))

    def failure(self, handle: Handle) -> TransportError | None:
        """Why a FAILED handle failed."""
        self._enter()
        return self._known(handle).error

    def release(self, handle: Handle) -> None:
        """Forget a handle in a terminal state.

        Raises:
            AssertionError: it is in flight: what it still moves would have no owner.
        """
        self._enter()
        post = self._known(handle)
        if post.state is PostState.IN_FLIGHT:
            raise AssertionError(
                f"handle {handle} is released while it is in flight; poll it to its end first"
            )
        del self._node.posts[handle]

    def close(self) -> None:
        """Leave the fabric; peers find us gone. Idempotent.

        Raises:
            UsageError: handles are in flight; poll them to their end first.
        """
        self._owner.check()
        if self._closed:
            return
        with self._fabric.lock:
            in_flight = self._node.posts_in_flight()
            if in_flight and not self._node.ended:
                raise UsageError(
                    f"{self.name} is closed with {len(in_flight)} transfers in flight; drain first"
                )
            for peer in list(self._node.connections):
                self._exchange.disconnect(self._node, peer)
            self._node.ended = True
        self._closed = True

    def _post(self, peer: PeerName, runs: Runs, notify: bytes | None, *, read: bool) -> Handle:
        self._enter()
        if notify is not None:
            check_payload(notify, self.notification_bytes_max)
        check_runs(runs)
        ours, theirs = (runs.target, runs.source) if read else (runs.source, runs.target)
        with self._fabric.lock:
            connection = self._exchange.connection(self._node, peer)
            self._node.regions.locate(ours, runs.length, self.name)
            connection.regions.locate(theirs, runs.length, peer)
            return self._exchange.post(connection, self._node, runs, notify, read).handle

    def _enter(self) -> None:
        self._owner.check()
        if self._closed:
            raise UsageError(f"transport {self.name} is closed")
        if self._node.ended:
            raise UsageError(f"{self.name} was killed; a dead process makes no calls")

    def _known(self, handle: Handle) -> Post:
        try:
            return self._node.posts[handle]
        except KeyError:
            raise AssertionError(f"handle {handle} is unknown or released") from None
