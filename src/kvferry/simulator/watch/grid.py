"""The grid of cases: which faults a history has met at which stage of a transfer.

A fault that hits a transfer counts for the stage of each of the transfer's consumer requests at that instant:
with several consumers one may be decoding while a post for another one is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kvferry.ids import ConsumerId, EngineId, PeerName, TransferId
from kvferry.protocol.commands import Abandon, Preempt, Released
from kvferry.protocol.reasons import LEASE_EXPIRED, code_of
from kvferry.simulator.ground.events import (
    Commanded,
    DecodeEnded,
    EngineStarted,
    FabricFault,
    FaultInjected,
    MessageEnded,
    MessageSent,
    Observed,
    PostEnded,
    Reported,
)
from kvferry.simulator.ground.outcome import CellKey
from kvferry.simulator.watch.checkers.base import Checker, Handlers
from kvferry.simulator.watch.courses import Course, Hand
from kvferry.simulator.watch.stages import RECEIVED, Stages
from kvferry.transport.base import PostState
from kvferry.transport.faults import MessageFault, PostFault

D_ABORT = "D abort"
P_ABORT = "P abort"
D_CRASH = "D crash"
P_CRASH = "P crash"
PEER_BACK = "peer back"
MESSAGE_LOST = "message lost"
MESSAGE_DOUBLED = "message doubled"
MESSAGE_LATE = "message late"
POST_REFUSED = "post refused"
RANK_ERROR = "error on one rank"
STALLED = "transfer stalled"
LEASE_ENDS = "lease ends"
P_PREEMPTION = "preemption on P"
D_PREEMPTION = "preemption on D"
SAME_ID = "same id again"

FAULTS = (
    D_ABORT,
    P_ABORT,
    D_CRASH,
    P_CRASH,
    PEER_BACK,
    MESSAGE_LOST,
    MESSAGE_DOUBLED,
    MESSAGE_LATE,
    POST_REFUSED,
    RANK_ERROR,
    STALLED,
    LEASE_ENDS,
    P_PREEMPTION,
    D_PREEMPTION,
    SAME_ID,
)
IMPOSSIBLE: dict[CellKey, str] = {
    (RECEIVED, LEASE_ENDS): "the lease begins when the prefill has ended",
}
"""Cells that no history can reach, each with its reason."""

_POST_FAULTS = {PostFault.REFUSE.value: POST_REFUSED, PostFault.FAIL.value: RANK_ERROR}
_MESSAGE_FAULTS = {MessageFault.DOUBLE.value: MESSAGE_DOUBLED, MessageFault.DELAY.value: MESSAGE_LATE}
_HELLO = b"\xa1t\xa5hello"
"""How a greeting's bytes begin to be told from other messages; it names no transfer, but carries one."""


