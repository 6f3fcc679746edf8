"""The server: connections, one request at a time on each, and the way back to the client.

A connection reads ahead while a request is served, so that a client that leaves is noticed; what it sends
ahead waits its turn. When several wait no more is read: such a client's leaving is noticed later.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

from kvferry.router.ground.errors import Cause, RequestError
from kvferry.router.http import awaiting
from kvferry.router.http.messages import date, header_lines, status_line
from kvferry.router.http.reading import Readers, Request, RequestReader

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_LINGER_SECONDS = 1.0
"""How long what a refused client still sends is thrown away, so that it reads the answer before the reset."""
_WAITING_MAX = 8
"""How many requests may wait on one connection; those of one read more."""
_SWEEP_SECONDS = 5.0
_BUFFERED_BYTES_MAX = 64 << 10
"""What transports hold before they say that it is much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """What a client may take."""

    body_bytes_max: int
    request_seconds: float
    """From a request's first byte to its last."""
    idle_seconds: float
    """Between two requests."""
    connections_max: int


class App(Protocol):
    """What is served."""

    def screen(self, request: Request) -> RequestError | None:
        """Why the body of a request shall not be read, if it shall not."""

    def begin(self, request: Request, reply: Reply) -> Serving | None:
        """Answer the request without a task, and tell `reply` when it is over; None: `handle` shall do it."""

    def handle(self, request: Request, reply: Reply, begun: Any = None) -> Awaitable[None]:
        """Answer the request, whatever happens; cancelled when the client is gone.

        `begun` is what has been given to `Reply.serve_on`.
        """


class Serving(Protocol):
    """A request that is served without a task."""

    def cancel(self) -> object:
        """The client is gone."""


class _Beginning:
    """Stands for what is about to be served without a task."""

    def cancel(self) -> None:
        """Nothing has begun."""


_BEGINNING = _Beginning()


