"""One life of an engine: its ranks, its core, and what the world sees of both."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Protocol

from kvferry.agent.directory import Directory, RankEntry
from kvferry.agent.links import Identity
from kvferry.host.events import Ended
from kvferry.host.facts import CacheGroup
from kvferry.host.facts import EngineFacts as HostFacts
from kvferry.host.metrics import TRANSFERS
from kvferry.host.outcomes import Outcomes
from kvferry.host.pins import Pins
from kvferry.host.scheduler_consumer import SchedulerConsumer
from kvferry.host.scheduler_producer import SchedulerProducer
from kvferry.host.starvation import Starvation
from kvferry.ids import ConsumerId, Incarnation, Rank
from kvferry.simulator.engine.core import Core
from kvferry.simulator.engine.facts import EngineFacts
from kvferry.simulator.engine.pool import BlockPool
from kvferry.simulator.engine.rank import RankNetwork, RankProcess, Resolvers
from kvferry.simulator.engine.requests import Request
from kvferry.simulator.engine.scheduler import Host, Scheduler
from kvferry.simulator.engine.steps import Step
from kvferry.simulator.engine.tables import Tables
from kvferry.simulator.engine.turns import Turns
from kvferry.simulator.engine.worker import Worker
from kvferry.simulator.ground.clock import ProcessClock
from kvferry.simulator.ground.events import (
    BlocksReturned,
    BlocksTaken,
    DecodeEnded,
    DecodeStarted,
    EngineCrashed,
    EngineStarted,
    FaultInjected,
    RequestEnded,
)
from kvferry.simulator.ground.ground import Ground


class Clients(Protocol):
    """Who has sent an engine its requests."""

    def leg_ended(self, request: Request) -> None:
        """The engine has ended a request."""
        ...

    def leg_aborted(self, request: Request) -> None:
        """The engine has heard that a request's client left, and does not know the request any more."""
        ...

    def leg_preempted(self, request: Request) -> None:
        """A decode request has lost its blocks while it decoded."""
        ...


class EngineNetwork(RankNetwork, Protocol):
    """What an engine needs of the network."""

    def kill(self, processes: list[RankProcess], noticed_after_seconds: float) -> None:
        """These ranks have died; peers can know after a while."""
        ...


class Surroundings(Protocol):
    """What an engine finds around it."""

    @property
    def network(self) -> EngineNetwork:
        """Joins the ranks of all engines."""
        ...

    @property
    def resolver(self) -> Resolvers:
        """All engines' directories."""
        ...

    @property
    def router(self) -> Clients:
        """Hears what becomes of requests."""
        ...

    def count(self, request: Request, outcome: str, reason: str) -> None:
        """The engine has counted the end of a transfer."""
        ...


