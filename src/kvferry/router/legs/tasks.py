"""One leg: an HTTP request to one engine, its answer or its stream, and its failures as one type.

Cancelling the task that runs a leg closes its connection, by which the engine learns that nobody waits any
more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType

import msgspec

from kvferry.errors import HandoffError
from kvferry.handoff import SourceParams, parse_source
from kvferry.router.api.openai import PARAMS, Body, cached_tokens_of, error_message
from kvferry.router.engines.pool import Pool, Worker
from kvferry.router.ground.errors import JSON, EngineAnswer
from kvferry.router.ground.settings import RouterSettings
from kvferry.router.http.answers import Answer
from kvferry.router.http.client import HttpClient
from kvferry.router.http.failures import ConnectError, LostError
from kvferry.router.legs.failures import LegError, Reason
from kvferry.router.legs.streams import DecodeStream
from kvferry.router.record.metrics import RouterMetrics
from kvferry.router.record.timeline import Timeline

__all__ = ["Call", "DecodeStream", "Engines", "LegError", "PrefillAnswer", "Reason"]

logger = logging.getLogger(__name__)

ERROR_BYTES_MAX = 1 << 20
RELEASE_SECONDS_MAX = 10.0
"""A release that takes longer is given up; the lease of what it was for ends by itself."""
HELD_SECONDS_MAX = 10.0
"""An engine that has not told by then what it keeps is taken to keep nothing of that turn."""
EVENT_STREAM = "text/event-stream"


@dataclass(frozen=True, slots=True)
class Call:
    """What is sent to an engine."""

    path: str
    body: bytes | None
    """None asks by GET."""
    headers: Mapping[str, str]
    tokens: int = 0
    """What it makes the engine hold or compute, roughly."""
    timeline: Timeline | None = None
    """Of the client request that it is for."""
    sent: Sent | None = None
    """It has been sent: only its answer is to be had."""


@dataclass(slots=True)
class Sent:
    """A leg under way."""

    answer: Answer
    at: float


@dataclass(slots=True)
class PrefillAnswer:
    """What the router wants to know of a finished prefill leg."""

    source: SourceParams | None
    cached_tokens: int | None
    params: Body
    """Its `kv_transfer_params` as the engine wrote them; empty when `source` is None."""


class Engines:
    """Sends legs."""

    def __init__(
        self, client: HttpClient, pool: Pool, settings: RouterSettings, metrics: RouterMetrics
    ) -> None:
        self.client = client
        self._pool = pool
        self._settings = settings
        self._metrics = metrics
        self._clock = asyncio.get_running_loop().time

    async def prefill(self, worker: Worker, call: Call) -> PrefillAnswer:
        """Run a prefill leg to its end, and learn from its answer who the engine is.

        Raises:
            LegError: it failed.
        """
        return self.prefilled(worker, await self._answered(worker, call), call.timeline)

    def prefilled(self, worker: Worker, answer: Body, timeline: Timeline | None) -> PrefillAnswer:
        """What a prefill leg's answer tells."""
        params = answer.get(PARAMS)
        known = worker.source
        source = known if known is not None and tells(params, known) else _source_of(answer)
        # An answer that was under way while the engine died says nothing of who comes after it.
        if source is not None and worker.up and source != worker.source:
            self._pool.learn(worker, source)
        if timeline is not None:
            timeline.prefilled = self._clock()
        return PrefillAnswer(source, cached_tokens_of(answer), {} if source is None else answer[PARAMS])

    async def answer(self, worker: Worker, call: Call) -> Body:
        """Run a decode leg that is not streamed to its end.

        Raises:
            LegError: it failed.
        """
        answer = await self._answered(worker, call)
        if call.timeline is not None:
            call.timeline.answered = self._clock()
        return answer

    async def release(self, worker: Worker, call: Call) -> None:
        """Tell a prefill engine that nobody will come for a transfer. A lease ends where this fails."""
        try:
            async with asyncio.timeout(RELEASE_SECONDS_MAX):
                answer = await self.client.send(worker.url, call.path, call.headers, call.body)
                try:
                    await read_bounded(worker, answer, self._settings.answer_bytes_max)
                finally:
                    answer.close()
        except (LegError, ConnectError, LostError, TimeoutError) as error:
            logger.info("%s could not be told of a release: %s", worker.name, error)

    async def held(self, worker: Worker, call: Call) -> Body:
        """Ask a decode engine what it keeps of a turn; empty when it does not tell."""
        try:
            async with asyncio.timeout(HELD_SECONDS_MAX):
                answer = await self.client.send(worker.url, call.path, call.headers, call.body)
                try:
                    await self._refuse_failure(worker, answer)
                    raw = await read_bounded(worker, answer, self._settings.answer_bytes_max)
                finally:
                    answer.close()
            params = object_of(worker, raw).get(PARAMS)
        except (LegError, ConnectError, LostError, TimeoutError) as error:
            logger.info("%s does not tell what it keeps: %s", worker.name, error)
            return {}
        return params if isinstance(params, dict) else {}

    async def stream(self, worker: Worker, call: Call) -> DecodeStream:
        """Start a streamed decode leg and wait for its first event.

        Raises:
            LegError: it failed before.
        """
        started = self._clock() if call.sent is None else call.sent.at
        with ExitStack() as slot:
            leg = slot.enter_context(worker.leg(call.tokens))
            call = _traced(worker, call, slot)
            with self.failures(worker):
                answer = await self._send(worker, call, started)
                slot.callback(answer.close)
                await self._refuse_failure(worker, answer)
                if answer.content_type != EVENT_STREAM:
                    raise LegError(worker, Reason.ERROR, f"streams {answer.content_type!r}, not events")
                stream = leg.stream = DecodeStream(worker, answer, self._settings.event_bytes_max)
                await stream.open()
            stream.closes(slot.pop_all().close)
        now = self._clock()
        self._metrics.leg.labels(worker.role.value, "first").observe(now - started)
        if call.timeline is not None:
            call.timeline.answered = now
        return stream

    async def send(self, worker: Worker, call: Call) -> Answer:
        """Send a request that the caller reads inside `failures`; close the answer.

        Raises:
            LegError: the engine answered with an error.
        """
        answer = await self._send(worker, call, self._clock())
        try:
            await self._refuse_failure(worker, answer)
        except BaseException:
            answer.close()
            raise
        return answer

    async def models(self, worker: Worker, headers: Mapping[str, str]) -> bytes:
        """The body of the engine's `/v1/models`.

        Raises:
            LegError: it failed.
        """
        with self.failures(worker):
            answer = await self.client.send(worker.url, "/v1/models", headers)
            try:
                await self._refuse_failure(worker, answer)
                return await read_bounded(worker, answer, ERROR_BYTES_MAX)
            finally:
                answer.close()

    async def _answered(self, worker: Worker, call: Call) -> Body:
        if call.timeline is None or call.timeline.trace is None:
            return await self._whole(worker, call)
        with ExitStack() as span:
            return await self._whole(worker, _traced(worker, call, span))

    async def _whole(self, worker: Worker, call: Call) -> Body:
        started = self._clock() if call.sent is None else call.sent.at
        with worker.leg(call.tokens), self.failures(worker):
            answer = await self._send(worker, call, started)
            try:
                await self._refuse_failure(worker, answer)
                raw = await read_bounded(worker, answer, self._settings.answer_bytes_max)
            finally:
                answer.close()
        self._metrics.leg.labels(worker.role.value, "answer").observe(self._clock() - started)
        return object_of(worker, raw)

    async def _send(self, worker: Worker, call: Call, now: float) -> Answer:
        if call.sent is not None:
            try:
                await call.sent.answer.head()
            except BaseException:
                call.sent.answer.close()
                raise
            return call.sent.answer
        if call.timeline is not None:
            call.timeline.leg_sent(worker.role.value, worker.name, now)
        return await self.client.send(worker.url, call.path, call.headers, call.body)

    async def _refuse_failure(self, worker: Worker, answer: Answer) -> None:
        if answer.status != 200:
            raise refusal(worker, answer, await read_bounded(worker, answer, ERROR_BYTES_MAX))

    def failures(self, worker: Worker) -> Failures:
        """A context manager in which the HTTP client's errors become a `LegError`."""
        return Failures(self._pool, worker)


