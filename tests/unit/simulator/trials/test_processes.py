"""Work over processes: each task once, every way that a process can end, and nothing left behind.

Goal: a run of many seeds neither loses one, nor hangs, nor leaves processes. Method: real processes, a few.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os

import pytest

from kvferry.simulator.trials.processes import WorkerError, spread
from tests.support.fake_simulation import squared

pytestmark = pytest.mark.timeout(120)
"""Processes: so long only where something hangs; a loaded machine is slow."""


def left_behind() -> list[int | None]:
    return [process.pid for process in multiprocessing.active_children()]


def test_every_task_is_answered_once_by_as_many_processes_as_asked() -> None:
    answers = dict(spread(squared, range(20), jobs=2))
    assert {task: answer for task, (answer, _) in answers.items()} == {n: n * n for n in range(20)}
    pids = {pid for _, pid in answers.values()}
    assert 1 <= len(pids) <= 2
    assert os.getpid() not in pids
    assert left_behind() == []


def test_a_fresh_process_has_one_task_only() -> None:
    answers = [pid for _, (_, pid) in spread(squared, range(3), jobs=2, fresh=True)]
    assert len(set(answers)) == 3
    assert left_behind() == []


def test_no_task_needs_no_process() -> None:
    assert list(spread(squared, [], jobs=4)) == []


def test_work_that_raises_names_its_task() -> None:
    with pytest.raises(WorkerError, match=r"(?s)work on -3 raised.*ValueError: -3 is negative"):
        list(spread(squared, [-3, 1, 2], jobs=1))
    assert left_behind() == []


def test_a_process_that_dies_names_its_task_and_its_exit_code() -> None:
    with pytest.raises(WorkerError, match="exit code 7; it had 7"):
        list(spread(os._exit, [7], jobs=1))
    assert left_behind() == []


def test_closing_it_ends_processes_that_are_at_work() -> None:
    with contextlib.closing(spread(squared, range(1000), jobs=2)) as answers:
        next(answers)
        assert len(left_behind()) == 2
    assert left_behind() == []
