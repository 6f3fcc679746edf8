"""The course of a history: first anything may fail, then faults stop and everything has to end.

Last of all, when nothing is left, engines have to show that transfers still work: see `probes`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

from kvferry.simulator.engine.engine import is_broken
from kvferry.simulator.faults import chance
from kvferry.simulator.faults.levers import Levers
from kvferry.simulator.ground.events import Healed, ItemBegan
from kvferry.simulator.ground.ground import stream
from kvferry.simulator.ground.options import Options
from kvferry.simulator.ground.outcome import Violation
from kvferry.simulator.play.probes import Probes
from kvferry.simulator.world.inspection import Inspection
from kvferry.simulator.world.workload import Item, workload
from kvferry.simulator.world.world import World
from kvferry.transport.memory import Link

CHECK_SECONDS = 0.5
"""How often it is looked for the end of a history, once faults have stopped."""
ACTIONS_MAX = 2_000_000
"""A history of more is one that turns in circles."""
ROUNDS_MAX = 3
"""Where nothing has ended for so many rounds, nothing will: what is left then is left for ever."""
_WORK, _FAULTS = 8, 9


class History:
    """One history: a world, what looks into it, what goes wrong in it, and its course. `run` plays it."""

    def __init__(self, seed: int, options: Options) -> None:
        self.world = World(seed, options)
        self.inspection = Inspection(self.world)
        self.levers = Levers(self.world, self.inspection)
        self.items: list[tuple[int, str]] = []
        """Number and words of each workload item and fault by chance."""
        self._probes = Probes(self.world)
        self._deadline_seconds = 0.0
        self._over = False
        self._ended = -1
        self._ended_at = 0.0

    @property
    def violations(self) -> list[Violation]:
        """What is found by other means than checkers."""
        return self._probes.violations

    def run(self) -> None:
        """Play it to its end.

        Raises:
            AssertionError: it has no end.
        """
        self._prepare()
        world = self.world
        schedule, fabric, clock = world.ground.schedule, world.network.fabric, world.ground.clock
        wire = fabric.exchange.wire
        for _ in range(ACTIONS_MAX):
            due, landing = schedule.next_due(), wire.next_due()
            if landing is not None and (due is None or landing <= due):
                clock.now = max(clock.now, landing)
                fabric.land_due(1)
            elif due is not None:
                clock.now = max(clock.now, due)
                schedule.pop()()
            if self._over:
                return
        raise AssertionError(f"{ACTIONS_MAX} things have happened and there is no end")

    def _prepare(self) -> None:
        world = self.world
        for facts in world.shape.engines:
            world.start(facts.engine)
        for item in self._workload():
            if item.number not in world.options.drop:
                self._plan(item, partial(world.router.dispatch, item))
        for fault in chance.draw(world, stream(world.seed, _FAULTS)):
            if fault.number not in world.options.drop:
                self._plan(fault, partial(chance.inject, self.levers, fault))
        world.at(world.shape.safety_seconds, self._heal)

    def _plan(self, item: Item | chance.Fault, begin: Callable[[], object]) -> None:
        """Begin what has a number at its time, and tell of it before."""
        self.items.append((item.number, str(item)))

        def act() -> None:
            self.world.emit(ItemBegan(self.world.now, item.number, str(item)))
            begin()

        self.world.at(item.at_seconds, act)

    def _workload(self) -> list[Item]:
        world = self.world
        source = stream(world.seed, _WORK)
        seeds = [source.getrandbits(62) for _ in range(world.shape.transfers)]
        is_calm = world.options.world == "calm"
        return workload(world.shape, world.contents, lambda number: Random(seeds[number]), is_calm=is_calm)

    def _heal(self) -> None:
        """Faults stop."""
        world = self.world
        world.ground.healed_at = world.now
        self._deadline_seconds = world.now + self.bound_seconds()
        link = world.shape.link
        calm = Link(latency_seconds=link.latency_seconds, jitter_seconds=link.jitter_seconds)
        world.network.fabric.set_all_links(calm)
        world.network.heal_all()
        world.resolver.calm()
        for name, engine in world.engines.items():
            if engine is not None and is_broken(engine):
                self.levers.crash(name)
            if engine is None or is_broken(engine):
                world.start(name)
            else:
                engine.unstall()
        world.emit(Healed(world.now, self._deadline_seconds))
        world.later(CHECK_SECONDS, self._look_for_end)

    def bound_seconds(self) -> float:
        """So long after the last fault everything must have ended.

        A consumer finds its producer (handshake), waits for its leg (unknown) or hears nothing (silence), and
        then for its fence: until the permission has run out and the transport has given up. The producer
        holds its blocks for a lease after that, or until a slice that never ends is overdue and given up.
        Engines that wait for each other's memory give up when they have starved for a while.
        Requests that wait for the memory of others go through all of it as often as the smallest cache has to
        be filled for what is there.
        """
        return (1 + self._fillings()) * self._round_seconds() + 30.0

    def _fillings(self) -> int:
        """How often the smallest cache would have to be filled for the requests that have not ended."""
        tokens = sum(
            request.prompt.tokens + request.outputs_max
            for engine in self.world.engines.values()
            if engine is not None
            for request in engine.scheduler.requests.values()
        )
        caches = [facts.cache for facts in self.world.shape.engines]
        return 1 + tokens // min(cache.token_count for cache in caches)

    def _round_seconds(self) -> float:
        """Within so long something ends, where anything is left."""
        world = self.world
        limits, bound = world.limits, world.shape.fabric.retry_bound_seconds
        consumer = (
            limits.handshake_seconds
            + max(limits.unknown_seconds, limits.silence_seconds)
            + limits.silence_seconds
            + limits.write_seconds
            + limits.starved_seconds
            + bound
        )
        held = max(facts.hold_seconds for facts in world.shape.engines)
        lease = max(limits.lease_seconds, limits.unknown_seconds, held)
        producer = lease + limits.slice_seconds + bound
        return consumer + producer

    def _look_for_end(self) -> None:
        world = self.world
        ended = sum(world.outcomes.values()) + world.router.served
        if ended != self._ended:
            self._ended, self._ended_at = ended, world.now
        stands_still = world.now > self._ended_at + ROUNDS_MAX * self._round_seconds()
        if world.now >= self._deadline_seconds or stands_still:
            self._over = True
        elif not world.router.is_idle() or self.inspection.remains():
            world.later(CHECK_SECONDS, self._look_for_end)
        elif self._probes.next():
            # What a probe leaves behind has to end as well.
            self._deadline_seconds = max(self._deadline_seconds, world.now + self._probes.seconds_max)
            world.later(CHECK_SECONDS, self._look_for_end)
        else:
            self._over = True