class Engine:
    """One life. `crash_core` and `crash` end it."""

    def __init__(self, ground: Ground, around: Surroundings, facts: EngineFacts, life: int) -> None:
        self.ground = ground
        self._around = around
        self.facts = facts
        random = Random(ground.seed * 65537 + facts.port * 64 + life)
        self.incarnation = Incarnation(f"i{life}{random.getrandbits(32):08x}")
        self._directory_from = ground.now + (facts.start_seconds if life else 0.0)
        self._gone = False
        self._requests: dict[str, Request] = {}
        self._known = _known(facts)
        self.ranks = [self._rank(rank) for rank in facts.cache.ranks]
        self.core = Core(ground, random, self.ranks, facts.pace.depth, self._tell_decoding)
        for index, process in enumerate(self.ranks):
            process.has_reported = self.core.poke
            lag = facts.pace.device_lag_seconds
            worker = Worker(process, index, self._known, lag, self.core.began, self.core.ended)
            self.core.workers.append(worker)
        self.pool = BlockPool(
            facts.cache.block_count,
            first=facts.cache.first_block,
            taken=self._taken,
            returned=self._returned,
            spoilt=self.core.spoil,
        )
        self.pins = Pins()
        self.pins.bind(self.pool)
        self.scheduler = self.core.scheduler = self._scheduler()
        names = tuple(process.name for process in self.ranks)
        ground.emit(EngineStarted(ground.now, facts.engine, names, facts.cache.block_count))

    def _rank(self, rank: Rank) -> RankProcess:
        identity = Identity(self.facts.engine, self.incarnation, rank)
        slot = self.ground.next_slot(self.facts.cache, rank)
        clock = ProcessClock(self.ground.clock, *self.ground.clock_error())
        return RankProcess(
            self.ground,
            self._around.network,
            self._around.resolver,
            identity,
            slot,
            clock,
            self.facts.limits,
            self.facts.agent_lag_seconds,
        )

    def _scheduler(self) -> Scheduler:
        facts, known = self.facts, self._known
        counter = Counter(self._count)
        outcomes = Outcomes(known, counter)
        consumer = SchedulerConsumer(
            known,
            self.pins,
            waiting_blocks_share=facts.waiting_blocks_share,
            quarantine_share=facts.quarantine_share,
        )
        clock = ProcessClock(self.ground.clock, *self.ground.clock_error())
        self._turns = Turns(self.ground, facts, known, self.pins, clock, self.incarnation)
        host = Host(
            SchedulerProducer(known, self.pins),
            consumer,
            outcomes,
            Starvation(facts.limits.starved_seconds),
            clock,
            known.received_stop,
            skip=partial(counter.skip, outcomes),
            count=partial(counter.end, outcomes),
            turns=self._turns,
        )
        defers = facts.consumes and facts.pace.depth > 1
        return Scheduler(facts.pace, Tables(self.pool, facts.cache.tables, defers), host, self._ending)

    # --- what others ask of it -----------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """A request arrives."""
        self._requests[request.name] = request
        self.core.take(partial(self.scheduler.add, request))

    def abort(self, name: str) -> bool:
        """The client of a request has gone; False when it has ended."""
        request = self._requests.get(name)
        if request is None or request.status.ended:
            return False
        self.core.take(partial(self._abort, request))
        return True

    def _abort(self, request: Request) -> None:
        if not request.status.ended:
            transfers = (request.transfer,)
            self.ground.emit(FaultInjected(self.ground.now, "abort", request.name, transfers))
            self.scheduler.abort(request)
            self._around.router.leg_aborted(request)

    def preempt(self, name: str) -> bool:
        """Preempt a request in the next plan; False when it does not run."""
        request = self._requests.get(name)
        if request is None or not self.scheduler.force_preemption(request):
            return False
        self.core.poke()
        return True

    def request(self, name: str) -> Request | None:
        """A request of this life, ended ones included."""
        return self._requests.get(name)

    def has_forgotten(self, name: str) -> bool:
        """Whether a request of this name has come to its end, so that the name is free again."""
        request = self._requests.get(name)
        return request is not None and request.status.ended and name not in self.scheduler.requests

    def directory(self) -> Directory | None:
        """What its side channel answers; None while it starts."""
        if self.ground.now < self._directory_from:
            return None
        entries = tuple(
            RankEntry(
                pp=rank.pp,
                tp=rank.tp,
                peer=process.name,
                metadata=process.metadata,
                cache=process.slot.encoded,
            )
            for rank, process in zip(self.facts.cache.ranks, self.ranks, strict=True)
        )
        return Directory(
            engine=self.facts.engine,
            incarnation=self.incarnation,
            tp_size=self.facts.cache.tp_size,
            pp_size=self.facts.cache.pp_size,
            ranks=entries,
        )

    @property
    def alive(self) -> bool:
        """Whether its core lives."""
        return self.core.alive

    def crash_core(self) -> None:
        """The core's process is gone, and with it the directory."""
        self.core.alive = False

    def crash(self, noticed_after_seconds: float = 0.0) -> None:
        """The ranks' processes are gone as well; nothing happens when they are."""
        if self._gone:
            return
        self._gone = True
        for process in self.ranks:
            process.die()
        names = tuple(process.name for process in self.ranks)
        self.ground.emit(EngineCrashed(self.ground.now, self.facts.engine, names))
        self._around.network.kill(self.ranks, noticed_after_seconds)

    def unstall(self) -> None:
        """Every thread of it runs again."""
        for process, worker in zip(self.ranks, self.core.workers, strict=True):
            process.unstall()
            worker.unstall()
        self.core.unstall()

    def remains(self) -> list[str]:
        """What has not come to its end, of this engine's own doing."""
        left = self.scheduler.remains()
        if len(self.pins):
            left.append(f"{len(self.pins)} pinned blocks")
        if self.pool.free_count != self.pool.count:
            left.append(f"blocks {self.pool.held()} held")
        for worker in self.core.workers:
            left += worker.remains()
        return [f"{self.facts.engine}: {what}" for what in left]

    # --- what is told to the world -------------------------------------------------------------------

    def _tell_decoding(self, step: Step) -> None:
        names = tuple(process.name for process in self.ranks)
        for work in step.work:
            request = work.request
            # A preemption or an end meanwhile has taken the blocks that this step used.
            lost = request.status.ended or request.stale
            if not request.is_decode or request.decoding or lost:
                continue
            request.decoding = True
            self.ground.emit(
                DecodeStarted(
                    self.ground.now,
                    self.facts.engine,
                    names,
                    request.name,
                    request.prompt.number,
                    work.start,
                    tuple(tuple(table.tolist()) for table in work.blocks),
                )
            )

    def _taken(self, blocks: tuple[int, ...], owner: str) -> None:
        self.ground.emit(BlocksTaken(self.ground.now, self.facts.engine, blocks, owner))

    def _returned(self, blocks: tuple[int, ...]) -> None:
        self.ground.emit(BlocksReturned(self.ground.now, self.facts.engine, blocks))

    def _count(self, name: str, outcome: str, reason: str, *, sent: bool) -> None:
        request = self._requests[name]
        if request.history is not None and not sent:
            self._turns.received(request, outcome)
            return
        consumer = ConsumerId(name) if request.is_decode else None
        self.ground.emit(
            RequestEnded(self.ground.now, self.facts.engine, name, request.transfer, consumer, outcome)
        )
        self._around.count(request, outcome, reason)

    def _ending(self, request: Request) -> None:
        ended = request.status.ended
        if request.is_decode and (ended or request.decoding):
            self.ground.emit(DecodeEnded(self.ground.now, self.facts.engine, request.name, not ended))
        if ended:
            self._around.router.leg_ended(request)
        elif request.is_decode and request.decoding:
            self._around.router.leg_preempted(request)


