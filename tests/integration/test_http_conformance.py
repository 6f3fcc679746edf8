"""The router's connections with odd clients: an independent parser (h11) reads what it answers.

Each test speaks raw bytes to a running router between fake engines, on both event loops where that matters.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import h11
import pytest

from tests.support.fake_engine import Step
from tests.support.router_world import RouterWorld, router_world, until

BODY = json.dumps({"model": "tiny", "prompt": "hello"}).encode()
STREAM = json.dumps({"model": "tiny", "prompt": "hello", "stream": True}).encode()


@dataclass
class Told:
    """One answer as h11 has read it."""

    status: int
    headers: dict[str, str]
    body: bytes


class Raw:
    """A connection to the router."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def answers(self, methods: Sequence[str]) -> list[Told]:
        """So many answers, each to a request with this method, read by h11 in its role of a client."""
        told = []
        connection = h11.Connection(h11.CLIENT)
        for method in methods:
            # h11 wants to have sent what is answered; the bytes that were sent are the test's own.
            connection.send(h11.Request(method=method, target="/", headers=[("Host", "x")]))
            connection.send(h11.EndOfMessage())
            told.append(await self._answer(connection))
            if connection.our_state is not h11.MUST_CLOSE:
                connection.start_next_cycle()
        return told

    async def _answer(self, connection: h11.Connection) -> Told:
        head: h11.Response | None = None
        body = b""
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await self.reader.read(65536))
            elif isinstance(event, h11.Response):
                head = event
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                assert head is not None
                headers = {name.decode(): value.decode() for name, value in head.headers}
                return Told(head.status_code, headers, body)
            else:
                assert isinstance(event, h11.InformationalResponse), event

    async def closed(self) -> bool:
        """Whether the router closes the connection without another byte."""
        return await self.reader.read() == b""


@asynccontextmanager
async def connected(world: RouterWorld) -> AsyncIterator[Raw]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(world.router.url.split(":")[-1]))
    try:
        yield Raw(reader, writer)
    finally:
        writer.close()


def post(body: bytes, *headers: bytes, path: bytes = b"/v1/completions", version: bytes = b"1.1") -> bytes:
    lines = [b"POST %b HTTP/%b" % (path, version), b"Host: x", *headers]
    if not any(line.lower().startswith((b"content-length", b"transfer-encoding")) for line in headers):
        lines.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join([*lines, b"", body])


async def test_one_byte_at_a_time_is_a_request_like_any_other() -> None:
    async with router_world() as world, connected(world) as raw:
        for byte in post(BODY):
            raw.writer.write(bytes([byte]))
            await asyncio.sleep(0)
        (told,) = await raw.answers(["POST"])
        assert told.status == 200
        assert json.loads(told.body)["choices"]


async def test_chunks_with_extensions_and_trailers_reach_the_engines_as_the_body() -> None:
    async with router_world() as world, connected(world) as raw:
        chunks = b"%x;a=b\r\n%b\r\n%x\r\n%b\r\n0\r\nX-Sum: 1\r\n\r\n" % (5, BODY[:5], len(BODY) - 5, BODY[5:])
        raw.writer.write(post(chunks, b"Transfer-Encoding: chunked") + post(BODY))
        first, second = await raw.answers(["POST", "POST"])
        assert (first.status, second.status) == (200, 200)
        assert world.d.requests[0].body["prompt"] == "hello"


async def test_leave_to_send_the_body_is_given_once() -> None:
    async with router_world() as world, connected(world) as raw:
        raw.writer.write(post(b"", b"Expect: 100-continue", b"Content-Length: %d" % len(BODY)))
        assert await raw.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        raw.writer.write(BODY)
        (told,) = await raw.answers(["POST"])
        assert told.status == 200


async def test_a_connection_serves_on_after_errors() -> None:
    async with router_world(api_key="secret") as world, connected(world) as raw:
        key = b"Authorization: Bearer secret"
        for body, headers, path, status in (
            (BODY, (), b"/v1/completions", 401),
            (b"{", (key,), b"/v1/completions", 400),
            (b'{"prompt": 1}', (key,), b"/v1/completions", 400),
            (BODY, (key,), b"/nowhere", 404),
            (BODY, (key,), b"/v1/completions", 200),
            (STREAM, (key,), b"/v1/completions", 200),
            (BODY, (key,), b"/v1/completions", 200),
        ):
            raw.writer.write(post(body, *headers, path=path))
            (told,) = await raw.answers(["POST"])
            assert told.status == status
            assert told.headers.get("connection") is None


