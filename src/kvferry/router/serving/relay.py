"""From a client request to its answer: one life per prompt, answers and streams joined in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from kvferry.router.api.openai import PARAMS, Body, ClientRequest, client_answer, joined, shifted, summed
from kvferry.router.api.sse import DONE, data_of, event_of
from kvferry.router.dispatch.dispatcher import Dispatcher
from kvferry.router.dispatch.prompt import Prompt, Route
from kvferry.router.dispatch.prompts import Served
from kvferry.router.dispatch.push import Begun
from kvferry.router.ground.errors import Cause
from kvferry.router.legs.tasks import DecodeStream, LegError, Reason
from kvferry.router.record.timeline import Timeline

_BATCHES_PER_PROMPT = 4
"""How many batches of events a prompt may be ahead of the client."""


class Outlet(Protocol):
    """Where a streamed answer goes."""

    def write(self, piece: bytes) -> bool:
        """Send a piece; the first one begins the answer. Whether the client is behind with reading."""

    def room(self) -> Awaitable[None]:
        """Wait until the client has caught up."""

    def when_room(self, resume: Callable[[], None]) -> None:
        """Call `resume` once when it has."""


@dataclass(slots=True)
class Account:
    """How a client request was served, for its metric."""

    path: str = "none"
    cause: Cause = Cause.NONE

    def note(self, route: Route) -> None:
        """One of its prompts was served; the first one speaks for all, or one that was not handed over."""
        if route.mode is None:
            self.path, self.cause = "local", route.cause
        elif self.path == "none":
            self.path = route.mode


class Relay:
    """One client request."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        request: ClientRequest,
        request_id: str,
        headers: Mapping[str, str],
        account: Account,
        session: str | None = None,
        timeline: Timeline | None = None,
        begun: Begun | None = None,
    ) -> None:
        self.account = account
        self._dispatcher = dispatcher
        self._request = request
        self._answer_id = f"cmpl-{request_id}"
        self._begun = begun
        """Of its only prompt."""
        self._prompts = [] if begun is None else [begun.prompt]
        self._prompts = self._prompts or [
            Prompt(
                endpoint=request.endpoint,
                body=body,
                n=request.n,
                stream=request.stream,
                whole_prompt=request.whole_prompt,
                request_id=f"{request_id}-{position}",
                headers=headers,
                # Of many prompts none is the conversation.
                session=session if len(request.bodies) == 1 else None,
                timeline=timeline,
            )
            for position, body in enumerate(request.bodies)
        ]

    async def answer(self) -> Body:
        """The answer to a request that is not streamed.

        Raises:
            RequestError: one of the prompts failed; the others are cancelled.
        """
        if len(self._prompts) == 1:
            return await self._answer(self._prompts[0])
        async with _running([self._answer(prompt) for prompt in self._prompts]) as tasks:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            _raise_failure(tasks)
            return joined([task.result() for task in tasks], self._request.n, self._answer_id)

    async def stream(self, outlet: Outlet) -> None:
        """Send a streamed answer, `[DONE]` included, to `outlet`.

        Raises:
            RequestError: one of the prompts failed; the others are cancelled.
            ConnectionError: the client is gone.
        """
        if len(self._prompts) == 1:
            await self._pour(self._prompts[0], outlet)
        else:
            async with aclosing(self._interleaved()) as pieces:
                async for piece in pieces:
                    outlet.write(piece)
                    await outlet.room()
        outlet.write(DONE)

    async def _answer(self, prompt: Prompt) -> Body:
        served = await self._dispatcher.serve(prompt, self._begun)
        try:
            assert isinstance(served.decode, dict)
            self.account.note(served.route)
            answer = client_answer(served.decode, served.cached_tokens)
            self._finish(prompt, served, served.decode.get(PARAMS))
            return answer
        finally:
            served.close()

    async def _pour(self, prompt: Prompt, outlet: Outlet) -> None:
        """Send one prompt's stream as it comes, reading no more of it while the client is behind."""
        served = await self._dispatcher.serve(prompt, self._begun)
        held: object = None
        try:
            stream = served.decode
            assert isinstance(stream, DecodeStream)
            self.account.note(served.route)

            def told(events: list[bytes]) -> None:
                nonlocal held
                held = params_in(events) or held
                plain(b"".join([client_event(event, served.cached_tokens) for event in events]))

            def plain(piece: bytes) -> None:
                if outlet.write(piece):
                    stream.hold()
                    outlet.when_room(stream.go_on)

            with self._failures():
                await stream.pour(told, plain)
            self._finish(prompt, served, held)
        finally:
            served.close()

    async def _batches(self, prompt: Prompt) -> AsyncGenerator[tuple[list[bytes], int | None]]:
        """The events of one prompt's stream, with the prefill engine's count of cached tokens."""
        served = await self._dispatcher.serve(prompt, self._begun)
        try:
            assert isinstance(served.decode, DecodeStream)
            self.account.note(served.route)
            held = None
            with self._failures():
                while (events := await served.decode.more()) is not None:
                    held = params_in(events) or held
                    yield events, served.cached_tokens
            self._finish(prompt, served, held)
        finally:
            served.close()

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """A stream that has begun is not sent anew: its failure is the client's."""
        try:
            yield
        except LegError as failure:
            pool = self._dispatcher.pool
            if failure.reason is Reason.LOST:
                pool.down(failure.worker, str(failure))
            if failure.reason is not Reason.REJECTED:
                failure.worker.breaker.failed(pool.clock())
            raise failure.request_error() from failure

    def _finish(self, prompt: Prompt, served: Served, held: object) -> None:
        served.finish()
        self._dispatcher.remember(prompt, served.route, held)

    async def _interleaved(self) -> AsyncGenerator[bytes]:
        """The events of all prompts as they come; the usage of all in one event at the end."""
        lane = _Lane(_BATCHES_PER_PROMPT * len(self._prompts))
        usages: list[object] = []
        last: Body = {}
        async with _running([self._pump(number, lane) for number in range(len(self._prompts))]) as tasks:
            for task in tasks:
                task.add_done_callback(lane.ended)
            running = len(tasks)
            while running:
                chunks = await lane.take()
                if chunks is None:
                    running -= 1
                    _raise_failure(tasks)
                    continue
                told = []
                for chunk in chunks:
                    last = {**chunk, "id": self._answer_id}
                    if chunk.get("choices") == [] and "usage" in chunk:
                        usages.append(chunk["usage"])
                    else:
                        told.append(event_of(msgspec.json.encode(last)))
                if told:
                    yield b"".join(told)
        if self._request.include_usage:
            yield event_of(msgspec.json.encode({**last, "choices": [], "usage": summed(usages)}))

    async def _pump(self, position: int, lane: _Lane) -> None:
        """Put one prompt's chunks into the lane."""
        async with aclosing(self._batches(self._prompts[position])) as batches:
            async for events, cached_tokens in batches:
                chunks = [chunk for event in events if (chunk := _chunk(event)) is not None]
                told = [client_answer(chunk, cached_tokens) for chunk in chunks]
                await lane.put([shifted(chunk, position, self._request.n) for chunk in told])


