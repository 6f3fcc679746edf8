"""Faults with an aim: each is kept for a transfer that reaches a stage of the grid, and struck there.

Chance alone seldom meets a crash with a write in flight. An aim waits until some consumer request stands at
its stage, then pulls its lever, and pulls again at later requests until its cell has been counted. Aims look
at events, and act between them, at the same virtual time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from random import Random

from kvferry.simulator.faults.levers import Levers
from kvferry.simulator.faults.strikes import BY_LINK, LastChunk, LinkFaults, Strikes
from kvferry.simulator.ground.events import (
    Commanded,
    DecodeStarted,
    Healed,
    ItemBegan,
    MessageEnded,
    MessageSent,
    Observed,
    Posted,
    PostEnded,
    Reported,
)
from kvferry.simulator.ground.ground import stream
from kvferry.simulator.watch import grid
from kvferry.simulator.watch.courses import Course
from kvferry.simulator.watch.grid import FAULTS, IMPOSSIBLE, Grid
from kvferry.simulator.watch.stages import (
    ALL_DONE,
    DECODING,
    HANDSHAKE,
    POSTED,
    QUEUED,
    RECEIVED,
    SENT,
    SOME_DONE,
    STAGES,
    TOLD,
)
from kvferry.simulator.world.world import World

NUMBER_FIRST = 2000
"""Below it are the numbers of workload items and of faults by chance."""
TRIES_MAX = 6
"""So often an aim pulls its lever at most."""
ASKS_MAX = 200
"""So often at most an engine is asked to preempt what it may not be able to preempt yet."""
PARTED_MAX = 3
"""Transfers per aim that others are let in to."""
_STREAM = 63
"""Among the random sources of a seed."""

NEEDED = {
    grid.D_ABORT: "abort",
    grid.P_ABORT: "abort",
    grid.D_CRASH: "crash",
    grid.P_CRASH: "crash",
    grid.PEER_BACK: "crash",
    grid.MESSAGE_LOST: "message_lost",
    grid.MESSAGE_DOUBLED: "message_doubled",
    grid.MESSAGE_LATE: "message_late",
    grid.POST_REFUSED: "post_refused",
    grid.RANK_ERROR: "post_failed",
    grid.STALLED: "post_stalled",
    grid.LEASE_ENDS: "stall_agent",
    grid.P_PREEMPTION: "preempt",
    grid.D_PREEMPTION: "preempt",
    grid.SAME_ID: "replay",
}
"""The kind of fault among `options.FAULTS` that must be switched on for an aim's."""

_OF_POSTS = (grid.POST_REFUSED, grid.RANK_ERROR, grid.STALLED)
_HARD: dict[int, tuple[tuple[str, str], ...]] = {
    4: (
        *(
            (stage, fault)
            for stage in (HANDSHAKE, SOME_DONE, TOLD)
            for fault in (grid.D_CRASH, grid.PEER_BACK)
        ),
        *(
            (stage, fault)
            for stage in (SENT, HANDSHAKE, DECODING)
            for fault in (*_OF_POSTS, grid.P_PREEMPTION)
        ),
        *((stage, fault) for stage in (ALL_DONE, TOLD) for fault in _OF_POSTS),
        *((stage, grid.LEASE_ENDS) for stage in (HANDSHAKE, POSTED, SOME_DONE)),
        *((stage, grid.D_PREEMPTION) for stage in (SENT, POSTED)),
        *((TOLD, fault) for fault in (grid.MESSAGE_LOST, grid.MESSAGE_DOUBLED)),
        (SOME_DONE, grid.STALLED),
    ),
    10: (
        *((ALL_DONE, fault) for fault in (grid.P_ABORT, grid.P_PREEMPTION, grid.LEASE_ENDS, grid.RANK_ERROR)),
        *((TOLD, fault) for fault in (grid.P_ABORT, grid.LEASE_ENDS, grid.D_PREEMPTION, grid.MESSAGE_LATE)),
        (SENT, grid.STALLED),
    ),
    20: (
        *((stage, grid.D_PREEMPTION) for stage in (RECEIVED, HANDSHAKE, SOME_DONE, ALL_DONE)),
        *((SOME_DONE, fault) for fault in (grid.P_ABORT, grid.P_PREEMPTION)),
        *((TOLD, fault) for fault in (*_OF_POSTS, grid.P_PREEMPTION)),
        (HANDSHAKE, grid.STALLED),
    ),
}
"""Cells that chance seldom meets, by how much more often they are aimed at; most of these aims miss."""
_SPLIT = tuple((QUEUED, fault) for fault in _OF_POSTS)
"""Cells of a request that some ranks have registered and others have not."""
_EARLY = frozenset({QUEUED, SENT, RECEIVED, HANDSHAKE})
_OF_A_RUNNING_PREFILL = frozenset({grid.P_ABORT, grid.P_PREEMPTION})
_OF_ANOTHER_CONSUMER = frozenset({grid.POST_REFUSED, grid.RANK_ERROR, grid.STALLED, grid.D_PREEMPTION})
"""Faults that can hit a request before it is posted only by way of another one of its transfer."""
_ALWAYS = frozenset({Commanded, Reported, Posted, PostEnded, DecodeStarted})
_MESSAGES = frozenset({MessageSent, MessageEnded})


