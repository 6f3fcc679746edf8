"""What happens to a leg besides its answer: its engine is lost, is too slow, or is judged by how it ended."""

from __future__ import annotations

import asyncio
from types import TracebackType

from kvferry.router.engines.pool import Pool, Worker
from kvferry.router.engines.worker import Answering
from kvferry.router.legs.failures import LegError, Reason


class Guard:
    """A context manager around one leg's wait for its answer, in a task of its own.

    The leg is ended when its engine is found to be gone, and what it came to is told to the engine's circuit
    breaker: a rejection is an answer, too, and a refused connection is the health check's affair.

    Raises:
        LegError: the engine is gone, or the block raised `TimeoutError`.
    """

    __slots__ = ("_answering", "_pool", "_worker")

    def __init__(self, pool: Pool, worker: Worker) -> None:
        self._pool = pool
        self._worker = worker
        task = asyncio.current_task()
        assert task is not None
        self._answering = Answering(task)

    def __enter__(self) -> None:
        self._worker.waits.add(self._answering)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._worker.waits.discard(self._answering)
        if error is None:
            self._worker.breaker.succeeded()
            return
        failure = self._failure(error)
        if failure is None:
            return
        judged = judge(self._pool, failure)
        if judged is not error:
            raise judged from error

    def _failure(self, error: BaseException) -> LegError | None:
        """What the engine has done; None when it has done nothing wrong."""
        worker = self._worker
        if isinstance(error, asyncio.CancelledError) and self._answering.lost:
            return silent(worker)
        if isinstance(error, TimeoutError):
            return too_slow(worker)
        return error if isinstance(error, LegError) else None


def judge(pool: Pool, failure: LegError) -> LegError:
    """Tell the engine's circuit breaker how a leg failed; the failure, which may not be what it seems."""
    worker = failure.worker
    if failure.reason is Reason.REJECTED and worker.rank is not None and "data_parallel_rank" in str(failure):
        # That is no answer to the client: the engine has come back with other ranks.
        pool.down(worker, str(failure))
        failure = LegError(worker, Reason.ERROR, "it has fewer data-parallel ranks than it had")
    if failure.reason is Reason.REJECTED:
        worker.breaker.succeeded()
    elif failure.reason is not Reason.REFUSED:
        worker.breaker.failed(pool.clock())
    return failure


def silent(worker: Worker) -> LegError:
    """The failure of a leg whose engine is found to be gone."""
    return LegError(worker, Reason.LOST, "it answers nothing any more, nor its health check")


def too_slow(worker: Worker) -> LegError:
    """The failure of a leg that has had `--leg-timeout-secs`."""
    return LegError(worker, Reason.SLOW, "no answer within --leg-timeout-secs")