class _Lane:
    """A bounded queue of chunks from many prompts; an end always fits in, so no end is ever lost."""

    def __init__(self, batches_max: int) -> None:
        self._queue: asyncio.Queue[list[Body] | None] = asyncio.Queue()
        self._room = asyncio.Semaphore(batches_max)

    async def put(self, chunks: list[Body]) -> None:
        await self._room.acquire()
        self._queue.put_nowait(chunks)

    def ended(self, task: asyncio.Task[Any]) -> None:
        """One prompt's task is done."""
        del task
        self._queue.put_nowait(None)

    async def take(self) -> list[Body] | None:
        """The next chunks; None when one more prompt has ended."""
        chunks = await self._queue.get()
        if chunks is not None:
            self._room.release()
        return chunks


def client_event(event: bytes, cached_tokens: int | None) -> bytes:
    """An event as the client gets it; parsed only when there may be something to change."""
    if b"kv_transfer_params" not in event and (b'"usage"' not in event or cached_tokens is None):
        return event
    chunk = _chunk(event)
    return event if chunk is None else event_of(msgspec.json.encode(client_answer(chunk, cached_tokens)))


def params_in(events: list[bytes]) -> object:
    """The last `kv_transfer_params` in a batch of events; None when there are none."""
    chunks = [_chunk(event) or {} for event in events if b"kv_transfer_params" in event]
    return next((chunk[PARAMS] for chunk in reversed(chunks) if chunk.get(PARAMS)), None)


def _chunk(event: bytes) -> Body | None:
    data = data_of(event)
    try:
        chunk = None if data is None else msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return chunk if isinstance(chunk, dict) else None


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is not None


def _raise_failure(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        if _failed(task):
            task.result()


@asynccontextmanager
async def _running(work: list[Coroutine[Any, Any, Any]]) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Tasks that do not outlive the block."""
    tasks = [asyncio.create_task(part) for part in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
