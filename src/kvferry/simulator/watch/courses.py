"""Follows each consumer request's way through its transfer, as far as events tell of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvferry.handoff import TransferMode
from kvferry.ids import ConsumerId, EngineId, PeerName, TransferId
from kvferry.protocol.commands import (
    Abandon,
    Advance,
    AnnounceCommand,
    Command,
    Expect,
    Finish,
    Preempt,
    Receive,
    Received,
    ReceiveFailed,
    Withdraw,
)
from kvferry.simulator.ground.events import (
    BlocksReturned,
    Commanded,
    DecodeEnded,
    DecodeStarted,
    EngineCrashed,
    EngineStarted,
    LegSent,
    Posted,
    PostEnded,
    Reported,
)
from kvferry.simulator.watch.checkers.base import Checker, Handlers
from kvferry.simulator.watch.checkers.ledger import expanded
from kvferry.transport.base import PostState


@dataclass(slots=True, eq=False)
class Course:
    """One consumer request's way through a transfer. Block sets are per rank."""

    transfer: TransferId
    consumer: ConsumerId
    engine: EngineId
    ranks: tuple[PeerName, ...]
    wanted: dict[PeerName, set[int]] = field(default_factory=dict)
    written: dict[PeerName, set[int]] = field(default_factory=dict)
    mode: TransferMode = "push"
    """Known when its destination is."""
    posted: bool = False
    received: set[PeerName] = field(default_factory=set)
    decoding: bool = False
    failed: bool = False
    """Its receive has failed or was withdrawn; if it decodes, it does so from what it computes itself."""
    gone: bool = False
    """It has ended, or its engine has died."""
    gone_at_stage: str | None = None
    """Where it was when its engine was about to die."""

    def ranks_written(self) -> int:
        """Ranks of which every block is in place."""
        return sum(1 for rank, blocks in self.wanted.items() if blocks <= self.written.get(rank, set()))