class Failures:
    """The one place where the HTTP client's errors become a `LegError`; who does not answer is down.

    Raises:
        LegError: on leaving, instead of what the client has raised.
    """

    __slots__ = ("_pool", "_worker")

    def __init__(self, pool: Pool, worker: Worker) -> None:
        self._pool = pool
        self._worker = worker

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the worker down if it was the worker's fault, and say so."""
        if isinstance(error, ConnectError | LostError):
            raise unanswered(self._pool, self._worker, error) from error
        if isinstance(error, LegError) and error.reason is Reason.LOST:
            self._pool.down(self._worker, str(error))


def unanswered(pool: Pool, worker: Worker, error: ConnectError | LostError) -> LegError:
    """The failure of a leg without a whole answer; the worker is down."""
    if isinstance(error, ConnectError):
        pool.down(worker, f"cannot be reached: {error}")
        return LegError(worker, Reason.REFUSED, "cannot be reached")
    pool.down(worker, f"lost: {error}")
    return LegError(worker, Reason.LOST, f"the connection was lost: {error}")


def refusal(worker: Worker, answer: Answer, raw: bytes) -> LegError:
    """The failure of a leg whose engine answered with another status than 200, and with this body."""
    status = answer.status
    content_type = answer.header(b"content-type") or JSON
    said = EngineAnswer(status, raw, content_type, answer.header(b"retry-after") or None)
    told = error_message(raw)
    detail = f"answered {status}" + (f": {told}" if told else "")
    if 400 <= status < 500:
        return LegError(worker, Reason.REJECTED, detail, said)
    return LegError(worker, Reason.ERROR, detail, said if status >= 500 else None)


