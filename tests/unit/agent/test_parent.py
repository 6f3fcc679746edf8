"""A rank that has outlived its engine posts nothing more."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection

import pytest

from kvferry.agent.parent import LOOK_SECONDS, ParentWatch
from kvferry.errors import TransportError


def _watch(results: Connection) -> None:
    """A rank: says when it runs, and when its parent is gone."""
    watch = ParentWatch()
    results.send(("runs", watch.is_gone()))
    while not watch.is_gone():
        pass
    results.send(("orphan", True))


def _engine(results: Connection) -> None:
    """An engine that starts a rank and waits to be killed."""
    context = multiprocessing.get_context("spawn")
    context.Process(target=_watch, args=(results,)).start()
    signal.pause()


def test_a_rank_notices_that_its_engine_was_killed() -> None:
    """P46, P04: SIGKILL of the engine's core; the rank's process still runs."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    engine = context.Process(target=_engine, args=(theirs,))
    engine.start()
    assert ours.poll(15)
    assert ours.recv() == ("runs", False)
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    assert ours.poll(15)
    assert ours.recv() == ("orphan", True)
    engine.join()


class Parent:
    """A parent process that is a child's own, or stands behind a fork server; it lives for so many looks."""

    def __init__(self, pid: int, looks: float = math.inf) -> None:
        self.pid, self.left, self.looks = pid, looks, 0

    def is_alive(self) -> bool:
        self.looks += 1
        self.left -= 1
        return self.left >= 0


def watching(monkeypatch: pytest.MonkeyPatch, parent: Parent | None) -> tuple[ParentWatch, list[float]]:
    """A watch whose clock stands still until it is moved."""
    monkeypatch.setattr("multiprocessing.parent_process", lambda: parent)
    now = [0.0]
    return ParentWatch(lambda: now[0]), now


def test_it_asks_the_parent_only_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    parent = Parent(os.getppid() + 1, looks=2)
    watch, now = watching(monkeypatch, parent)
    found = []
    for _ in range(8):
        now[0] += LOOK_SECONDS / 2
        found.append(watch.is_gone())
    assert parent.looks == 4
    assert found.index(True) == 4


def test_before_a_post_it_asks_a_parent_behind_a_fork_server_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parent = Parent(os.getppid() + 1, looks=3)
    watch, _ = watching(monkeypatch, parent)
    for _ in range(3):
        watch.check_now()
    with pytest.raises(TransportError, match="is gone"):
        watch.check_now()


def test_a_child_sees_at_once_that_it_was_orphaned(monkeypatch: pytest.MonkeyPatch) -> None:
    """P46: however seldom it asks, a post after the engine's death is not made."""
    parent = Parent(os.getppid())
    watch, _ = watching(monkeypatch, parent)
    for _ in range(100):
        watch.check_now()
    assert parent.looks <= 1, "one system call each, no more"
    monkeypatch.setattr("os.getppid", lambda: 1)
    with pytest.raises(TransportError, match="is gone"):
        watch.check_now()
    with pytest.raises(TransportError, match="is gone"):
        watch.check()


def test_a_process_that_nobody_started_by_multiprocessing_may_outlive_its_shell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch, _ = watching(monkeypatch, None)
    monkeypatch.setattr("os.getppid", lambda: 1)
    watch.check_now()
    assert not watch.is_gone()
