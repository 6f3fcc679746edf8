"""Work spread over processes: one task at a time to each, answers as they come, and a clean end.

A task whose process died, or whose work raised, is answered by `Lost`, and the others go on. Every process
is started anew (`spawn`), so that it shares nothing with ours: neither a hash seed, nor a planted fault, nor
an open file. At most one task per process is under way, so nothing piles up.
"""

from __future__ import annotations

import contextlib
import signal
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Generic, TypeVar

Task = TypeVar("Task")
Answer = TypeVar("Answer")
END_SECONDS_MAX = 5.0
"""So long a process may take to end that was told to."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Why a task has no answer: its process died, or its work raised."""

    why: str


def spread(
    work: Callable[[Task], Answer], tasks: Iterable[Task], *, jobs: int, fresh: bool = False
) -> Generator[tuple[Task, Answer | Lost], None, None]:
    """Give each task to one of up to `jobs` processes; yields `(task, answer)` in the order they are done.

    `work` and tasks are pickled, so `work` is a function of a module. With `fresh` no process gets a second
    task. Closing the iterator, by an interrupt for instance, ends the processes at once.
    """
    pending = iter(tasks)
    crew: dict[Connection, _Worker[Task, Answer]] = {}
    try:
        for task in _first(pending, jobs):
            worker = _Worker[Task, Answer](work, task)
            crew[worker.connection] = worker
        while crew:
            for ready in wait(list(crew)):
                assert isinstance(ready, Connection), "we wait for nothing else"
                worker = crew[ready]
                done, answer = worker.task, worker.answer()
                following = next(pending, None)
                alone = fresh or isinstance(answer, Lost)
                if alone or following is None:
                    del crew[worker.connection]
                    worker.end()
                if following is not None:
                    if alone:
                        worker = _Worker[Task, Answer](work, following)
                        crew[worker.connection] = worker
                    else:
                        worker.give(following)
                yield done, answer
    finally:
        for worker in crew.values():
            worker.end()


def _first(pending: Iterator[Task], count: int) -> Iterator[Task]:
    for _, task in zip(range(count), pending, strict=False):
        yield task


class _Worker(Generic[Task, Answer]):
    """One process, and the task that it has."""

    def __init__(self, work: Callable[[Task], Answer], task: Task) -> None:
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, work), daemon=True)
        # The tracker, which the first start would start too, takes our mask away.
        resource_tracker.ensure_running()
        # A terminal interrupts its whole group. The child inherits the mask and leaves the answer to us.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()
        self.give(task)

    def give(self, task: Task) -> None:
        """Hand it its next task."""
        self.task = task
        # A process that died is noticed when its answer is asked for.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(task)

    def answer(self) -> Answer | Lost:
        """What its work returned for the task."""
        try:
            answer: Answer | Lost = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join(END_SECONDS_MAX)
            return Lost(f"a worker process {_end_words(self.process.exitcode)}")
        return answer

    def end(self) -> None:
        """End the process, whatever it does."""
        self.connection.close()
        self.process.terminate()
        self.process.join(END_SECONDS_MAX)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        self.process.close()


def _end_words(code: int | None) -> str:
    if code is None or code >= 0:
        return f"ended with exit code {code}"
    return f"was killed by signal {-code} ({signal.strsignal(-code)})"


def _serve(connection: Connection, work: Callable[[Task], Answer]) -> None:
    """A worker's life: until nobody has a task for it."""
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            task: Task = connection.recv()
            try:
                answer: Answer | Lost = work(task)
            except Exception:  # noqa: BLE001 - whoever gave the task is told, and the others go on
                answer = Lost(f"its work raised:\n{traceback.format_exc()}")
            connection.send(answer)