def _traced(worker: Worker, call: Call, span: ExitStack) -> Call:
    """The call with its leg's span as the engine's parent; the span ends with the stack."""
    trace = None if call.timeline is None else call.timeline.trace
    if trace is None:
        return call
    headers = span.enter_context(trace.leg(worker.role.value, worker.name))
    return replace(call, headers={**call.headers, **headers})


async def read_bounded(worker: Worker, answer: Answer, bytes_max: int) -> bytes:
    """The whole body.

    Raises:
        LegError: it is longer.
        LostError: the connection ended before it did.
    """
    whole = await answer.read()
    if answer.ended and answer.drained and len(whole) <= bytes_max:
        return whole
    parts = [whole]
    size = len(whole)
    while size <= bytes_max and (part := await answer.read()):
        size += len(part)
        parts.append(part)
    if size > bytes_max:
        raise too_long(worker, bytes_max)
    return b"".join(parts)


def too_long(worker: Worker, bytes_max: int) -> LegError:
    """The failure of a leg whose answer is over its bound."""
    return LegError(worker, Reason.ERROR, f"its answer has more than {bytes_max} bytes")


def object_of(worker: Worker, raw: bytes) -> Body:
    """An engine's answer.

    Raises:
        LegError: it is none.
    """
    try:
        answer = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise LegError(worker, Reason.ERROR, f"its answer is not JSON: {error}") from error
    if not isinstance(answer, dict):
        raise LegError(worker, Reason.ERROR, "its answer is not an object")
    return answer


def tells(params: object, source: SourceParams) -> bool:
    """Whether an answer's `kv_transfer_params` say the same as is known: most do, and need no closer look."""
    if not isinstance(params, dict):
        return False
    told = params.get
    return bool(
        told("remote_engine_id") == source.engine
        and told("kvferry_incarnation") == source.incarnation
        and told("remote_host") == source.host
        and told("remote_port") == source.port
        and told("tp_size", 1) == source.tp
        and told("pp_size", 1) == source.pp
        and told("transfer_mode") == source.mode
    )


def _source_of(answer: Body) -> SourceParams | None:
    """The coordinates in a prefill answer. An answer without usable ones tells nothing about a restart."""
    try:
        return parse_source(answer.get(PARAMS))
    except HandoffError:
        return None