class Grid(Checker):
    """Counts cells, and drives the stages: an event is judged by the stages before it."""

    def __init__(self, stages: Stages) -> None:
        self.cells: dict[CellKey, int] = {}
        self.stages = stages
        self._payloads: dict[tuple[PeerName, int], bytes] = {}
        self._crashed: set[EngineId] = set()
        super().__init__()

    def handlers(self) -> Handlers:
        """What is called for which kind of event."""
        return {
            FaultInjected: self._injected,
            FabricFault: self._fabric_fault,
            MessageSent: self._sent,
            MessageEnded: self._message_ended,
            PostEnded: self._post_ended,
            EngineStarted: self._started,
            Commanded: self._commanded,
            Reported: self._reported,
            DecodeEnded: self._decode_ended,
        }

    def observe(self, event: Observed) -> None:
        """Take one event, and pass it on to the stages: what an event ends is looked at before it does."""
        super().observe(event)
        self.stages.observe(event)

    def taker(self, kind: type[Observed]) -> Callable[[Any], None] | None:
        """What takes events of a kind; None when nothing does."""
        ours, theirs = super().taker(kind), self.stages.taker(kind)
        return self.observe if ours is not None and theirs is not None else ours or theirs

    def hit(self, fault: str, transfers: Iterable[TransferId]) -> None:
        """A fault has just hit these transfers."""
        for transfer in transfers:
            hand = self.stages.hands.get(transfer)
            if hand is not None:
                self._hit(fault, hand.courses)

    def _hit(self, fault: str, courses: Iterable[Course]) -> None:
        for course in courses:
            stage = self.stages.stage(course)
            if stage is not None:
                self._count(stage, fault)

    def _count(self, stage: str, fault: str) -> None:
        cell = stage, fault
        self.cells[cell] = self.cells.get(cell, 0) + 1

    # --- faults ----------------------------------------------------------------------------------

    def _injected(self, event: FaultInjected) -> None:
        if event.kind == "crash":
            # Told before the processes die, whose cores cannot be looked into afterwards.
            self._crash(EngineId(event.what.partition(",")[0]))
        elif event.kind == "replay":
            self.hit(SAME_ID, event.transfers)
        elif event.kind == "abort":
            consumer = ConsumerId(event.what)
            self.hit(D_ABORT, [name for name in event.transfers if self.stages.course(name, consumer)])

    def _fabric_fault(self, event: FabricFault) -> None:
        fault = _POST_FAULTS.get(event.fault)
        if event.fault == PostFault.STALL.value:
            fault = STALLED
        if fault is not None:
            course = self.stages.course_into(event.target, event.target_blocks)
            if course is not None:
                self.hit(fault, (course.transfer,))
            return
        fault = _MESSAGE_FAULTS.get(event.fault)
        if fault is not None:
            self.hit(fault, self._named(event.rank, event.target, event.payload))

    def _sent(self, event: MessageSent) -> None:
        self._payloads[event.rank, event.number] = event.payload

    def _message_ended(self, event: MessageEnded) -> None:
        payload = self._payloads.pop((event.rank, event.number), None)
        if payload is not None and not event.arrived:
            self.hit(MESSAGE_LOST, self._named(event.rank, event.target, payload))

    def _post_ended(self, event: PostEnded) -> None:
        if event.state is PostState.FAILED:
            course = self.stages.course_of_write(event.rank, event.handle)
            if course is not None:
                self.hit(RANK_ERROR, (course.transfer,))

    def _commanded(self, event: Commanded) -> None:
        command = event.command
        if isinstance(command, Preempt):
            self.hit(P_PREEMPTION, command.transfers)
        elif isinstance(command, Abandon) and "abort" in command.reason:
            self.hit(P_ABORT, (command.transfer,))

    def _reported(self, event: Reported) -> None:
        result = event.result
        if isinstance(result, Released) and code_of(result.outcome) == LEASE_EXPIRED:
            self.hit(LEASE_ENDS, (result.transfer,))

    def _decode_ended(self, event: DecodeEnded) -> None:
        course = self.stages.course_of_request(event.engine, event.request) if event.preempted else None
        if course is not None:
            self.hit(D_PREEMPTION, (course.transfer,))

    def _crash(self, engine: EngineId) -> None:
        self._crashed.add(engine)
        for hand in self.stages.hands.values():
            if hand.engine == engine:
                self._hit(P_CRASH, hand.courses)
            dying = [course for course in hand.courses if course.engine == engine and not course.gone]
            if dying:
                self._hit(D_CRASH, hand.courses)
            for course in dying:
                course.gone_at_stage = self.stages.stage(course)

    def _started(self, event: EngineStarted) -> None:
        if event.engine not in self._crashed:
            return
        for hand in self.stages.hands.values():
            if hand.engine == event.engine:
                self._hit(PEER_BACK, hand.courses)
            for course in hand.courses:
                if course.engine == event.engine and course.gone_at_stage is not None:
                    # Its producer still holds what it held for the dead request.
                    self._count(course.gone_at_stage, PEER_BACK)
                    course.gone_at_stage = None

    def _named(self, rank: PeerName, target: PeerName, payload: bytes) -> Iterator[TransferId]:
        """Transfers between two ranks' engines that a message speaks of; a greeting speaks of all."""
        ends = {self.stages.engine_of(rank), self.stages.engine_of(target)}
        greets = _HELLO in payload[:24]
        for hand in self.stages.hands.values():
            if ends <= _engines(hand) and (greets or hand.transfer.encode() in payload):
                yield hand.transfer


def _engines(hand: Hand) -> set[EngineId | None]:
    return {hand.engine, *(course.engine for course in hand.courses)}
