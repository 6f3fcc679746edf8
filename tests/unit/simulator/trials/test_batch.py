"""Many seeds: nothing lost, nothing counted twice, memory bounded, ended when enough have failed."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace

import pytest

from kvferry.simulator.ground.options import Options
from kvferry.simulator.ground.outcome import Outcome, Violation
from kvferry.simulator.trials.batch import (
    FAILURES_KEPT_MAX,
    Batch,
    Chunk,
    Simulate,
    Tally,
    guarded,
    run_batch,
    run_chunk,
)
from kvferry.simulator.trials.processes import WorkerError
from tests.support import fake_simulation as fake

pytestmark = pytest.mark.timeout(120)
"""Processes: so long only where something hangs; a loaded machine is slow."""


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
    return run_chunk(Chunk(first, 2, Options(), fake.endless, None, 0.2))


def test_a_seed_that_does_not_end_is_a_finding() -> None:
    """In a process of its own: the alarm is the test runner's here."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        tally = pool.apply(endless_chunk, (2,))
        pool.close()
        pool.join()
    assert (tally.seeds, tally.failed_seeds) == (2, 1)
    assert tally.failures[0].violations == (Violation(0, 0.0, "did not end within 0.2 s of real time"),)


def test_a_process_that_dies_names_its_seeds() -> None:
    with pytest.raises(WorkerError, match="exit code 9; it had seeds 1 to 2"):
        total(batch(4, simulate=fake.dying, jobs=2, first=1))
