"""What an agent knows of its peers: who they are, whether we can write to them, and by which plan.

A consumer finds a producer engine through its directory, checks that the caches can be joined, connects to
the ranks that hold its KV and says `Hello`. A producer connects back when `Hello` arrives. Nothing here
waits: the directory is read on other threads, whose results come through the agent's mailbox. Belongs to
the agent's thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kvferry.agent.directory import Directory
from kvferry.agent.idle import Connections
from kvferry.errors import GeometryError, KvferryError, PeerError
from kvferry.ids import EngineId, Incarnation, PeerName, Rank, peer_name
from kvferry.layout.compare import compare
from kvferry.layout.plan import CopyPlan, plan
from kvferry.layout.ranks import EngineSizes, sharers, sources
from kvferry.layout.spec import CacheSpec, decode_spec, encode_spec
from kvferry.protocol.commands import Source
from kvferry.protocol.limits import Limits
from kvferry.protocol.messages import PROTOCOL_VERSION, PROTOCOL_VERSION_MIN, Hello
from kvferry.protocol.outputs import Link, PeerFacts
from kvferry.transport.base import Transport


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a rank is. One per engine start."""

    engine: EngineId
    incarnation: Incarnation
    rank: Rank

    @property
    def peer(self) -> PeerName:
        """The name of this rank's transport."""
        return peer_name(self.engine, self.incarnation, self.rank)


class Resolver(Protocol):
    """Reads a producer engine's directory on another thread."""

    def resolve(
        self,
        host: str,
        port: int,
        engine: EngineId,
        callback: Callable[[Directory | Exception], None],
        *,
        patient: bool = True,
    ) -> None:
        """Call `callback` once, from any thread, with the directory or why there is none.

        A patient lookup waits for an engine that is starting; an impatient one ends with a `PeerGoneError`
        as soon as its connection is refused.
        """
        ...

    def close(self) -> None:
        """Stop; outstanding callbacks may be dropped."""
        ...


@dataclass(slots=True)
class _Writable:
    """A consumer rank that we can write to."""

    hello: Hello
    plan: CopyPlan
    linked: bool = True


