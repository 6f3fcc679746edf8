"""The members of a memory fabric, their ways to each other, and what they have posted."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvferry.errors import TransportError
from kvferry.ids import PeerName
from kvferry.transport.base import Handle, Notification, PostState
from kvferry.transport.regions import RegionIndex
from kvferry.transport.wire import LinkKey


@dataclass(frozen=True, slots=True)
class FabricLimits:
    """Sizes and times of every node of a fabric."""

    notification_bytes_max: int = 64 << 10
    posts_in_flight_max: int = 4096
    """Per node; a post beyond it is refused (`retryable`)."""
    messages_pending_max: int = 1 << 16
    """Per receiver, under way or not yet taken; a message beyond it is refused (`retryable`)."""
    afterlife_seconds: float | None = None
    """What a killed node had posted lands within so long of its death, or never, whatever its peers are told.
    None: it lands whenever it does, until the peer that it lands at is told of the death."""
    retry_bound_seconds: float = 5.0
    """So long after its post a transfer fails whose peer cannot be reached."""
    pieces_max: int = 8
    """Into so many pieces a transfer is cut at most; each lands on its own."""


@dataclass(slots=True, eq=False)
class Connection:
    """One node's way to another. Once not alive it never is again; connecting anew makes a new one."""

    key: LinkKey
    target: Node | None
    """None when the metadata was of an earlier life of the peer."""
    regions: RegionIndex
    metadata: bytes
    alive: bool = True


@dataclass(slots=True, eq=False)
class Node:
    """One member of the fabric: one rank in one life."""

    name: PeerName
    generation: int
    regions: RegionIndex
    connections: dict[PeerName, Connection] = field(default_factory=dict)
    inbox: deque[Notification] = field(default_factory=deque)
    messages_pending: int = 0
    """Messages in the inbox and on the way to it."""
    posts: dict[Handle, Post] = field(default_factory=dict)
    """Every post that is not released."""
    ended: bool = False
    """Killed or closed: nothing writes its memory any more."""
    ended_at: float = 0.0
    """When it was killed."""
    noticed_at: float = 0.0
    """From then on peers can know that it ended."""

    def posts_in_flight(self) -> list[Post]:
        """Posts that are not terminal."""
        return [post for post in self.posts.values() if post.state is PostState.IN_FLIGHT]


@dataclass(slots=True, eq=False)
class Post:
    """A transfer. Nothing of it lands once `state` is terminal."""

    handle: Handle
    initiator: Node
    peer: Node
    connection: Connection
    read: bool
    notify: bytes | None
    posted_at: float
    pieces_left: int
    state: PostState = PostState.IN_FLIGHT
    error: TransportError | None = None
    stalled: bool = False
    """No byte of it moves; it ends when its connection does."""
    end_seen: bool = False
    """Whether the initiator has polled it since it ended."""

    @property
    def owner(self) -> Node:
        """Whose memory it writes."""
        return self.initiator if self.read else self.peer

    @property
    def source(self) -> Node:
        """Whose memory it reads."""
        return self.peer if self.read else self.initiator

    @property
    def link(self) -> LinkKey:
        """The direction in which its bytes move."""
        return self.source.name, self.owner.name

    def fail(self, error: TransportError) -> None:
        """End it, unless it has ended."""
        if self.state is PostState.IN_FLIGHT:
            self.state = PostState.FAILED
            self.error = error
