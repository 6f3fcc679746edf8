"""Many seeds: run over processes, folded into one tally, ended early when enough of them failed.

Seeds whose process died are named, and the others count. Memory is bounded: only what is counted, and the
first failures, are kept.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

from kvferry.simulator.ground.events import ItemBegan, Observed, Observer
from kvferry.simulator.ground.options import Options
from kvferry.simulator.ground.outcome import (
    ITEMS_MAX,
    CellKey,
    Outcome,
    TransitionKey,
    Violation,
    findings,
)
from kvferry.simulator.trials.processes import Lost, spread

FAILURES_KEPT_MAX = 50
"""So many failing histories are kept with all that they say; the others are counted."""
CHUNK_SEEDS_MAX = 4
"""A process answers after so many seeds at the latest, so that a failure is soon told."""
SEED_SECONDS_MAX = 60.0
"""CPU time; a history that takes more does not end. A busy or stopped machine makes no history longer."""
ENDLESS = "did not end within"
LOST_MAX = 10
"""When so many chunks were lost with their processes, something is wrong that more seeds do not tell."""


class Simulate(Protocol):
    """`kvferry.simulator.run.simulate`, or what stands in for it in a test."""

    def __call__(
        self, seed: int, options: Options, *, traced: bool = False, observers: Sequence[Observer] = ()
    ) -> Outcome:
        """Run one history."""
        ...


@dataclass(frozen=True, slots=True)
class LostSeeds:
    """Seeds that were not judged, and why."""

    seeds: range
    why: str


@dataclass(slots=True)
class Tally:
    """What the histories of many seeds came to. Pickles."""

    seeds: int = 0
    failed_seeds: int = 0
    violations: int = 0
    transfers: int = 0
    events: int = 0
    virtual_seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    transitions: Counter[TransitionKey] = field(default_factory=Counter)
    cells: Counter[CellKey] = field(default_factory=Counter)
    failures: list[Outcome] = field(default_factory=list)
    """The first FAILURES_KEPT_MAX."""
    ran: list[range] = field(default_factory=list)
    """The seeds that were run, in order, as few ranges as can be."""
    lost: list[LostSeeds] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """Count one history."""
        self.seeds += 1
        self.ran = _joined([*self.ran, range(outcome.seed, outcome.seed + 1)])
        self.violations += len(findings(outcome.violations))
        self.transfers += outcome.transfers
        self.events += outcome.events
        self.virtual_seconds += outcome.virtual_seconds
        self.outcomes.update(outcome.outcomes)
        self.transitions.update(outcome.transitions)
        self.cells.update(outcome.cells)
        if outcome.violations:
            self.failed_seeds += 1
            self._keep((outcome,))

    def merge(self, other: Tally) -> None:
        """Count what another tally has counted."""
        self.seeds += other.seeds
        self.failed_seeds += other.failed_seeds
        self.violations += other.violations
        self.transfers += other.transfers
        self.events += other.events
        self.virtual_seconds += other.virtual_seconds
        self.outcomes.update(other.outcomes)
        self.transitions.update(other.transitions)
        self.cells.update(other.cells)
        self.ran = _joined([*self.ran, *other.ran])
        self.lost += other.lost
        self._keep(other.failures)

    def _keep(self, failures: Sequence[Outcome]) -> None:
        self.failures.extend(failures[: FAILURES_KEPT_MAX - len(self.failures)])


def _joined(ranges: list[range]) -> list[range]:
    """Ranges in order, those that touch as one."""
    joined: list[range] = []
    for one in sorted(ranges, key=lambda each: each.start):
        if joined and one.start <= joined[-1].stop:
            joined[-1] = range(joined[-1].start, max(one.stop, joined[-1].stop))
        else:
            joined.append(one)
    return joined


@dataclass(frozen=True, slots=True)
class Batch:
    """Which seeds to run, and how."""

    first: int
    count: int
    options: Options
    simulate: Simulate
    jobs: int = 1
    """With 1 the seeds run in this process."""
    stop_after: int | None = None
    """Stop when so many seeds have failed."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive seeds, as a process takes them."""

    first: int
    count: int
    options: Options
    simulate: Simulate
    stop_after: int | None
    seed_seconds_max: float | None

    def __str__(self) -> str:
        """For errors."""
        return f"seeds {self.first} to {self.first + self.count - 1}"


