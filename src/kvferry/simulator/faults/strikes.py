"""How directed faults strike: which lever is pulled for which fault of the grid."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from kvferry.ids import EngineId, PeerName
from kvferry.simulator.engine.engine import Engine
from kvferry.simulator.engine.requests import Status
from kvferry.simulator.faults.levers import Levers
from kvferry.simulator.watch import grid
from kvferry.simulator.watch.courses import Course
from kvferry.simulator.watch.stages import DECODING, POSTED, SOME_DONE, TOLD, Stages
from kvferry.simulator.world.world import World
from kvferry.transport.memory import MessageFault, PostFault

WATCH_SECONDS = 0.002
"""How often a producer is looked at whose last chunk is waited for."""
HOLD_SECONDS = 1.6
"""So long a request is kept at a stage; the longest that a producer's step is put off."""
BY_LINK: dict[str, MessageFault | PostFault] = {
    grid.MESSAGE_LOST: MessageFault.LOSE,
    grid.MESSAGE_DOUBLED: MessageFault.DOUBLE,
    grid.MESSAGE_LATE: MessageFault.DELAY,
    grid.POST_REFUSED: PostFault.REFUSE,
    grid.RANK_ERROR: PostFault.FAIL,
    grid.STALLED: PostFault.STALL,
}
"""Faults that wait on a link until something is sent or posted over it."""


@dataclass(frozen=True, slots=True)
class Strikes:
    """Levers by fault. Each says whether it has been pulled."""

    levers: Levers
    stages: Stages

    @property
    def world(self) -> World:
        """Where it happens."""
        return self.levers.world

    def strike(self, fault: str, course: Course, random: Random) -> bool:
        """Let a fault hit the transfer of a consumer request now."""
        return _LEVERS[fault](self, course, random)

    def abort_decode(self, course: Course, random: Random) -> bool:
        """Its client leaves."""
        return self.levers.abort(course.consumer)

    def abort_prefill(self, course: Course, random: Random) -> bool:
        """The prefill leg's client leaves."""
        return any(self.levers.abort(name) for _, name in self.prefills(course))

    def crash_consumer(self, course: Course, random: Random) -> bool:
        """Its engine dies, and comes back."""
        return self._crash(course.engine, random.choice((0.0, 0.3, 2.0)))

    def crash_producer(self, course: Course, random: Random) -> bool:
        """The producer's engine dies, and comes back."""
        return self._crash(self.stages.hands[course.transfer].engine, random.choice((0.0, 0.3, 2.0)))

    def bring_back(self, course: Course, random: Random) -> bool:
        """The producer's engine dies and is back before anything else has happened."""
        return self._crash(self.stages.hands[course.transfer].engine, random.choice((0.0, 0.0, 0.001)))

    def replay(self, course: Course, random: Random) -> bool:
        """The router sends the legs again."""
        return self.levers.replay(course.transfer)

    def preempt_prefill(self, course: Course, random: Random) -> bool:
        """The producer takes the prefill request's blocks away."""
        return any(self.levers.preempt(name) for _, name in self.prefills(course))

    def preempt_decode(self, course: Course, random: Random) -> bool:
        """The consumer preempts what decodes of the transfer.

        An engine with steps in flight cannot always do so; who asks may have to ask again.
        """
        courses = self.stages.hands[course.transfer].courses
        decoding = [one for one in courses if self.stages.stage(one) == DECODING]
        asked = [self.levers.preempt(one.consumer) for one in decoding]
        return any(asked)

    def end_lease(self, course: Course, random: Random) -> bool:
        """Keep the consumer from saying or doing anything until the producer has lost patience.

        In vain where faults stop before, or where nobody is left who needs the lease.
        """
        hand = self.stages.hands[course.transfer]
        seconds = self.world.fleet.facts(hand.engine).limits.lease_seconds + 1.0
        served = sum(1 for one in hand.courses if one.gone or len(one.received) == len(one.ranks))
        if self.world.now + seconds > self.world.shape.safety_seconds or served >= hand.consumers > 0:
            return False
        for rank in self.stages.lives[course.engine]:
            self.levers.stall_agent(rank, seconds)
        return self.levers.stall_engine(course.engine, seconds)

    def hold(self, course: Course, stage: str) -> None:
        """Keep a request at its stage for as long as a producer's step may be put off."""
        levers = self.levers
        if stage in (TOLD, DECODING):
            levers.stall_engine(course.engine, HOLD_SECONDS)
            return
        writers = self.stages.hands[course.transfer].ranks if stage in (POSTED, SOME_DONE) else ()
        for rank in (*course.ranks, *writers):
            levers.stall_agent(rank, HOLD_SECONDS)

    def split(self, course: Course) -> bool:
        """Hold those ranks of its engine back that have not been given the request's destination yet.

        The others have registered theirs by then, and are written to. In vain where all have it, or none.
        """
        late = [index for index, rank in enumerate(course.ranks) if rank not in course.wanted]
        if not late or not course.wanted:
            return False
        for index in late:
            self.levers.stall_engine(course.engine, HOLD_SECONDS, rank=index)
        return True

    def part(self, course: Course, random: Random) -> None:
        """Let others of its transfer arrive, maybe on another engine, who are slow to find the producer."""
        world, producer = self.world, self.stages.hands[course.transfer].engine
        if "replay" not in world.faults:
            return
        if random.random() < 0.5:
            for consumer_rank in course.ranks:
                for rank in self.stages.lives.get(producer, ()):
                    self.levers.break_connection(consumer_rank, rank)
        world.resolver.slow_until = world.now + 3.0
        world.resolver.slow_seconds = random.choice((0.2, 1.0))
        self.levers.replay(course.transfer)

    def prefills(self, course: Course) -> Iterator[tuple[EngineId, str]]:
        """The transfer's prefill requests that have not ended, with their engine."""
        dispatch = self.world.router.dispatches.get(course.transfer)
        for leg in () if dispatch is None else dispatch.prefills:
            if leg.engine.alive and not leg.ended:
                yield leg.engine.facts.engine, leg.request

    def _crash(self, engine: EngineId, back_after_seconds: float) -> bool:
        levers = self.levers
        return levers.crash(engine) and levers.restart(engine, back_after_seconds)


