"""Routes: what a client may ask, admission, and how errors look."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from typing import Any

import msgspec
from aiohttp import web

from kvferry.router.dispatch import Dispatcher
from kvferry.router.errors import JSON, Cause, RequestError, invalid
from kvferry.router.legs import LegError
from kvferry.router.metrics import CONTENT_TYPE
from kvferry.router.openai import ClientRequest, Endpoint, read
from kvferry.router.pool import Role, Worker
from kvferry.router.relay import Account, Relay
from kvferry.router.sse import event_of

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

FORWARDED_HEADERS = ("Authorization", "traceparent", "tracestate")
_REQUEST_ID = re.compile(r"[0-9A-Za-z_.:-]{1,128}")
_SESSION = re.compile(r"[\x20-\x7e]{1,256}")
_OPEN_PATHS = frozenset({"/health", "/liveness", "/readiness", "/metrics"})
_LAST_WORDS_SECONDS = 1.0
"""How long a client that does not read may delay the end of its broken stream."""


class Api:
    """The handlers of one router."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self.settings = dispatcher.settings
        self.draining = False
        """Whether new requests are refused."""
        self.ended = False
        """Whether requests in flight are ended, too."""
        self.bounds: set[asyncio.Timeout] = set()
        """The deadlines of the requests in flight."""
        self._pool = dispatcher.pool
        self._metrics = dispatcher.metrics
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def application(self) -> web.Application:
        """The routes of this API."""

        @web.middleware
        async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._guarded(request, handler)

        app = web.Application(client_max_size=self.settings.body_bytes_max, middlewares=[guarded])
        app.router.add_post(Endpoint.COMPLETIONS.value, self.completions)
        app.router.add_post(Endpoint.CHAT.value, self.chat_completions)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/health", self.readiness)
        app.router.add_get("/readiness", self.readiness)
        app.router.add_get("/liveness", self.liveness)
        app.router.add_get("/metrics", self.exposition)
        app.router.add_get("/workers", self.workers)
        return app

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/completions`."""
        return await self._infer(request, Endpoint.COMPLETIONS)

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/chat/completions`."""
        return await self._infer(request, Endpoint.CHAT)

    async def models(self, request: web.Request) -> web.StreamResponse:
        """`GET /v1/models`: what the first decode engine that answers serves."""
        tried: set[Worker] = set()
        failure = RequestError(503, Cause.NO_DECODE, "no decode engine is ready; see /workers")
        while True:
            worker = await self.dispatcher.worker(Role.DECODE, tried)
            if worker is None or worker in tried:
                raise failure
            tried.add(worker)
            try:
                async with asyncio.timeout(self.settings.health_timeout_seconds):
                    body = await self.dispatcher.engines.models(worker, _forwarded(request))
            except LegError as error:
                failure = error.request_error()
            except TimeoutError:
                failure = RequestError(504, Cause.TIMEOUT, "the decode engine did not answer in time")
            else:
                return web.Response(body=body, content_type=JSON)

    async def readiness(self, request: web.Request) -> web.StreamResponse:
        """`GET /readiness`, `/health`: 200 when a request could be served: a ready engine of each role."""
        del request
        ready = self._pool.ready and not self.draining
        counts = {role.value: sum(w.ready for w in self._pool.workers(role)) for role in Role}
        return _json({"ready": ready, "draining": self.draining, **counts}, 200 if ready else 503)

    async def liveness(self, request: web.Request) -> web.StreamResponse:
        """`GET /liveness`: 200 as long as the router runs."""
        del request
        return _json({"alive": True})

    async def exposition(self, request: web.Request) -> web.StreamResponse:
        """`GET /metrics`."""
        del request
        return web.Response(body=self._metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})

    async def workers(self, request: web.Request) -> web.StreamResponse:
        """`GET /workers`: the engines, and why one is not ready."""
        del request
        return _json({"workers": [_described(worker) for worker in self._pool.workers()]})

    async def drain(self) -> None:
        """Refuse new requests, give those in flight their time, then end the rest with an error."""
        self.draining = True
        if await self._idle_within(self.settings.drain_seconds):
            return
        self.ended = True
        for bound in self.bounds:
            if not bound.expired():
                bound.reschedule(asyncio.get_running_loop().time())
        await self._idle_within(_LAST_WORDS_SECONDS)

    async def _idle_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        return self._idle.is_set()

    async def _infer(self, request: web.Request, endpoint: Endpoint) -> web.StreamResponse:
        deadline = asyncio.get_running_loop().time() + self.settings.request_timeout_seconds
        account = Account()
        outcome, cause = "error", Cause.INTERNAL
        exchange = _Exchange(self, request)
        try:
            with self._admitted():
                response = await exchange.run(endpoint, deadline, account)
            outcome, cause = "ok", account.cause
        except asyncio.CancelledError:
            outcome, cause = "cancelled", Cause.SHUTTING_DOWN if self.draining else Cause.CLIENT_GONE
            raise
        except ConnectionError:
            # The client's connection broke under a write; nobody is left to tell.
            outcome, cause = "cancelled", Cause.CLIENT_GONE
            return exchange.response or web.Response(status=499)
        except RequestError as error:
            cause = error.cause
            if exchange.response is None:
                error.request_id = exchange.request_id
                raise
            await exchange.say_why(error)
            return exchange.response
        finally:
            self._metrics.requests.labels(account.path, outcome, cause.value).inc()
        return response

    @contextmanager
    def _admitted(self) -> Iterator[None]:
        if self.draining:
            raise RequestError(503, Cause.SHUTTING_DOWN, "the router is shutting down", retry_after_seconds=1)
        most = self.settings.concurrent_requests_max
        if self._in_flight >= most:
            message = f"{most} requests are in flight, as many as --max-concurrent-requests allows"
            raise RequestError(429, Cause.OVERLOADED, message, retry_after_seconds=1)
        self._in_flight += 1
        self._idle.clear()
        self._metrics.in_flight.set(self._in_flight)
        try:
            yield
        finally:
            self._in_flight -= 1
            self._metrics.in_flight.set(self._in_flight)
            if not self._in_flight:
                self._idle.set()

    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the key, and give every error OpenAI's shape. This is the router's last handler."""
        try:
            self._authorize(request)
            return await handler(request)
        except RequestError as error:
            failure = error
        except RecursionError:
            failure = RequestError(400, Cause.INVALID_REQUEST, "the body is nested too deeply")
        except web.HTTPException as error:
            failure = RequestError(error.status, Cause.NOT_FOUND, f"{request.path}: {error.reason}")
        except Exception:
            logger.exception("a request failed by a fault of the router")
            failure = RequestError(500, Cause.INTERNAL, "internal error of the router; see its log")
        headers = failure.headers() | {"Content-Type": failure.content_type()}
        headers["X-Request-Id"] = failure.request_id or _request_id(request)
        return web.Response(status=failure.status, body=failure.body(), headers=headers)

    def _authorize(self, request: web.Request) -> None:
        key = self.settings.api_key
        if key is None or request.path in _OPEN_PATHS:
            return
        given = request.headers.get("Authorization", "")
        # Bytes that are no UTF-8 stand in the header as surrogates.
        if not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), f"Bearer {key}".encode()):
            raise RequestError(401, Cause.UNAUTHORIZED, "send the header Authorization: Bearer <api key>")


