"""The engines that the router knows, and the choice among them.

Everything here belongs to the event loop's thread. A worker is `ready` when a request can be sent to it: it
answers its health check and, being a prefill engine, has told its coordinates.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from random import Random

from kvferry.handoff import SourceParams
from kvferry.router.late_choice import LateChoice
from kvferry.router.pace import Pace
from kvferry.router.policy import MEASURED_POLICIES, POLICIES, Queue, expected_waits, worth_keeping


class Role(enum.StrEnum):
    """What an engine does for a request; also the name of the leg that goes to it."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(slots=True, eq=False)
class Worker:
    """One engine at one address."""

    url: str
    role: Role
    up: bool = False
    source: SourceParams | None = None
    """Where its KV can be had; None until a probe or an answer told, and again after a sign of a restart."""
    problem: str = "not checked yet"
    """Why it is not ready; empty when it is."""
    in_flight: int = 0
    """Legs open to it."""
    pace: Pace = field(default_factory=Pace)
    """A decode engine's: what it adds to the first token by itself."""
    holds: bool | None = None
    """A decode engine's: whether it keeps anything after a turn; None until it was asked."""
    losses: int = 0
    """How often it was found to be down: another may have come back each time."""
    hanging: bool = False
    """Its last check got no answer in time: no request waits for the next one."""

    @property
    def ready(self) -> bool:
        """Whether a request can be sent to it."""
        return self.up and (self.role is Role.DECODE or self.source is not None)

    @contextmanager
    def leg(self) -> Iterator[None]:
        """Count one leg for as long as it is open."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1


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
    _sides: dict[Role, _Side] = field(default_factory=dict)

    def add(self, role: Role, urls: Collection[str], policy: str) -> None:
        """Add the engines of a role; none is ready before its first check."""
        self._sides[role] = _Side(policy, [Worker(url, role) for url in urls])
        for worker in self._sides[role].workers:
            self.changed(worker)

    def workers(self, role: Role | None = None) -> list[Worker]:
        """The workers of a role, or all."""
        sides = self._sides.values() if role is None else (self._sides[role],)
        return [worker for side in sides for worker in side.workers]

    def choose(
        self, role: Role, tried: Collection[Worker] = (), preferred: Worker | None = None
    ) -> Worker | None:
        """A ready worker by the role's policy, an untried one if there is one; None when none is ready.

        The `preferred` one is taken as long as it is no worse off than `keeps` says.
        """
        if preferred is not None and preferred not in tried and self.keeps(preferred):
            return preferred
        side = self._sides[role]
        ready = [worker for worker in side.workers if worker.ready]
        fresh = [worker for worker in ready if worker not in tried] or ready
        if not fresh:
            return None
        index = self._chosen(side, self._queues(fresh))
        side.turn += 1
        return fresh[index]

    def next(self, role: Role) -> Worker | None:
        """The one that `choose` would take now."""
        side = self._sides[role]
        ready = [worker for worker in side.workers if worker.ready]
        return ready[self._chosen(side, self._queues(ready))] if ready else None

    def gain_seconds(self, early: Worker, *, has_leg: bool) -> float:
        """How much sooner than at `early` a first token is expected at the engine that is chosen now.

        `has_leg` says that the prompt has a leg at `early`, which is no load to itself.
        """
        side = self._sides[early.role]
        ready = [worker for worker in side.workers if worker.ready]
        if early not in ready:
            return 0.0
        queues, own = self._queues(ready), ready.index(early)
        # Its leg may have ended.
        queues[own] = replace(queues[own], in_flight=max(queues[own].in_flight - has_leg, 0))
        waits = expected_waits(queues)
        return waits[own] - waits[self._chosen(side, queues)]

    def _chosen(self, side: _Side, queues: list[Queue]) -> int:
        loads = [queue.in_flight for queue in queues]
        if side.policy in MEASURED_POLICIES:
            loads = [round(seconds * 1e6) for seconds in expected_waits(queues)]
        return POLICIES[side.policy](loads, side.turn, self.chance)

    def keeps(self, worker: Worker) -> bool:
        """Whether a worker that knows a conversation goes on with it: ready, not much busier than others."""
        ready = [other.in_flight for other in self._sides[worker.role].workers if other.ready]
        return worker.ready and worth_keeping(worker.in_flight, min(ready))

    def queues(self, role: Role) -> list[Queue]:
        """What is known of the role's ready workers."""
        return self._queues([worker for worker in self._sides[role].workers if worker.ready])

    def _queues(self, workers: Sequence[Worker]) -> list[Queue]:
        now = self.clock()
        return [Queue(worker.in_flight, worker.pace.recent(now), worker.pace.legs) for worker in workers]

    def any_ready(self, role: Role) -> bool:
        """Whether a worker of the role is ready."""
        return any(worker.ready for worker in self._sides[role].workers)

    @property
    def ready(self) -> bool:
        """Whether a request could be handed over: at least one ready engine of each role."""
        return all(self.any_ready(role) for role in self._sides)

    def alive(self, worker: Worker) -> None:
        """The worker answered its health check."""
        worker.up = True
        worker.hanging = False
        if worker.ready:
            worker.problem = ""
        self.changed(worker)

    def down(self, worker: Worker, problem: str) -> None:
        """The worker cannot serve. Another may come back at its address, so its identity is forgotten."""
        worker.up = False
        worker.source = None
        worker.holds = None
        worker.pace.forget()
        worker.losses += 1
        worker.problem = problem
        self.changed(worker)

    def learn(self, worker: Worker, source: SourceParams) -> None:
        """Note where the worker's KV can be had."""
        worker.source = source
        if worker.ready:
            worker.problem = ""
        self.changed(worker)


def same_engine(one: SourceParams, other: SourceParams) -> bool:
    """Whether two coordinates name the same incarnation of the same engine; the mode is no part of that."""
    return _identity(one) == _identity(other)


def _identity(source: SourceParams) -> tuple[object, ...]:
    return (source.engine, source.incarnation, source.host, source.port, source.tp, source.pp)