@dataclass(slots=True, eq=False)
class Aim:
    """One fault that waits for one stage. `skip` requests reach it unharmed before."""

    number: int
    stage: str
    fault: str
    skip: int
    random: Random
    tries_left: int = TRIES_MAX
    counted: int = 0
    """What the cell's count was when the aim was last looked at."""
    met: list[Course] = field(default_factory=list)
    held: list[Course] = field(default_factory=list)
    """Requests that were kept at the stage, or brought near it."""
    armed: Course | None = None
    """The request for whose links a fault waits."""
    began: bool = False

    def __post_init__(self) -> None:
        """A preemption on D may have to be asked for many times."""
        if self.fault == grid.D_PREEMPTION:
            self.tries_left = ASKS_MAX

    def __str__(self) -> str:
        return f"aim: {self.fault} while {self.stage}"

    @property
    def is_late(self) -> bool:
        """Whether it needs a producer whose prefill is over in a moment."""
        return self.fault in _OF_A_RUNNING_PREFILL and self.stage not in _EARLY

    def meets(self, course: Course) -> bool:
        """Whether it is the turn of a request that has reached the stage."""
        if course not in self.met:
            self.met.append(course)
            self.skip -= 1
        return self.skip < 0


def draw(world: World) -> list[Aim]:
    """The aims of a history, from a random source of their own."""
    random = stream(world.seed, _STREAM)
    count = random.choice((0, 1, 2, 3, 4))
    cells = _weighted(world)
    drawn = [
        (random.choice(cells), random.choice((0, 0, 1, 3)), random.getrandbits(32)) for _ in range(count)
    ]
    return [
        Aim(NUMBER_FIRST + index, stage, fault, skip, Random(seed))
        for index, ((stage, fault), skip, seed) in enumerate(drawn)
        if NEEDED[fault] in world.faults
    ]


def _weighted(world: World) -> list[tuple[str, str]]:
    """Cells to choose from, hard ones several times and those that this world cannot have not at all."""
    cells = [(stage, fault) for stage in STAGES for fault in FAULTS if (stage, fault) not in IMPOSSIBLE]
    cells += [cell for times, hard in _HARD.items() for cell in times * hard]
    # Where the lease outlives the faults such an aim is in vain; elsewhere it makes up for that.
    in_vain = world.limits.lease_seconds + 1.0 > world.shape.safety_seconds
    ending = [cell for cell in cells if cell[1] == grid.LEASE_ENDS]
    cells = [cell for cell in cells if cell[1] != grid.LEASE_ENDS] if in_vain else cells + 3 * ending
    alone = all(facts.cache.tp_size == 1 for facts in world.shape.engines)
    return [cell for cell in cells if cell not in _SPLIT] if alone else [*cells, *(8 * _SPLIT)]