class _Exchange:
    """One client request on its connection."""

    def __init__(self, api: Api, request: web.Request) -> None:
        self._api = api
        self._settings = api.settings
        self._dispatcher = api.dispatcher
        self._request = request
        self.request_id = _request_id(request)
        self._started = asyncio.get_running_loop().time()
        self.response: web.StreamResponse | None = None
        """Set as soon as bytes have gone to the client: from then on errors are events in its stream."""

    async def run(self, endpoint: Endpoint, deadline: float, account: Account) -> web.StreamResponse:
        try:
            async with self._bounded(deadline):
                asked = read(endpoint, await self._body(), self._settings.prompts_max)
                session = _session(self._request)
                headers = _forwarded(self._request)
                relay = Relay(self._dispatcher, asked, self.request_id, headers, account, session)
                return await self._respond(asked, relay)
        except TimeoutError as error:
            if self._api.ended:
                raise RequestError(503, Cause.SHUTTING_DOWN, "the router was shut down") from error
            seconds = self._settings.request_timeout_seconds
            message = f"no answer within {seconds:g} seconds (--request-timeout-secs)"
            raise RequestError(504, Cause.TIMEOUT, message) from error

    @asynccontextmanager
    async def _bounded(self, deadline: float) -> AsyncIterator[None]:
        async with asyncio.timeout_at(deadline) as bound:
            self._api.bounds.add(bound)
            try:
                yield
            finally:
                self._api.bounds.discard(bound)

    async def say_why(self, error: RequestError) -> None:
        """End a stream that has begun by an event that tells the error."""
        assert self.response is not None
        if self._backed_up():
            self._hang_up()
            return
        try:
            async with asyncio.timeout(_LAST_WORDS_SECONDS):
                await self.response.write(event_of(msgspec.json.encode(error.shape())))
                await self.response.write_eof()
        except (TimeoutError, ConnectionError):
            self._hang_up()

    def _backed_up(self) -> bool:
        """Whether the client does not read what it was sent, so that the deadline came amid a write.

        aiohttp lets no further write wait after one that was cancelled while it waited.
        """
        transport = self._request.transport
        return transport is None or transport.get_write_buffer_size() > transport.get_write_buffer_limits()[0]

    def _hang_up(self) -> None:
        """A client that does not read would keep its connection, and what is buffered for it, for ever."""
        if self._request.transport is not None:
            self._request.transport.abort()

    async def _body(self) -> bytes:
        try:
            async with asyncio.timeout(self._settings.body_timeout_seconds):
                return await self._request.read()
        except web.HTTPRequestEntityTooLarge as error:
            most = self._settings.body_bytes_max
            message = f"the body has more than {most} bytes (--max-body-bytes)"
            raise RequestError(413, Cause.BODY_TOO_LARGE, message) from error
        except web.RequestPayloadError as error:
            raise invalid("body", f"cannot be read: {error}") from error
        except TimeoutError as error:
            seconds = self._settings.body_timeout_seconds
            raise RequestError(
                408, Cause.TIMEOUT, f"the body did not arrive in {seconds:g} seconds"
            ) from error

    async def _respond(self, asked: ClientRequest, relay: Relay) -> web.StreamResponse:
        headers = {"X-Request-Id": self.request_id}
        if not asked.stream:
            answer = await relay.answer()
            whole = web.Response(body=msgspec.json.encode(answer), content_type=JSON, headers=headers)
            return await self._send(whole)
        metrics = self._dispatcher.metrics
        clock = asyncio.get_running_loop().time
        async with aclosing(relay.events()) as pieces:
            # Nothing is promised to the client before the first piece is there, so a failure until then has a
            # status of its own.
            first = await anext(pieces)
            response = await self._begin(headers)
            before = clock()
            metrics.ttft.observe(before - self._started)
            await response.write(first)
            async for piece in pieces:
                now = clock()
                metrics.itl.observe(now - before)
                before = now
                await response.write(piece)
        await response.write_eof()
        return response

    async def _send(self, response: web.Response) -> web.Response:
        """Send a whole answer within the request's deadline; once begun, nothing else can be said."""
        try:
            await response.prepare(self._request)
            await response.write_eof()
        except BaseException:
            self._hang_up()
            raise
        return response

    async def _begin(self, headers: dict[str, str]) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={
                **headers,
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
            }
        )
        await response.prepare(self._request)
        self.response = response
        return response


