"""One prompt's life: both legs at once, and what happens when one of them fails.

The rules, in the order in which they are met:

- The decode engine is chosen first, then the prefill engine; without a ready prefill engine the decode engine
  prefills itself.
- The decode leg's answer (its first event, in a stream) decides: with it the prompt is served, whatever the
  prefill leg does; a prefill leg that is still open may finish in the background, for a bounded time.
- A leg that is rejected (4xx) ends both legs: every engine would say the same.
- A failed decode leg ends both legs; they are sent anew, with a new transfer.
- A failed prefill leg is handled as `--on-prefill-failure` says, see `_Life._after_prefill_failure`.
- A dispatch that ends unserved after its prefill leg has ended well leaves KV behind; the prefill engine is
  told to release it, since the decode engine may never have heard of the request.
- A prefill answer that shows another incarnation than the decode leg was sent to: both are sent anew.

Nothing here runs after the client's first byte, so each of these restarts is invisible to the client. The
caller bounds the whole by the request's deadline, and ends both legs by cancelling.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import msgspec

from kvferry.handoff import DecodeParams, PrefillParams, SourceParams
from kvferry.ids import TransferId
from kvferry.router.errors import Cause, RequestError
from kvferry.router.health import Monitor
from kvferry.router.legs import Call, DecodeStream, Engines, LegError, PrefillAnswer, Reason
from kvferry.router.metrics import RouterMetrics
from kvferry.router.openai import Body, Endpoint, decode_body, prefill_body
from kvferry.router.pool import Pool, Role, Worker, same_engine
from kvferry.router.probe import release_body
from kvferry.router.settings import OnPrefillFailure, RouterSettings

logger = logging.getLogger(__name__)

_BACKOFF_SECONDS_MAX = 1.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
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


class Served:
    """An answered decode leg, and the prefill leg that may still be open. `close` it in every case."""

    def __init__(
        self,
        decode: Body | DecodeStream,
        cause: Cause,
        prefill: asyncio.Task[PrefillAnswer] | None,
        background: Background,
    ) -> None:
        self.decode = decode
        self.cause = cause
        """Why the decode engine prefilled itself; NONE when the KV was pushed."""
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

    def __len__(self) -> int:
        return len(self._tasks)

    def adopt(self, leg: asyncio.Task[PrefillAnswer]) -> None:
        """Let `leg` finish, or cancel it when its time is over."""
        self.run(self._linger(leg))

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, which bounds its own time."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel all."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _linger(self, leg: asyncio.Task[PrefillAnswer]) -> None:
        try:
            await asyncio.wait({leg}, timeout=self._linger_seconds)
        finally:
            await _cancelled(leg)


class Dispatcher:
    """Serves prompts."""

    def __init__(
        self,
        settings: RouterSettings,
        pool: Pool,
        engines: Engines,
        monitor: Monitor,
        metrics: RouterMetrics,
    ) -> None:
        self.settings = settings
        self.pool = pool
        self.engines = engines
        self.monitor = monitor
        self.metrics = metrics
        self.background = Background(settings.prefill_linger_seconds)

    async def serve(self, prompt: Prompt) -> Served:
        """Dispatch the prompt until a decode leg answers.

        Raises:
            RequestError: no leg answered, or one was rejected.
        """
        return await _Life(self, prompt).run()

    async def worker(self, role: Role, tried: set[Worker]) -> Worker | None:
        """A worker that is ready, looking again when none is; None when there is none."""
        worker = self.pool.choose(role, tried)
        if worker is None:
            await self.monitor.recheck(role)
            worker = self.pool.choose(role, tried)
        return worker


@dataclass(frozen=True, slots=True)
class _Legs:
    """The two legs of one dispatch."""

    worker: Worker
    """The prefill engine."""
    source: SourceParams
    """Where the decode leg was told to expect the KV from."""
    transfer: TransferId
    prefill: asyncio.Task[PrefillAnswer]
    decode: asyncio.Task[Body | DecodeStream]

    @property
    def may_be_held(self) -> bool:
        """Whether the prefill engine may keep KV, both legs having ended and decode not having been served.

        A cancelled leg's engine may have ended it before it heard of that.
        """
        return self.prefill.cancelled() or self.prefill.exception() is None

    async def cancel(self) -> None:
        """End both, and give back what an answer that came too late holds."""
        self.decode.add_done_callback(_close_stream)
        await _cancelled(self.prefill, self.decode)


class _Again(Exception):
    """Both legs shall be sent anew. Control flow between a dispatch and its life, an error to nobody."""


class _Life:
    """The dispatches of one prompt until one is answered."""

    def __init__(self, dispatcher: Dispatcher, prompt: Prompt) -> None:
        self._dispatcher = dispatcher
        self._settings = dispatcher.settings
        self._prompt = prompt
        self._retries_left = dispatcher.settings.retries
        self._tried: set[Worker] = set()
        self._alone = Cause.NEEDS_WHOLE_PROMPT if prompt.whole_prompt else Cause.NONE
        """Why no prefill engine is asked; NONE while one is."""
        self._failure: LegError | None = None
        """The last one, to be told when nothing is left to try."""

    async def run(self) -> Served:
        while True:
            try:
                return await self._dispatch()
            except _Again:
                continue
            except LegError as failure:
                self._after_failure(failure)

    async def _dispatch(self) -> Served:
        decode = await self._choose(Role.DECODE)
        if decode is None:
            raise self._nobody_decodes()
        prefill = await self._choose(Role.PREFILL) if self._alone is Cause.NONE else None
        # A prefill engine may have been forgotten while the choice backed off.
        if prefill is not None and prefill.source is not None:
            return await self._push(prefill, prefill.source, decode)
        if self._alone is Cause.NONE:
            self._alone = Cause.NO_PREFILL if self._failure is None else Cause.PREFILL_FAILED
        headers = self._headers()
        answer = await self._decode(decode, self._call(headers, decode_body(self._prompt.body, None)))
        return Served(answer, self._alone, None, self._dispatcher.background)

    async def _push(self, prefill: Worker, source: SourceParams, decode: Worker) -> Served:
        legs = self._start(prefill, source, decode)
        try:
            answer = await self._outcome(legs)
        except BaseException:
            await legs.cancel()
            self._release(legs)
            raise
        return Served(answer, Cause.NONE, legs.prefill, self._dispatcher.background)

    def _start(self, prefill: Worker, source: SourceParams, decode: Worker) -> _Legs:
        prompt = self._prompt
        transfer = TransferId(secrets.token_hex(16))
        consumers = prompt.n
        producing = PrefillParams(transfer=transfer, mode="push", consumers=consumers).to_params()
        consuming = DecodeParams(
            source=source, transfer=transfer, mode="push", consumers=consumers
        ).to_params()
        headers = self._headers()
        decode_call = self._call(headers, decode_body(prompt.body, consuming))
        prefill_call = self._call(headers, prefill_body(prompt.endpoint, prompt.body, producing))
        return _Legs(
            worker=prefill,
            source=source,
            transfer=transfer,
            decode=_leg_task(self._decode(decode, decode_call)),
            prefill=_leg_task(self._dispatcher.engines.prefill(prefill, prefill_call)),
        )

    def _release(self, legs: _Legs) -> None:
        """Give back what a decode leg leaves behind that its engine may never have heard of."""
        if not legs.may_be_held or legs.source.incarnation is None:
            # An engine with another connector would take the release for a request; its lease ends by itself.
            return
        model = self._prompt.body.get("model")
        body = msgspec.json.encode(release_body(model, legs.transfer))
        call = Call(Endpoint.COMPLETIONS.value, body, self._headers())
        self._dispatcher.background.run(self._dispatcher.engines.release(legs.worker, call))

    async def _outcome(self, legs: _Legs) -> Body | DecodeStream:
        """Wait for the decode leg, minding what the prefill leg does before."""
        waiting: set[asyncio.Task[Any]] = {legs.prefill, legs.decode}
        patience_seconds: float | None = None
        while not legs.decode.done():
            done, _ = await asyncio.wait(
                waiting, timeout=patience_seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                self._decode_alone("recovery")
            if legs.prefill in done and not legs.decode.done():
                waiting.discard(legs.prefill)
                patience_seconds = await self._after_prefill(legs)
        if patience_seconds is not None:
            self._after_recovery(legs.decode)
        return legs.decode.result()

    async def _after_prefill(self, legs: _Legs) -> float | None:
        """How many seconds the decode leg has from now; None for as many as the request has."""
        try:
            answer = legs.prefill.result()
        except LegError as failure:
            return await self._after_prefill_failure(legs, failure)
        if answer.source is None or same_engine(answer.source, legs.source):
            return None
        if self._retries_left:
            self._again(Role.PREFILL, "identity")
        return None

    async def _after_prefill_failure(self, legs: _Legs, failure: LegError) -> float | None:
        """End, restart, or give the running decode leg time to recompute.

        A prefill engine that dies may have written most of the KV: the decode engine knows how much, and
        recomputes from the last good token. That is worth waiting for, unless a prefill engine can be had.
        """
        self._tried.add(legs.worker)
        self._failure = failure
        self._log(failure)
        policy = self._settings.on_prefill_failure
        if failure.reason is Reason.REJECTED or policy is OnPrefillFailure.FAIL:
            raise failure
        if policy is OnPrefillFailure.RETRY and self._retries_left:
            another = await self._dispatcher.worker(Role.PREFILL, self._tried)
            # The decode leg may have been answered while engines were looked for; then it counts.
            if another is not None and not legs.decode.done():
                self._again(Role.PREFILL, failure.reason.value)
        if legs.decode.done() or failure.may_have_started:
            return self._settings.decode_recovery_seconds
        self._decode_alone(failure.reason.value)

    def _after_recovery(self, decode: asyncio.Task[Body | DecodeStream]) -> None:
        """A decode leg that could not recover is sent anew: its engine may fail requests whose KV is lost."""
        failure = decode.exception()
        if isinstance(failure, LegError) and failure.reason is not Reason.REJECTED:
            self._decode_alone("recovery")

    def _decode_alone(self, reason: str) -> NoReturn:
        """The decode engine shall prefill itself, by a new leg. The last resort: no retry is taken for it."""
        self._alone = Cause.PREFILL_FAILED
        self._dispatcher.metrics.retries.labels(Role.DECODE.value, reason).inc()
        raise _Again

    def _again(self, leg: Role, reason: str) -> NoReturn:
        self._retries_left -= 1
        self._dispatcher.metrics.retries.labels(leg.value, reason).inc()
        raise _Again

    def _after_failure(self, failure: LegError) -> None:
        """A leg failed for good: try elsewhere if it is a decode leg and the budget allows.

        Raises:
            RequestError: nothing is left to try.
        """
        worker = failure.worker
        final = worker.role is Role.PREFILL or failure.reason is Reason.REJECTED or not self._retries_left
        if final:
            raise failure.request_error() from failure
        self._log(failure)
        self._failure = failure
        self._tried.add(worker)
        self._retries_left -= 1
        self._dispatcher.metrics.retries.labels(worker.role.value, failure.reason.value).inc()

    def _log(self, failure: LegError) -> None:
        logger.warning("request %s, %s: %s", self._prompt.request_id, failure.worker.url, failure)

    async def _choose(self, role: Role) -> Worker | None:
        worker = await self._dispatcher.worker(role, self._tried)
        if worker in self._tried:
            # The same engine again: give it a moment.
            attempt = self._settings.retries - self._retries_left
            seconds = self._settings.retry_backoff_seconds * 2 ** max(attempt - 1, 0)
            await asyncio.sleep(min(seconds, _BACKOFF_SECONDS_MAX))
        return worker

    def _nobody_decodes(self) -> RequestError:
        if self._failure is not None and self._failure.worker.role is Role.DECODE:
            return self._failure.request_error()
        message = "no decode engine is ready; see /workers"
        return RequestError(503, Cause.NO_DECODE, message, retry_after_seconds=1)

    async def _decode(self, worker: Worker, call: Call) -> Body | DecodeStream:
        engines = self._dispatcher.engines
        return await (engines.stream(worker, call) if self._prompt.stream else engines.answer(worker, call))

    def _call(self, headers: Mapping[str, str], body: Body) -> Call:
        return Call(self._prompt.endpoint.value, msgspec.json.encode(body), headers)

    def _headers(self) -> dict[str, str]:
        # Engines that pair legs by the id strip `-` and 8 hexadecimal digits; 16 are not mistaken for these.
        request_id = f"{self._prompt.request_id}-{secrets.token_hex(8)}"
        return {**self._prompt.headers, "Content-Type": "application/json", "X-Request-Id": request_id}


async def _cancelled(*tasks: asyncio.Task[Any]) -> None:
    """Cancel the tasks and wait for their end, whatever it is."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def _leg_task(leg: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a leg whose failure may stay unread: the other leg may have decided before."""
    task = asyncio.create_task(leg)
    task.add_done_callback(lambda ended: None if ended.cancelled() else ended.exception())
    return task


def _close_stream(leg: asyncio.Task[Body | DecodeStream]) -> None:
    if not leg.cancelled() and leg.exception() is None:
        stream = leg.result()
        if isinstance(stream, DecodeStream):
            stream.close()
