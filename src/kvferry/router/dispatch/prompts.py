"""A prompt to be served, what it is served by, and what may outlive its request."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from kvferry.router.api.openai import Body
from kvferry.router.dispatch.prompt import Route
from kvferry.router.ground.timeouts import Timeouts
from kvferry.router.legs.tasks import DecodeStream, PrefillAnswer

T = TypeVar("T")


class Served:
    """An answered decode leg, and the prefill leg that may still be open. `close` it in every case."""

    def __init__(
        self,
        decode: Body | DecodeStream,
        route: Route,
        prefill: asyncio.Future[PrefillAnswer] | None,
        background: Background,
    ) -> None:
        self.decode = decode
        self.route = route
        self._prefill = prefill
        self._background = background

    @property
    def cached_tokens(self) -> int | None:
        """The prefill engine's count of cached prompt tokens, as soon as it is known."""
        task = self._prefill
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            return None
        return task.result().cached_tokens

    def finish(self) -> None:
        """The client has its answer: an open prefill leg may finish in the background."""
        if self._prefill is not None and not self._prefill.done():
            self._background.adopt(self._prefill)
        self._prefill = None

    def close(self) -> None:
        """End what is still open."""
        if isinstance(self.decode, DecodeStream):
            self.decode.close()
        if self._prefill is not None:
            self._prefill.cancel()


class Background:
    """What outlives its request, each for a bounded time: prefill legs, and releases of held KV."""

    def __init__(self, linger_seconds: float) -> None:
        self._linger_seconds = linger_seconds
        self._tasks: set[asyncio.Task[None]] = set()
        self.lingering = Timeouts(linger_seconds)
        """Prefill legs that no task waits for."""

    def __len__(self) -> int:
        return len(self._tasks) + len(self.lingering)

    def adopt(self, leg: asyncio.Future[PrefillAnswer]) -> None:
        """Let `leg` finish, or cancel it when its time is over."""
        self.run(self._linger(leg))

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, which bounds its own time."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel all."""
        for leg in self.lingering:
            leg.late()
        self.lingering.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _linger(self, leg: asyncio.Future[PrefillAnswer]) -> None:
        try:
            await asyncio.wait({leg}, timeout=self._linger_seconds)
        finally:
            await cancelled(leg)


async def cancelled(*tasks: asyncio.Future[Any]) -> None:
    """Cancel the tasks and wait for their end, whatever it is."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def leg_task(leg: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a leg whose failure may stay unread: the other leg may have decided before."""
    task = asyncio.create_task(leg)
    task.add_done_callback(lambda ended: None if ended.cancelled() else ended.exception())
    return task


async def in_a_task(leg: Coroutine[Any, Any, Body | DecodeStream]) -> Body | DecodeStream:
    """Run a decode leg as a task of its own; a stream that comes too late is closed."""
    task = leg_task(leg)
    try:
        return await task
    except BaseException:
        task.add_done_callback(close_stream)
        await cancelled(task)
        raise


def close_stream(leg: asyncio.Future[Body | DecodeStream]) -> None:
    """Close the stream that an ended leg has brought, if it has."""
    if not leg.cancelled() and leg.exception() is None:
        stream = leg.result()
        if isinstance(stream, DecodeStream):
            stream.close()


def may_be_held(prefill: asyncio.Future[PrefillAnswer]) -> bool:
    """Whether the engine may keep KV after its leg has ended and decode has not been served.

    A cancelled leg's engine may have ended it before it heard of that.
    """
    return prefill.cancelled() or prefill.exception() is None
