"""Hand-made histories for the simulator's checkers: one producer engine P and one consumer engine D."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvferry.handoff import TransferMode
from kvferry.ids import ConsumerId, EngineId, PeerName, TransferId
from kvferry.layout.spans import to_spans
from kvferry.protocol.codec import Encoder
from kvferry.protocol.commands import Advance, Command, Preempt, Receive, Result, Source
from kvferry.protocol.limits import Limits
from kvferry.protocol.messages import AnyMessage
from kvferry.simulator.ground.arena import GroupShape
from kvferry.simulator.ground.events import (
    BlocksReturned,
    BlocksTaken,
    Commanded,
    DecodeEnded,
    DecodeStarted,
    EngineCrashed,
    EngineStarted,
    Healed,
    Landed,
    MessageEnded,
    MessageSent,
    Observed,
    Posted,
    PostEnded,
    Reported,
    RequestEnded,
)
from kvferry.simulator.watch.checkers.base import Checker
from kvferry.simulator.watch.checkers.ledger import Ledger
from kvferry.simulator.watch.checkers.letters import Letters
from kvferry.simulator.watch.checkers.wakes import Wakes
from kvferry.transport.base import PostState

PRODUCER, CONSUMER = EngineId("P"), EngineId("D")
P0, P1 = PeerName("P/1/tp0"), PeerName("P/1/tp1")
D0, D1 = PeerName("D/1/tp0"), PeerName("D/1/tp1")
T = TransferId("t")
C = ConsumerId("c")
SOURCE = Source(PRODUCER, "p", 1)


@dataclass
class FakeOracle:
    """A world's memory, as a set of what is wrong in it."""

    wrong: set[tuple[PeerName, int]] = field(default_factory=set)
    """Ranks and blocks whose bytes are another's."""
    left: list[str] = field(default_factory=list)
    is_calm: bool = False
    delay_seconds: float = 0.2
    limits: Limits = field(default_factory=Limits)
    retry_bound_seconds: float = 5.0
    groups: tuple[GroupShape, ...] = (GroupShape(4),)
    groups_by_rank: dict[PeerName, tuple[GroupShape, ...]] = field(default_factory=dict)
    """Of ranks that have others."""
    clock_rate: float = 1.0
    misfits: set[tuple[PeerName, PeerName]] = field(default_factory=set)
    """Source and target."""
    memory: dict[tuple[PeerName, int, int], int] = field(default_factory=dict)
    """What a token of a block has, by rank, block and place in the block."""

    def groups_of(self, rank: PeerName) -> tuple[GroupShape, ...]:
        """The same, but for some."""
        return self.groups_by_rank.get(rank, self.groups)

    def fits(self, source: PeerName, target: PeerName) -> bool:
        """Whether KV may go from the one to the other."""
        return (source, target) not in self.misfits

    def content(self, rank: PeerName, group: int, blocks: Sequence[int]) -> npt.NDArray[np.uint32]:
        """One layer and head."""
        places = range(self.groups[group].block_tokens)
        words = [self.memory.get((rank, block, place), 0) for block in blocks for place in places]
        return np.array(words, dtype=np.uint32).reshape(-1, 1, 1)

    def limits_of(self, rank: PeerName) -> Limits:
        """Every rank has the same."""
        return self.limits

    def clock_rate_of(self, rank: PeerName) -> float:
        """Every rank's clock runs as fast."""
        return self.clock_rate

    def mismatch(
        self, rank: PeerName, prompt: int, group: int, start: int, stop: int, blocks: Sequence[int]
    ) -> str | None:
        """Blocks of four tokens each."""
        used = blocks[: -(-stop // 4) - start // 4]
        bad = [block for block in used if (rank, block) in self.wrong]
        return f"blocks {bad} of prompt {prompt}" if bad else None

    def prompt_of(self, transfer: TransferId, consumer: ConsumerId) -> int | None:
        """Every request has prompt 7."""
        return 7

    def remains(self) -> Iterable[str]:
        """What the test has put there."""
        return self.left


class History:
    """Feeds events to the ledger and to one checker, one after the other, a second apart."""

    def __init__(self, checker: type[Checker], *, tp: int = 1, calm: bool = False) -> None:
        self.oracle = FakeOracle(is_calm=calm)
        self.ledger = Ledger()
        self.letters, self.wakes = Letters(), Wakes(self.oracle)
        parts = {
            "ledger": self.ledger,
            "letters": self.letters,
            "wakes": self.wakes,
            "oracle": self.oracle,
        }
        wanted = checker.__init__.__annotations__
        self.checker = checker(**{name: part for name, part in parts.items() if name in wanted})
        self.now = 0.0
        self._messages = 0
        self.producers, self.consumers = (P0, P1)[:tp], (D0, D1)[:tp]
        self.start(PRODUCER, self.producers)
        self.start(CONSUMER, self.consumers)

    @property
    def found(self) -> list[str]:
        """What the checker has found so far."""
        return [violation.what for violation in self.checker.violations]

    def finish(self) -> list[str]:
        """End the history; what has been found."""
        self.checker.finish()
        return self.found

    def see(self, event: Observed) -> None:
        """Feed one event."""
        for one in (self.ledger, self.letters, self.wakes, self.checker):
            one.observe(event)

    def _tick(self) -> float:
        self.now += 1.0
        return self.now

    def start(self, engine: EngineId, ranks: tuple[PeerName, ...]) -> None:
        """An engine with 32 blocks starts."""
        self.see(EngineStarted(self._tick(), engine, ranks, 32))

    def crash(self, engine: EngineId) -> None:
        """An engine of the first generation dies."""
        ranks = self.producers if engine == PRODUCER else self.consumers
        self.see(EngineCrashed(self._tick(), engine, ranks))

    def command(self, rank: PeerName, *commands: Command) -> None:
        """A host tells a rank."""
        for command in commands:
            self.see(Commanded(self._tick(), rank, command))

    def report(self, rank: PeerName, *results: Result) -> None:
        """A rank tells its host."""
        for result in results:
            self.see(Reported(self._tick(), rank, result))

    def say(self, rank: PeerName, to: PeerName, message: AnyMessage, *, arrives: bool = True) -> None:
        """A rank sends a message, which arrives in the same second or never."""
        (payload,) = Encoder(1 << 16).encode(message)
        self._messages += 1
        at_seconds = self._tick()
        self.see(MessageSent(at_seconds, rank, to, self._messages, payload))
        self.see(MessageEnded(at_seconds, rank, to, self._messages, arrives))

    def take(self, engine: EngineId, *blocks: int, owner: str = "request") -> None:
        """A pool gives blocks out."""
        self.see(BlocksTaken(self._tick(), engine, blocks, owner))

    def give(self, engine: EngineId, *blocks: int) -> None:
        """A pool gets blocks back."""
        self.see(BlocksReturned(self._tick(), engine, blocks))

    def post(
        self,
        handle: int,
        sources: Sequence[int],
        targets: Sequence[int],
        rank: PeerName = P0,
        to: PeerName = D0,
    ) -> None:
        """A rank posts a WRITE."""
        self.see(Posted(self._tick(), rank, to, handle, tuple(sources), tuple(targets)))

    def read(
        self,
        handle: int,
        sources: Sequence[int],
        targets: Sequence[int],
        rank: PeerName = D0,
        source: PeerName = P0,
    ) -> None:
        """A rank posts a READ."""
        self.see(Posted(self._tick(), rank, rank, handle, tuple(sources), tuple(targets), source))

    def land(self, handle: int, rank: PeerName = P0, to: PeerName = D0) -> None:
        """A piece of a WRITE lands."""
        self.see(Landed(self._tick(), rank, to, handle))

    def end_post(self, handle: int, rank: PeerName = P0, to: PeerName = D0) -> None:
        """The initiator sees a WRITE done."""
        self.see(PostEnded(self._tick(), rank, to, handle, PostState.DONE))

    def decode(self, *tables: Sequence[int], tokens: int, request: str = "c") -> None:
        """The consumer engine starts decoding."""
        ranks = self.consumers
        self.see(DecodeStarted(self._tick(), CONSUMER, ranks, request, 7, tokens, tuple(map(tuple, tables))))

    def end_decode(self, request: str = "c") -> None:
        """The consumer engine ends a decode request."""
        self.see(DecodeEnded(self._tick(), CONSUMER, request, preempted=False))

    def end(self, engine: EngineId, outcome: str, request: str = "c") -> None:
        """An engine counts a request's outcome."""
        consumer = C if engine == CONSUMER else None
        self.see(RequestEnded(self._tick(), engine, request, T, consumer, outcome))

    def heal(self, deadline_seconds: float) -> None:
        """Faults stop."""
        self.see(Healed(self._tick(), deadline_seconds))


def receive(
    blocks: Sequence[int],
    start: int = 0,
    stop: int = 8,
    consumer: ConsumerId = C,
    mode: TransferMode = "push",
    more: Sequence[Sequence[int]] = (),
) -> Receive:
    """A destination in `blocks`, and of further cache groups in `more`."""
    groups = tuple(to_spans(list(one)) for one in (blocks, *more))
    return Receive(T, consumer, SOURCE, start, stop, groups, mode)


def advance(blocks: Sequence[int], frontier: int = 8, first_block: int = 0) -> Advance:
    """KV in `blocks`."""
    return Advance(T, frontier, first_block, (to_spans(list(blocks)),))


def preempt(ticket: int) -> Preempt:
    """The transfer's blocks are taken away."""
    return Preempt((T,), ticket)
