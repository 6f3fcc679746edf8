"""What is drawn into a world."""

from __future__ import annotations

from random import Random

import pytest

from kvferry.simulator.ground.options import Options
from kvferry.simulator.world import shape


def drawn(world: str, count: int = 80) -> list[shape.Shape]:
    return [shape.draw(Options(world=world), Random(seed), Random(seed + 0.5)) for seed in range(count)]


@pytest.mark.parametrize("world", ["calm", "small"])
def test_links_are_given_up_soon_in_some_histories_of_every_kind(world: str) -> None:
    hurried = [
        all(facts.limits.idle_seconds == shape.IDLE_SECONDS for facts in one.engines) for one in drawn(world)
    ]
    assert {*hurried} == {True, False}


def test_small_tables_of_links_and_of_ended_transfers_are_faults() -> None:
    names = ("links_max", "hellos_max", "tombstones_max")
    for name in names:
        least = {
            world: min(getattr(facts.limits, name) for one in drawn(world) for facts in one.engines)
            for world in ("calm", "small")
        }
        assert least["small"] == 1
        assert least["calm"] > 100