async def test_pipelined_requests_are_answered_in_their_order() -> None:
    """Also when a later one would be answered sooner, or is refused."""
    async with router_world() as world, connected(world) as raw:
        gate = asyncio.Event()
        world.d.plan(Step(gate=gate))
        health = b"GET /liveness HTTP/1.1\r\nHost: x\r\n\r\n"
        raw.writer.write(post(BODY) + health + post(STREAM) + b"garbage\r\n\r\n")
        await world.d.received(1)
        gate.set()
        answers = await raw.answers(["POST", "GET", "POST", "GET"])
        assert [told.status for told in answers] == [200, 200, 200, 400]
        assert answers[2].body.endswith(b"data: [DONE]\n\n")
        assert await raw.closed()


async def test_a_client_that_leaves_amid_its_pipeline_leaves_nothing_behind() -> None:
    async with router_world() as world:
        async with connected(world) as raw:
            world.d.plan(Step(gate=asyncio.Event()))
            raw.writer.write(post(BODY) + post(BODY))
            await world.d.received(1)
        await until(lambda: not world.router.server.connections)
        await world.legs_ended()
        assert len(world.d.requests) == 1


async def test_http_1_0_gets_a_stream_that_ends_with_its_connection() -> None:
    async with router_world() as world, connected(world) as raw:
        raw.writer.write(post(STREAM, version=b"1.0"))
        head, _, body = (await raw.reader.read()).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head.lower()
        assert body.startswith(b"data: {")
        assert body.endswith(b"data: [DONE]\n\n")


async def test_a_head_request_gets_the_head_alone() -> None:
    async with router_world() as world, connected(world) as raw:
        raw.writer.write(b"HEAD /health HTTP/1.1\r\nHost: x\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        first, second = await raw.answers(["HEAD", "GET"])
        assert (first.status, first.body) == (200, b"")
        assert int(first.headers["content-length"]) == len(second.body)


async def test_a_refused_client_reads_why_although_it_is_still_sending() -> None:
    async with router_world(body_bytes_max=1000) as world, connected(world) as raw:
        raw.writer.write(post(b"x" * 500_000))
        (told,) = await raw.answers(["POST"])
        assert told.status == 413
        assert told.headers["connection"] == "close"
        assert json.loads(told.body)["error"]["kvferry"] == "body_too_large"
        assert world.count("none", "error", "body_too_large") == 1


async def test_a_head_that_takes_too_long_is_refused() -> None:
    """Hostile: a client that sends a byte now and then would keep its connection for ever."""
    async with router_world(body_timeout_seconds=0.05) as world, connected(world) as raw:
        raw.writer.write(b"POST /v1/comp")
        (told,) = await raw.answers(["POST"])
        assert told.status == 408
        assert await raw.closed()


async def test_connections_have_a_limit() -> None:
    async with router_world(connections_max=2) as world, connected(world) as one, connected(world) as two:
        for raw in (one, two):
            raw.writer.write(b"GET /liveness HTTP/1.1\r\nHost: x\r\n\r\n")
            await raw.answers(["GET"])
        async with connected(world) as third:
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await third.reader.readexactly(1)
        one.writer.write(b"GET /liveness HTTP/1.1\r\nHost: x\r\n\r\n")
        (told,) = await one.answers(["GET"])
        assert told.status == 200


async def test_answers_say_when_they_were_made_and_of_what_kind_they_are() -> None:
    async with router_world() as world, connected(world) as raw:
        raw.writer.write(post(BODY) + post(STREAM))
        whole, stream = await raw.answers(["POST", "POST"])
        assert whole.headers["date"].endswith(" GMT")
        assert whole.headers["content-type"] == "application/json"
        assert stream.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert stream.headers["transfer-encoding"] == "chunked"


def test_the_same_on_uvloop() -> None:
    """The process runs on uvloop, whose transports are others."""
    uvloop = pytest.importorskip("uvloop")

    async def all_of_them() -> None:
        await test_a_connection_serves_on_after_errors()
        await test_pipelined_requests_are_answered_in_their_order()
        await test_a_client_that_leaves_amid_its_pipeline_leaves_nothing_behind()
        await test_a_refused_client_reads_why_although_it_is_still_sending()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(all_of_them())
