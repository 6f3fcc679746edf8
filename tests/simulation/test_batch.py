"""Many seeds: nothing lost, nothing counted twice, memory bounded, ended when enough have failed."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvferry.simulator.ground.events import ItemBegan, Observer
from kvferry.simulator.ground.options import Options
from kvferry.simulator.ground.outcome import ITEMS_MAX, Finding, Outcome, Violation, findings
from kvferry.simulator.trials.batch import (
    FAILURES_KEPT_MAX,
    LOST_MAX,
    Batch,
    Chunk,
    LostSeeds,
    Simulate,
    Tally,
    guarded,
    run_batch,
    run_chunk,
)
from tests.support import fake_simulation as fake

pytestmark = pytest.mark.timeout(120)
"""Processes: so long only where something hangs; a loaded machine is slow."""


LIMIT_SECONDS = 0.3


def batch(count: int, **changes: object) -> Batch:
    return replace(Batch(0, count, Options(), fake.simulate), **changes)


def total(of: Batch) -> Tally:
    tally = Tally()
    for part in run_batch(of):
        tally.merge(part)
    return tally


def shown(tally: Tally) -> tuple[object, ...]:
    return (
        tally.seeds,
        tally.failed_seeds,
        tally.violations,
        tally.transfers,
        tally.outcomes,
        tally.transitions,
        tally.cells,
        sorted(outcome.seed for outcome in tally.failures),
    )


def test_one_process_counts_every_seed() -> None:
    tally = total(batch(30, first=5))
    assert (tally.seeds, tally.failed_seeds, tally.violations, tally.transfers) == (30, 3, 3, 210)
    assert [outcome.seed for outcome in tally.failures] == [7, 17, 27]
    assert tally.outcomes == {"completed": 54, "failed": 6}
    assert tally.transitions == {("source", "queued", "advance"): 30, ("part", "written", "failed"): 30}
    assert tally.cells == {("posted", "D abort"): 30, ("decoding", "late"): 30}
    assert tally.virtual_seconds == 45.0
    assert tally.events == sum(fake.simulate(seed, Options()).events for seed in range(5, 35))


def test_many_processes_count_the_same() -> None:
    assert shown(total(batch(41, jobs=3))) == shown(total(batch(41)))


def test_histories_are_the_same_in_a_process_with_another_hash_seed() -> None:
    parts = list(run_batch(batch(18, jobs=2)))
    hashes = {outcome.seed: outcome.trace_hash for part in parts for outcome in part.failures}
    assert hashes == {seed: fake.simulate(seed, Options()).trace_hash for seed in (7, 17)}


def test_it_stops_when_enough_have_failed() -> None:
    tally = total(batch(1000, stop_after=2))
    assert (tally.seeds, tally.failed_seeds) == (18, 2)


def test_it_stops_over_processes_too_and_ends_them() -> None:
    tally = total(batch(10_000, jobs=2, stop_after=2))
    assert 2 <= tally.failed_seeds <= 3
    assert tally.seeds < 200
    assert multiprocessing.active_children() == []


def test_only_the_first_failures_are_kept_with_all_that_they_say() -> None:
    tally = Tally()
    violation = Violation(1, 0.0, "x")
    for seed in range(FAILURES_KEPT_MAX + 5):
        tally.add(Outcome(seed, (violation, violation), "", 1, 1.0, 1))
    assert (tally.failed_seeds, tally.violations) == (FAILURES_KEPT_MAX + 5, 2 * FAILURES_KEPT_MAX + 10)
    assert [outcome.seed for outcome in tally.failures] == list(range(FAILURES_KEPT_MAX))
    other = Tally()
    other.merge(tally)
    other.merge(tally)
    assert (other.failed_seeds, len(other.failures)) == (2 * FAILURES_KEPT_MAX + 10, FAILURES_KEPT_MAX)


def test_a_seed_that_raises_is_a_finding_and_the_others_go_on() -> None:
    tally = total(batch(4, simulate=fake.raising))
    assert (tally.seeds, tally.failed_seeds) == (4, 1)
    (violation,) = tally.failures[0].violations
    assert violation.promise == 0
    assert violation.what.startswith("the simulation raised ZeroDivisionError: in seed 2 (")
    assert "fake_simulation.py:" in violation.what


def test_an_interrupt_is_no_finding() -> None:
    def interrupted(seed: int, options: Options, **_: object) -> Outcome:
        raise KeyboardInterrupt

    simulate: Simulate = interrupted
    with pytest.raises(KeyboardInterrupt):
        guarded(simulate, 1, Options())


def endless_chunk(first: int) -> Tally:
    """Seed 2 has no end."""
    return run_chunk(Chunk(first, 2, Options(), fake.endless, None, 0.2))


def test_a_seed_that_does_not_end_is_a_finding() -> None:
    """In a process of its own, which nothing else times."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        tally = pool.apply(endless_chunk, (2,))
        pool.close()
        pool.join()
    assert (tally.seeds, tally.failed_seeds) == (2, 1)
    assert tally.failures[0].violations == (Violation(0, 0.0, "did not end within 0.2 s of CPU time"),)


