"""Directed faults: every fault of the grid can be aimed, strikes at its stage, and can be left out."""

from __future__ import annotations

from random import Random

import pytest

from kvferry.simulator.faults import aims
from kvferry.simulator.faults.aims import NEEDED, Aim
from kvferry.simulator.faults.strikes import _LEVERS, BY_LINK, LinkFaults
from kvferry.simulator.ground.options import FAULTS as KINDS
from kvferry.simulator.ground.options import Options
from kvferry.simulator.ground.outcome import Outcome
from kvferry.simulator.play.history import History
from kvferry.simulator.run import simulate
from kvferry.simulator.watch import grid, stages
from kvferry.simulator.watch.grid import FAULTS, IMPOSSIBLE, Grid
from kvferry.simulator.watch.stages import STAGES, Stages
from kvferry.simulator.world.world import World
from kvferry.transport.memory import MessageFault, PostFault

pytestmark = pytest.mark.timeout(120)
"""Histories: so long only where something hangs; a loaded machine is slow."""


def aimed(seed: int, stage: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> Outcome:
    """A history with one aim, and no other fault than what it needs."""

    def draw(world: World) -> list[Aim]:
        return [Aim(aims.NUMBER_FIRST, stage, fault, 0, Random(seed))]

    monkeypatch.setattr(aims, "draw", draw)
    return simulate(seed, Options(faults=frozenset({NEEDED[fault]})))


def test_every_fault_has_a_lever_and_a_switch() -> None:
    assert {*_LEVERS, *BY_LINK} == set(FAULTS) == set(NEEDED)
    assert not _LEVERS.keys() & BY_LINK.keys()
    assert set(NEEDED.values()) <= set(KINDS)


@pytest.mark.parametrize(
    ("stage", "fault"),
    [
        (stages.QUEUED, grid.D_ABORT),
        (stages.SENT, grid.MESSAGE_LOST),
        (stages.RECEIVED, grid.P_CRASH),
        (stages.POSTED, grid.POST_REFUSED),
        (stages.POSTED, grid.P_PREEMPTION),
        (stages.ALL_DONE, grid.D_CRASH),
        (stages.DECODING, grid.SAME_ID),
        (stages.DECODING, grid.D_PREEMPTION),
    ],
)
def test_an_aim_strikes_at_its_stage(stage: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some seeds do not come to the stage: of a few histories one at least must."""
    found = [aimed(seed, stage, fault, monkeypatch).cells.get((stage, fault), 0) for seed in range(12)]
    assert any(found)


def test_aims_are_drawn_from_the_seed_over_the_whole_grid() -> None:
    def drawn(seed: int) -> list[str]:
        return [str(aim) for aim in aims.draw(World(seed, Options()))]

    assert [drawn(seed) for seed in range(20)] == [drawn(seed) for seed in range(20)]
    seen = {(aim.stage, aim.fault) for seed in range(800) for aim in aims.draw(World(seed, Options()))}
    assert seen <= {(stage, fault) for stage in STAGES for fault in FAULTS} - IMPOSSIBLE.keys()
    assert len(seen) > 100


def test_a_kind_of_fault_that_is_switched_off_is_not_aimed() -> None:
    options = Options(faults=frozenset(KINDS) - {"crash"})
    kinds = {NEEDED[aim.fault] for seed in range(100) for aim in aims.draw(World(seed, options))}
    assert "abort" in kinds
    assert "crash" not in kinds


def test_an_aim_can_be_left_out() -> None:
    seed = next(seed for seed in range(50) if aims.draw(World(seed, Options())))
    numbers = [number for number, _ in simulate(seed, Options()).items]
    assert aims.NUMBER_FIRST in numbers
    left = simulate(seed, Options(drop=frozenset({aims.NUMBER_FIRST}))).items
    assert [number for number, _ in left] == [number for number in numbers if number != aims.NUMBER_FIRST]


def test_what_waits_on_links_is_taken_away_again() -> None:
    history = History(3, Options(faults=frozenset()))
    world, tracker = history.world, Stages(history.inspection)
    world.ground.watch(Grid(tracker))
    history.run()
    links = LinkFaults(world, tracker)
    course = next(tracker.courses())
    for fault in (MessageFault.LOSE, PostFault.STALL):
        links.arm(fault, course)
        plans = world.network.fabric.exchange.plans.values()
        assert sum(len(plan.posts) + len(plan.messages) for plan in plans) > 0
        links.disarm(fault, course)
        assert sum(len(plan.posts) + len(plan.messages) for plan in plans) == 0
