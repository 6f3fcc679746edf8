"""One history from one seed."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvferry.simulator.aims import Aims
from kvferry.simulator.checkers import checkers
from kvferry.simulator.coverage import recording
from kvferry.simulator.events import Observer
from kvferry.simulator.grid import Grid
from kvferry.simulator.options import Options
from kvferry.simulator.outcome import Outcome, Violation
from kvferry.simulator.stages import Stages
from kvferry.simulator.trace import TraceHash, TraceLines
from kvferry.simulator.world import World


def simulate(
    seed: int, options: Options, *, traced: bool = False, observers: Sequence[Observer] = ()
) -> Outcome:
    """Run a history to its end. The same seed, options and code give the same events in any process."""
    with _quiet():
        return _simulate(seed, options, traced=traced, observers=observers)


def _simulate(seed: int, options: Options, *, traced: bool, observers: Sequence[Observer]) -> Outcome:
    hashing, lines = TraceHash(), TraceLines()
    world = World(seed, options)
    judges = checkers(world.inspection)
    grid = Grid(Stages(world.inspection))
    seen_by: list[Observer] = [hashing, *([lines] if traced else []), *observers, grid, *judges]
    world.observers += [*seen_by, Aims(world, grid)]
    violations: list[Violation] = []
    with recording() as transitions:
        try:
            world.run()
        except Exception as error:  # noqa: BLE001 - any exception of the code under test is a finding
            violations.append(Violation(0, world.now, _described(error)))
        else:
            for judge in judges:
                judge.finish()
    violations += world.violations
    for judge in judges:
        violations += judge.violations
    return Outcome(
        seed=seed,
        violations=tuple(violations),
        trace_hash=hashing.hexdigest(),
        events=hashing.events,
        virtual_seconds=world.now,
        transfers=len(world.router.dispatches),
        outcomes=dict(sorted(world.outcomes.items())),
        transitions=transitions,
        cells=grid.cells,
        items=tuple(world.items),
        trace=tuple(lines.lines),
    )


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
