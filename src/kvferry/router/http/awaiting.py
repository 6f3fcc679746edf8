"""What waits at the connections: the coroutines of classes that are compiled.

A compiled coroutine is a generator, and compiled generators are not safe: see CONTRIBUTING.md. So the classes
have plain methods that return what is awaited, and the waiting is here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvferry.router.http.failures import ConnectError
from kvferry.router.http.messages import header_lines

if TYPE_CHECKING:
    import ssl

    from kvferry.router.http.answers import Answer
    from kvferry.router.http.client import Connecting, Connection, HttpClient, Origin
    from kvferry.router.http.server import ClientConnection, HttpServer, Reply

_BACKLOG = 1024
_HANDSHAKE_SECONDS = 10.0


async def head(answer: Answer) -> None:
    """See `Answer.head`."""
    while not answer.status:
        answer.raise_failure()
        await answer.waiter()


async def read(answer: Answer) -> bytes:
    """See `Answer.read`."""
    while answer.drained:
        answer.raise_failure()
        if answer.ended:
            return b""
        await answer.waiter()
    return answer.taken()


async def send(
    client: HttpClient, url: str, path: str, headers: Mapping[str, str], body: bytes | None
) -> Answer:
    """See `HttpClient.send`."""
    answer = client.start(url, path, header_lines(headers), body)
    try:
        await head(answer)
    except BaseException:
        answer.close()
        raise
    return answer


async def connect(connecting: Connecting, origin: Origin, first: bytes, body: bytes | None) -> None:
    """Make a connection for its first request, and send that."""
    try:
        connection = await connected(connecting.client, origin)
    except ConnectError as error:
        connecting.answer.fail(error)
    else:
        connecting.answer.connection = connection
        connection.send(connecting.answer, first, body)


async def connected(client: HttpClient, origin: Origin) -> Connection:
    """A new connection.

    Raises:
        ConnectError: there is none.
    """
    tls = client.tls if origin.tls else None
    connection = client.unconnected(origin)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(client.connect_seconds):
            await loop.create_connection(lambda: connection, origin.host, origin.port, ssl=tls)
    except BaseException as error:
        # uvloop tells no protocol of the end of a connection whose making was cancelled.
        connection.abort()
        client.closed(connection)
        if isinstance(error, TimeoutError):
            raise ConnectError(f"no connection within {client.connect_seconds:g} s") from error
        if isinstance(error, OSError):
            raise ConnectError(str(error) or type(error).__name__) from error
        raise
    return connection


async def close_client(client: HttpClient) -> None:
    """See `HttpClient.close`."""
    client.abort_all()
    await client.all_closed.wait()


async def room(reply: Reply) -> None:
    """See `Reply.room`."""
    if reply.buffers_much:
        # uvloop writes, and finds that it cannot, after the present callbacks.
        await asyncio.sleep(0)
    while reply.full:
        await reply.room_waiter()


async def serve(connection: ClientConnection, reply: Reply, begun: object) -> None:
    """Let the app answer one request."""
    reply.task_begins = True
    try:
        await connection.app.handle(reply.request, reply, begun)
    finally:
        connection.ended(reply)


async def start(server: HttpServer, host: str, port: int, tls: ssl.SSLContext | None) -> None:
    """See `HttpServer.start`."""
    listening = await server.loop.create_server(
        server.accept,
        host,
        port,
        ssl=tls,
        ssl_handshake_timeout=None if tls is None else _HANDSHAKE_SECONDS,
        backlog=_BACKLOG,
        reuse_address=True,
    )
    server.listens(listening)


async def close_server(server: HttpServer) -> None:
    """See `HttpServer.close`."""
    tasks: list[asyncio.Task[Any]] = server.cancel_all()
    await asyncio.gather(*tasks, return_exceptions=True)
    server.hang_up_all()
    await server.deserted.wait()
