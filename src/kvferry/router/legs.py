"""One leg: an HTTP request to one engine, its answer or its stream, and its failures as one type.

Cancelling the task that runs a leg closes its connection, by which the engine learns that nobody waits any
more.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import aiohttp
import msgspec

from kvferry.errors import HandoffError, KvferryError
from kvferry.handoff import SourceParams, parse_source
from kvferry.router.errors import JSON, Cause, EngineAnswer, RequestError
from kvferry.router.metrics import RouterMetrics
from kvferry.router.openai import PARAMS, Body, cached_tokens_of, error_message
from kvferry.router.pool import Pool, Worker
from kvferry.router.settings import RouterSettings
from kvferry.router.sse import EventSplitter, EventTooLongError, data_of

logger = logging.getLogger(__name__)

_ERROR_BYTES_MAX = 1 << 20
_END_OF_BODY_SECONDS = 0.5
RELEASE_SECONDS_MAX = 10.0
"""A release that takes longer is given up; the lease of what it was for ends by itself."""
HELD_SECONDS_MAX = 10.0
"""An engine that has not told by then what it keeps is taken to keep nothing of that turn."""
_EVENT_STREAM = "text/event-stream"


class Reason(enum.StrEnum):
    """How a leg failed."""

    REFUSED = "refused"
    """No connection: the engine has not seen the request."""
    LOST = "lost"
    """The connection ended before the answer did."""
    REJECTED = "rejected"
    """A 4xx: the request is at fault, another engine would say the same."""
    ERROR = "error"
    """A 5xx, an error event, or an answer that cannot be read."""


class LegError(KvferryError):
    """One leg failed; `answer` is what the engine said, if it said something."""

    def __init__(
        self, worker: Worker, reason: Reason, detail: str, answer: EngineAnswer | None = None
    ) -> None:
        super().__init__(f"{worker.role.value} engine: {detail}")
        self.worker = worker
        self.reason = reason
        self.answer = answer

    @property
    def may_have_started(self) -> bool:
        """Whether the engine may have worked on the request; an overloaded one (502 to 504) has not."""
        overloaded = self.answer is not None and self.answer.status in {502, 503, 504}
        return self.reason is not Reason.REFUSED and not overloaded

    def request_error(self) -> RequestError:
        """What the client is told when nothing else can be tried."""
        unanswered = 503 if self.reason is Reason.REFUSED else 502
        status = unanswered if self.answer is None else self.answer.status
        cause = Cause(f"{self.worker.role.value}_{self.reason.value}")
        return RequestError(status, cause, str(self), answer=self.answer)


@dataclass(frozen=True, slots=True)
class Call:
    """What is sent to an engine."""

    path: str
    body: bytes
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class PrefillAnswer:
    """What the router wants to know of a finished prefill leg."""

    source: SourceParams | None
    cached_tokens: int | None
    params: Body
    """Its `kv_transfer_params` as the engine wrote them; empty when `source` is None."""


class DecodeStream:
    """An answered decode leg whose first event has arrived; `close` it in every case."""

    def __init__(self, worker: Worker, response: aiohttp.ClientResponse, event_bytes_max: int) -> None:
        self.worker = worker
        self._response = response
        self._splitter = EventSplitter(event_bytes_max)
        self._slot = ExitStack()
        self._first: list[bytes] | None = None
        self._failure: LegError | None = None
        self._finished = False

    async def open(self) -> None:
        """Wait for the first event with data.

        Raises:
            LegError: the stream ends or fails before it.
        """
        self._first = await self._next()
        if self._first is None:
            raise LegError(self.worker, Reason.LOST, "the stream ended without an event")

    def closes(self, slot: ExitStack) -> None:
        """Hand over what `close` gives back: the connection and the worker's slot."""
        self._slot = slot

    async def more(self) -> list[bytes] | None:
        """The events that have arrived since, at least one; None after `[DONE]`, which is not one of them.

        Raises:
            LegError: the engine reports an error, or the stream ends without `[DONE]`.
        """
        if self._first is not None:
            first, self._first = self._first, None
            return first
        return await self._next()

    def close(self) -> None:
        """End the leg; an engine that has not finished learns it by the closed connection."""
        self._slot.close()

    async def _next(self) -> list[bytes] | None:
        while not self._finished:
            if self._failure is not None:
                raise self._failure
            data = await self._read()
            if not data:
                raise LegError(self.worker, Reason.LOST, "the stream ended before its answer did")
            try:
                events = self._splitter.feed(data)
            except EventTooLongError as error:
                raise LegError(self.worker, Reason.ERROR, str(error)) from error
            told, self._finished, self._failure = self._sorted(events)
            if told:
                return told
        await self._read_to_end()
        return None

    async def _read(self) -> bytes:
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise LegError(self.worker, Reason.LOST, f"the stream broke: {_named(error)}") from error

    async def _read_to_end(self) -> None:
        """Read the body's end so that the connection can serve again; nothing of worth follows `[DONE]`."""
        with suppress(TimeoutError, LegError):
            async with asyncio.timeout(_END_OF_BODY_SECONDS):
                while await self._read():
                    pass

    def _sorted(self, events: list[bytes]) -> tuple[list[bytes], bool, LegError | None]:
        """`(events for the client, whether [DONE] was among them, the engine's error)`."""
        told: list[bytes] = []
        for event in events:
            data = data_of(event)
            if data is None:
                continue
            if data == b"[DONE]":
                return told, True, None
            if data.startswith(b'{"error"'):
                return told, False, self._told_failure(data)
            told.append(event)
        return told, False, None

    def _told_failure(self, data: bytes) -> LegError:
        code = _error_code(data)
        reason = Reason.REJECTED if 400 <= code < 500 else Reason.ERROR
        message = error_message(data) or "an error without a message"
        return LegError(self.worker, reason, message, EngineAnswer(code, data, JSON))