def run_batch(batch: Batch) -> Generator[Tally, None, None]:
    """Yield the tally of a few seeds at a time, as they are done. Close it to stop early.

    Seeds whose process died are in `Tally.lost`; after `LOST_MAX` such losses no further seed is run.
    """
    failed = lost = 0
    with contextlib.closing(_parts(batch)) as parts:
        for part in parts:
            failed += part.failed_seeds
            lost += len(part.lost)
            yield part
            if lost >= LOST_MAX or (batch.stop_after is not None and failed >= batch.stop_after):
                return


def _parts(batch: Batch) -> Generator[Tally, None, None]:
    if batch.jobs == 1:
        # A timer's signal reaches the main thread only.
        guard = SEED_SECONDS_MAX if threading.current_thread() is threading.main_thread() else None
        yield from map(run_chunk, _chunks(batch, 1, guard))
        return
    size = max(1, min(CHUNK_SEEDS_MAX, batch.count // batch.jobs))
    with contextlib.closing(
        spread(run_chunk, _chunks(batch, size, SEED_SECONDS_MAX), jobs=batch.jobs)
    ) as answers:
        for chunk, part in answers:
            if isinstance(part, Lost):
                seeds = range(chunk.first, chunk.first + chunk.count)
                yield Tally(lost=[LostSeeds(seeds, part.why)])
            else:
                yield part


def _chunks(batch: Batch, size: int, seed_seconds_max: float | None) -> Iterator[Chunk]:
    end = batch.first + batch.count
    for first in range(batch.first, end, size):
        count = min(size, end - first)
        yield Chunk(first, count, batch.options, batch.simulate, batch.stop_after, seed_seconds_max)


def run_chunk(chunk: Chunk) -> Tally:
    """Run a chunk's seeds one after the other."""
    tally = Tally()
    for seed in range(chunk.first, chunk.first + chunk.count):
        tally.add(guarded(chunk.simulate, seed, chunk.options, seconds_max=chunk.seed_seconds_max))
        if chunk.stop_after is not None and tally.failed_seeds >= chunk.stop_after:
            break
    return tally


# --- one history, whatever it does ----------------------------------------------------------------


class _TooLongError(BaseException):
    """Raised into a history that does not end. No handler of errors in the code under test catches it."""


def guarded(
    simulate: Simulate,
    seed: int,
    options: Options,
    *,
    seconds_max: float | None = None,
    observers: Sequence[Observer] = (),
) -> Outcome:
    """Run one history; if it raises, or takes more than `seconds_max` of CPU time, that is its violation.

    Real time does not count: the machine may be busy, or stopped. The limit needs a main thread whose
    profiling timer (SIGPROF) is free, as a worker process has.
    """
    began = _Began()
    try:
        with _limit(seconds_max):
            return simulate(seed, options, observers=(began, *observers))
    except _TooLongError:
        return _broken(seed, f"{ENDLESS} {seconds_max:g} s of CPU time", began)
    except Exception as error:  # noqa: BLE001 - a broken history is a finding, and the others go on
        where = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno}, {where.name})"
        return _broken(seed, f"the simulation raised {what}", began)


class _Began:
    """An observer that keeps what has a number: all that is known of a history that did not end."""

    def __init__(self) -> None:
        self.items: dict[int, str] = {}

    def observe(self, event: Observed) -> None:
        """Take one event."""
        if isinstance(event, ItemBegan):
            self.items[event.number] = event.what

    def taker(self, kind: type[Observed]) -> Callable[[Any], None] | None:
        """Nothing else is wanted."""
        return self.observe if kind is ItemBegan else None


def _broken(seed: int, what: str, began: _Began) -> Outcome:
    items = tuple((number, item) for number, item in began.items.items() if number < ITEMS_MAX)
    return Outcome(seed, (Violation(0, 0.0, what),), "", 0, 0.0, 0, items=items)


@contextlib.contextmanager
def _limit(cpu_seconds: float | None) -> Iterator[None]:
    if cpu_seconds is None:
        yield
        return

    def ring(_signal: int, _frame: FrameType | None) -> None:
        raise _TooLongError

    before = signal.signal(signal.SIGPROF, ring)
    # Somebody else's timer, as a profiler's, goes on afterwards.
    earlier = signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)
        signal.setitimer(signal.ITIMER_PROF, *earlier)
