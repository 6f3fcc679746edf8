"""The router's connections to engines: reuse, odd answers, ends."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvferry.router.http.answers import Answer
from kvferry.router.http.client import HttpClient, origin_of
from kvferry.router.http.failures import ConnectError, LostError

OK = b"HTTP/1.1 200 OK\r\n"


class Peer:
    """A server that says what a test wants, and counts its connections."""

    def __init__(self, *said: bytes, close: bool = False) -> None:
        self.said = list(said)
        self.close = close
        self.connections = 0
        self.requests: list[bytes] = []
        self.port = 0
        self.gone = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while self.said:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
                self.requests.append(head + await reader.readexactly(length))
                writer.write(self.said.pop(0))
                if self.close:
                    break
            else:
                await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.gone.set()
            writer.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/base"


@asynccontextmanager
async def talking(peer: Peer) -> AsyncIterator[HttpClient]:
    server = await asyncio.start_server(peer.serve, "127.0.0.1", 0)
    peer.port = server.sockets[0].getsockname()[1]
    client = HttpClient(5.0, 5.0, ssl.create_default_context())
    try:
        yield client
    finally:
        await client.close()
        server.close()


async def whole(answer: Answer) -> bytes:
    parts = []
    while part := await answer.read():
        parts.append(part)
    return b"".join(parts)


async def test_a_connection_is_used_again_when_its_answer_is_complete() -> None:
    peer = Peer(
        OK + b"Content-Length: 2\r\n\r\nab",
        OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\ncd\r\n0\r\nX-Trailer: 1\r\n\r\n",
        b"HTTP/1.1 503 No\r\nRetry-After: 7\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"Content-Length: 1\r\n\r\ne",
        OK + b"Connection: close\r\nContent-Length: 1\r\n\r\nf",
        OK + b"Content-Length: 1\r\n\r\ng",
    )
    async with talking(peer) as client:
        told = []
        for number in range(6):
            answer = await client.send(peer.url, "/x", {"X-Number": str(number)}, b"body")
            told.append((answer.status, await whole(answer)))
            assert answer.ended
            assert answer.header(b"x-trailer") == ""
            answer.close()
        assert told == [(200, b"ab"), (200, b"cd"), (503, b""), (200, b"e"), (200, b"f"), (200, b"g")]
        assert peer.connections == 2
        assert peer.requests[0].startswith(b"POST /base/x HTTP/1.1\r\nHost: 127.0.0.1:")
        assert b"\r\nX-Number: 0\r\n" in peer.requests[0]


async def test_a_body_without_a_length_ends_with_its_connection() -> None:
    peer = Peer(OK + b"\r\nall of it", close=True)
    async with talking(peer) as client:
        answer = await client.send(peer.url, "/", {})
        assert await whole(answer) == b"all of it"


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"HTTP/1.1 200",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        OK + b"X: " + b"x" * 1_000_000 + b"\r\n\r\n",
        OK + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
)
async def test_what_is_no_answer_is_a_lost_one(said: bytes) -> None:
    peer = Peer(said, close=True)
    async with talking(peer) as client:
        with pytest.raises(LostError):
            await client.send(peer.url, "/", {})


@pytest.mark.parametrize(
    "said",
    [
        OK + b"Content-Length: 9\r\n\r\nshort",
        OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nshort\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nshortXX",
    ],
)
async def test_a_body_that_is_cut_is_told_from_one_that_ends(said: bytes) -> None:
    peer = Peer(said, close=True)
    async with talking(peer) as client:
        answer = await client.send(peer.url, "/", {})
        assert await answer.read() == b"short"
        with pytest.raises(LostError):
            await answer.read()
        assert not answer.ended


async def test_nobody_listening_is_told_from_a_lost_answer() -> None:
    peer = Peer()
    async with talking(peer) as client:
        with pytest.raises(ConnectError):
            await client.send("http://127.0.0.1:1", "/", {}, b"")


async def test_an_answer_that_is_closed_early_closes_its_connection() -> None:
    peer = Peer(OK + b"Content-Length: 9\r\n\r\nshort", b"")
    async with talking(peer) as client:
        answer = await client.send(peer.url, "/", {})
        answer.close()
        await peer.gone.wait()


async def test_what_comes_unasked_makes_a_connection_useless() -> None:
    """Hostile: an answer that nobody asked for must not become the next request's."""
    stray = OK + b"Content-Length: 6\r\n\r\nforged"
    peer = Peer(OK + b"Content-Length: 2\r\n\r\nab" + stray, OK + b"Content-Length: 2\r\n\r\ncd")
    async with talking(peer) as client:
        assert await whole(await client.send(peer.url, "/", {}, b"1")) == b"ab"
        assert await whole(await client.send(peer.url, "/", {}, b"2")) == b"cd"
        assert peer.connections == 2


async def test_what_is_poured_comes_whole_and_ends_once() -> None:
    peer = Peer(OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n2\r\ncd\r\n0\r\n\r\n")
    async with talking(peer) as client:
        answer = await client.send(peer.url, "/", {})
        ended = asyncio.Event()
        pieces: list[bytes] = []

        def sink(data: bytes) -> None:
            pieces.append(data)
            if not data:
                ended.set()

        answer.pour(sink)
        await ended.wait()
        assert b"".join(pieces) == b"abcd"
        assert pieces.count(b"") == 1
        assert answer.failure is None


async def test_a_reader_that_is_behind_holds_the_sender() -> None:
    """Everything has a limit: what an engine sends ahead of a slow client."""
    size = 32 << 20
    peer = Peer(OK + b"Content-Length: %d\r\n\r\n" % size + b"x" * size)
    async with talking(peer) as client:
        answer = await client.send(peer.url, "/", {})
        first = await answer.read()
        for _ in range(200):
            await asyncio.sleep(0)
        second = await answer.read()
        assert max(len(first), len(second)) < 1 << 20
        assert len(first) + len(second) + len(await whole(answer)) == size


async def test_a_header_cannot_begin_another() -> None:
    peer = Peer()
    async with talking(peer) as client:
        for value in ("a\r\nX: b", "a\nX: b", "a\0"):
            with pytest.raises(ValueError, match="line end or a zero byte"):
                await client.send(peer.url, "/", {"X-Id": value})


def test_the_parts_of_a_base_url() -> None:
    origin = origin_of("https://[::1]:8443/engines/1")
    assert (origin.host, origin.port, origin.tls) == ("::1", 8443, True)
    assert (origin.authority, origin.path) == ("[::1]:8443", "/engines/1")
    assert origin_of("http://engine").port == 80
    assert origin_of("https://engine").port == 443
