"""Engines as the benchmark meets them: completions over HTTP, as an application in the test's own loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

Body = dict[str, Any]


class StubEngine:
    """Answers `max_tokens` tokens, each in a chunk of its own, with usage at the end.

    What it is asked stands in `asked`. `gate` holds answers back until it is set. `params` stands as
    `kv_transfer_params` in answers that are not streamed.
    """

    def __init__(self, name: str = "engine", params: Body | None = None) -> None:
        self.name = name
        self.params = params
        self.asked: list[tuple[Body, Mapping[str, str]]] = []
        self.order: list[str] = []
        """Shared between engines by the test: who was asked, in order."""
        self.news = asyncio.Condition()
        """Notified when somebody is asked."""
        self.gate = asyncio.Event()
        self.gate.set()
        self.status = 200
        self.metrics = ""
        self.events: list[bytes] | None = None
        """Instead of the usual stream."""
        self.dropped = asyncio.Event()
        """Set when a client leaves before its answer."""

    @property
    def bodies(self) -> list[Body]:
        """What it was asked."""
        return [body for body, _ in self.asked]

    async def tell_metrics(self, request: web.Request) -> web.Response:
        """Answer `/metrics`."""
        del request
        return web.Response(text=self.metrics, status=self.status)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answer a completion."""
        body = json.loads(await request.read())
        self.asked.append((body, request.headers))
        async with self.news:
            self.order.append(self.name)
            self.news.notify_all()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.dropped.set()
            raise
        if self.status != 200:
            return web.json_response({"error": {"message": f"{self.name} is unwell"}}, status=self.status)
        if not body.get("stream"):
            return web.json_response({"choices": [{"text": "a"}], "kv_transfer_params": self.params})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in self.events or _stream(body):
            await response.write(event)
        return response


def _stream(body: Body) -> list[bytes]:
    count, prompt = body["max_tokens"], body["prompt"]
    length = len(prompt) if isinstance(prompt, list) else len(prompt.split())
    chunks: list[Body] = [{"choices": [{"text": " a", "token_ids": [token]}]} for token in range(count)]
    usage = {"prompt_tokens": length, "completion_tokens": count}
    events = [*chunks, {"choices": [], "usage": usage}]
    return [*(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events), b"data: [DONE]\n\n"]


@asynccontextmanager
async def serving(engine: StubEngine) -> AsyncIterator[str]:
    """The URL under which it answers, on a free loopback port."""
    application = web.Application()
    application.router.add_post("/v1/completions", engine.complete)
    application.router.add_get("/metrics", engine.tell_metrics)
    async with TestServer(application, handler_cancellation=True) as server:
        yield str(server.make_url("")).rstrip("/")
