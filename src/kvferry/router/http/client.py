"""The client: connections to the engines that are used again, and answers that are read as they come.

Who reads an answer piece by piece is woken by each; one that is poured is given to a function at once.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import cast
from urllib.parse import urlsplit

import httptools

from kvferry.router.http import awaiting
from kvferry.router.http.answers import Answer
from kvferry.router.http.failures import LostError
from kvferry.router.http.messages import Headers, note_header

_HEAD_BYTES_MAX = 64 << 10
_WHOLE_BYTES_MAX = 64 << 10
"""A longer body is not copied behind its head."""
_SWEEP_SECONDS = 5.0
_FIXED_HEADERS = "Accept-Encoding: identity\r\n"
# A host that has vanished says nothing; these find it out after 11 s.
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, getattr(socket, "TCP_KEEPIDLE", None), 5),
    (socket.IPPROTO_TCP, getattr(socket, "TCP_KEEPINTVL", None), 2),
    (socket.IPPROTO_TCP, getattr(socket, "TCP_KEEPCNT", None), 3),
)


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """Where a base URL leads; `origin_of` makes one for each."""

    host: str
    port: int
    tls: bool
    authority: str
    path: str


@lru_cache(maxsize=4096)
def origin_of(url: str) -> Origin:
    """The parts of a base URL that was checked before."""
    parts = urlsplit(url)
    tls = parts.scheme == "https"
    host = parts.hostname or ""
    return Origin(host, parts.port or (443 if tls else 80), tls, parts.netloc.rpartition("@")[2], parts.path)


@dataclass(slots=True)
class _Shelf:
    """The connections to one origin that nobody uses, the longest unused first."""

    idle: list[Connection] = field(default_factory=list)

    def take(self) -> Connection | None:
        while self.idle:
            connection = self.idle.pop()
            if connection.usable():
                return connection
        return None


class HttpClient:
    """Sends requests. Its connections are closed when they were unused for `idle_seconds`."""

    def __init__(self, connect_seconds: float, idle_seconds: float, tls: ssl.SSLContext) -> None:
        self._loop = asyncio.get_running_loop()
        self.connect_seconds = connect_seconds
        self.idle_seconds = idle_seconds
        self._shelves: dict[Origin, _Shelf] = {}
        self._connections: set[Connection] = set()
        self.connecting: set[Connecting] = set()
        self.all_closed = asyncio.Event()
        self.all_closed.set()
        self.tls = tls
        self._sweep: asyncio.TimerHandle | None = None

    def send(
        self, url: str, path: str, headers: Mapping[str, str], body: bytes | None = None
    ) -> Awaitable[Answer]:
        """Send a POST to `path` under `url`, or a GET where there is no body; wait for the answer's head.

        Raises:
            ConnectError: there is no connection.
            LostError: the connection ended before the head of the answer was there.
        """
        return awaiting.send(self, url, path, headers, body)

    def start(self, url: str, path: str, lines: bytes, body: bytes | None = None) -> Answer:
        """Send the same, at once or on a connection that is made for it; the answer may fail as `send` does.

        `lines` are the headers as they are sent.
        """
        head = _first_lines(url, path, body is None) + lines
        head += b"\r\n" if body is None else b"Content-Length: %d\r\n\r\n" % len(body)
        origin = origin_of(url)
        shelf = self._shelves.get(origin)
        connection = None if shelf is None else shelf.take()
        if connection is not None:
            answer = Answer(connection, self._loop)
            connection.send(answer, head, body)
            return answer
        return Connecting(self, origin, head, body).answer

    def close(self) -> Awaitable[None]:
        """Close all connections."""
        return awaiting.close_client(self)

    def abort_all(self) -> None:
        """Close all connections, also those that are being made, without waiting for their ends."""
        if self._sweep is not None:
            self._sweep.cancel()
        for connecting in list(self.connecting):
            connecting.abort()
        for connection in list(self._connections):
            connection.abort()

    def unused(self, connection: Connection) -> None:
        """A connection can serve again."""
        self._shelves.setdefault(connection.origin, _Shelf()).idle.append(connection)
        if self._sweep is None:
            self._sweep = self._loop.call_later(_SWEEP_SECONDS, self._close_idle)

    def opened(self, connection: Connection) -> None:
        """A connection is there."""
        self._connections.add(connection)
        self.all_closed.clear()

    def closed(self, connection: Connection) -> None:
        """A connection is gone."""
        self._connections.discard(connection)
        if not self._connections:
            self.all_closed.set()
        shelf = self._shelves.get(connection.origin)
        if shelf is not None and connection in shelf.idle:
            shelf.idle.remove(connection)

    def unconnected(self, origin: Origin) -> Connection:
        """What a new connection to the origin tells its events."""
        return Connection(self, origin, self._loop)

    def _close_idle(self) -> None:
        self._sweep = None
        latest = self._loop.time() - self.idle_seconds
        for origin, shelf in list(self._shelves.items()):
            while shelf.idle and shelf.idle[0].idle_since < latest:
                shelf.idle.pop(0).abort()
            if not shelf.idle:
                del self._shelves[origin]
        if self._shelves:
            self._sweep = self._loop.call_later(_SWEEP_SECONDS, self._close_idle)


class Connecting:
    """What stands for a connection while that is being made for its first request."""

    def __init__(self, client: HttpClient, origin: Origin, head: bytes, body: bytes | None) -> None:
        loop = asyncio.get_running_loop()
        self.answer = Answer(self, loop)
        self.client = client
        self._task = loop.create_task(awaiting.connect(self, origin, head, body))
        client.connecting.add(self)
        # A task that is cancelled before it has begun runs no `finally` of its own.
        self._task.add_done_callback(lambda _: client.connecting.discard(self))

    def hold(self) -> None:
        """Nothing comes yet."""

    def go_on(self) -> None:
        """Nothing was held."""

    def abort(self) -> None:
        """Make no connection."""
        self._task.cancel()


class Connection(asyncio.Protocol):
    """One connection to one origin, with one request at a time."""

    def __init__(self, client: HttpClient, origin: Origin, loop: asyncio.AbstractEventLoop) -> None:
        self.origin = origin
        self.idle_since = 0.0
        self._client = client
        self._loop = loop
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self._headers: Headers = {}
        self._head_bytes = 0
        self._informational = False
        self._body: list[bytes] = []
        self._complete = False
        self._reusable = False
        self._stray = False

    def usable(self) -> bool:
        """Whether a request may be sent on it."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return False
        if self._loop.time() - self.idle_since < self._client.idle_seconds:
            return True
        transport.abort()
        return False

    def send(self, answer: Answer, head: bytes, body: bytes | None) -> None:
        """Send a request."""
        transport = self._transport
        self._answer = answer
        self._headers = answer.headers
        self._head_bytes = 0
        self._complete = False
        if transport is None or transport.is_closing():
            answer.fail(LostError("the connection was closed"))
        elif body is None or len(body) > _WHOLE_BYTES_MAX:
            transport.write(head)
            if body is not None:
                transport.write(body)
        else:
            transport.write(head + body)

    def abort(self) -> None:
        """Close it at once."""
        self._answer = None
        if self._transport is not None:
            self._transport.abort()

    def hold(self) -> None:
        """Read no more for now."""
        if self._transport is not None:
            self._transport.pause_reading()

    def go_on(self) -> None:
        """Read again."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    # --- told by the transport -----------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        self._client.opened(self)
        plain = transport.get_extra_info("socket")
        for level, option, value in _KEEPALIVE:
            if option is not None and plain is not None:
                plain.setsockopt(level, option, value)

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:
            # Nothing was asked, so nothing that comes can be trusted.
            self.abort()
            return
        if not answer.status:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self._complete:
                self._deliver(answer)
                answer.fail(LostError(f"its answer is not HTTP: {error}"))
                self.abort()
                return
            # The answer is complete; what follows is none.
            self._reusable = False
        if not answer.status and self._head_bytes > _HEAD_BYTES_MAX:
            answer.fail(LostError("the head of its answer is too long"))
            self.abort()
            return
        if self._complete:
            # Who gets the last piece need not wait for the end.
            answer.ended = True
            self._deliver(answer)
            self._done(answer)
        else:
            self._deliver(answer)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._client.closed(self)
        answer, self._answer = self._answer, None
        if answer is None:
            return
        if error is None and answer.status and _until_the_end(answer):
            answer.end()
        else:
            answer.fail(LostError(str(error or "closed by the other side")))

    # --- told by the parser --------------------------------------------------

    def on_message_begin(self) -> None:
        # One answer was asked for; with another one behind it nothing here can be trusted any more.
        self._stray = self._complete

    def on_header(self, name: bytes, value: bytes) -> None:
        answer = self._answer
        if answer is not None and not answer.status:
            note_header(self._headers, name, value)

    def on_headers_complete(self) -> None:
        if self._stray:
            return
        status = self._parser.get_status_code()
        self._informational = status < 200
        answer = self._answer
        if self._informational:
            self._headers.clear()
        elif answer is not None:
            answer.status = status
            answer.wake()

    def on_body(self, data: bytes) -> None:
        if not self._stray:
            self._body.append(data)

    def on_message_complete(self) -> None:
        if not self._informational and not self._stray:
            self._complete = True
            # The parser knows it only now.
            self._reusable = self._parser.should_keep_alive()

    # -------------------------------------------------------------------------

    def _deliver(self, answer: Answer) -> None:
        body = self._body
        if body:
            data = body[0] if len(body) == 1 else b"".join(body)
            body.clear()
            sink = answer.sink
            if sink is None:
                answer.fed(data)
            else:
                sink(data)

    def _done(self, answer: Answer) -> None:
        # Whoever was given the last piece may have closed it.
        if self._answer is answer:
            self._answer = None
            transport = self._transport
            if transport is not None and not transport.is_closing():
                answer.go_on()
                if self._reusable and not self._stray:
                    self.idle_since = self._loop.time()
                    self._client.unused(self)
                else:
                    transport.abort()
        answer.end()


@lru_cache(maxsize=4096)
def _first_lines(url: str, path: str, asks: bool) -> bytes:
    """The request line and the headers that are always the same."""
    origin = origin_of(url)
    method = "GET" if asks else "POST"
    first = f"{method} {origin.path}{path} HTTP/1.1\r\nHost: {origin.authority}\r\n{_FIXED_HEADERS}"
    return first.encode("latin-1", "replace")


def _until_the_end(answer: Answer) -> bool:
    """Whether the answer's body ends with its connection."""
    return b"content-length" not in answer.headers and b"transfer-encoding" not in answer.headers