class Aims:
    """An observer that strikes. It acts through the world's levers, never within an event."""

    def __init__(self, levers: Levers, cells: Grid) -> None:
        world = levers.world
        self._world, self._grid, self._stages = world, cells, cells.stages
        self._strikes = Strikes(levers, cells.stages)
        self._links = LinkFaults(world, cells.stages)
        self._last_chunk = LastChunk(self._strikes)
        self._open = [aim for aim in draw(world) if aim.number not in world.options.drop]
        self._planned = False
        self._early = any(aim.stage in _EARLY for aim in self._open)
        self.items = [(aim.number, str(aim)) for aim in self._open]
        """Number and words of each."""

    def observe(self, event: Observed) -> None:
        """Take one event; after those that may change a stage everyone is looked at."""
        if not self._open:
            return
        kind = type(event)
        if kind is Healed:
            self._open = []
        elif not self._planned and (kind in _ALWAYS or (self._early and kind in _MESSAGES)):
            self._planned = True
            self._world.at(self._world.now, self._look)

    def _look(self) -> None:
        self._planned = False
        for aim in self._open:
            self._look_for(aim)
        self._open = [aim for aim in self._open if aim.tries_left > 0]

    def _look_for(self, aim: Aim) -> None:
        counted = self._grid.cells.get((aim.stage, aim.fault), 0)
        if counted > aim.counted and aim.skip < 0:
            self._disarm(aim)
            aim.tries_left = 0
            return
        aim.counted = counted
        if aim.armed is not None and self._stages.stage(aim.armed) != aim.stage:
            self._disarm(aim)
        if aim.is_late:
            self._await_last_chunk(aim)
            return
        if aim.stage == HANDSHAKE and aim.fault in _OF_ANOTHER_CONSUMER:
            self._part_the_others(aim)
        for course in self._stages.courses():
            if aim.tries_left <= 0 or aim.armed is not None:
                break
            if self._stages.stage(course) == aim.stage and aim.meets(course):
                self._strike(aim, course)

    def _strike(self, aim: Aim, course: Course) -> None:
        if (aim.stage, aim.fault) in _SPLIT and not self._strikes.split(course):
            return
        self._begin(aim)
        fault = BY_LINK.get(aim.fault)
        if fault is not None:
            self._links.arm(fault, course)
            aim.armed = course
            aim.tries_left -= 1
        elif self._strikes.strike(aim.fault, course, aim.random):
            aim.tries_left -= 1

    def _begin(self, aim: Aim) -> None:
        """Tell of it before it strikes for the first time."""
        if not aim.began:
            aim.began = True
            self._world.emit(ItemBegan(self._world.now, aim.number, str(aim)))

    def _disarm(self, aim: Aim) -> None:
        if aim.armed is not None:
            self._links.disarm(BY_LINK[aim.fault], aim.armed)
            aim.armed = None

    def _part_the_others(self, aim: Aim) -> None:
        """While one consumer request is served, let others have to find the producer anew."""
        wanted = DECODING if aim.fault == grid.D_PREEMPTION else POSTED
        parted = {course.transfer for course in aim.held}
        for course in self._stages.courses():
            if len(parted) >= PARTED_MAX:
                return
            is_complete = self._stages.hands[course.transfer].is_complete
            # Once per transfer: those who are let in by it would otherwise let in others in turn.
            if is_complete and course.transfer not in parted and self._stages.stage(course) == wanted:
                parted.add(course.transfer)
                aim.held.append(course)
                self._world.at(self._world.now, partial(self._strikes.part, course, aim.random))

    def _await_last_chunk(self, aim: Aim) -> None:
        for course in aim.met:
            if course not in aim.held and self._stages.stage(course) == aim.stage:
                aim.held.append(course)
                self._strikes.hold(course, aim.stage)
        for hand in self._stages.hands.values():
            for course in hand.courses if hand.running else ():
                if course not in aim.met and aim.meets(course) and aim.tries_left > 0:
                    aim.tries_left -= 1
                    self._begin(aim)
                    self._last_chunk.wait(aim.fault, course, aim.random, lambda: aim in self._open)
