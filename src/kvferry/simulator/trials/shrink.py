"""A failing history made smaller: items and faults are left out while the same promise stays broken.

Every workload item and random fault of a seed has a number (`Outcome.items`); `Options.drop` leaves numbers
out. All of them are tried first, then large groups, then small ones. Runs and time are bounded, so the
result is smaller, not smallest.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvferry.simulator.ground.options import Options
from kvferry.simulator.ground.outcome import Outcome
from kvferry.simulator.trials.batch import Simulate, guarded

RUNS_MAX = 200
SECONDS_MAX = 300.0
"""Real time; a history that does not end by itself takes long to look at."""


@dataclass(frozen=True, slots=True)
class Shrink:
    """A failing history to make smaller. Pickles."""

    failing: Outcome
    options: Options
    simulate: Simulate
    runs_max: int = RUNS_MAX
    seconds_max: float = SECONDS_MAX
    seed_seconds_max: float | None = None

    def __str__(self) -> str:
        """For errors."""
        return f"seed {self.failing.seed}"


@dataclass(frozen=True, slots=True)
class Shrunk:
    """The smallest history found that breaks the same promise."""

    outcome: Outcome
    options: Options
    """Those of the failing history with more dropped."""
    items_before: int
    runs: int

    @property
    def items(self) -> tuple[tuple[int, str], ...]:
        """What is left."""
        return self.outcome.items


def shrink(task: Shrink) -> Shrunk:
    """Leave out what can be left out, greedily, in at most `runs_max` runs and about `seconds_max`."""
    until = time.monotonic() + task.seconds_max
    best = Shrunk(task.failing, task.options, len(task.failing.items), runs=0)
    promise = task.failing.violations[0].promise
    size = max(1, len(best.items))
    while True:
        smaller, runs = best, best.runs
        for group in _groups(best, size):
            # An earlier success may have taken these along: a fault has nothing left to hit.
            leave_out = group & {number for number, _ in smaller.items}
            if not leave_out:
                continue
            if runs >= task.runs_max or time.monotonic() >= until:
                return replace(smaller, runs=runs)
            runs += 1
            smaller = _attempt(task, smaller, leave_out, promise) or smaller
        shrank = len(smaller.items) < len(best.items)
        best = replace(smaller, runs=runs)
        if size == 1 and not shrank:
            return best
        size = max(1, min(size // 2, len(best.items) // 2))


def _groups(best: Shrunk, size: int) -> Iterator[frozenset[int]]:
    numbers = [number for number, _ in best.items]
    for at in range(0, len(numbers), size):
        yield frozenset(numbers[at : at + size])


def _attempt(task: Shrink, best: Shrunk, leave_out: frozenset[int], promise: int) -> Shrunk | None:
    options = replace(best.options, drop=best.options.drop | leave_out)
    outcome = guarded(task.simulate, task.failing.seed, options, seconds_max=task.seed_seconds_max)
    if all(violation.promise != promise for violation in outcome.violations):
        return None
    return replace(best, outcome=outcome, options=options)