class Engines:
    """Sends legs."""

    def __init__(
        self, session: aiohttp.ClientSession, pool: Pool, settings: RouterSettings, metrics: RouterMetrics
    ) -> None:
        self._session = session
        self._pool = pool
        self._settings = settings
        self._metrics = metrics

    async def prefill(self, worker: Worker, call: Call) -> PrefillAnswer:
        """Run a prefill leg to its end, and learn from its answer who the engine is.

        Raises:
            LegError: it failed.
        """
        answer = await self.answer(worker, call)
        source = _source_of(answer)
        # An answer that was under way while the engine died says nothing of who comes after it.
        if source is not None and worker.up:
            self._pool.learn(worker, source)
        params = {} if source is None else answer[PARAMS]
        return PrefillAnswer(source, cached_tokens_of(answer), params)

    async def answer(self, worker: Worker, call: Call) -> Body:
        """Run a leg that is not streamed to its end.

        Raises:
            LegError: it failed.
        """
        started = asyncio.get_running_loop().time()
        with worker.leg(), self._failures(worker):
            async with await self._post(worker, call) as response:
                await self._refuse_failure(worker, response)
                raw = await _read_bounded(worker, response, self._settings.answer_bytes_max)
        self._observe(worker, "answer", started)
        return _object(worker, raw)

    async def release(self, worker: Worker, call: Call) -> None:
        """Tell a prefill engine that nobody will come for a transfer. A lease ends where this fails."""
        try:
            async with asyncio.timeout(RELEASE_SECONDS_MAX), await self._post(worker, call) as response:
                await _read_bounded(worker, response, self._settings.answer_bytes_max)
        except (LegError, aiohttp.ClientError, TimeoutError) as error:
            logger.info("%s could not be told of a release: %s", worker.url, error)

    async def held(self, worker: Worker, call: Call) -> Body:
        """Ask a decode engine what it keeps of a turn; empty when it does not tell."""
        try:
            async with asyncio.timeout(HELD_SECONDS_MAX), await self._post(worker, call) as response:
                await self._refuse_failure(worker, response)
                raw = await _read_bounded(worker, response, self._settings.answer_bytes_max)
            params = _object(worker, raw).get(PARAMS)
        except (LegError, aiohttp.ClientError, TimeoutError) as error:
            logger.info("%s does not tell what it keeps: %s", worker.url, error)
            return {}
        return params if isinstance(params, dict) else {}

    async def stream(self, worker: Worker, call: Call) -> DecodeStream:
        """Start a streamed decode leg and wait for its first event.

        Raises:
            LegError: it failed before.
        """
        started = asyncio.get_running_loop().time()
        with ExitStack() as slot:
            slot.enter_context(worker.leg())
            with self._failures(worker):
                response = await self._post(worker, call)
                slot.callback(response.close)
                await self._refuse_failure(worker, response)
                if response.content_type != _EVENT_STREAM:
                    raise LegError(worker, Reason.ERROR, f"streams {response.content_type!r}, not events")
                stream = DecodeStream(worker, response, self._settings.event_bytes_max)
                await stream.open()
            stream.closes(slot.pop_all())
        self._observe(worker, "first", started)
        return stream

    async def models(self, worker: Worker, headers: Mapping[str, str]) -> bytes:
        """The body of the engine's `/v1/models`.

        Raises:
            LegError: it failed.
        """
        with self._failures(worker):
            async with self._session.get(f"{worker.url}/v1/models", headers=headers) as response:
                await self._refuse_failure(worker, response)
                return await _read_bounded(worker, response, _ERROR_BYTES_MAX)

    async def _post(self, worker: Worker, call: Call) -> aiohttp.ClientResponse:
        return await self._session.post(
            worker.url + call.path, data=call.body, headers=call.headers, allow_redirects=False
        )

    async def _refuse_failure(self, worker: Worker, response: aiohttp.ClientResponse) -> None:
        status = response.status
        if status == 200:
            return
        raw = await _read_bounded(worker, response, _ERROR_BYTES_MAX)
        content_type = response.headers.get("Content-Type", JSON)
        answer = EngineAnswer(status, raw, content_type, response.headers.get("Retry-After"))
        told = error_message(raw)
        detail = f"answered {status}" + (f": {told}" if told else "")
        if 400 <= status < 500:
            raise LegError(worker, Reason.REJECTED, detail, answer)
        raise LegError(worker, Reason.ERROR, detail, answer if status >= 500 else None)

    @contextmanager
    def _failures(self, worker: Worker) -> Iterator[None]:
        """The one place where the HTTP client's errors become ours; a worker that does not answer is down."""
        try:
            yield
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            self._pool.down(worker, f"cannot be reached: {error}")
            raise LegError(worker, Reason.REFUSED, "cannot be reached") from error
        except (aiohttp.ClientError, OSError) as error:
            self._pool.down(worker, f"lost: {_named(error)}")
            raise LegError(worker, Reason.LOST, f"the connection was lost: {_named(error)}") from error
        except LegError as error:
            if error.reason is Reason.LOST:
                self._pool.down(worker, str(error))
            raise

    def _observe(self, worker: Worker, stage: str, started: float) -> None:
        seconds = asyncio.get_running_loop().time() - started
        self._metrics.leg.labels(worker.role.value, stage).observe(seconds)


async def _read_bounded(worker: Worker, response: aiohttp.ClientResponse, bytes_max: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > bytes_max:
            raise LegError(worker, Reason.ERROR, f"its answer has more than {bytes_max} bytes")
        parts.append(part)
    return b"".join(parts)


def _object(worker: Worker, raw: bytes) -> Body:
    try:
        answer = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise LegError(worker, Reason.ERROR, f"its answer is not JSON: {error}") from error
    if not isinstance(answer, dict):
        raise LegError(worker, Reason.ERROR, "its answer is not an object")
    return answer


def _source_of(answer: Body) -> SourceParams | None:
    """The coordinates in a prefill answer. An answer without usable ones tells nothing about a restart."""
    try:
        return parse_source(answer.get(PARAMS))
    except HandoffError:
        return None


def _error_code(data: bytes) -> int:
    try:
        error = msgspec.json.decode(data).get("error")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return 500
    code = error.get("code") if isinstance(error, Mapping) else None
    return code if isinstance(code, int) and 400 <= code < 600 else 500


def _named(error: BaseException) -> str:
    return str(error) or type(error).__name__
