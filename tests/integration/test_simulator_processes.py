"""Work over processes: each task once, every way that a process can end, and nothing left behind.

Goal: a run of many seeds neither loses one, nor hangs, nor leaves processes. Method: real processes, a few.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys

import pytest

from kvferry.simulator.trials.processes import Lost, spread
from tests.support.fake_simulation import squared

pytestmark = pytest.mark.timeout(120)
"""Processes: so long only where something hangs; a loaded machine is slow."""


def deadly(number: int) -> int:
    """7 exits with that code, 9 is killed as one that took too much memory is."""
    if number == 7:
        os._exit(number)
    if number == 9:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


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


def test_work_that_raises_loses_its_task_only() -> None:
    answers = dict(spread(squared, [-3, 1, 2], jobs=1))
    lost = answers.pop(-3)
    assert isinstance(lost, Lost)
    assert lost.why.startswith("its work raised:\nTraceback")
    assert "ValueError: -3 is negative" in lost.why
    assert {task: answer for task, (answer, _) in answers.items()} == {1: 1, 2: 4}
    assert left_behind() == []


def test_a_process_that_dies_loses_its_task_only() -> None:
    answers = dict(spread(deadly, [0, 7, 2, 9], jobs=2))
    assert answers == {
        0: 0,
        7: Lost("a worker process ended with exit code 7"),
        2: 2,
        9: Lost("a worker process was killed by signal 9 (Killed)"),
    }
    assert left_behind() == []


def test_closing_it_ends_processes_that_are_at_work() -> None:
    with contextlib.closing(spread(squared, range(1000), jobs=2)) as answers:
        next(answers)
        assert len(left_behind()) == 2
    assert left_behind() == []


PROGRAM = """
from kvferry.simulator.trials.processes import spread
from tests.support.fake_simulation import interrupts_blocked
print(sorted(spread(interrupts_blocked, range(3), jobs=1, fresh=True)))
"""


def test_no_process_answers_a_terminals_interrupt_not_even_the_first() -> None:
    """The first one that a program starts brings multiprocessing's tracker along, which takes masks away."""
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == "[(0, True), (1, True), (2, True)]\n"
