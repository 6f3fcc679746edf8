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

from kvferry.agent.directory import Directory, RankEntry
from kvferry.agent.idle import Connections
from kvferry.errors import GeometryError, KvferryError, PeerError
from kvferry.ids import EngineId, Incarnation, PeerName, Rank, peer_name
from kvferry.layout.compare import compare
from kvferry.layout.plan import CopyPlan, plan
from kvferry.layout.plans import PlanCache
from kvferry.layout.ranks import Meeting, meetings, shape_of, turn_of
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
    linked: bool = True


@dataclass(slots=True)
class Links:
    """The tables of one agent. `ours` is our rank's cache."""

    identity: Identity
    ours: CacheSpec
    limits: Limits
    transport: Transport
    connections: Connections
    _readable: dict[PeerName, bytes] = field(default_factory=dict)
    """Encoded caches of the producer ranks that we are connected to."""
    _writable: OrderedDict[PeerName, _Writable] = field(default_factory=OrderedDict)
    _plans: PlanCache = field(default_factory=PlanCache)

    # --- as a consumer ---------------------------------------------------------------------------

    def open(self, source: Source, directory: Directory, make_room: Callable[[], bool]) -> tuple[Link, ...]:
        """Connect to the producer's ranks that hold our KV, or that we tell that they need not send it.

        Each has to be greeted. `make_room` is asked before each new connection, and says whether there is
        room for it.

        Raises:
            GeometryError: the caches cannot be joined; all differing fields are in the text.
            PeerError, TransportError: what the directory says cannot be used.
        """
        met = self._meet(source, directory)
        most = self.limits.slice_bytes, self.limits.slice_runs
        links: list[Link] = []
        for meeting, entry, joint in met:
            peer = PeerName(entry.peer)
            if peer not in self.connections and not make_room():
                raise PeerError(self._no_room())
            self._connect(peer, entry.metadata)
            self._readable[peer] = entry.cache
            self._plans.keep(("read", peer), joint)
            links.append(
                Link(
                    peer,
                    meeting.sharers,
                    joint.block_bytes,
                    entry.ends_with_engine,
                    joint.source_tokens,
                    joint.slice_tokens(*most),
                    joint.joined_tokens(*most),
                    writes=meeting.writes,
                )
            )
        return tuple(links)

    def _meet(self, source: Source, directory: Directory) -> list[tuple[Meeting, RankEntry, CopyPlan]]:
        """The producer's ranks that we register with, once it is known that they bring all that we need."""
        specs: dict[str, CacheSpec] = {}
        producer = shape_of(self._described(directory, directory.ranks[0], specs))
        turn = turn_of(self.identity.engine)
        entries = {Rank(entry.pp, entry.tp): entry for entry in directory.ranks}
        found = []
        for meeting in meetings(self.identity.rank, shape_of(self.ours), producer, turn):
            entry = entries.get(meeting.rank)
            if entry is None:
                raise PeerError(f"the directory of {source.engine} lacks rank {meeting.rank}")
            theirs = self._described(directory, entry, specs)
            if shape_of(theirs) != producer:
                raise PeerError(f"ranks of {source.engine} differ in what they say of their engine")
            found.append((meeting, entry, plan(theirs, self.ours, turn)))
        self._check_complete(found)
        return found

    def _described(self, directory: Directory, entry: RankEntry, known: dict[str, CacheSpec]) -> CacheSpec:
        """A rank's cache, checked."""
        if entry.peer not in known:
            theirs = decode_spec(entry.cache)
            stated = (theirs.rank, theirs.tp_size, theirs.pp_size)
            if stated != (Rank(entry.pp, entry.tp), directory.tp_size, directory.pp_size):
                raise PeerError(f"{entry.peer} describes the cache of {theirs.rank}, not its own")
            self._check(theirs, we_send=False)
            known[entry.peer] = theirs
        return known[entry.peer]

    def _check_complete(self, found: list[tuple[Meeting, RankEntry, CopyPlan]]) -> None:
        for table, groups in enumerate(self.ours.tables):
            needed = sum(group.block_bytes for group in groups)
            coming = sum(joint.bytes_per_block(table) for _, _, joint in found)
            if needed != coming:
                raise GeometryError(
                    f"groups[{table}].bytes",
                    f"{needed} per block",
                    f"{coming} per block from {len(found)} ranks",
                    "start all ranks of an engine with the same settings",
                )

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
        if theirs.rank != Rank(hello.pp, hello.tp):
            raise PeerError(f"{peer} describes the cache of {theirs.rank}, not its own")
        self._check(theirs, we_send=True)
        joint = self._plans.keep(peer, plan(self.ours, theirs, turn_of(hello.engine)))
        self._writable[peer] = _Writable(hello)
        self._writable.move_to_end(peer)
        most = self.limits.slice_bytes, self.limits.slice_runs
        return PeerFacts(
            block_tokens=theirs.block_tokens,
            slice_tokens=joint.slice_tokens(*most),
            joined_tokens=joint.joined_tokens(*most),
            block_counts=theirs.block_counts,
            block_bytes=joint.block_bytes,
            windows=theirs.windows,
            whole_tokens=theirs.whole_tokens,
        )

    def plan_for(self, peer: PeerName) -> CopyPlan:
        """How our blocks map to those of a peer that we can write to."""
        hello = self._writable[peer].hello
        return self._plans.find(peer, lambda: self._plan_again(hello))

    def _plan_again(self, hello: Hello) -> CopyPlan:
        return plan(self.ours, decode_spec(hello.cache), turn_of(hello.engine))

    def reading_plan(self, peer: PeerName) -> CopyPlan:
        """How the blocks of a peer that we read from map to ours."""
        theirs = self._readable[peer]
        turn = turn_of(self.identity.engine)
        return self._plans.find(("read", peer), lambda: plan(decode_spec(theirs), self.ours, turn))

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
        self._plans.drop(("read", peer))
        self.transport.disconnect(peer)
        self.connections.closed(peer)

    def forget(self, peer: PeerName) -> None:
        """A peer is gone for good."""
        self.disconnect(peer)
        self._writable.pop(peer, None)
        self._plans.drop(peer)

    def _no_room(self) -> str:
        return f"{self.limits.links_max} other ranks are linked and needed, the limit is links_max"

    def _connect(self, peer: PeerName, metadata: bytes) -> None:
        self.transport.connect(peer, metadata)
        self.connections.opened(peer)

    def _check(self, theirs: CacheSpec, *, we_send: bool) -> None:
        problems = compare(self.ours, theirs, we_send=we_send)
        if problems:
            rest = "; ".join(str(problem) for problem in problems[1:])
            first = problems[0]
            raise GeometryError(first.field, first.ours, first.theirs, rest)

    def _trim(self) -> None:
        unlinked = [peer for peer, writable in self._writable.items() if not writable.linked]
        for peer in unlinked[: -self.limits.hellos_max]:
            del self._writable[peer]
            self._plans.drop(peer)


def describe(error: Exception) -> str:
    """Why a link could not be made, with the code that it is counted under."""
    code = "geometry" if isinstance(error, GeometryError) else "handshake"
    name = "" if isinstance(error, KvferryError) else f"{type(error).__name__}: "
    return f"{code}: {name}{error}"
