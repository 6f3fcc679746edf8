"""The engines that the router knows, and the choice among them.

Everything here belongs to the event loop's thread. A worker is `ready` when a request can be sent to it: it
answers its health check, is not being drained and, being a prefill engine, has told its coordinates. It is
usable when, besides, its circuit breaker lets requests through.

Breakers choose between engines; they never leave a prompt without a decode engine. When all are open, one of
those is asked: its error is worth more to a client than ours. Without a usable prefill engine the decode
engine computes, so there the breakers have the last word.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

from kvferry.errors import UsageError
from kvferry.handoff import SourceParams
from kvferry.router.engines.late_choice import LateChoice
from kvferry.router.engines.prefixes import Prefixes
from kvferry.router.engines.worker import Leg, Model, Origin, Worker
from kvferry.router.ground.policy import (
    CACHE_POLICIES,
    MEASURED_POLICIES,
    POLICIES,
    Queue,
    expected_waits,
    prefix_costs,
    rendezvous,
    worth_keeping,
)
from kvferry.router.ground.roles import Role

__all__ = ["Ask", "Leg", "Model", "Origin", "Pool", "Role", "Worker", "same_engine"]

WORKERS_MAX = 4096


@dataclass(slots=True, kw_only=True)
class Ask:
    """What a choice may depend on besides the engines."""

    model: str | None = None
    tokens: int = 0
    chain: Sequence[bytes] = ()
    """The hashes of the prompt's pieces, where they are known."""
    session: bytes | None = None
    """Of the client's conversation, when its engine shall follow from its name."""


ANYTHING = Ask()


@dataclass(frozen=True, slots=True)
class _Own:
    """A prompt's own leg, which may have ended."""

    worker: Worker
    tokens: int


@dataclass(slots=True)
class _Side:
    policy: str
    workers: list[Worker]
    turn: int = 0


@dataclass(slots=True)
class Pool:
    """All workers of both roles."""

    chance: Random
    changed: Callable[[Worker], None]
    """Told after each change of a worker's readiness."""
    clock: Callable[[], float] = time.monotonic
    late_choice: LateChoice = field(default_factory=LateChoice)
    joined: Callable[[Worker], None] = field(default=lambda worker: None)
    """Told of each worker that is added later."""
    left: Callable[[Worker], None] = field(default=lambda worker: None)
    """Told of each worker that is gone from the pool."""
    prefixes: Prefixes = field(default_factory=Prefixes)
    _sides: dict[Role, _Side] = field(default_factory=dict)

    def add(self, role: Role, urls: Collection[str], policy: str) -> None:
        """Add a role with its first engines; none is ready before its first check."""
        self._sides[role] = _Side(policy, [Worker(url, role) for url in urls])
        for worker in self._sides[role].workers:
            self._tell(worker)

    def join(self, worker: Worker) -> None:
        """Add an engine later.

        Raises:
            UsageError: there is one by that name, or there are too many.
        """
        if self.named(worker.role, worker.name) is not None:
            raise UsageError(f"{worker.role.value}: {worker.name} is in the pool already")
        if len(self.workers()) >= WORKERS_MAX:
            raise UsageError(f"{worker.role.value}: the pool has {WORKERS_MAX} workers, as many as it takes")
        self._sides[worker.role].workers.append(worker)
        self._tell(worker)
        self.joined(worker)

    def drain(self, worker: Worker) -> None:
        """Send nothing new to a worker."""
        worker.draining = True
        worker.problem = "is being drained"
        self._tell(worker)

    def undrain(self, worker: Worker) -> None:
        """Send to a drained worker again."""
        worker.draining = False
        worker.problem = "" if worker.ready else "not checked yet"
        self._tell(worker)

    def remove(self, worker: Worker) -> None:
        """Take a worker out of the pool; what is open there goes on."""
        self.drain(worker)
        self._sides[worker.role].workers.remove(worker)
        worker.gone = True
        self.left(worker)

    def named(self, role: Role, name: str) -> Worker | None:
        """The worker of that name."""
        return next((worker for worker in self._sides[role].workers if worker.name == name), None)

    def workers(self, role: Role | None = None) -> list[Worker]:
        """The workers of a role, or all."""
        sides: Iterable[_Side] = self._sides.values() if role is None else (self._sides[role],)
        return [worker for side in sides for worker in side.workers]

    def choose(
        self,
        role: Role,
        tried: Collection[Worker] = (),
        preferred: Worker | None = None,
        ask: Ask = ANYTHING,
    ) -> Worker | None:
        """A usable worker by the role's policy, an untried one if there is one; None when none is usable.

        The `preferred` one is taken as long as it is no worse off than `keeps` says.
        """
        now = self.clock()
        side = self._sides[role]
        fitting = _fitting(_usable(side, now), ask.model)
        fresh = [worker for worker in fitting if worker not in tried] if tried else fitting
        fresh = fresh or fitting
        if not fresh:
            return None
        chosen = self._kept(fresh, preferred, ask)
        if chosen is None:
            chosen = fresh[self._next(side, fresh, ask, now)]
            side.turn += 1
        chosen.breaker.sent(now)
        return chosen

    def next(self, role: Role, preferred: Worker | None = None, ask: Ask = ANYTHING) -> Worker | None:
        """The one that the policy would choose now; None when none is usable, or affinity has settled it."""
        now = self.clock()
        side = self._sides[role]
        fitting = _fitting(_usable(side, now), ask.model)
        if not fitting or self._kept(fitting, preferred, ask) is not None:
            return None
        return fitting[self._next(side, fitting, ask, now)]

    def gain_seconds(self, early: Worker, ask: Ask = ANYTHING, *, leg_tokens: int = 0) -> float:
        """How much sooner than at `early` a first token is expected at the engine that is chosen now.

        `leg_tokens` are those of the prompt's leg at `early`, which is no load to itself; 0 when it has none.
        """
        now = self.clock()
        side = self._sides[early.role]
        fitting = _fitting(_usable(side, now), ask.model)
        if early not in fitting:
            return 0.0
        own = _Own(early, leg_tokens) if leg_tokens else None
        waits = expected_waits(_queues(fitting, now, own))
        return waits[fitting.index(early)] - waits[self._next(side, fitting, ask, now, own)]

    def _kept(self, workers: Sequence[Worker], preferred: Worker | None, ask: Ask) -> Worker | None:
        """The one that affinity takes; None when the policy has the choice."""
        if preferred is None and ask.session is not None:
            preferred = workers[rendezvous([worker.name for worker in workers], ask.session)]
        if preferred is None or preferred not in workers or not self.keeps(preferred):
            return None
        return preferred

    def _next(
        self, side: _Side, workers: Sequence[Worker], ask: Ask, now: float, own: _Own | None = None
    ) -> int:
        if side.policy in MEASURED_POLICIES:
            waits = expected_waits(_queues(workers, now, own))
            loads = [round(seconds * 1e6) for seconds in waits]
        else:
            loads = _tokens(workers, own)
        if side.policy in CACHE_POLICIES:
            loads = prefix_costs(loads, self.prefixes.matched(ask.chain, workers, now), ask.tokens)
        return POLICIES[side.policy](loads, side.turn, self.chance)

    def keeps(self, worker: Worker) -> bool:
        """Whether a worker that knows a conversation goes on with it: usable, not much busier than others."""
        if not worker.ready or not worker.breaker.permits(self.clock()):
            return False
        in_flight = len(worker.legs)
        if worth_keeping(in_flight, 0):
            return True
        ready = [len(other.legs) for other in self._sides[worker.role].workers if other.ready]
        return worth_keeping(in_flight, min(ready, default=0))

    def queues(self, role: Role, ask: Ask = ANYTHING) -> list[Queue]:
        """What is known of the role's workers that may be chosen."""
        now = self.clock()
        return _queues(_fitting(_usable(self._sides[role], now), ask.model), now)

    def any_ready(self, role: Role) -> bool:
        """Whether a worker of the role is usable."""
        return bool(_usable(self._sides[role], self.clock()))

    @property
    def ready(self) -> bool:
        """Whether a request could be handed over: usable engines of both roles that serve one model."""
        now = self.clock()
        served = [_served(_usable(side, now)) for side in self._sides.values()]
        return all(served) and (None in set().union(*served) or bool(set.intersection(*served)))

    def alive(self, worker: Worker) -> None:
        """The worker answered its health check."""
        worker.up = True
        worker.hanging = False
        if worker.ready:
            worker.problem = ""
        self._tell(worker)

    def down(self, worker: Worker, problem: str) -> None:
        """The worker cannot serve. Another may come back at its address, so its identity is forgotten."""
        worker.up = False
        worker.source = None
        worker.models = ()
        worker.losses += 1
        worker.forget()
        worker.problem = problem
        self._tell(worker)

    def learn(self, worker: Worker, source: SourceParams) -> None:
        """Note where the worker's KV can be had; what was known of another incarnation is forgotten."""
        if worker.source is not None and not same_engine(worker.source, source):
            worker.losses += 1
            worker.models = ()
            worker.forget()
            worker.breaker.reset()
        worker.source = source
        if worker.ready:
            worker.problem = ""
        self._tell(worker)

    def _tell(self, worker: Worker) -> None:
        if not worker.gone:
            self.changed(worker)