def _known(facts: EngineFacts) -> HostFacts:
    """What the production host is told of its engine."""
    cache = facts.cache
    return HostFacts(
        engine=facts.engine,
        tp=cache.tp_size,
        pp=cache.pp_size,
        produces=facts.produces,
        consumes=facts.consumes,
        block_tokens=cache.block_tokens,
        block_count=cache.block_count,
        groups=tuple(CacheGroup(group.block_tokens, group.window_tokens) for group in cache.groups),
    )


def is_broken(engine: Engine) -> bool:
    """Whether some rank's agent has stopped."""
    return any(process.broken for process in engine.ranks)


class Told(Protocol):
    """Hears how the transfer of a request has ended, and whether that request `sent` it."""

    def __call__(self, name: str, outcome: str, reason: str, *, sent: bool) -> None:
        """It has."""
        ...


class Counter:
    """The host's counters; `told` hears which request moved the counter of transfers, and how."""

    def __init__(self, told: Told) -> None:
        self._told = told
        self._request, self._sent = "", False

    def skip(self, outcomes: Outcomes, request: Request, reason: str) -> None:
        """A transfer ended before any rank heard of it."""
        self._request, self._sent = request.name, False
        outcomes.skipped(reason, request.params.mode or "push")

    def end(self, outcomes: Outcomes, event: Ended) -> None:
        """A rank has reported the end of its part."""
        self._request, self._sent = event.request, event.sending
        outcomes.add(event)

    def count(self, name: str, amount: int = 1, labels: tuple[str, ...] = ()) -> None:
        """Add to a counter."""
        if name == TRANSFERS:
            self._told(self._request, *labels[1:], sent=self._sent)

    def observe(self, name: str, value: float) -> None:
        """Times are nobody's business here."""