def _forwarded(request: web.Request) -> dict[str, str]:
    given = {name: request.headers.get(name, "") for name in FORWARDED_HEADERS}
    return {name: value for name, value in given.items() if value and value.isascii()}


def _request_id(request: web.Request) -> str:
    """The client's id for its request if it is sane, else one of ours."""
    given = request.headers.get("X-Request-Id", "")
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)


def _session(request: web.Request) -> str | None:
    """The client's name for its conversation, if it is sane; it is its own among those of other keys."""
    given = request.headers.get("X-Session-Id", "")
    key = request.headers.get("Authorization", "")
    return f"{key}\n{given}" if _SESSION.fullmatch(given) and key.isascii() else None


def _described(worker: Worker) -> dict[str, Any]:
    source = worker.source
    described: dict[str, Any] = {
        "url": worker.url,
        "role": worker.role.value,
        "up": worker.up,
        "ready": worker.ready,
        "in_flight": worker.in_flight,
        "problem": worker.problem,
    }
    if worker.holds is not None:
        described["holds"] = worker.holds
    if source is not None:
        described["engine"] = {
            "id": source.engine,
            "incarnation": source.incarnation,
            "host": source.host,
            "port": source.port,
            "tp": source.tp,
            "pp": source.pp,
        }
    return described


def _json(body: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type=JSON)
