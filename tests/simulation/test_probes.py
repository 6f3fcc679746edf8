"""What a world notices by itself: transfers that no longer work at the end, and agents that never sleep."""

from __future__ import annotations

import pytest

from kvferry.ids import ConsumerId
from kvferry.simulator.events import LegSent, Observed
from kvferry.simulator.options import Options
from kvferry.simulator.probes import PAUSE_SECONDS, TRIES
from kvferry.simulator.rank import SPIN_STEPS
from kvferry.simulator.world import World

pytestmark = pytest.mark.timeout(120)
"""So long only where something hangs; a loaded machine is slow."""


class Saboteur:
    """Has the decode legs of probes aborted, of so many tries of each pair."""

    def __init__(self, world: World, tries: int) -> None:
        self.world = world
        self.left = tries
        self.probes: list[float] = []

    def observe(self, event: Observed) -> None:
        """Take one event."""
        if not isinstance(event, LegSent) or not event.transfer.startswith("t3"):
            return
        if event.consumer is None:
            self.probes.append(event.at_seconds)
        elif self.left:
            self.left -= 1
            consumer = ConsumerId(event.request)
            self.world.later(0.0, lambda: self.world.levers.abort_decode(event.transfer, consumer))


def play(tries: int) -> tuple[World, Saboteur]:
    world = World(5, Options(world="calm"))
    saboteur = Saboteur(world, tries)
    world.observers.append(saboteur)
    world.run()
    return world, saboteur


def test_each_producer_is_asked_for_one_more_transfer_to_each_consumer() -> None:
    world, saboteur = play(0)
    engines = world.shape.engines
    pairs = [(p, c) for p in engines for c in engines if p.produces and c.consumes and p is not c]
    assert len(saboteur.probes) == len(pairs)
    assert world.violations == []


def test_one_failed_probe_is_tried_again_after_a_pause() -> None:
    world, saboteur = play(1)
    assert world.violations == []
    first, second = saboteur.probes[:2]
    assert second - first >= PAUSE_SECONDS


def test_a_second_failed_probe_has_no_excuse() -> None:
    world, saboteur = play(TRIES)
    [violation] = world.violations
    assert violation.promise == 6
    assert "still fails" in violation.what
    assert saboteur.left == 0


def test_an_agent_that_never_sleeps_is_noticed() -> None:
    world = World(5, Options(world="calm"))

    def spin() -> None:
        process = next(iter(world.engines.values())).ranks[0]  # type: ignore[union-attr]
        for _ in range(2 * SPIN_STEPS):
            process.step()

    world.at(0.01, spin)
    with pytest.raises(AssertionError, match="spins"):
        world.run()


def test_a_wake_up_that_the_agent_sleeps_through_is_lost_here_too() -> None:
    """The world steps an agent when it would have polled: one that says it need not poll is not stepped."""
    world = World(5, Options(world="calm"))
    world.at(0.005, lambda: _deafen(world))
    world.run()
    assert any("receiving" in what for what in world.inspection.remains())


def _deafen(world: World) -> None:
    for engine in world.engines.values():
        for process in engine.ranks if engine is not None and engine.facts.consumes else ():
            process.loop._pause = lambda: float("inf")  # type: ignore[method-assign]
