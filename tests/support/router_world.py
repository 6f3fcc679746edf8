"""A router between fake engines, all on loopback, and a client of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from kvferry.router.engines.pool import Role
from kvferry.router.ground.settings import RouterSettings
from kvferry.router.operation.listening import Listening
from kvferry.router.server import RouterServer
from tests.support.fake_engine import FakeEngine, source

_UNTIL_SECONDS = 60.0


@dataclass(slots=True)
class RouterWorld:
    """The router, its engines and a client session whose base is the router."""

    router: RouterServer
    prefill: list[FakeEngine]
    decode: list[FakeEngine]
    client: aiohttp.ClientSession

    @property
    def p(self) -> FakeEngine:
        """The first prefill engine."""
        return self.prefill[0]

    @property
    def d(self) -> FakeEngine:
        """The first decode engine."""
        return self.decode[0]

    def complete(self, path: str = "/v1/completions", **fields: Any) -> Any:
        """A request as the client's context manager; one short prompt unless `fields` say else."""
        body: dict[str, Any] = {"model": "tiny", "prompt": "hello"} if path == "/v1/completions" else {}
        return self.client.post(path, json=body | fields)

    def count(self, path: str, outcome: str, cause: str) -> float:
        """The value of `kvferry_router_requests_total`."""
        labels = {"path": path, "outcome": outcome, "cause": cause}
        return self.router.metrics.registry.get_sample_value("kvferry_router_requests_total", labels) or 0.0

    def retries(self, leg: str, reason: str) -> float:
        """The value of `kvferry_router_retries_total`."""
        labels = {"leg": leg, "reason": reason}
        return self.router.metrics.registry.get_sample_value("kvferry_router_retries_total", labels) or 0.0

    def transfers(self, mode: str, reason: str) -> float:
        """The value of `kvferry_router_transfers_total`."""
        labels = {"mode": mode, "reason": reason}
        return self.router.metrics.registry.get_sample_value("kvferry_router_transfers_total", labels) or 0.0

    def turns(self, outcome: str) -> float:
        """The value of `kvferry_router_turns_total`."""
        value = self.router.metrics.registry.get_sample_value
        return value("kvferry_router_turns_total", {"outcome": outcome}) or 0.0

    def histories(self, outcome: str) -> float:
        """The value of `kvferry_router_histories_total`."""
        value = self.router.metrics.registry.get_sample_value
        return value("kvferry_router_histories_total", {"outcome": outcome}) or 0.0

    async def check(self) -> None:
        """Check every engine once more."""
        for worker in self.router.pool.workers():
            await self.router.monitor.check(worker)

    async def client_stuck(self) -> None:
        """Wait until what the router has to send to a client that does not read stays as it is."""
        seen: list[int] = []
        while not (len(seen) > 500 and min(seen[-500:]) == max(seen[-500:]) > 1 << 16):
            await asyncio.sleep(0)
            transports = [connection.transport for connection in self.router.server.connections]
            seen.append(sum(each.get_write_buffer_size() for each in transports if each is not None))

    def prefill_answered(self) -> bool:
        """Whether the router has read every prefill leg's answer."""
        return not any(worker.in_flight for worker in self.router.pool.workers(Role.PREFILL))

    async def legs_ended(self) -> None:
        """Wait until no worker has a slot taken."""
        await until(lambda: not any(worker.in_flight for worker in self.router.pool.workers()))


async def until(condition: Callable[[], object]) -> None:
    """Let the loop run until something is so that has no event.

    The test's time-out is the first bound; asyncio swallows it when it comes amid a callback.
    """
    async with asyncio.timeout(_UNTIL_SECONDS):
        while not condition():  # noqa: ASYNC110 - see above
            await asyncio.sleep(0)


@asynccontextmanager
async def router_world(
    prefill: int = 1, decode: int = 1, listening: Listening | None = None, **settings: Any
) -> AsyncIterator[RouterWorld]:
    """A router that has checked its engines once, and does so again only when a test or a request asks."""
    producers = [FakeEngine(source(f"engine-p{number}", port=5600 + number)) for number in range(prefill)]
    consumers = [FakeEngine() for _ in range(decode)]
    async with AsyncExitStack() as stack:
        for engine in producers + consumers:
            await stack.enter_async_context(engine)
        chosen: dict[str, Any] = {
            "health_interval_seconds": 3600.0,
            # A busy machine is no slow engine.
            "health_timeout_seconds": 15.0,
            "retry_backoff_seconds": 0.0,
            "request_timeout_seconds": 15.0,
        } | settings
        configuration = RouterSettings(
            prefill=tuple(engine.url for engine in producers),
            decode=tuple(engine.url for engine in consumers),
            **chosen,
        )
        router = await stack.enter_async_context(RouterServer(configuration, listening))
        client = await stack.enter_async_context(aiohttp.ClientSession(router.url))
        world = RouterWorld(router, producers, consumers, client)
        await world.check()
        assert all(worker.ready for role in Role for worker in router.pool.workers(role))
        yield world


async def events_of(response: aiohttp.ClientResponse) -> list[Any]:
    """The data of all events of a streamed answer; `[DONE]` stays a text."""
    text = (await response.read()).decode()
    data = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    return [part if part == "[DONE]" else json.loads(part) for part in data]