class Reply:
    """The way back to one client, for one request."""

    __slots__ = (
        "_chunked",
        "_connection",
        "_head",
        "_with_body",
        "ended",
        "keeps_alive",
        "request",
        "started",
        "task_begins",
    )

    def __init__(self, connection: ClientConnection, request: Request) -> None:
        self.task_begins = False
        """Whether a task serves it, which has begun to."""
        self._connection = connection
        self.request = request
        self._chunked = request.version != "1.0"
        self._with_body = request.method != "HEAD"
        self._head = b""
        self.keeps_alive = request.keeps_alive
        self.started = False
        """Whether bytes have gone to the client."""
        self.ended = False

    @property
    def full(self) -> bool:
        """Whether the client is behind with reading."""
        return self._connection.paused

    def send(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Send a whole answer."""
        head = self._lines(status, headers, b"Content-Length: %d\r\n" % len(body))
        self.started = self.ended = True
        self._connection.write(head + body if self._with_body else head)

    def begin(self, headers: Mapping[str, str]) -> None:
        """Begin an answer of unknown length; it goes out with its first piece."""
        if not self._chunked:
            self.keeps_alive = False
        self._head = self._lines(200, headers, b"Transfer-Encoding: chunked\r\n" if self._chunked else b"")

    def write(self, piece: bytes) -> bool:
        """Send a piece of the answer that was begun; whether the client is behind with reading."""
        if self._chunked:
            piece = b"%x\r\n%b\r\n" % (len(piece), piece)
        if not self.started:
            self.started = True
            piece = self._head + piece
        self._connection.write(piece)
        return self._connection.paused

    def end(self, piece: bytes = b"") -> None:
        """End the answer that was begun, with a last piece."""
        self.ended = True
        if self._chunked:
            piece = b"%x\r\n%b\r\n0\r\n\r\n" % (len(piece), piece) if piece else b"0\r\n\r\n"
        if not self.started:
            self.started = True
            piece = self._head + piece
        self._connection.write(piece)

    def room(self) -> Awaitable[None]:
        """Wait until the client has read most of what was sent."""
        return awaiting.room(self)

    @property
    def buffers_much(self) -> bool:
        """Whether much of what was sent has not been written yet."""
        return self._connection.buffers_much

    def room_waiter(self) -> asyncio.Future[None]:
        """A future that is done when the client has caught up, or is gone."""
        return self._connection.room_waiter()

    def when_room(self, resume: Callable[[], None]) -> None:
        """Call `resume` once when the client has read most of what was sent."""
        self._connection.on_room = resume

    def hang_up(self) -> None:
        """End the connection at once, with what is buffered for a client that does not read."""
        self._connection.hang_up()

    def over(self) -> None:
        """The request, which no task serves, has been served."""
        self._connection.ended(self)

    def serve_on(self, begun: object, abandoned: Callable[[], None]) -> None:
        """Let a task go on by the app's `handle`, or be `abandoned` if the client leaves before it begins."""
        task = self._connection.go_on(self, begun)
        # A task that is cancelled before it has begun does nothing at all.
        task.add_done_callback(lambda _: None if self.task_begins else abandoned())

    def _lines(self, status: int, headers: Mapping[str, str], length: bytes) -> bytes:
        end = b"\r\n" if self.keeps_alive else b"Connection: close\r\n\r\n"
        if self.keeps_alive and not self._chunked:
            end = b"Connection: keep-alive\r\n\r\n"
        return b"".join((status_line(status), header_lines(headers), length, date.line(), end))


class ClientConnection(asyncio.Protocol):
    """One client's connection."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._loop = server.loop
        told = Readers(server.app.screen, self._expects, self._arrived)
        self._reader = RequestReader(told, server.limits.body_bytes_max)
        self.transport: asyncio.Transport | None = None
        self.paused = False
        self.on_room: Callable[[], None] | None = None
        self.serving: Serving | None = None
        """The request that is being served: its task, or what serves it without one."""
        self._waiting: deque[Request] = deque()
        self._room: asyncio.Future[None] | None = None
        self._late: asyncio.TimerHandle | None = None
        self._late_number = 0
        """Which of the connection's requests the timer is for."""
        self._held_back = False
        self.idle_since = self._loop.time()

    # --- told by the transport -----------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self.transport = cast("asyncio.Transport", transport)
        self._server.opened(self)

    def data_received(self, data: bytes) -> None:
        if self._reader.refused:
            return
        reader = self._reader
        reader.feed(data)
        if self._late is not None and (not reader.within or reader.number != self._late_number):
            self._late.cancel()
            self._late = None
        if reader.within and self._late is None:
            self._late_number = reader.number
            self._late = self._loop.call_later(self._server.limits.request_seconds, self._is_late)
        if len(self._waiting) >= _WAITING_MAX and not self._held_back and self.transport is not None:
            self._held_back = True
            self.transport.pause_reading()

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        resume, self.on_room = self.on_room, None
        if resume is not None:
            resume()
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._server.closed(self)
        self.paused = False
        self.on_room = None
        self._waiting.clear()
        if self._late is not None:
            self._late.cancel()
        self.transport = None
        if self.serving is not None:
            self.serving.cancel()

    # --- told by the reader --------------------------------------------------

    def _expects(self) -> None:
        # Amid another answer it would be part of that; the client sends the body after a while anyway.
        if self.serving is None:
            self.write(CONTINUE)

    def _arrived(self, request: Request) -> None:
        if self.serving is None:
            self._serve(request)
        else:
            self._waiting.append(request)

    def _is_late(self) -> None:
        self._late = None
        seconds = self._server.limits.request_seconds
        if not self._reader.refused:
            message = f"the body did not arrive in {seconds:g} seconds"
            self._reader.refuse(RequestError(408, Cause.TIMEOUT, message))

    # -------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether it waits for a request."""
        return self.serving is None and not self._reader.within

    def write(self, data: bytes) -> None:
        """Send bytes to the client.

        Raises:
            ConnectionResetError: it is gone.
        """
        if self.transport is None or self.transport.is_closing():
            raise ConnectionResetError("the client is gone")
        self.transport.write(data)

    @property
    def buffers_much(self) -> bool:
        """Whether the transport's buffer is beyond its mark."""
        transport = self.transport
        return transport is not None and transport.get_write_buffer_size() > _BUFFERED_BYTES_MAX

    def room_waiter(self) -> asyncio.Future[None]:
        """A future that is done when the transport's buffer is low."""
        self._room = self._loop.create_future()
        return self._room

    @property
    def app(self) -> App:
        """What is served."""
        return self._server.app

    def hang_up(self) -> None:
        """Abort the connection."""
        if self.transport is not None:
            self.transport.abort()

    def go_on(self, reply: Reply, begun: object = None) -> asyncio.Task[None]:
        """Serve by a task, also what has `begun` without one."""
        task = self._loop.create_task(awaiting.serve(self, reply, begun))
        self.serving = task
        return task

    def _serve(self, request: Request) -> None:
        reply = Reply(self, request)
        if self._server.closing:
            reply.keeps_alive = False
        self.serving = _BEGINNING
        serving = self._server.app.begin(request, reply)
        if serving is None:
            self.go_on(reply)
        elif self.serving is _BEGINNING:
            # Else it is over, or a task goes on with it.
            self.serving = serving

    def ended(self, reply: Reply) -> None:
        """A request has been served."""
        self.serving = None
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        if not reply.ended:
            transport.abort()
        elif self._reader.refused and not self._waiting:
            self._linger(transport)
        elif not reply.keeps_alive:
            transport.close()
        elif self._waiting:
            self._serve(self._waiting.popleft())
            self._read_on(transport)
        else:
            self.idle_since = self._loop.time()

    def _read_on(self, transport: asyncio.Transport) -> None:
        """Read again when few wait."""
        if self._held_back and len(self._waiting) < _WAITING_MAX:
            self._held_back = False
            transport.resume_reading()

    def _linger(self, transport: asyncio.Transport) -> None:
        """Close the connection of a client that may still be sending."""
        self._read_on(transport)
        if transport.can_write_eof():
            transport.write_eof()
        self._late = self._loop.call_later(_LINGER_SECONDS, transport.abort)


class HttpServer:
    """Listens, and keeps the connections."""

    def __init__(self, app: App, limits: ServerLimits) -> None:
        self.app = app
        self.limits = limits
        self.loop = asyncio.get_running_loop()
        self.connections: set[ClientConnection] = set()
        self.closing = False
        self.deserted = asyncio.Event()
        self.deserted.set()
        self._server: asyncio.Server | None = None
        self._sweep: asyncio.TimerHandle | None = None

    def start(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> Awaitable[None]:
        """Listen.

        Raises:
            OSError: it cannot.
        """
        return awaiting.start(self, host, port, tls)

    def accept(self) -> ClientConnection:
        """What a new connection tells its events."""
        return ClientConnection(self)

    def listens(self, server: asyncio.Server) -> None:
        """The sockets are open."""
        self._server = server

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        # uvloop's server has its sockets in a list, where asyncio's has a tuple.
        server: Any = self._server
        host, port = server.sockets[0].getsockname()[:2]
        return host, port

    def close(self) -> Awaitable[None]:
        """Stop listening, cancel what is being served, close all connections."""
        return awaiting.close_server(self)

    def cancel_all(self) -> list[asyncio.Task[Any]]:
        """Stop listening and cancel what is being served; the tasks that are still to end."""
        self.closing = True
        if self._server is not None:
            self._server.close()
        if self._sweep is not None:
            self._sweep.cancel()
        serving = [connection.serving for connection in self.connections]
        for each in serving:
            if each is not None:
                each.cancel()
        return [each for each in serving if isinstance(each, asyncio.Task)]

    def hang_up_all(self) -> None:
        """Close all connections."""
        for connection in list(self.connections):
            connection.hang_up()

    def opened(self, connection: ClientConnection) -> None:
        """A connection is there; one too many is closed."""
        self.connections.add(connection)
        self.deserted.clear()
        if len(self.connections) > self.limits.connections_max or self.closing:
            connection.hang_up()
        elif self._sweep is None:
            self._sweep = self.loop.call_later(_SWEEP_SECONDS, self._close_idle)

    def closed(self, connection: ClientConnection) -> None:
        """A connection is gone."""
        self.connections.discard(connection)
        if not self.connections:
            self.deserted.set()

    def _close_idle(self) -> None:
        self._sweep = None
        latest = self.loop.time() - self.limits.idle_seconds
        for connection in list(self.connections):
            # Also one whose client has not read its last answer until now.
            if connection.idle and connection.idle_since < latest:
                connection.hang_up()
        if self.connections and not self.closing:
            self._sweep = self.loop.call_later(_SWEEP_SECONDS, self._close_idle)
