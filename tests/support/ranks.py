"""Agents of several engines on one fake clock: production loops and cores over the memory transport.

Every loop is stepped in turn and time moves by `TICK_SECONDS`, or by more while nothing happens; nothing
sleeps. A rank's cache is a real buffer, filled so that each block of each rank differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from random import Random

import numpy as np
import numpy.typing as npt

from kvferry.agent.directory import Directory, RankEntry
from kvferry.agent.links import Identity
from kvferry.agent.loop import Incoming, Loop
from kvferry.agent.mailbox import Mailbox
from kvferry.agent.stats import Stats
from kvferry.errors import PeerGoneError, TransportError
from kvferry.handoff import TransferMode
from kvferry.ids import ConsumerId, EngineId, Incarnation, PeerName, Rank, TransferId
from kvferry.layout.describe import describe
from kvferry.layout.spans import to_spans
from kvferry.layout.spec import CacheSpec, encode_spec
from kvferry.protocol.commands import Advance, Expect, Finish, Receive, Result, Source
from kvferry.protocol.limits import Limits
from kvferry.transport.memory import MemoryFabric, MemoryTransport
from tests.support.fabric import FakeClock

TICK_SECONDS = 0.001
CALM_SECONDS = 0.005
"""What passes at once while nothing lands and no timer ends: loops look for other things as often as this."""
BLOCK_TOKENS = 16
LAYERS = 3
HEADS = 2
CONTENT_BYTES = 8
BLOCKS = 64


class DirectResolver:
    """Answers from a table, at once or when told; an engine that is not in it cannot be reached."""

    def __init__(self) -> None:
        self.engines: dict[int, Directory] = {}
        self.held: set[int] = set()
        self.asked: list[int] = []
        self.inquired: list[int] = []
        """Ports of impatient lookups: whether an engine is still there."""
        self.mute: set[int] = set()
        """Ports whose engines are there and answer no impatient lookup."""
        self._waiting: list[tuple[int, Callable[[Directory | Exception], None], bool]] = []

    def resolve(
        self,
        host: str,
        port: int,
        engine: EngineId,
        callback: Callable[[Directory | Exception], None],
        *,
        patient: bool = True,
    ) -> None:
        """Answer now, or keep the callback while the port is held."""
        (self.asked if patient else self.inquired).append(port)
        if port in self.held:
            self._waiting.append((port, callback, patient))
        else:
            callback(self._answer(port, patient=patient))

    def free(self, port: int) -> None:
        """Answer what waits for a port."""
        self.held.discard(port)
        waiting, self._waiting = self._waiting, []
        for held_port, callback, patient in waiting:
            if held_port == port:
                callback(self._answer(port, patient=patient))
            else:
                self._waiting.append((held_port, callback, patient))

    def _answer(self, port: int, *, patient: bool) -> Directory | Exception:
        if not patient and port in self.mute:
            return TransportError(f"port {port} did not answer in time")
        nobody = TransportError if patient else PeerGoneError
        return self.engines.get(port) or nobody(f"nobody listens on port {port}")

    def close(self) -> None:
        """Nothing to stop."""


class TestRank:
    """One rank: its cache's memory, its loop, and what it has reported."""

    __test__ = False

    def __init__(self, world: World, identity: Identity, tp_size: int, order: str, seed: int) -> None:
        size = LAYERS * BLOCKS * HEADS * BLOCK_TOKENS * CONTENT_BYTES
        self.memory: npt.NDArray[np.uint8] = np.random.default_rng(seed).integers(
            0, 256, size, dtype=np.uint8
        )
        group, region = describe(
            order,
            layers=LAYERS,
            blocks=BLOCKS,
            heads=HEADS,
            block_tokens=BLOCK_TOKENS,
            content_bytes=CONTENT_BYTES,
            address=int(self.memory.ctypes.data),
            heads_total=HEADS * tp_size,
            head_first=HEADS * identity.rank.tp,
        )
        self.cache = CacheSpec(
            model="tiny",
            dtype="float32",
            kv_dtype="float32",
            rank=identity.rank,
            tp_size=tp_size,
            pp_size=1,
            groups=(group,),
            regions=(region,),
        )
        self.identity = identity
        self.transport = MemoryTransport(world.fabric, identity.peer)
        self.transport.register(self.cache.regions)
        self.inbox: Mailbox[Incoming] = Mailbox()
        self.results: list[Result] = []
        self.stats = Stats()
        self.dead = False
        self.loop = Loop(
            identity,
            self.cache,
            self.transport,
            world.limits,
            world.resolver,
            self.inbox,
            self.results.append,
            self.stats,
            world.clock,
        )

    @property
    def peer(self) -> PeerName:
        """The name of its transport."""
        return self.identity.peer

    def do(self, *commands: Incoming) -> None:
        """Submit commands."""
        for command in commands:
            self.inbox.put(command)

    def block(self, number: int) -> bytes:
        """All bytes of one block, layer by layer, head by head."""
        group = self.cache.groups[0]
        base = int(self.memory.ctypes.data)
        parts = []
        for plane in group.planes:
            for head in range(group.head_count):
                for token in range(group.block_tokens):
                    at = (
                        plane.address
                        - base
                        + number * group.block_stride
                        + head * group.head_stride
                        + token * group.token_stride
                    )
                    parts.append(self.memory[at : at + group.content_bytes].tobytes())
        return b"".join(parts)

    def of(self, kind: type[Result]) -> list[Result]:
        """Results of one type."""
        return [result for result in self.results if isinstance(result, kind)]