def same_engine(one: SourceParams, other: SourceParams) -> bool:
    """Whether two coordinates name the same incarnation of the same engine; the mode is no part of that."""
    return _identity(one) == _identity(other)


def _identity(source: SourceParams) -> tuple[object, ...]:
    return (source.engine, source.incarnation, source.host, source.port, source.tp, source.pp)


def _queues(workers: Sequence[Worker], now: float, own: _Own | None = None) -> list[Queue]:
    return [
        Queue(worker.in_flight, worker.pace.recent(now), worker.pace.legs)
        if own is None or worker is not own.worker
        else Queue(max(worker.in_flight - 1, 0), worker.pace.recent(now), worker.pace.legs)
        for worker in workers
    ]


def _tokens(workers: Sequence[Worker], own: _Own | None) -> list[int]:
    return [
        worker.tokens if own is None or worker is not own.worker else max(worker.tokens - own.tokens, 0)
        for worker in workers
    ]


def _usable(side: _Side, now: float) -> list[Worker]:
    usable = [worker for worker in side.workers if worker.ready and worker.breaker.permits(now)]
    return usable or [worker for worker in side.workers if worker.ready and worker.role is Role.DECODE]


def _fitting(workers: list[Worker], model: str | None) -> list[Worker]:
    """Those that serve the model; all when none says so, for the engines know best what they can load."""
    if model is None or not any(worker.models for worker in workers):
        return workers
    serving = [worker for worker in workers if any(each.name == model for each in worker.models)]
    unknown = [worker for worker in workers if not worker.models]
    return serving or unknown or workers


def _served(workers: Iterable[Worker]) -> set[str | None]:
    """The names of the models that the workers serve; None stands for a worker that has not told."""
    names: set[str | None] = set()
    for worker in workers:
        names.update(model.name for model in worker.models)
        if not worker.models:
            names.add(None)
    return names