def test_seeds_whose_process_died_are_named_and_the_others_count() -> None:
    tally = total(batch(8, simulate=fake.dying, jobs=2, first=1))
    assert tally.lost == [LostSeeds(range(1, 5), "a worker process ended with exit code 9")]
    assert tally.ran == [range(5, 9)]
    assert (tally.seeds, tally.failed_seeds) == (4, 1)


def dying_always(seed: int, options: Options, **_: object) -> Outcome:
    """Every seed takes its process with it."""
    os._exit(9)


def test_it_stops_when_every_process_dies() -> None:
    tally = total(batch(1000, simulate=dying_always, jobs=2))
    assert (tally.seeds, len(tally.lost)) == (0, LOST_MAX)
    assert multiprocessing.active_children() == []


def test_the_seeds_that_were_run_are_known() -> None:
    assert total(batch(30, first=5)).ran == [range(5, 35)]
    assert total(batch(30, first=5, jobs=3)).ran == [range(5, 35)]
    tally = Tally()
    for seed in (4, 9, 3, 8, 0):
        tally.add(Outcome(seed, (), "", 1, 1.0, 1))
    assert tally.ran == [range(1), range(3, 5), range(8, 10)]


def test_what_hangs_counts_once_with_all_that_follows_from_it() -> None:
    owed, ended = Violation(6, 3.0, "owed since 3", unfinished=True), Violation(6, 1.0, "x", unfinished=True)
    left, other = Violation(7, math.inf, "left over", unfinished=True), Violation(2, 1.5, "a late write")
    assert findings((other, left, ended, owed)) == (Finding(other), Finding(owed, (ended, left)))
    tally = Tally()
    tally.add(Outcome(0, (other, left, ended, owed), "", 1, 1.0, 1))
    assert tally.violations == 2


def test_a_history_without_an_end_tells_what_has_begun_in_it() -> None:
    outcome = guarded(begins_and_raises, 3, Options())
    assert outcome.items == ((4, "a request"), (1002, "a fault"))


def begins_and_raises(seed: int, options: Options, *, observers: Sequence[Observer], **_: object) -> Outcome:
    for number, what in ((4, "a request"), (1002, "a fault"), (ITEMS_MAX + 1, "what always happens")):
        for observer in observers:
            observer.observe(ItemBegan(1.0, number, what))
    raise ZeroDivisionError


def test_a_timer_that_was_set_before_goes_on_afterwards() -> None:
    """The test runner's limit, which is an alarm, and a profiler's timer."""
    alarm = signal.getitimer(signal.ITIMER_REAL)[0]
    assert alarm > 0, "the test runner's limit is an alarm"
    handler = signal.signal(signal.SIGPROF, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_PROF, 900.0)
    try:
        guarded(fake.simulate, 1, Options(), seconds_max=1000.0)
        assert 0 < signal.getitimer(signal.ITIMER_PROF)[0] <= 901.0
        assert signal.getsignal(signal.SIGPROF) is signal.SIG_IGN
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, handler)
    assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= alarm


def waiting(seed: int, options: Options, **_: object) -> Outcome:
    """Takes longer than its limit in real time, and next to no CPU time, as in a stopped process."""
    began, stopped = time.monotonic(), threading.Event()
    while time.monotonic() - began < 2 * LIMIT_SECONDS:
        stopped.wait(LIMIT_SECONDS)
    return Outcome(seed, (), "hash", 1, 1.0, 1)


def waiting_chunk(first: int) -> Tally:
    """Each seed is kept from running."""
    return run_chunk(Chunk(first, 2, Options(), waiting, None, LIMIT_SECONDS))


def test_a_history_that_is_kept_from_running_is_no_finding() -> None:
    """A machine may be busy or stopped: only what a history computes itself counts."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        tally = pool.apply(waiting_chunk, (0,))
        pool.close()
        pool.join()
    assert (tally.seeds, tally.failed_seeds) == (2, 0)