_LEVERS: dict[str, Callable[[Strikes, Course, Random], bool]] = {
    grid.D_ABORT: Strikes.abort_decode,
    grid.P_ABORT: Strikes.abort_prefill,
    grid.D_CRASH: Strikes.crash_consumer,
    grid.P_CRASH: Strikes.crash_producer,
    grid.PEER_BACK: Strikes.bring_back,
    grid.LEASE_ENDS: Strikes.end_lease,
    grid.P_PREEMPTION: Strikes.preempt_prefill,
    grid.D_PREEMPTION: Strikes.preempt_decode,
    grid.SAME_ID: Strikes.replay,
}


@dataclass(frozen=True, slots=True)
class LinkFaults:
    """Faults that wait on every link of a request's transfer, and are taken away when it has moved on."""

    world: World
    stages: Stages

    def arm(self, fault: MessageFault | PostFault, course: Course) -> None:
        """Let the next message or post over each of its links suffer."""
        for source, target in self._links(fault, course):
            self.world.network.fabric.inject(source, target, fault)

    def disarm(self, fault: MessageFault | PostFault, course: Course) -> None:
        """What has not struck shall not strike later."""
        for source, target in self._links(fault, course):
            plan = self.world.network.fabric.exchange.plan((source, target))
            if isinstance(fault, PostFault):
                if fault in plan.posts:
                    plan.posts.remove(fault)
            elif fault in plan.messages:
                plan.messages.remove(fault)

    def _links(self, fault: MessageFault | PostFault, course: Course) -> Iterator[tuple[PeerName, PeerName]]:
        hand = self.stages.hands[course.transfer]
        consumers = dict.fromkeys(rank for one in hand.courses for rank in one.ranks)
        for producer in self.stages.lives.get(hand.engine, ()):
            for consumer in consumers:
                yield producer, consumer
                if isinstance(fault, MessageFault) or any(one.mode == "pull" for one in hand.courses):
                    yield consumer, producer


@dataclass(frozen=True, slots=True)
class LastChunk:
    """Faults of a producer whose prefill is over in a moment.

    Everything is written only after the last chunk, and then the prefill request ends within a step. So its
    end is told, or its blocks are taken away, by a step that is planned while the last chunk is computed, and
    whose beginning is put off until the consumer may have come further.
    """

    strikes: Strikes

    def wait(self, fault: str, course: Course, random: Random, going: Callable[[], bool]) -> None:
        """Look again and again for the last chunk, while `going`."""
        if not going() or course.gone:
            return
        waiting = False
        for engine, name in self.strikes.prefills(course):
            life = self.strikes.world.engines.get(engine)
            request = None if life is None else life.request(name)
            if life is None or request is None or request.status.ended:
                continue
            if request.computed < request.prompt.tokens or request.status is not Status.RUNNING:
                waiting = True
            else:
                self._strike(fault, life, name, random)
        if waiting:
            self.strikes.world.later(WATCH_SECONDS, lambda: self.wait(fault, course, random, going))

    def _strike(self, fault: str, engine: Engine, name: str, random: Random) -> None:
        levers = self.strikes.levers
        if not (levers.abort if fault == grid.P_ABORT else levers.preempt)(name):
            return
        seconds = random.choice((0.05, 0.3, 1.0, 1.4))
        for rank in range(len(engine.ranks)):
            levers.stall_engine(engine.facts.engine, seconds, rank=rank)
