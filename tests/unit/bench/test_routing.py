"""`kvferry bench router`: its engines and clients, its figures, what it says of targets."""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvferry.bench.routing import (
    Contender,
    Cost,
    Load,
    Seen,
    Taken,
    cost_of,
    measure,
    problems,
    quantile,
    table,
)
from kvferry.bench.routing_engine import END, TOKEN, Engine, Steps
from kvferry.bench.routing_load import RoutingError, drive
from kvferry.cli import bench_router
from kvferry.errors import UsageError
from kvferry.router.ground.settings import RouterSettings
from kvferry.router.http import awaiting
from kvferry.router.http.server import ClientConnection, HttpServer
from kvferry.router.server import RouterServer


class Overheard(asyncio.Protocol):
    """Stands before a connection of the router's server, and notes what that writes."""

    def __init__(self, connection: ClientConnection, written: list[bytes]) -> None:
        self.connection = connection
        self.written = written

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        stand_in: Any = self
        self.connection.connection_made(stand_in)

    def data_received(self, data: bytes) -> None:
        self.connection.data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.connection.connection_lost(exc)

    def write(self, data: bytes) -> None:
        self.written.append(data)
        self.transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)


@asynccontextmanager
async def engines() -> AsyncIterator[tuple[str, str]]:
    """A prefill and a decode engine; their URLs."""
    loop = asyncio.get_running_loop()
    steps = Steps()
    urls = []
    servers = []
    for role in ("prefill", "decode"):
        server = await loop.create_server(lambda role=role: Engine(role, steps), "127.0.0.1", 0)
        servers.append(server)
        urls.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        yield urls[0], urls[1]
    finally:
        for server in servers:
            server.close()


@pytest.mark.parametrize("pace_ms", [0, 1])
async def test_the_engine_and_the_router_before_it_stream_what_is_asked(pace_ms: int) -> None:
    load = Load(clients=3, tokens=5, pace_ms=pace_ms)
    async with engines() as (prefill, decode):
        settings = RouterSettings(prefill=(prefill,), decode=(decode,))
        async with RouterServer(settings) as router:
            for worker in router.pool.workers():
                await router.monitor.check(worker)
            for url in (decode, router.url):
                seen = await drive(url, load, 0.1, warm_seconds=0.0)
                assert seen.requests > 0
                # Those that were under way when the measurement began are counted where they end.
                assert len(seen.ttfts) >= seen.requests - load.clients
                assert seen.tokens >= 5 * (seen.requests - load.clients)
            counted = router.metrics.registry.get_sample_value
            labels = {"path": "push", "outcome": "ok", "cause": "none"}
            assert counted("kvferry_router_requests_total", labels)


async def test_what_comes_at_once_goes_on_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Head, events and end in one write: another one costs 6 % of a request's CPU."""
    written: list[bytes] = []

    async def start(server: HttpServer, host: str, port: int, tls: object) -> None:
        del tls
        loop = asyncio.get_running_loop()
        server.listens(await loop.create_server(lambda: Overheard(server.accept(), written), host, port))

    monkeypatch.setattr(awaiting, "start", start)
    async with (
        engines() as (prefill, decode),
        RouterServer(RouterSettings(prefill=(prefill,), decode=(decode,))) as router,
    ):
        for worker in router.pool.workers():
            await router.monitor.check(worker)
        seen = await drive(router.url, Load(clients=1, tokens=5), 0.02, warm_seconds=0.0)
    assert len(written) >= seen.requests > 0
    assert all(data.startswith(b"HTTP/1.1 200") and data.endswith(b"0\r\n\r\n") for data in written)
    assert all(data.count(b"data: {") == 5 and data.count(b"data: [DONE]") == 1 for data in written)


class Written(asyncio.Transport):
    """What uvloop's transports do: they refuse a write once they are closed."""

    def __init__(self, *, closed: bool) -> None:
        super().__init__()
        self.closed = closed
        self.data = b""
        self.ended = asyncio.Event()

    def is_closing(self) -> bool:
        return self.closed

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self.closed:
            raise RuntimeError("the handler is closed")
        self.data += data
        if END in self.data:
            self.ended.set()


async def test_streams_go_on_when_another_client_has_left() -> None:
    """One timer serves all streams of a pace."""
    steps = Steps()
    gone, there = Written(closed=True), Written(closed=False)
    steps.add(gone, 1, 0.001)
    steps.add(there, 2, 0.001)
    await there.ended.wait()
    assert there.data == TOKEN * 2 + END


def test_paced_clients_do_not_begin_together_and_first_streams_are_not_measured() -> None:
    paced = Load(clients=4, tokens=5, pace_ms=200)
    assert [paced.begins_after(client) for client in range(4)] == [0.0, 0.25, 0.5, 0.75]
    assert paced.first_streams_seconds >= paced.begins_after(3) + paced.stream_seconds
    at_once = Load(clients=4, tokens=5)
    assert [at_once.begins_after(client) for client in range(4)] == [0.0] * 4


