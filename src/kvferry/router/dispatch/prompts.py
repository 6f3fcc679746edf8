"""A prompt to be served, what it is served by, and what may outlive its request."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvferry.handoff import TransferMode
from kvferry.ids import TransferId
from kvferry.router.api.conversation import Fingerprint, fingerprint
from kvferry.router.api.openai import Body, Endpoint, estimated_tokens
from kvferry.router.engines.pool import Worker
from kvferry.router.ground.errors import Cause
from kvferry.router.ground.timeouts import Timeouts
from kvferry.router.legs.tasks import DecodeStream, PrefillAnswer
from kvferry.router.record.timeline import Timeline

T = TypeVar("T")

_ANSWER_TOKENS = 256
"""What an answer is taken to have whose length nobody has bounded."""
_ANSWER_TOKENS_MAX = 4096
"""A bound beyond this is no expectation."""


@dataclass(slots=True, eq=False)
class Prompt:
    """One prompt of a client request."""

    endpoint: Endpoint
    body: Body
    n: int
    stream: bool
    whole_prompt: bool
    request_id: str
    """Of the client request and the prompt's position in it; each dispatch adds a random part of its own."""
    headers: Mapping[str, str]
    """What both legs get of the client's headers."""

    session: str | None = None
    """The client's name for the conversation that it belongs to."""
    timeline: Timeline | None = None
    """Of the client request."""

    _fingerprint: Fingerprint | None = field(default=None, init=False)
    _estimated_tokens: int = field(default=0, init=False)

    @property
    def fingerprint(self) -> Fingerprint:
        """What its continuations are known by."""
        # Not cached by functools, whose lock costs as much as what it guards.
        if self._fingerprint is None:
            self._fingerprint = fingerprint(self.endpoint, self.body, self.session)
        return self._fingerprint

    @property
    def estimated_tokens(self) -> int:
        """How long it is, roughly."""
        if not self._estimated_tokens:
            self._estimated_tokens = estimated_tokens(self.endpoint, self.body)
        return self._estimated_tokens

    @property
    def expected_tokens(self) -> int:
        """How many tokens a decode engine will hold for it in the end, roughly."""
        asked = self.body.get("max_completion_tokens") or self.body.get("max_tokens")
        answer = _ANSWER_TOKENS
        if isinstance(asked, int) and not isinstance(asked, bool) and asked > 0:
            answer = min(asked, _ANSWER_TOKENS_MAX)
        return self.estimated_tokens + self.n * answer


@dataclass(slots=True)
class Route:
    """How a prompt was served: by which decode engine, and how its KV came there."""

    decode: Worker
    prefill: Worker | None = None
    mode: TransferMode | None = None
    """None when the decode engine prefilled itself."""
    cause: Cause = Cause.NONE
    """Why it did; NONE when the KV was handed over."""
    transfer: TransferId | None = None
    """By which the KV was handed over."""


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
