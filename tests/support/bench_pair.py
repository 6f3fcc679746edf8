"""Pairs of stub engines behind real HTTP, in a thread, that keep journals as emulated engines do."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from kvferry.bench.connectors import Connector
from kvferry.errors import KvferryError
from tests.support.stub_engines import StubEngine, serving

SOURCE = {
    "remote_engine_id": "prefill-0",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "pp_size": 1,
    "remote_block_ids": [[1]],
    "remote_request_id": "cmpl-x-0-0123abcd",
}


class JournalingEngine(StubEngine):
    """Notes each request, its hooks and its pages, like an emulated engine."""

    def __init__(self, name: str, journal: Path) -> None:
        super().__init__(name, dict(SOURCE))
        self.journal = journal
        self.mismatches = 0
        self.silent = False
        """Whether it forgets to keep its journal."""
        self._served = 0

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answer, and note it."""
        arrived = time.time_ns()
        response = await super().complete(request)
        self._served += 1
        # The end of prefill, or the first token.
        moment = "prefill_end_ns" if self.name == "prefill" else "first_token_ns"
        rows: list[dict[str, Any]] = [
            {
                "kind": "request",
                "request": f"cmpl-{request.headers['X-Request-Id']}-0-0123abcd",
                "arrived_ns": arrived,
                moment: time.time_ns(),
            },
            {
                "kind": "hook",
                "side": "worker",
                "hook": "get_finished",
                "count": 10 * self._served,
                "seconds": 0.002 * self._served,
                "idle_count": 9 * self._served,
                "idle_seconds": 0.0005 * self._served,
            },
            {"kind": "step", "intended_seconds": 0.005, "actual_seconds": 0.006},
            {"kind": "verified", "pages": 64 * self._served, "mismatches": self.mismatches},
        ]
        if not self.silent:
            with self.journal.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
        self.metrics = f"# TYPE kvferry_x counter\nkvferry_x_total {self._served}\n"
        return response


class StubPair:
    """What a comparison sees of the two."""

    def __init__(self, engines: Mapping[str, JournalingEngine], urls: Mapping[str, str]) -> None:
        self.engines = engines
        self.urls = urls
        self.journals = {side: engine.journal for side, engine in engines.items()}
        self.ended: str | None = None
        """Why an engine has ended."""
        self._asked = 0

    def cpu_seconds(self) -> dict[str, float]:
        """A tenth of a second more each time that it is asked."""
        self._asked += 1
        return dict.fromkeys(self.engines, 0.1 * self._asked)

    def part_seconds(self) -> dict[str, dict[str, float]]:
        """Of kvferry a fiftieth of a second more each time that `cpu_seconds` is asked."""
        return {side: {"main": 0.05 * self._asked, "kvferry": 0.02 * self._asked} for side in self.engines}

    def check(self) -> None:
        """Raise what ended an engine."""
        if self.ended:
            raise KvferryError(self.ended)


class StubLauncher:
    """Starts pairs, and keeps them; `prepare` may spoil a pair before it is used."""

    def __init__(self, directory: Path, prepare: Callable[[StubPair], None] = lambda pair: None) -> None:
        self.directory = directory
        self.prepare = prepare
        self.started: list[tuple[str, int]] = []
        self.pairs: dict[tuple[str, int], StubPair] = {}

    @contextmanager
    def __call__(self, connector: Connector, repeat: int) -> Iterator[StubPair]:
        """One connector's pair."""
        self.started.append((connector.name, repeat))
        sides = ("prefill", "decode") if connector.needs_prefill else ("decode",)
        home = self.directory / f"{repeat}-{connector.name}-{len(self.started)}"
        home.mkdir(parents=True)
        engines = {side: JournalingEngine(side, home / f"{side}.jsonl") for side in sides}
        with _served(engines) as urls:
            pair = StubPair(engines, urls)
            self.pairs[connector.name, repeat] = pair
            self.prepare(pair)
            yield pair


@contextmanager
def _served(engines: Mapping[str, StubEngine]) -> Iterator[dict[str, str]]:
    """The engines' URLs while a thread serves them."""
    urls: dict[str, str] = {}
    loop = asyncio.new_event_loop()
    ready, stop = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with AsyncExitStack() as stack:
            for side, engine in engines.items():
                urls[side] = await stack.enter_async_context(serving(engine))
            ready.set()
            await stop.wait()

    def run() -> None:
        loop.run_until_complete(serve())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(10)
    try:
        yield urls
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
