"""The engine core's thread: plans steps, hands them to the ranks, and takes them back.

It plans a step as soon as there is something to do and fewer than `depth` steps are under way; what arrives
meanwhile waits until then. Every rank begins and ends a step for itself; the forward pass is common, so it
starts when the last rank has begun. The core hears of a step when its last rank has computed it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random

from kvferry.host.events import RankIndex
from kvferry.simulator.engine.rank import RankProcess
from kvferry.simulator.engine.scheduler import Scheduler
from kvferry.simulator.engine.steps import JointReports, Step
from kvferry.simulator.engine.worker import Worker
from kvferry.simulator.ground.ground import Ground

CORE_SECONDS = 1e-4
"""What the core takes for anything."""
STUCK_SECONDS = 0.5
"""How often an engine that is stuck tries again by itself."""


@dataclass(slots=True, eq=False)
class Core:
    """One life's core. `computed` hears of each step that its last rank has computed."""

    ground: Ground
    random: Random
    ranks: list[RankProcess]
    depth: int
    computed: Callable[[Step], None]
    workers: list[Worker] = field(default_factory=list)
    scheduler: Scheduler = field(init=False)
    alive: bool = True
    stalled_until: float = 0.0
    _joint: JointReports = field(init=False)
    _inputs: deque[Callable[[], object]] = field(default_factory=deque)
    """What has arrived and waits until the core is between two steps."""
    _steps: deque[Step] = field(default_factory=deque)
    _planning: bool = False

    def __post_init__(self) -> None:
        """It is idle at first."""
        self._joint = JointReports(len(self.ranks))

    def take(self, action: Callable[[], object]) -> None:
        """Something has arrived: act on it when the core is between two steps."""
        self._inputs.append(action)
        self.poke()

    def poke(self) -> None:
        """There may be something to do."""
        if not self._planning and self.alive:
            self._planning = True
            self._later(self._plan)

    def stall(self, seconds: float) -> None:
        """The core does nothing for so long."""
        self.stalled_until = max(self.stalled_until, self.ground.now + seconds)

    def unstall(self) -> None:
        """It runs again."""
        self.stalled_until = 0.0
        self._planning = False
        self.poke()

    def spoil(self, blocks: Sequence[int]) -> None:
        """Their content is lost; where frees are not deferred, only after the steps that are in flight."""
        newest = self._steps[-1] if self._steps and not self.scheduler.tables.defers else None
        for index, process in enumerate(self.ranks):
            if newest is None or index in newest.computed:
                process.scribble(list(blocks))
            else:
                newest.spoilt.setdefault(index, []).extend(blocks)

    def began(self, step: Step) -> None:
        """A rank has begun a step."""
        step.began += 1
        if step.began < len(self.workers):
            return
        seconds = step.seconds * (0.5 + self.random.random())
        for worker in self.workers:
            late = worker.process.jitter() * 1e-3
            self.ground.later(seconds + late, worker.process.guard(partial(worker.end, step)))

    def ended(self, step: Step, rank: RankIndex) -> None:
        """A rank has computed a step."""
        if len(step.computed) == len(self.workers) and self.alive:
            self.computed(step)
            self._later(self._update)

    def _later(self, action: Callable[[], None]) -> None:
        """On the core's thread."""
        self.ground.at(max(self.ground.now + CORE_SECONDS, self.stalled_until), partial(self._run, action))

    def _run(self, action: Callable[[], None]) -> None:
        if not self.alive:
            return
        if self.ground.now < self.stalled_until:
            self._later(action)
        else:
            action()

    def _plan(self) -> None:
        self._planning = False
        if len(self._steps) >= self.depth:
            return
        while self._inputs:
            # What follows at once upon an abort has come before this step as well.
            self._inputs.popleft()()
        if not self.scheduler.awake:
            return
        step = self.scheduler.plan()
        if self.scheduler.stuck:
            # Such an engine goes on stepping; what it waits for may be its own patience.
            self.ground.later(STUCK_SECONDS, self.poke)
        if step.is_empty and not any(worker.has_results for worker in self.workers):
            return
        self._steps.append(step)
        for worker in self.workers:
            worker.give(step)
        self.poke()

    def _update(self) -> None:
        step = self._steps.popleft()
        assert len(step.computed) == len(self.workers), "steps end in order"
        self.scheduler.update(step, self._joint.add(step.reports))
        self.poke()
