"""A failing history becomes small, still fails for the same reason, and the search has an end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.simulator.ground.options import Options
from kvferry.simulator.ground.outcome import Outcome, Violation
from kvferry.simulator.trials.shrink import RUNS_MAX, Shrink, Shrunk, shrink
from tests.support import fake_simulation as fake


class Counting:
    """A simulation of numbered items that fails as `breaks` says, and counts its runs."""

    def __init__(self, items: int, breaks: object) -> None:
        self.items, self.breaks, self.runs = items, breaks, 0

    def __call__(self, seed: int, options: Options, **_: object) -> Outcome:
        self.runs += 1
        kept = frozenset(range(self.items)) - options.drop
        violations = tuple(Violation(promise, 1.0, "x") for promise in self.breaks(kept))
        items = tuple((number, f"item {number}") for number in sorted(kept))
        return Outcome(seed, violations, "", 1, 1.0, 1, items=items)


def shrunk(simulation: Counting, **changes: object) -> Shrunk:
    failing = simulation(7, Options())
    simulation.runs = 0
    return shrink(replace(Shrink(failing, Options(), simulation), **changes))


@pytest.mark.parametrize("guilty", [{0}, {99}, {3, 8}, {0, 50, 99}, {10, 11, 12, 13}, set()])
def test_only_what_is_needed_remains(guilty: set[int]) -> None:
    simulation = Counting(100, lambda kept: [2] if kept >= guilty else [])
    result = shrunk(simulation)
    assert {number for number, _ in result.items} == guilty
    assert result.options.drop == frozenset(range(100)) - guilty
    assert result.outcome.violations[0].promise == 2
    assert (result.items_before, result.runs) == (100, simulation.runs)
    assert simulation.runs < RUNS_MAX


def test_everything_is_left_out_first() -> None:
    """What breaks with nothing in it is told at once."""
    simulation = Counting(100, lambda kept: [2])
    result = shrunk(simulation)
    assert (result.items, simulation.runs) == ((), 1)
    assert result.options.drop == frozenset(range(100))


def test_the_time_is_bounded() -> None:
    simulation = Counting(64, lambda kept: [2])
    result = shrunk(simulation, seconds_max=0.0)
    assert (result.runs, len(result.items)) == (0, 64)


def test_another_promise_is_another_bug() -> None:
    def breaks(kept: frozenset[int]) -> list[int]:
        return [2] if kept >= {3, 8} else [5]

    assert {number for number, _ in shrunk(Counting(12, breaks)).items} == {3, 8}


def test_the_same_promise_counts_wherever_it_stands() -> None:
    def breaks(kept: frozenset[int]) -> list[int]:
        return [2, 6] if len(kept) > 6 else [6, 2] if 3 in kept else [6]

    assert {number for number, _ in shrunk(Counting(12, breaks)).items} == {3}


def test_the_number_of_runs_is_bounded() -> None:
    simulation = Counting(64, lambda kept: [2] if kept >= set(range(0, 64, 2)) else [])
    result = shrunk(simulation, runs_max=10)
    assert simulation.runs == result.runs == 10
    assert {number for number, _ in result.items} >= set(range(0, 64, 2))
    assert result.outcome.violations[0].promise == 2


def test_what_is_dropped_already_stays_dropped() -> None:
    options = Options(drop=frozenset({0, 1}))
    failing = fake.simulate(7, options)
    result = shrink(Shrink(failing, options, fake.simulate))
    assert result.options.drop == frozenset(range(12)) - fake.GUILTY
    assert result.items_before == 10


def test_a_history_without_numbers_stays_as_it_is() -> None:
    failing = Outcome(2, (Violation(0, 0.0, "raised"),), "", 0, 0.0, 0)
    result = shrink(Shrink(failing, Options(), fake.raising))
    assert (result.outcome, result.runs, result.items) == (failing, 0, ())


def test_a_run_that_raises_is_not_the_failure_that_is_looked_for() -> None:
    def breaks(kept: frozenset[int]) -> list[int]:
        if 5 not in kept:
            raise ZeroDivisionError
        return [2]

    assert {number for number, _ in shrunk(Counting(12, breaks)).items} == {5}
