"""One client request on its connection: from its body to the last byte of its answer."""

from __future__ import annotations

import asyncio
from types import TracebackType

import msgspec

from kvferry.router.api.openai import Endpoint, read
from kvferry.router.api.sse import event_of
from kvferry.router.dispatch.dispatcher import Dispatcher
from kvferry.router.dispatch.push import Begun
from kvferry.router.ground.errors import JSON, Cause, RequestError
from kvferry.router.ground.timeouts import Timeouts
from kvferry.router.http.reading import Request
from kvferry.router.http.server import Reply
from kvferry.router.record.timeline import Timeline
from kvferry.router.serving.asking import forwarded, session_of
from kvferry.router.serving.outlet import StreamOutlet
from kvferry.router.serving.relay import Account, Relay

_LAST_WORDS_SECONDS = 1.0
"""How long a client that does not read may delay the end of its broken stream."""


class Deadlines:
    """The deadlines of the requests in flight, which a shutdown brings forward."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.bounds: set[asyncio.Timeout] = set()
        self.pushes = Timeouts(seconds)
        """Those that no task serves."""
        self.ended = False
        """Whether requests in flight are ended by a shutdown."""

    def __len__(self) -> int:
        return len(self.bounds) + len(self.pushes)

    def end_all(self) -> None:
        """The router ends: so does every request in flight."""
        self.ended = True
        self.expire()

    def expire(self) -> None:
        """Let every request in flight time out now."""
        for bound in self.bounds:
            if not bound.expired():
                bound.reschedule(asyncio.get_running_loop().time())
        for push in self.pushes:
            push.late()

    def over(self) -> RequestError:
        """Why a request ends whose time is over."""
        if self.ended:
            return RequestError(503, Cause.SHUTTING_DOWN, "the router was shut down")
        message = f"no answer within {self.seconds:g} seconds (--request-timeout-secs)"
        return RequestError(504, Cause.TIMEOUT, message)

    def within(self, deadline: float) -> Bound:
        """An asynchronous context manager that bounds its block."""
        return Bound(self, deadline)


class Bound:
    """The deadline of one request.

    Raises:
        RequestError: on leaving when it has come: 504, or 503 in a shutdown.
    """

    __slots__ = ("_deadlines", "_timeout")

    def __init__(self, deadlines: Deadlines, deadline: float) -> None:
        self._deadlines = deadlines
        self._timeout = asyncio.timeout_at(deadline)

    async def __aenter__(self) -> None:
        """Begin."""
        await self._timeout.__aenter__()
        self._deadlines.bounds.add(self._timeout)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End, and say why if the time is over."""
        self._deadlines.bounds.discard(self._timeout)
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError as late:
            raise self._deadlines.over() from late


class Exchange:
    """One inference request."""

    def __init__(
        self, dispatcher: Dispatcher, request: Request, reply: Reply, request_id: str, timeline: Timeline
    ) -> None:
        self.account = Account()
        self._dispatcher = dispatcher
        self._request = request
        self._reply = reply
        self._request_id = request_id
        self._timeline = timeline

    async def run(self, endpoint: Endpoint, begun: Begun | None = None) -> None:
        """Serve it; its legs may have `begun`. The caller bounds the time.

        Raises:
            RequestError: it failed, before or amid its answer.
            ConnectionError: the client is gone.
        """
        settings = self._dispatcher.settings
        request = None if begun is None else begun.request
        asked = request or read(endpoint, self._request.body, settings.prompts_max)
        relay = Relay(
            self._dispatcher,
            asked,
            self._request_id,
            forwarded(self._request, settings),
            self.account,
            session_of(self._request),
            self._timeline,
            begun,
        )
        if asked.stream:
            outlet = StreamOutlet(self._reply, self._request_id, self._timeline, self._dispatcher.metrics)
            await relay.stream(outlet)
            self._reply.end()
            return
        answer = msgspec.json.encode(await relay.answer())
        headers = {"X-Request-Id": self._request_id, "Content-Type": JSON}
        await send_whole(self._reply, 200, headers, answer, self._timeline)


async def send_whole(
    reply: Reply, status: int, headers: dict[str, str], body: bytes, timeline: Timeline
) -> None:
    """Send a whole answer within the request's deadline; once begun, nothing else can be said."""
    timeline.first_byte = asyncio.get_running_loop().time()
    reply.send(status, headers, body)
    try:
        await reply.room()
    except BaseException:
        reply.hang_up()
        raise


async def say_why(reply: Reply, error: RequestError) -> None:
    """End a stream that has begun by an event that tells the error."""
    if reply.ended:
        return
    if reply.full:
        # A client that does not read would keep its connection, and what is buffered for it, for ever.
        reply.hang_up()
        return
    try:
        async with asyncio.timeout(_LAST_WORDS_SECONDS):
            reply.write(event_of(msgspec.json.encode(error.shape())))
            reply.end()
            await reply.room()
    except (TimeoutError, ConnectionError):
        reply.hang_up()
