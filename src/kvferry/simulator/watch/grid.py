"""The grid of cases: which faults a history has met at which stage of a transfer.

A fault counts for the consumer request that it hits, at the stage where that request is just then: an abort
for the request that is aborted, a refused post for the one whose blocks it was to write. What hits the whole
transfer, as the death of its producer does, counts for each of its consumer requests. Some cells mean
something only where a transfer has several consumers, `BY_SIBLING`: those count for the others of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
from kvferry.simulator.ground.options import HARMLESS
from kvferry.simulator.ground.outcome import CellKey
from kvferry.simulator.watch.checkers.base import Checker, Handlers
from kvferry.simulator.watch.courses import Course
from kvferry.simulator.watch.stages import (
    ALL_DONE,
    DECODING,
    HANDSHAKE,
    RECEIVED,
    SENT,
    STAGES,
    TOLD,
    Stages,
)
from kvferry.transport.base import PostState
from kvferry.transport.faults import MessageFault, PostFault

D_ABORT = "abort of D"
P_ABORT = "abort of P"
D_CRASH = "crash of D"
P_CRASH = "crash of P"
PEER_BACK = "crash: back again"
MESSAGE_LOST = "message_lost"
MESSAGE_DOUBLED = "message_doubled"
MESSAGE_LATE = "message_late"
POST_REFUSED = "post_refused"
RANK_ERROR = "post_failed"
STALLED = "post_stalled"
LEASE_ENDS = "stall_agent: lease ends"
P_PREEMPTION = "preempt on P"
D_PREEMPTION = "preempt on D"
SAME_ID = "replay"

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

_NOT_YET = (
    "nothing is posted for a request that its producer does not know; another one of its transfer is hit"
)
_ALL_WRITTEN = "all of its own writes have ended; one of another request of its transfer is hit"
_NOT_DECODING = "only what decodes is preempted on D; another request of its transfer is"
_OF_POSTS = (POST_REFUSED, RANK_ERROR, STALLED)
BY_SIBLING: dict[CellKey, str] = {
    **{(stage, fault): _NOT_YET for stage in (SENT, HANDSHAKE) for fault in _OF_POSTS},
    **{(stage, fault): _ALL_WRITTEN for stage in (ALL_DONE, TOLD, DECODING) for fault in _OF_POSTS},
    **{(stage, D_PREEMPTION): _NOT_DECODING for stage in STAGES if stage != DECODING},
}
"""Cells where the fault hits another consumer request of the same transfer, each with its reason.

A request at that stage cannot be hit itself, and shares its transfer's tables and lanes with the one that is.
"""

_WITHOUT_FAULTS = frozenset({P_PREEMPTION, D_PREEMPTION})
"""An engine that runs out of blocks preempts, whatever may go wrong or not."""
_ONLY_BY: dict[str, frozenset[str]] = {
    MESSAGE_DOUBLED: frozenset({"message_doubled", "late_write"}),
    MESSAGE_LATE: frozenset({"message_late", "late_write"}),
    POST_REFUSED: frozenset({"post_refused"}),
    STALLED: frozenset({"post_stalled", "late_write"}),
    SAME_ID: frozenset({"replay", "late_write"}),
}
"""What brings a fault of the grid about, where it is not any of many kinds."""


def within_reach(kinds: frozenset[str]) -> tuple[str, ...]:
    """The grid's faults that histories with these kinds of faults can meet."""
    harmful = kinds - HARMLESS
    return tuple(
        fault for fault in FAULTS if fault in _WITHOUT_FAULTS or harmful & _ONLY_BY.get(fault, harmful)
    )


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

    def _hit_all(self, fault: str, transfers: Iterable[TransferId]) -> None:
        """A fault has just hit these transfers as a whole."""
        for transfer in transfers:
            hand = self.stages.hands.get(transfer)
            for course in () if hand is None else hand.courses:
                self._hit(fault, course)

    def _hit_one(self, fault: str, course: Course | None) -> None:
        """A fault has just hit one consumer request."""
        if course is None:
            return
        self._hit(fault, course)
        for other in self.stages.hands[course.transfer].courses:
            stage = self.stages.stage(other) if other is not course else None
            if stage is not None and (stage, fault) in BY_SIBLING:
                self._count(stage, fault)

    def _hit(self, fault: str, course: Course) -> None:
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
            self._hit_all(SAME_ID, event.transfers)
        elif event.kind == "abort":
            for transfer in event.transfers:
                self._hit_one(D_ABORT, self.stages.course(transfer, ConsumerId(event.what)))

    def _fabric_fault(self, event: FabricFault) -> None:
        fault = _POST_FAULTS.get(event.fault)
        if event.fault == PostFault.STALL.value:
            fault = STALLED
        if fault is not None:
            self._hit_one(fault, self.stages.course_into(event.owner, event.target_blocks))
            return
        fault = _MESSAGE_FAULTS.get(event.fault)
        if fault is not None:
            self._hit_named(fault, event.rank, event.target, event.payload)

    def _sent(self, event: MessageSent) -> None:
        self._payloads[event.rank, event.number] = event.payload

    def _message_ended(self, event: MessageEnded) -> None:
        payload = self._payloads.pop((event.rank, event.number), None)
        if payload is not None and not event.arrived:
            self._hit_named(MESSAGE_LOST, event.rank, event.target, payload)

    def _post_ended(self, event: PostEnded) -> None:
        if event.state is PostState.FAILED:
            self._hit_one(RANK_ERROR, self.stages.course_of_write(event.rank, event.handle))

    def _commanded(self, event: Commanded) -> None:
        command = event.command
        if isinstance(command, Preempt):
            self._hit_all(P_PREEMPTION, command.transfers)
        elif isinstance(command, Abandon) and "abort" in command.reason:
            self._hit_all(P_ABORT, (command.transfer,))

    def _reported(self, event: Reported) -> None:
        result = event.result
        if isinstance(result, Released) and code_of(result.outcome) == LEASE_EXPIRED:
            self._hit_all(LEASE_ENDS, (result.transfer,))

    def _decode_ended(self, event: DecodeEnded) -> None:
        if event.preempted:
            self._hit_one(D_PREEMPTION, self.stages.course_of_request(event.engine, event.request))

    def _crash(self, engine: EngineId) -> None:
        self._crashed.add(engine)
        for hand in self.stages.hands.values():
            for course in hand.courses:
                if hand.engine == engine:
                    self._hit(P_CRASH, course)
                if course.engine == engine and not course.gone:
                    self._hit(D_CRASH, course)
                    course.gone_at_stage = self.stages.stage(course)

    def _started(self, event: EngineStarted) -> None:
        if event.engine not in self._crashed:
            return
        for hand in self.stages.hands.values():
            for course in hand.courses:
                if hand.engine == event.engine:
                    self._hit(PEER_BACK, course)
                if course.engine == event.engine and course.gone_at_stage is not None:
                    # Its producer still holds what it held for the dead request.
                    self._count(course.gone_at_stage, PEER_BACK)
                    course.gone_at_stage = None

    def _hit_named(self, fault: str, rank: PeerName, target: PeerName, payload: bytes) -> None:
        """A message has suffered: it hits what it speaks of between the two engines, a greeting all."""
        ends = {self.stages.engine_of(rank), self.stages.engine_of(target)}
        greets = _HELLO in payload[:24]
        for hand in self.stages.hands.values():
            if hand.engine in ends and (greets or hand.transfer.encode() in payload):
                for course in hand.courses:
                    if ends == {hand.engine, course.engine} and (
                        greets or course.consumer.encode() in payload
                    ):
                        self._hit(fault, course)
