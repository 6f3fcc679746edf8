"""The course of a history: first anything may fail, then faults stop and everything has to end.

Last of all, when nothing is left, engines have to show that transfers still work: see `probes`.
"""

from __future__ import annotations

from functools import partial
from random import Random
from typing import TYPE_CHECKING

from kvferry.simulator import faults
from kvferry.simulator.events import Healed
from kvferry.simulator.probes import Probes
from kvferry.simulator.router import workload
from kvferry.transport.memory import Link

if TYPE_CHECKING:
    from kvferry.simulator.world import World

CHECK_SECONDS = 0.5
"""How often it is looked for the end of a history, once faults have stopped."""
ACTIONS_MAX = 2_000_000
"""A history of more is one that turns in circles."""
ROUNDS_MAX = 3
"""Where nothing has ended for so many rounds, nothing will: what is left then is left for ever."""
_WORK, _FAULTS = 8, 9


class History:
    """One play of a world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._over = False
        self._ended = -1
        self._ended_at = 0.0
        self._probes = Probes(world)

    def run(self) -> None:
        """Play it to its end.

        Raises:
            AssertionError: it has no end.
        """
        self._prepare()
        world = self._world
        schedule, fabric, clock = world.schedule, world.network.fabric, world.clock
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
        world = self._world
        for facts in world.shape.engines:
            world.start(facts.engine)
        source = world.stream(_WORK)
        seeds = [source.getrandbits(62) for _ in range(world.shape.transfers)]
        for item in workload(world, lambda number: Random(seeds[number])):
            if item.number not in world.options.drop:
                world.items.append((item.number, str(item)))
                world.at(item.at_seconds, partial(world.router.dispatch, item))
        for fault in faults.draw(world, world.stream(_FAULTS)):
            if fault.number not in world.options.drop:
                world.items.append((fault.number, str(fault)))
                world.at(fault.at_seconds, partial(faults.inject, world, fault))
        world.at(world.shape.safety_seconds, self._heal)

    def _heal(self) -> None:
        """Faults stop."""
        world = self._world
        world.healed_at = world.now
        world.deadline_seconds = world.now + self.bound_seconds()
        link = world.shape.link
        calm = Link(latency_seconds=link.latency_seconds, jitter_seconds=link.jitter_seconds)
        world.network.fabric.set_all_links(calm)
        world.network.heal_all()
        world.resolver.calm()
        for name, engine in world.engines.items():
            if engine is None:
                world.start(name)
            else:
                engine.unstall()
        world.emit(Healed(world.now, world.deadline_seconds))
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
        return (1 + self._world.fillings()) * self._round_seconds() + 30.0

    def _round_seconds(self) -> float:
        """Within so long something ends, where anything is left."""
        world = self._world
        limits, bound = world.limits, world.shape.fabric.retry_bound_seconds
        consumer = (
            limits.handshake_seconds
            + max(limits.unknown_seconds, limits.silence_seconds)
            + limits.silence_seconds
            + limits.write_seconds
            + limits.starved_seconds
            + bound
        )
        producer = max(limits.lease_seconds, limits.unknown_seconds) + limits.slice_seconds + bound
        return consumer + producer

    def _look_for_end(self) -> None:
        world = self._world
        ended = sum(world.outcomes.values()) + world.router.served
        if ended != self._ended:
            self._ended, self._ended_at = ended, world.now
        stands_still = world.now > self._ended_at + ROUNDS_MAX * self._round_seconds()
        if world.now >= world.deadline_seconds or stands_still:
            self._over = True
        elif not world.router.is_idle() or world.inspection.remains():
            world.later(CHECK_SECONDS, self._look_for_end)
        elif self._probes.next():
            # What a probe leaves behind has to end as well.
            world.deadline_seconds = max(world.deadline_seconds, world.now + self._probes.seconds_max)
            world.later(CHECK_SECONDS, self._look_for_end)
        else:
            self._over = True
