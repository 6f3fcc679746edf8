"""One history from one seed."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from kvferry.simulator.faults.aims import Aims
from kvferry.simulator.ground.events import Observer
from kvferry.simulator.ground.options import Options
from kvferry.simulator.ground.outcome import Outcome, Violation
from kvferry.simulator.play.history import History
from kvferry.simulator.watch.checkers import checkers
from kvferry.simulator.watch.checkers.base import Checker
from kvferry.simulator.watch.coverage import recording
from kvferry.simulator.watch.grid import Grid
from kvferry.simulator.watch.stages import Stages
from kvferry.simulator.watch.trace import TraceHash, TraceLines


def simulate(
    seed: int, options: Options, *, traced: bool = False, observers: Sequence[Observer] = ()
) -> Outcome:
    """Run a history to its end. The same seed, options and code give the same events in any process."""
    with _quiet():
        return _simulate(seed, options, traced=traced, observers=observers)


def _simulate(seed: int, options: Options, *, traced: bool, observers: Sequence[Observer]) -> Outcome:
    hashing, lines = TraceHash(), TraceLines()
    history = History(seed, options)
    judges = checkers(history.inspection)
    grid = Grid(Stages(history.inspection))
    seen_by: list[Observer] = [hashing, *([lines] if traced else []), *observers, grid, *judges]
    aims = Aims(history.levers, grid)
    history.world.ground.watch(*seen_by, aims)
    violations: list[Violation] = []
    unfinished: list[Violation] = []
    with recording() as transitions:
        try:
            history.run()
        except Exception as error:  # noqa: BLE001 - any exception of the code under test is a finding
            violations.append(Violation(0, history.world.now, _described(error)))
        else:
            unfinished = [violation for judge in judges for violation in _judged_at_end(judge)]
    violations += history.violations
    for judge in judges:
        violations += judge.violations
    violations += unfinished
    return Outcome(
        seed=seed,
        violations=tuple(violations),
        trace_hash=hashing.hexdigest(),
        events=hashing.events,
        virtual_seconds=history.world.now,
        transfers=len(history.world.router.dispatches),
        outcomes=dict(sorted(history.world.outcomes.items())),
        transitions=transitions,
        cells=grid.cells,
        items=(*aims.items, *history.items),
        trace=tuple(lines.lines),
    )


def _judged_at_end(judge: Checker) -> list[Violation]:
    """What never happened, taken out of what the checker has found."""
    before = len(judge.violations)
    judge.finish()
    unfinished = [replace(violation, unfinished=True) for violation in judge.violations[before:]]
    del judge.violations[before:]
    return unfinished


def _described(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)
    place = " < ".join(f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in where[:-6:-1])
    return f"{type(error).__name__}: {error} ({place})"


@contextmanager
def _quiet() -> Iterator[None]:
    """What agents and hosts warn of is what histories are made of."""
    logger = logging.getLogger("kvferry")
    level, logger_level = logging.CRITICAL + 1, logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(logger_level)