@dataclass(slots=True, eq=False)
class Hand:
    """The producer's side of a transfer. `frontiers` per rank in the running life of the id."""

    transfer: TransferId
    engine: EngineId
    ranks: tuple[PeerName, ...] = ()
    tokens: int = 0
    consumers: int = 0
    frontiers: dict[PeerName, int] = field(default_factory=dict)
    running: bool = False
    """The engine has the prefill request and has not ended it."""
    courses: list[Course] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether every rank has computed the whole prompt."""
        frontiers = self.frontiers
        return bool(self.ranks) and all(frontiers.get(rank, -1) >= self.tokens for rank in self.ranks)


class Courses(Checker):
    """Follows every transfer of a world."""

    def __init__(self) -> None:
        self.hands: dict[TransferId, Hand] = {}
        self.lives: dict[EngineId, tuple[PeerName, ...]] = {}
        """Ranks of each engine's life now, empty while it is dead."""
        self._engine_of: dict[PeerName, EngineId] = {}
        self._by_name: dict[tuple[TransferId, ConsumerId], Course] = {}
        self._by_request: dict[tuple[EngineId, str], Course] = {}
        self._by_block: dict[PeerName, dict[int, Course]] = {}
        self._writes: dict[tuple[PeerName, int], tuple[Course, tuple[int, ...]]] = {}
        super().__init__()

    def handlers(self) -> Handlers:
        """What is called for which kind of event."""
        return {
            EngineStarted: self._started,
            EngineCrashed: self._crashed,
            LegSent: self._sent,
            Commanded: self._commanded,
            Reported: self._reported,
            Posted: self._posted,
            PostEnded: self._post_ended,
            BlocksReturned: self._returned,
            DecodeStarted: self._decode_started,
            DecodeEnded: self._decode_ended,
        }

    # --- looking ---------------------------------------------------------------------------------

    def courses(self) -> Iterator[Course]:
        """Every consumer request that has been seen, of every transfer."""
        return iter(self._by_name.values())

    def course_into(self, rank: PeerName, blocks: tuple[int, ...]) -> Course | None:
        """The consumer request whose destination on a rank has one of these blocks."""
        known = self._by_block.get(rank, {})
        return next((known[block] for block in blocks if block in known), None)

    def course_of_write(self, rank: PeerName, handle: int) -> Course | None:
        """The consumer request that a write was for whose end its rank has not seen before."""
        course, _ = self._writes.get((rank, handle), (None, ()))
        return course

    def course_of_request(self, engine: EngineId, request: str) -> Course | None:
        """The consumer request of that name on an engine."""
        return self._by_request.get((engine, request))

    def engine_of(self, rank: PeerName) -> EngineId | None:
        """The engine of a rank of any life."""
        return self._engine_of.get(rank)

    def course(self, transfer: TransferId, consumer: ConsumerId) -> Course | None:
        """A consumer request's course."""
        return self._by_name.get((transfer, consumer))

    # --- following -------------------------------------------------------------------------------

    def _started(self, event: EngineStarted) -> None:
        self.lives[event.engine] = event.ranks
        for rank in event.ranks:
            self._engine_of[rank] = event.engine

    def _crashed(self, event: EngineCrashed) -> None:
        for course in self._by_name.values():
            if course.engine == event.engine and not course.gone:
                course.gone, course.decoding = True, False
        for hand in self.hands.values():
            if hand.engine == event.engine:
                hand.running, hand.ranks, hand.frontiers = False, (), {}
        self.lives[event.engine] = ()

    def _sent(self, event: LegSent) -> None:
        """A name may be used again once the earlier request of that name has ended."""
        if event.consumer is not None:
            self._by_name.pop((event.transfer, event.consumer), None)

    def _commanded(self, event: Commanded) -> None:
        command, engine = event.command, self._engine_of[event.rank]
        if isinstance(command, AnnounceCommand | Receive):
            course = self._course(command, engine)
            if isinstance(command, Receive):
                course.mode = command.mode
                blocks = expanded(command.groups)
                course.wanted[event.rank] = set(blocks)
                self._by_block.setdefault(event.rank, {}).update(dict.fromkeys(blocks, course))
        elif isinstance(command, Withdraw):
            known = self._by_name.get((command.transfer, command.consumer))
            if known is not None:
                known.failed = True
        else:
            self._producer_commanded(event.rank, engine, command)

    def _producer_commanded(self, rank: PeerName, engine: EngineId, command: Command) -> None:
        if isinstance(command, Expect):
            hand = self.hands.setdefault(command.transfer, Hand(command.transfer, engine))
            if not hand.running:
                hand.engine, hand.ranks, hand.frontiers = engine, self.lives[engine], {}
            hand.tokens, hand.consumers, hand.running = command.tokens, command.consumers, True
        elif isinstance(command, Advance):
            self.hands[command.transfer].frontiers[rank] = command.frontier
        elif isinstance(command, Finish | Abandon):
            self.hands[command.transfer].running = False
        elif isinstance(command, Preempt):
            for transfer in command.transfers:
                # A rank that had no room for its `Expect` knows nothing of it.
                if transfer in self.hands:
                    self.hands[transfer].frontiers.clear()

    def _course(self, command: AnnounceCommand | Receive, engine: EngineId) -> Course:
        key = command.transfer, command.consumer
        course = self._by_name.get(key)
        if course is None:
            course = Course(command.transfer, command.consumer, engine, self.lives[engine])
            self._by_name[key] = self._by_request[engine, command.consumer] = course
            hand = self.hands.setdefault(command.transfer, Hand(command.transfer, command.source.engine))
            hand.courses.append(course)
        return course

    def _reported(self, event: Reported) -> None:
        result = event.result
        if isinstance(result, Received | ReceiveFailed):
            course = self._by_name.get((result.transfer, result.consumer))
            if course is None:
                return
            if isinstance(result, Received):
                course.received.add(event.rank)
            else:
                course.failed = True

    def _posted(self, event: Posted) -> None:
        course = self.course_into(event.target, event.target_blocks)
        if course is not None:
            course.posted = True
            self._writes[event.rank, event.handle] = course, event.target_blocks

    def _post_ended(self, event: PostEnded) -> None:
        course, blocks = self._writes.pop((event.rank, event.handle), (None, ()))
        if course is not None and event.state is PostState.DONE:
            course.written.setdefault(event.target, set()).update(blocks)

    def _returned(self, event: BlocksReturned) -> None:
        for rank in self.lives[event.engine]:
            known = self._by_block.get(rank)
            if known:
                for block in event.blocks:
                    known.pop(block, None)

    def _decode_started(self, event: DecodeStarted) -> None:
        course = self._by_request.get((event.engine, event.request))
        if course is not None:
            course.decoding = True

    def _decode_ended(self, event: DecodeEnded) -> None:
        course = self._by_request.get((event.engine, event.request))
        if course is not None:
            course.decoding = False
            course.failed = True
            course.gone = not event.preempted