async def test_a_router_that_fails_ends_the_measurement_with_what_it_said() -> None:
    async with engines() as (prefill, decode):
        settings = RouterSettings(prefill=(prefill,), decode=(decode,), api_key="secret")
        async with RouterServer(settings) as router:
            with pytest.raises(RoutingError, match="401"):
                await drive(router.url, Load(clients=1, tokens=1), 5.0)


async def test_every_contender_meets_every_load_in_every_round() -> None:
    async with engines() as (_, decode):
        contenders = [
            Contender(name, decode, lambda: 1.0, lambda: 1 << 20) for name in ("direct", "one", "two")
        ]
        loads = {"one": Load(clients=1, tokens=1), "many": Load(clients=2, tokens=2, pace_ms=1)}
        taken = await measure(contenders[0], contenders[1:], 2, 0.02, loads, warm_seconds=0.0)
    for each in taken.values():
        assert {name: len(seen) for name, seen in each.seen.items()} == {"one": 2, "many": 2}
        assert each.memory_bytes == 1 << 20


def seen(requests: int, tokens: int, cpu_seconds: float, ttft: float) -> list[Seen]:
    return [Seen(requests, tokens, 2.0, cpu_seconds, [ttft] * 10)]


def test_figures_follow_from_what_was_seen() -> None:
    direct = Taken(
        {"throughput": seen(1, 1, 0, 0), "one": seen(1, 1, 0, 0.001), "many": seen(1, 1, 0, 0.002)}
    )
    router = Taken(
        {
            "throughput": seen(1000, 8000, 0.5, 0),
            "one": seen(10, 40, 0.1, 0.0012),
            "many": seen(10, 640, 0.0064, 0.0025),
        },
        32 << 20,
    )
    cost = cost_of(router, direct)
    assert (cost.requests_per_second, cost.cpu_us_per_request, cost.memory_mib) == (500.0, 500.0, 32.0)
    assert cost.cpu_us_per_token == pytest.approx(10.0)
    assert (cost.one_p50_us, cost.many_p99_us) == (pytest.approx(200.0), pytest.approx(500.0))
    assert "| requests/s, 64 clients, 8 tokens each | 500 |" in table({"kvferry": cost})
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([], 0.5) == 0.0


def test_each_target_is_judged() -> None:
    peer = Cost(1000, 100, 40.0, 200, 300, 500, 900, 30)
    ours = Cost(1500, 60, 20.0, 200, 300, 500, 900, 90)
    assert problems(ours, peer) == []
    for change, named in (
        ({"requests_per_second": 1499}, "requests/s"),
        ({"cpu_us_per_token": 20.1}, "CPU per token"),
        ({"one_p50_us": 201}, "1 stream, p50"),
        ({"many_p99_us": 901}, "128 streams, p99"),
    ):
        (told,) = problems(replace(ours, **change), peer)
        assert named in told


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--rounds=0"], "--rounds"),
        (["--peer=none", "--router-core=9999"], "--router-core"),
        (["--peer-command=/nowhere/vllm-router"], "--peer-command"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(arguments: list[str], named: str) -> None:
    parser = argparse.ArgumentParser()
    bench_router.add_arguments(parser)
    with pytest.raises(UsageError, match=named):
        bench_router.run(parser.parse_args(arguments))


def test_the_peer_is_the_program_beside_this_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `make` puts it; what is named is taken instead."""
    for name in ("bin/vllm-router", "elsewhere/vllm-router"):
        program = tmp_path / name
        program.parent.mkdir()
        program.write_text("")
        program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", "/nowhere")
    assert bench_router.peer_program(None) == str(tmp_path / "bin" / "vllm-router")
    named = str(tmp_path / "elsewhere" / "vllm-router")
    assert bench_router.peer_program(named) == named


async def test_what_has_been_served_leaves_nothing_behind() -> None:
    """Compiled code counts references by itself, so what it forgets to give back no collector finds."""
    async with (
        engines() as (prefill, decode),
        RouterServer(RouterSettings(prefill=(prefill,), decode=(decode,))) as router,
    ):
        for worker in router.pool.workers():
            await router.monitor.check(worker)
        # Until tables and connections have their size.
        warm = await drive(router.url, Load(clients=4, tokens=5), 0.3, warm_seconds=0.0)
        warm.ttfts.clear()
        gc.collect()
        before = sys.getallocatedblocks()
        seen = await drive(router.url, Load(clients=4, tokens=5), 0.6, warm_seconds=0.0)
        # The measurement's own.
        seen.ttfts.clear()
        gc.collect()
        more = sys.getallocatedblocks() - before
    assert seen.requests >= 100
    assert more / seen.requests < 0.5
