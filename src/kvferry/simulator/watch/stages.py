"""How far each transfer has come, for each of its consumers: the stages of the grid.

Most of it follows from events. Who has been told of what is known only to the cores, which are looked into:
this measures what a history visits, it judges nothing.
"""

from __future__ import annotations

from typing import Protocol

from kvferry.agent.loop import Loop
from kvferry.ids import ConsumerId, PeerName, TransferId
from kvferry.protocol.states import DeliveryState, PartState
from kvferry.simulator.watch.courses import Course, Courses, Hand

QUEUED = "registration queued"
SENT = "registration sent"
RECEIVED = "received while P runs"
HANDSHAKE = "matched, handshake pending"
POSTED = "posted"
SOME_DONE = "some ranks done"
ALL_DONE = "all done, D not told"
TOLD = "D told, not scheduled"
DECODING = "decoding"

_WANTED = frozenset({DeliveryState.REGISTERED, DeliveryState.ASKED, DeliveryState.LENT})
_TOLD = frozenset({PartState.TOLD, PartState.ASKED, PartState.OFFERED})

STAGES = (QUEUED, SENT, RECEIVED, HANDSHAKE, POSTED, SOME_DONE, ALL_DONE, TOLD, DECODING)


class Loops(Protocol):
    """Where the cores can be found."""

    def loop_of(self, rank: PeerName) -> Loop | None:
        """The agent loop of a living rank."""
        ...


class Stages(Courses):
    """Courses, and the stage at which each is."""

    def __init__(self, loops: Loops) -> None:
        self._loops = loops
        super().__init__()

    def stage_of(self, transfer: TransferId, consumer: ConsumerId) -> str | None:
        """The stage of one consumer request; None when it is in none: failing, ended, unknown."""
        course = self.course(transfer, consumer)
        return None if course is None else self.stage(course)

    def stage(self, course: Course) -> str | None:
        """The stage of one consumer request."""
        if course.decoding:
            return DECODING
        if course.gone or course.failed:
            return None
        return _late_stage(course) or self._early_stage(course)

    def _early_stage(self, course: Course) -> str:
        """Nothing is posted yet: who knows of whom?"""
        if len(course.wanted) < len(course.ranks):
            return QUEUED
        hand = self.hands[course.transfer]
        registered, linked = self._at_producer(hand, course)
        if registered:
            # With everything computed it is about to be posted, or its posts are refused.
            return POSTED if hand.is_complete else RECEIVED
        told = self._is_told(course)
        if hand.is_complete and not (told and linked):
            return HANDSHAKE
        return SENT if told else QUEUED

    def _at_producer(self, hand: Hand, course: Course) -> tuple[bool, bool]:
        registered = linked = False
        for rank in hand.ranks or self.lives.get(hand.engine, ()):
            loop = self._loops.loop_of(rank)
            if loop is None:
                continue
            state = loop.producer.state
            linked = linked or any(target in state.lanes for target in course.ranks)
            row = state.rows.get(course.transfer)
            deliveries = () if row is None else row.deliveries.values()
            registered = registered or any(
                delivery.consumer == course.consumer and delivery.state in _WANTED for delivery in deliveries
            )
        return registered, linked

    def _is_told(self, course: Course) -> bool:
        for rank in course.ranks:
            loop = self._loops.loop_of(rank)
            row = None if loop is None else loop.consumer.state.rows.get((course.transfer, course.consumer))
            if row is not None and any(part.state in _TOLD for part in (row.parts or {}).values()):
                return True
        return False


def _late_stage(course: Course) -> str | None:
    """Something is posted; None before that."""
    count = len(course.ranks)
    if len(course.received) == count:
        return TOLD
    done = course.ranks_written()
    if done == count:
        return ALL_DONE
    if done or course.received:
        return SOME_DONE
    return POSTED if course.posted else None