class World:
    """Engines, their network and their clock."""

    def __init__(self, limits: Limits | None = None, seed: int = 1) -> None:
        self.clock = FakeClock()
        self.limits = limits or Limits()
        self.fabric = MemoryFabric(random=Random(seed), clock=self.clock)
        self.resolver = DirectResolver()
        self.ranks: list[TestRank] = []
        self._starts = 0

    def engine(self, name: str, port: int, tp_size: int = 1, order: str = "LBHNC") -> list[TestRank]:
        """Start an engine whose directory is at `port`; one that was there before is replaced in it."""
        self._starts += 1
        incarnation = Incarnation(f"i{self._starts}")
        ranks = []
        for tp in range(tp_size):
            identity = Identity(EngineId(name), incarnation, Rank(0, tp))
            ranks.append(TestRank(self, identity, tp_size, order, seed=100 * self._starts + tp))
        self.ranks += ranks
        self.resolver.engines[port] = Directory(
            engine=EngineId(name),
            incarnation=incarnation,
            tp_size=tp_size,
            pp_size=1,
            ranks=tuple(
                RankEntry(
                    pp=0,
                    tp=rank.identity.rank.tp,
                    peer=rank.peer,
                    metadata=rank.transport.local_metadata(),
                    cache=encode_spec(rank.cache),
                )
                for rank in ranks
            ),
        )
        return ranks

    def kill(self, rank: TestRank) -> None:
        """End a rank as SIGKILL does."""
        rank.dead = True
        self.fabric.kill(rank.peer)
        dead = {rank.peer for rank in self.ranks if rank.dead}
        for port, known in list(self.resolver.engines.items()):
            if {PeerName(entry.peer) for entry in known.ranks} <= dead:
                del self.resolver.engines[port]

    def step(self) -> None:
        """Step every living loop once and let a tick pass."""
        self._step_loops()
        self.clock.advance(TICK_SECONDS)

    def run(self, seconds: float) -> None:
        """Let time pass."""
        until = self.clock.now + seconds
        while self.clock.now < until:
            self._step_loops()
            self._let_pass(until)

    def _step_loops(self) -> None:
        for rank in self.ranks:
            if not rank.dead:
                rank.loop.step()
                rank.loop.producer.check_invariants()
                rank.loop.consumer.check_invariants()

    def _dues(self) -> Iterator[float]:
        """When something lands, or is due in a core; now, where a mailbox holds something already."""
        landing = self.fabric.next_due()
        if landing is not None:
            yield landing
        for rank in self.ranks:
            if rank.dead:
                continue
            if rank.inbox:
                yield self.clock.now
            for core in (rank.loop.producer, rank.loop.consumer):
                due = core.next_due()
                if due is not None:
                    yield due

    def _let_pass(self, until: float) -> None:
        """Let a tick pass, or all the time for which nothing can matter to any loop, up to a moment."""
        moment = min(until, self.clock.now + CALM_SECONDS, *self._dues())
        self.clock.advance(max(moment - self.clock.now, TICK_SECONDS))

    def until(self, condition: Callable[[], object], seconds: float = 5.0) -> float:
        """Run until `condition` holds; returns how long it took. Fails the test after `seconds`."""
        start = self.clock.now
        holds = condition()
        while not holds:
            assert self.clock.now < start + seconds, f"not within {seconds:g} s: {self.dump()}"
            self._step_loops()
            holds = condition()
            self._let_pass(self.clock.now if holds else start + seconds)
        return self.clock.now - start

    def dump(self) -> str:
        """What every rank has in its tables and has reported."""
        return "; ".join(
            f"{rank.peer}: {rank.loop.producer.states()} {rank.loop.consumer.states()} {rank.results}"
            for rank in self.ranks
        )

    def assert_empty(self) -> None:
        """No living rank has a transfer in any table, and nothing is under way."""
        for rank in self.ranks:
            if not rank.dead:
                assert rank.loop.producer.states() == {}, self.dump()
                assert rank.loop.consumer.states() == {}, self.dump()
                assert rank.loop.quiet


def source_of(rank: TestRank, port: int) -> Source:
    """How a consumer is told of a producer engine."""
    return Source(rank.identity.engine, "127.0.0.1", port, incarnation=rank.identity.incarnation)


def prefill(
    transfer: TransferId, blocks: Iterable[int], tokens: int, consumers: int = 1
) -> tuple[Expect, Advance, Finish]:
    """A prompt of `tokens` tokens that is computed in one step into `blocks`."""
    spans = to_spans(list(blocks))
    return Expect(transfer, tokens, consumers), Advance(transfer, tokens, 0, (spans,)), Finish(transfer)


def receive(
    transfer: TransferId,
    consumer: str,
    source: Source,
    blocks: Iterable[int],
    stop: int,
    start: int = 0,
    mode: TransferMode = "push",
) -> Receive:
    """A destination of `blocks` for tokens `[start, stop)`."""
    return Receive(transfer, ConsumerId(consumer), source, start, stop, (to_spans(list(blocks)),), mode)
