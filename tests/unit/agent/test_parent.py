"""A rank that has outlived its engine posts nothing more."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection

from kvferry.agent.parent import LOOK_SECONDS, ParentWatch


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


def test_it_looks_only_now_and_then_and_a_process_of_its_own_has_no_parent() -> None:
    now = [0.0]
    watch = ParentWatch(lambda: now[0])
    assert not watch.is_gone()
    looks = []

    class Parent:
        def is_alive(self) -> bool:
            looks.append(now[0])
            return len(looks) < 3

    watch._parent = Parent()
    found = []
    for _ in range(8):
        now[0] += LOOK_SECONDS / 2
        found.append(watch.is_gone())
    assert len(looks) == 4
    assert found.index(True) == 4
