"""A completion server for tests of the soak: answers as its `plan` says, request by request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

ANSWER = (7, 8, 9)
Choices = Callable[[dict[str, Any]], list[list[int]]]


def same_answer(body: dict[str, Any]) -> list[list[int]]:
    """The same tokens for every choice."""
    return [list(ANSWER)] * body.get("n", 1)


@dataclass(slots=True)
class SoakServer:
    """One server. What it does is said by its fields, which may change at any time."""

    choices: Choices = same_answer
    status: int = 200
    text: str | None = None
    """The body of another status than 200, or a body instead of the answer."""
    stream_end: str = "data: [DONE]\n\n"
    """What follows the tokens of a stream."""
    stream_tokens_max: int = 1 << 30
    hangs: bool = False
    """After what it has to send, it sends nothing more and keeps the connection."""
    breaks: bool = False
    """It closes the connection instead of answering."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    health: dict[str, Any] | None = None
    """What `/health` says; None answers something that cannot be read."""
    health_asked: int = 0

    async def well(self, request: web.Request) -> web.StreamResponse:
        """`GET /health`, as the router answers it."""
        del request
        self.health_asked += 1
        if self.health is None:
            return web.Response(text="[]")
        return web.json_response(self.health, status=200 if self.health.get("ready") else 503)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/completions`."""
        body = await request.json()
        self.bodies.append(body)
        if self.breaks:
            assert request.transport is not None
            request.transport.abort()
        if body.get("stream") and self.status == 200:
            return await self._stream(request, body)
        if self.hangs:
            await asyncio.Event().wait()
        text = self.text
        if text is None:
            choices = [{"index": k, "text": "", "token_ids": ids} for k, ids in enumerate(self.choices(body))]
            text = json.dumps({"choices": choices})
        return web.Response(status=self.status, text=text, content_type="application/json")

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for index, ids in enumerate(self.choices(body)):
            for token in ids[: self.stream_tokens_max]:
                event = {"choices": [{"index": index, "text": "", "token_ids": [token]}]}
                await response.write(f"data: {json.dumps(event)}\n\n".encode())
        if self.hangs:
            await asyncio.Event().wait()
        await response.write(self.stream_end.encode())
        await response.write_eof()
        return response


@asynccontextmanager
async def serving(server: SoakServer) -> AsyncIterator[str]:
    """Where it answers, on a free port of the loopback interface."""
    application = web.Application()
    application.router.add_post("/v1/completions", server.answer)
    application.router.add_get("/health", server.well)
    runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
