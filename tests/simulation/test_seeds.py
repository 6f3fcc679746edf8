"""Histories that failed once stay right, new ones break no promise, and a seed means one history for ever.

Goal: a change that breaks a promise is noticed here, with the command that shows how. Method: the simulator
on seeds; `kvferry simulate` runs more of them.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

import pytest

from kvferry.cli.simulate_report import failure_lines
from kvferry.simulator.faults.aims import NUMBER_FIRST as AIMS
from kvferry.simulator.ground.events import ItemBegan, Observed
from kvferry.simulator.ground.options import FAULTS, WORLDS, Options
from kvferry.simulator.ground.outcome import ITEMS_MAX
from kvferry.simulator.run import simulate
from kvferry.simulator.trials.batch import Batch, Tally, run_batch
from kvferry.simulator.trials.processes import spread


@dataclass(frozen=True)
class FailedOnce:
    """A history that broke a promise, and `why`: the cause, and the transcript that shows it smallest."""

    world: str
    seed: int
    why: str
    faults: frozenset[str] = frozenset(FAULTS)
    drop: frozenset[int] = frozenset()

    @property
    def options(self) -> Options:
        return Options(world=self.world, faults=self.faults, drop=self.drop)


# A seed means another history when the world's code changes, so the transcript is what keeps a bug away; the
# seed stays because it is cheap.
FAILED_ONCE: tuple[FailedOnce, ...] = ()

pytestmark = pytest.mark.timeout(120)
"""So long only where something hangs; a loaded machine is slow."""

SMALL_SEEDS = 100
OTHER_SEEDS = {
    "both": 10,
    "calm": 10,
    "groups": 15,
    "long": 2,
    "mixed": 15,
    "tall": 5,
    "turns": 10,
    "wide": 3,
}
FIRST = int(os.environ.get("KVFERRY_SIMULATION_FROM", "0"))
"""The same seeds in every run, so that a red build is red for its author too."""
NEW_SEEDS = 2000


def broken(first: int, count: int, options: Options) -> str:
    """What failed and how to see it; empty when nothing did. In processes, so that no seed can hang."""
    tally = Tally()
    for part in run_batch(Batch(first, count, options, simulate, jobs=2)):
        tally.merge(part)
    assert tally.seeds == count, tally.lost
    return "\n".join(line for outcome in tally.failures for line in failure_lines(outcome, options))


def test_what_failed_once_is_right() -> None:
    found = [broken(failed.seed, 1, failed.options) for failed in FAILED_ONCE]
    assert "\n".join(filter(None, found)) == ""


def test_the_small_world_keeps_every_promise() -> None:
    assert broken(FIRST, SMALL_SEEDS, Options()) == ""


@pytest.mark.parametrize("world", sorted(OTHER_SEEDS))
def test_other_worlds_keep_every_promise(world: str) -> None:
    assert broken(FIRST, OTHER_SEEDS[world], Options(world=world)) == ""


def test_every_world_is_tried() -> None:
    assert {"small", *OTHER_SEEDS} == set(WORLDS)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_alone_breaks_no_promise(fault: str) -> None:
    options = Options(faults=frozenset({fault}))
    found = [simulate(seed, options).violations for seed in range(FIRST, FIRST + 3)]
    assert found == [()] * 3


@pytest.mark.parametrize("world", WORLDS)
def test_the_same_seed_is_the_same_history(world: str) -> None:
    first, again = (simulate(FIRST, Options(world=world)) for _ in range(2))
    assert first == again
    assert first.events > 0


def test_who_watches_changes_nothing() -> None:
    plain, traced = simulate(FIRST, Options()), simulate(FIRST, Options(), traced=True)
    assert plain.trace_hash == traced.trace_hash
    assert len(traced.trace) == traced.events
    assert plain.trace == ()


def hashes(seed_and_world: tuple[int, str]) -> str:
    """Work for another process, which has another hash seed."""
    seed, world = seed_and_world
    return simulate(seed, Options(world=world)).trace_hash


def test_another_process_sees_the_same_history() -> None:
    tasks = [(FIRST + number, world) for world in ("small", "both", "tall", "groups") for number in range(2)]
    elsewhere = dict(spread(hashes, tasks, jobs=1))
    assert elsewhere == {task: hashes(task) for task in tasks}


def test_without_an_item_the_history_is_another_one() -> None:
    """What shrinking relies on: every number that is named can be left out, and then is not there."""
    whole = simulate(FIRST, Options())
    numbers = [number for number, _ in whole.items]
    assert len(numbers) == len(set(numbers)) > 0
    for number in numbers[:10]:
        without = simulate(FIRST, Options(drop=frozenset({number})))
        assert number not in dict(without.items)
        assert without.violations == ()
    nothing = simulate(FIRST, Options(drop=frozenset(numbers)))
    assert nothing.transfers < whole.transfers


class Begun:
    """Keeps what has a number and began."""

    def __init__(self) -> None:
        self.items: dict[int, str] = {}

    def observe(self, event: Observed) -> None:
        """Take one event."""
        if isinstance(event, ItemBegan):
            assert event.number not in self.items
            self.items[event.number] = event.what


def test_what_has_a_number_is_told_when_it_begins() -> None:
    """All work begins, and faults by chance; an aim may wait in vain; the last transfers always begin."""
    aims = 0
    for seed in range(FIRST, FIRST + 20):
        begun = Begun()
        items = dict(simulate(seed, Options(), observers=(begun,)).items)
        always = {number for number in begun.items if number >= ITEMS_MAX}
        assert always
        assert begun.items.keys() - always <= items.keys()
        assert all(begun.items[number] == items[number] for number in begun.items.keys() & items.keys())
        assert all(number >= AIMS for number in items.keys() - begun.items.keys())
        aims += sum(AIMS <= number < ITEMS_MAX for number in begun.items)
    assert aims > 0


@pytest.mark.long
@pytest.mark.timeout(600)
def test_new_seeds_break_no_promise() -> None:
    """Others in every run: what fails here is printed with its replay command."""
    first = random.SystemRandom().randrange(1 << 31)
    assert broken(first, NEW_SEEDS, Options()) == ""
