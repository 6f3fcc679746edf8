"""What a simulated world lets its observers see: checkers, coverage and traces.

Everything is a fact that has just become true, in true virtual time (no process's own clock). Observers
change nothing. A *life* is one start of one engine: `(engine id, incarnation)`; ranks are named by their
transport's name, which contains both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvferry.ids import ConsumerId, EngineId, PeerName, TransferId
from kvferry.protocol.commands import Command, Result
from kvferry.transport.base import PostState


@dataclass(frozen=True, slots=True)
class Observed:
    """Base of what happens. `at_seconds` is true virtual time."""

    at_seconds: float


@dataclass(frozen=True, slots=True)
class EngineStarted(Observed):
    """An engine lives; `ranks` in order of their tensor-parallel index."""

    engine: EngineId
    ranks: tuple[PeerName, ...]
    block_count: int


@dataclass(frozen=True, slots=True)
class EngineCrashed(Observed):
    """Every process of the engine is gone at once."""

    engine: EngineId
    ranks: tuple[PeerName, ...]


@dataclass(frozen=True, slots=True)
class Commanded(Observed):
    """The host has put a command into a rank's mailbox (and it was accepted)."""

    rank: PeerName
    command: Command


@dataclass(frozen=True, slots=True)
class Reported(Observed):
    """A rank's agent has put a result into its mailbox for the host."""

    rank: PeerName
    result: Result


@dataclass(frozen=True, slots=True)
class Posted(Observed):
    """A rank has posted a WRITE, or a READ into memory of its own, which is the target then.

    Blocks are block ids, each once, of the source's and the target's caches.
    """

    rank: PeerName
    target: PeerName
    handle: int
    source_blocks: tuple[int, ...]
    target_blocks: tuple[int, ...]
    read_from: PeerName | None = None
    """Whose memory a READ reads; None for a WRITE."""

    @property
    def read(self) -> bool:
        """Whether it is a READ."""
        return self.read_from is not None

    @property
    def source(self) -> PeerName:
        """Whose memory is read."""
        return self.rank if self.read_from is None else self.read_from


@dataclass(frozen=True, slots=True)
class Landed(Observed):
    """A piece of a post has just been copied into the target's memory."""

    rank: PeerName
    target: PeerName
    handle: int


@dataclass(frozen=True, slots=True)
class PostEnded(Observed):
    """The initiator has seen a post's terminal state."""

    rank: PeerName
    target: PeerName
    handle: int
    state: PostState


@dataclass(frozen=True, slots=True)
class BlocksTaken(Observed):
    """An engine's pool has given blocks out: they were free, and are `owner`'s alone now."""

    engine: EngineId
    blocks: tuple[int, ...]
    owner: str


@dataclass(frozen=True, slots=True)
class BlocksReturned(Observed):
    """Blocks are free again: nobody holds them, and anyone may get them next."""

    engine: EngineId
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DecodeStarted(Observed):
    """A decode request has its first forward pass: its KV of tokens `[0, tokens)` is used from now on.

    `blocks` are its block tables, by cache group. `prompt` names the content (see `content`), which every
    rank must hold.
    """

    engine: EngineId
    ranks: tuple[PeerName, ...]
    request: str
    prompt: int
    tokens: int
    blocks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class DecodeEnded(Observed):
    """A decode request has ended in its engine, at whatever stage, or was preempted after it had started.

    Seen before the pool gets its blocks back.
    """

    engine: EngineId
    request: str
    preempted: bool


@dataclass(frozen=True, slots=True)
class RequestEnded(Observed):
    """A request's part in a transfer has ended on its engine, which has counted it under `outcome`."""

    engine: EngineId
    request: str
    transfer: TransferId
    consumer: ConsumerId | None
    """None on the producer's side."""
    outcome: str


@dataclass(frozen=True, slots=True)
class ItemBegan(Observed):
    """What has a number in this history begins: a workload item, a fault by chance, a stroke of an aim."""

    number: int
    what: str


@dataclass(frozen=True, slots=True)
class FaultInjected(Observed):
    """Something went wrong on purpose. `kind` is one of `grid.FAULTS` or a name of its own; `what` is for
    people."""

    kind: str
    what: str
    transfers: tuple[TransferId, ...] = ()
    """The transfers that it hits, where that is known."""


@dataclass(frozen=True, slots=True)
class FabricFault(Observed):
    """The network has let a post or a message of `rank` to `target` suffer.

    `fault` is the value of a `PostFault` or `MessageFault`, `delay_post` for a late post. A post is known by
    the blocks that it was to write (it may have been refused, and then has no handle), a message by its
    bytes. A READ's blocks are the rank's own.
    """

    rank: PeerName
    target: PeerName
    fault: str
    target_blocks: tuple[int, ...] = ()
    payload: bytes = b""
    read: bool = False

    @property
    def owner(self) -> PeerName:
        """Whose blocks a post was to write."""
        return self.rank if self.read else self.target


@dataclass(frozen=True, slots=True)
class Healed(Observed):
    """Faults have stopped: the liveness phase begins, and all must end by `deadline_seconds`."""

    deadline_seconds: float


@dataclass(frozen=True, slots=True)
class MessageSent(Observed):
    """A rank's transport has taken a message, a finished post's notification included."""

    rank: PeerName
    target: PeerName
    number: int
    """Names this message in this history."""
    payload: bytes


@dataclass(frozen=True, slots=True)
class MessageEnded(Observed):
    """A message, or one copy of a doubled one, has reached the target's inbox, or never will."""

    rank: PeerName
    target: PeerName
    number: int
    arrived: bool


@dataclass(frozen=True, slots=True)
class LegSent(Observed):
    """The router has sent one leg to an engine."""

    engine: EngineId
    request: str
    transfer: TransferId
    consumer: ConsumerId | None
    """None for a prefill leg."""


class Observer(Protocol):
    """Sees everything in order."""

    def observe(self, event: Observed) -> None:
        """Take one event."""
        ...