@dataclass(slots=True)
class Links:
    """The tables of one agent. `ours` is our rank's cache."""

    identity: Identity
    ours: CacheSpec
    limits: Limits
    transport: Transport
    connections: Connections
    _readable: dict[PeerName, CopyPlan] = field(default_factory=dict)
    """How blocks of the producer ranks that we are connected to map to ours."""
    _writable: OrderedDict[PeerName, _Writable] = field(default_factory=OrderedDict)

    # --- as a consumer ---------------------------------------------------------------------------

    def open(self, source: Source, directory: Directory, make_room: Callable[[], bool]) -> tuple[Link, ...]:
        """Connect to the producer's ranks that hold our KV; each has to be greeted.

        `make_room` is asked before each new connection, and says whether there is room for it.

        Raises:
            GeometryError: the caches cannot be joined; all differing fields are in the text.
            PeerError, TransportError: what the directory says cannot be used.
        """
        consumer = EngineSizes(self.ours.tp_size, self.ours.pp_size)
        producer = EngineSizes(directory.tp_size, directory.pp_size)
        entries = {(entry.pp, entry.tp): entry for entry in directory.ranks}
        links: list[Link] = []
        for rank in sources(self.identity.rank, consumer, producer):
            entry = entries.get((rank.pp, rank.tp))
            if entry is None:
                raise PeerError(f"the directory of {source.engine} lacks rank {rank}")
            theirs = decode_spec(entry.cache)
            self._check(theirs)
            joint = plan(theirs, self.ours)
            peer = PeerName(entry.peer)
            if peer not in self.connections and not make_room():
                raise PeerError(self._no_room())
            self._connect(peer, entry.metadata)
            self._readable[peer] = joint
            links.append(
                Link(
                    peer,
                    sharers(rank, consumer, producer),
                    tuple(joint.bytes_per_block(group) for group in range(len(joint.groups))),
                    entry.ends_with_engine,
                    tuple(group.block_tokens for group in theirs.groups),
                    *self._slice_tokens(joint),
                )
            )
        return tuple(links)

    def hello(self) -> Hello:
        """What we say first on a new link."""
        rank = self.identity.rank
        return Hello(
            engine=self.identity.engine,
            incarnation=self.identity.incarnation,
            pp=rank.pp,
            tp=rank.tp,
            version=PROTOCOL_VERSION,
            version_min=PROTOCOL_VERSION_MIN,
            metadata=self.transport.local_metadata(),
            cache=encode_spec(self.ours),
        )

    # --- as a producer ---------------------------------------------------------------------------

    def welcome(self, peer: PeerName, hello: Hello, *, has_room: bool = True) -> PeerFacts:
        """Connect back to a consumer rank and make the plan for writing to it.

        Without room it is connected to only to be told so.

        Raises:
            GeometryError, PeerError, TransportError: it cannot be written to; the text says why.
        """
        if peer != peer_name(hello.engine, hello.incarnation, Rank(hello.pp, hello.tp)):
            raise PeerError(f"Hello of {hello.engine} came from {peer}")
        self._connect(peer, hello.metadata)
        if not has_room:
            raise PeerError(self._no_room())
        if hello.version < PROTOCOL_VERSION_MIN or hello.version_min > PROTOCOL_VERSION:
            raise PeerError(
                f"protocol version {hello.version_min} to {hello.version}, "
                f"ours is {PROTOCOL_VERSION_MIN} to {PROTOCOL_VERSION}; upgrade the older engine"
            )
        theirs = decode_spec(hello.cache)
        self._check(theirs)
        joint = plan(self.ours, theirs)
        self._writable[peer] = _Writable(hello, joint)
        self._writable.move_to_end(peer)
        slice_tokens, joined_tokens = self._slice_tokens(joint)
        return PeerFacts(
            block_tokens=tuple(group.block_tokens for group in theirs.groups),
            slice_tokens=slice_tokens,
            block_counts=tuple(group.block_count for group in theirs.groups),
            joined_tokens=joined_tokens,
        )

    def plan_for(self, peer: PeerName) -> CopyPlan:
        """How our blocks map to those of a peer that we can write to."""
        return self._writable[peer].plan

    def reading_plan(self, peer: PeerName) -> CopyPlan:
        """How the blocks of a peer that we read from map to ours."""
        return self._readable[peer]

    def is_linked(self, peer: PeerName) -> bool:
        """Whether we can write to a peer."""
        writable = self._writable.get(peer)
        return writable is not None and writable.linked

    def remembered_hello(self, peer: PeerName) -> Hello | None:
        """The Hello of a peer whose connection we tore down, for when it speaks again."""
        writable = self._writable.get(peer)
        return None if writable is None or writable.linked else writable.hello

    def other_incarnations(self, peer: PeerName) -> list[PeerName]:
        """Other linked peers that are the same rank of the same engine, started at another time."""
        writable = self._writable.get(peer)
        if writable is None:
            return []
        hello = writable.hello
        same = (hello.engine, hello.pp, hello.tp)
        return [
            name
            for name, other in self._writable.items()
            if name != peer and other.linked and (other.hello.engine, other.hello.pp, other.hello.tp) == same
        ]

    def retire(self, peer: PeerName) -> None:
        """Write to a peer no more; its connection stays until nothing is in flight on it."""
        writable = self._writable.get(peer)
        if writable is not None:
            writable.linked = False

    # --- both --------------------------------------------------------------------------------------

    def disconnect(self, peer: PeerName) -> None:
        """Tear a connection down; the peer may come back under the same name."""
        writable = self._writable.get(peer)
        if writable is not None:
            writable.linked = False
            self._writable.move_to_end(peer)
            self._trim()
        self._readable.pop(peer, None)
        self.transport.disconnect(peer)
        self.connections.closed(peer)

    def forget(self, peer: PeerName) -> None:
        """A peer is gone for good."""
        self.disconnect(peer)
        self._writable.pop(peer, None)

    def _no_room(self) -> str:
        return f"{self.limits.links_max} other ranks are linked and needed, the limit is links_max"

    def _connect(self, peer: PeerName, metadata: bytes) -> None:
        self.transport.connect(peer, metadata)
        self.connections.opened(peer)

    def _check(self, theirs: CacheSpec) -> None:
        problems = compare(self.ours, theirs)
        if problems:
            rest = "; ".join(str(problem) for problem in problems[1:])
            first = problems[0]
            raise GeometryError(first.field, first.ours, first.theirs, rest)

    def _slice_tokens(self, joint: CopyPlan) -> tuple[int, int]:
        """The most tokens of one slice: within the limits of bytes and of descriptors, at least a block.

        And the most where blocks that follow each other on both sides are one descriptor per piece.
        """
        tokens, joined = [], []
        for index, group in enumerate(self.ours.groups):
            most = max(self.limits.slice_bytes // max(joint.bytes_per_block(index), 1), 1)
            apart = max(self.limits.slice_runs // max(joint.pieces(index), 1), 1)
            touch = joint.groups[index].blocks_touch
            tokens.append(min(most, apart) * group.block_tokens)
            joined.append((most if touch else min(most, apart)) * group.block_tokens)
        return min(tokens), min(joined)

    def _trim(self) -> None:
        unlinked = [peer for peer, writable in self._writable.items() if not writable.linked]
        for peer in unlinked[: -self.limits.hellos_max]:
            del self._writable[peer]


def describe(error: Exception) -> str:
    """Why a link could not be made, with the code that it is counted under."""
    code = "geometry" if isinstance(error, GeometryError) else "handshake"
    name = "" if isinstance(error, KvferryError) else f"{type(error).__name__}: "
    return f"{code}: {name}{error}"
