"""What a memory fabric lets listeners see, as it happens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.ids import PeerName
from kvferry.layout.runs import Runs
from kvferry.transport.base import Handle, PostState
from kvferry.transport.faults import MessageFault, PostFault


@dataclass(frozen=True, slots=True)
class Posted:
    """A transfer was accepted: bytes of `source` move into memory of `owner`; `initiator` is one of them."""

    at_seconds: float
    initiator: PeerName
    source: PeerName
    owner: PeerName
    handle: Handle
    runs: Runs


@dataclass(frozen=True, slots=True)
class Landing:
    """Bytes have just been written: `runs` of `initiator`'s transfer `handle`, into memory of `owner`."""

    at_seconds: float
    initiator: PeerName
    owner: PeerName
    handle: Handle
    runs: Runs


@dataclass(frozen=True, slots=True)
class Ended:
    """The initiator has polled a transfer and seen, for the first time, that it has ended."""

    at_seconds: float
    initiator: PeerName
    owner: PeerName
    handle: Handle
    state: PostState


@dataclass(frozen=True, slots=True)
class Carried:
    """A message, a transfer's notification included, was taken over for `target`."""

    at_seconds: float
    sender: PeerName
    target: PeerName
    number: int
    """Counts the messages of a fabric."""
    payload: bytes


@dataclass(frozen=True, slots=True)
class Delivered:
    """A message, or one copy of a doubled one, has reached the target's inbox, or never will."""

    at_seconds: float
    sender: PeerName
    target: PeerName
    number: int
    arrived: bool


@dataclass(frozen=True, slots=True)
class Faulted:
    """A post or a message of `sender` to `target` suffers a fault. A post has `runs`, a message a payload.

    `read` says that the post reads from the target.
    """

    at_seconds: float
    sender: PeerName
    target: PeerName
    fault: PostFault | MessageFault
    runs: Runs | None = None
    payload: bytes = b""
    read: bool = False


@dataclass(slots=True)
class Listeners:
    """Who is told of what happens on a fabric, each in the order of registration."""

    posted: list[Callable[[Posted], None]] = field(default_factory=list)
    landed: list[Callable[[Landing], None]] = field(default_factory=list)
    ended: list[Callable[[Ended], None]] = field(default_factory=list)
    carried: list[Callable[[Carried], None]] = field(default_factory=list)
    delivered: list[Callable[[Delivered], None]] = field(default_factory=list)
    faulted: list[Callable[[Faulted], None]] = field(default_factory=list)
    progress: list[Callable[[PeerName], None]] = field(default_factory=list)
