"""Routes: what a client may ask, who may, and how errors look."""

from __future__ import annotations

import asyncio
import hmac
import logging
from contextlib import suppress

from kvferry.router.api.openai import Endpoint
from kvferry.router.dispatch.dispatcher import Dispatcher
from kvferry.router.dispatch.push import Begun
from kvferry.router.ground.errors import Cause, RequestError, not_allowed
from kvferry.router.http.reading import Request
from kvferry.router.http.server import Reply
from kvferry.router.operation.pages import Page, PageHandler, Pages
from kvferry.router.record.accesslog import AccessLog
from kvferry.router.record.timeline import Timeline
from kvferry.router.record.tracing import Tracing
from kvferry.router.serving.accounting import Accounting
from kvferry.router.serving.admission import Admission
from kvferry.router.serving.asking import request_id_of
from kvferry.router.serving.exchange import Deadlines, Exchange, say_why
from kvferry.router.serving.handing_over import Desk
from kvferry.router.serving.ordinary import Ordinary
from kvferry.router.serving.ordinary_push import OrdinaryPush
from kvferry.router.serving.passing import PASSED, Passing

logger = logging.getLogger(__name__)

_LAST_WORDS_SECONDS = 1.0
_OPEN_PATHS = frozenset({"/health", "/liveness", "/readiness", "/metrics"})
_ENDPOINTS = {endpoint.value: endpoint for endpoint in Endpoint}
_SERVED = frozenset({*_ENDPOINTS, *PASSED})


class Api:
    """What one router serves."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        admission: Admission,
        pages: Pages,
        log: AccessLog,
        tracing: Tracing | None = None,
    ) -> None:
        self.dispatcher = dispatcher
        self.admission = admission
        self.settings = dispatcher.settings
        self.deadlines = Deadlines(self.settings.request_timeout_seconds)
        self._pages = pages
        self._passing = Passing(dispatcher)
        self._accounting = Accounting(dispatcher.metrics, log)
        self._tracing = tracing
        desk = Desk(dispatcher, admission, self.deadlines, self._accounting)
        self._ordinary = Ordinary(desk)
        self._clock = asyncio.get_running_loop().time
        key = self.settings.api_key
        self._bearer = None if key is None else f"Bearer {key}".encode()

    def screen(self, request: Request) -> RequestError | None:
        """Why the body of a request shall not be read, if it shall not."""
        try:
            self._authorize(request)
            self._find(request)
        except RequestError as error:
            return error
        return None

    def begin(self, request: Request, reply: Reply) -> OrdinaryPush | None:
        """Answer the request without a task if it is an ordinary one."""
        # Spans belong to tasks.
        if self._tracing is not None or not self._authorized(request):
            return None
        try:
            return self._ordinary.begin(request, reply)
        except Exception:
            # The parser that tells of requests would take it for theirs.
            logger.exception("a request cannot be begun by a fault of the router")
            return None

    async def handle(self, request: Request, reply: Reply, begun: Begun | None = None) -> None:
        """Answer the request; every error gets OpenAI's shape. This is the router's last handler."""
        request_id = request_id_of(request) if begun is None else begun.request_id
        # The client's connection may break under a write; then nobody is left to tell.
        with suppress(ConnectionError):
            failure = await self._tried(request, reply, request_id, begun)
            if failure is None:
                return
            if reply.started:
                await say_why(reply, failure)
                return
            headers = failure.headers() | {"Content-Type": failure.content_type()}
            headers["X-Request-Id"] = request_id
            reply.send(failure.status, headers, failure.body())

    async def _tried(
        self, request: Request, reply: Reply, request_id: str, begun: Begun | None
    ) -> RequestError | None:
        """Answer the request; the error instead if there is one and it has not been told."""
        try:
            if request.path in _SERVED and request.method == "POST":
                await self._serve(request, reply, request_id, begun)
            else:
                self._send_page(reply, await self._page(request))
        except RequestError as error:
            return error
        except RecursionError:
            return RequestError(400, Cause.INVALID_REQUEST, "the body is nested too deeply")
        except ConnectionError:
            raise
        except Exception:
            logger.exception("a request failed by a fault of the router")
            return RequestError(500, Cause.INTERNAL, "internal error of the router; see its log")
        return None

    async def drain(self) -> None:
        """Refuse new requests, give those in flight their time, then end the rest with an error."""
        self.admission.close()
        if await self._idle_within(self.settings.drain_seconds):
            return
        self.deadlines.end_all()
        await self._idle_within(_LAST_WORDS_SECONDS)

    async def _idle_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.admission.idle()
                return True
        return False

    async def _page(self, request: Request) -> Page:
        if request.problem is not None:
            raise request.problem
        handler = self._find(request)
        self._authorize(request)
        assert handler is not None
        return await handler(request)

    def _find(self, request: Request) -> PageHandler | None:
        """Who answers a request; None when an engine does.

        Raises:
            RequestError: 404 or 405.
        """
        if request.path not in _SERVED:
            return self._pages.find(request)
        if request.method != "POST":
            raise not_allowed(request.path, request.method, ("POST",))
        return None

    def _send_page(self, reply: Reply, page: Page) -> None:
        reply.send(page.status, {"Content-Type": page.content_type, **page.headers}, page.body)

    async def _serve(self, request: Request, reply: Reply, request_id: str, begun: Begun | None) -> None:
        timeline = Timeline(self._clock()) if begun is None else begun.timeline
        if self._tracing is not None:
            timeline.trace = self._tracing.request(request.path, request_id, request.headers)
        exchange = Exchange(self.dispatcher, request, reply, request_id, timeline)
        account = exchange.account
        outcome, cause, status = "error", Cause.INTERNAL, 500
        try:
            if request.problem is not None:
                raise request.problem
            self._authorize(request)
            deadline = timeline.arrived + self.deadlines.seconds
            place = self.admission.enter(_key(request), entered=begun is not None)
            async with self.deadlines.within(deadline), place:
                endpoint = _ENDPOINTS.get(request.path)
                if endpoint is not None:
                    await exchange.run(endpoint, begun)
                    status = 200
                else:
                    account.path = "passed"
                    status = await self._passing.run(request, reply, request_id, timeline)
            outcome, cause = "ok" if status < 400 else "error", account.cause
        except asyncio.CancelledError:
            outcome, cause, status = "cancelled", self._why_gone(), 499
            raise
        except ConnectionError:
            outcome, cause, status = "cancelled", Cause.CLIENT_GONE, 499
            raise
        except RequestError as error:
            cause, status = error.cause, error.status
            if reply.started:
                await say_why(reply, error)
            else:
                raise
        finally:
            self._accounting.note(request, request_id, timeline, (account.path, outcome, cause), status)

    def _why_gone(self) -> Cause:
        return Cause.SHUTTING_DOWN if self.admission.closed else Cause.CLIENT_GONE

    def _authorize(self, request: Request) -> None:
        if not self._authorized(request):
            raise RequestError(401, Cause.UNAUTHORIZED, "send the header Authorization: Bearer <api key>")

    def _authorized(self, request: Request) -> bool:
        if self._bearer is None or request.path in _OPEN_PATHS:
            return True
        return hmac.compare_digest(request.headers.get(b"authorization", b""), self._bearer)


def _key(request: Request) -> bytes:
    return request.headers.get(b"authorization", b"")
