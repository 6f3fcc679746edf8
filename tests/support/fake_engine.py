"""Engines that only speak HTTP: they record what they are asked and answer as the test has planned.

A fake engine takes one planned step per request, in order, and answers plainly when nothing is planned.
Probes and releases (requests whose `kv_transfer_params` say so) are answered at once and recorded apart.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec
from aiohttp import web

from kvferry.handoff import SourceParams
from kvferry.ids import EngineId, Incarnation

_STREAM_ERROR = {"error": {"message": "planned mid-stream", "type": "x", "param": None, "code": 500}}


@dataclass(slots=True)
class Received:
    """One request as an engine saw it."""

    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    """The engine has answered whole."""
    disconnected: asyncio.Event = field(default_factory=asyncio.Event)
    """The router closed the connection before that."""

    @property
    def rank(self) -> int | None:
        """The data-parallel rank that it is for."""
        rank = self.headers.get("X-data-parallel-rank")
        return None if rank is None else int(rank)

    @property
    def params(self) -> dict[str, Any]:
        """Its `kv_transfer_params`; empty when it has none."""
        return self.body.get("kv_transfer_params") or {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """How one request is answered.

    `gate` is waited for before anything is sent, `after_first` after a stream's first event.
    """

    gate: asyncio.Event | None = None
    status: int = 200
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    close: bool = False
    """Close the connection instead of answering."""
    tokens: tuple[str, ...] = (" one", " two")
    prelude: bytes = b""
    """What a stream begins with before its first event."""
    pause: asyncio.Event | None = None
    """Waited for between the prelude and the first event."""
    stream_type: str = "text/event-stream; charset=utf-8"
    after_first: asyncio.Event | None = None
    break_after: int | None = None
    """Close the connection after so many events of a stream."""
    end_after: int | None = None
    """End the body, orderly but without `[DONE]`, after so many events."""
    error_after: int | None = None
    """Send an error event instead of the event with this number."""
    cached_tokens: int | None = None
    finish_reason: str = "length"
    """Of an answer that is not streamed."""
    half: asyncio.Event | None = None
    """Send half of an answer that is not streamed, and wait."""


def failing(status: int, message: str = "planned", **more: Any) -> Step:
    """A step that answers with an error in OpenAI's shape."""
    error = {"error": {"message": message, "type": "planned", "param": None, "code": status}}
    return Step(status=status, body=json.dumps(error).encode(), **more)


def source(engine: str = "engine-p", incarnation: str = "first", port: int = 5600) -> SourceParams:
    """Coordinates of a prefill engine."""
    return SourceParams(
        engine=EngineId(engine), host="10.0.0.1", port=port, incarnation=Incarnation(incarnation)
    )


class FakeEngine:
    """One engine; an async context manager, or `await start()` before and `await stop()` after use."""

    def __init__(self, identity: SourceParams | None = None) -> None:
        self.identity = identity
        self.told: dict[str, Any] = {}
        """What its coordinates in answers carry besides."""
        self.holds: dict[str, Any] | None = None
        """What it tells of each request that it has decoded: coordinates of what it keeps."""
        self.tells_in_streams = False
        """Whether a stream's last event carries them, which vLLM's do not."""
        self.healthy = True
        self.stuck: asyncio.Event | None = None
        """When set to an event, health checks wait for it."""
        self.health_checks = 0
        self.requests: list[Received] = []
        self.probes: list[Received] = []
        self.questions: list[Received] = []
        """Probes that ask what is kept of a turn."""
        self.releases: list[Received] = []
        self.models: list[str] = ["tiny"]
        self.length_max: int | None = None
        self.version: str | None = None
        self.ranks: int | None = None
        """How many data-parallel ranks it has and tells of; each has an identity of its own."""
        self.port = 0
        self._plan: deque[Step] = deque()
        self._arrived = asyncio.Condition()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Its base URL."""
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen; at the same port as before after a stop."""
        app = web.Application(client_max_size=1 << 28)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/completions", self._infer)
        app.router.add_post("/v1/chat/completions", self._infer)
        app.router.add_post("/{path:.*}", self._infer)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1, handle_signals=False
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Close all connections and stop listening, as a killed process does."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def plan(self, *steps: Step) -> None:
        """The next requests are answered so, one step each."""
        self._plan.extend(steps)

    async def received(self, count: int) -> Received:
        """Wait until `count` requests have arrived; the last of them."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: len(self.requests) >= count)
        return self.requests[count - 1]

    async def _health(self, request: web.Request) -> web.StreamResponse:
        del request
        self.health_checks += 1
        if self.stuck is not None:
            await self.stuck.wait()
        return web.Response(status=200 if self.healthy else 503)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        del request
        card = {} if self.length_max is None else {"max_model_len": self.length_max}
        cards = [{"id": name, **card} for name in self.models]
        return web.json_response({"object": "list", "data": cards})

    async def _version(self, request: web.Request) -> web.StreamResponse:
        del request
        return (
            web.Response(status=404) if self.version is None else web.json_response({"version": self.version})
        )

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        del request
        lines = [
            f'vllm:num_requests_running{{engine="{rank}",model_name="tiny"}} 0.0\n'
            for rank in range(self.ranks or 0)
        ]
        return web.Response(status=404) if self.ranks is None else web.Response(text="".join(lines))

    async def _infer(self, request: web.Request) -> web.StreamResponse:
        received = Received(request.path, request.headers, await request.json())
        if received.params.get("held_of"):
            self.questions.append(received)
            told = (self.holds or {}) | {"holds": self.holds is not None}
            return web.json_response(self._answer(received, Step()) | {"kv_transfer_params": told})
        if self.ranks is not None and received.rank is not None and received.rank >= self.ranks:
            body = failing(400, f"data_parallel_rank {received.rank} is out of range [0, {self.ranks}).").body
            return web.Response(status=400, body=body, content_type="application/json")
        if received.params.get("probe"):
            self.probes.append(received)
            return web.json_response(self._answer(received, Step()))
        if received.params.get("release"):
            self.releases.append(received)
            return web.json_response(self._answer(received, Step()))
        step = self._plan.popleft() if self._plan else Step()
        async with self._arrived:
            self.requests.append(received)
            self._arrived.notify_all()
        try:
            response = await self._take(step, received, request)
        except (asyncio.CancelledError, ConnectionError):
            received.disconnected.set()
            raise
        received.finished.set()
        return response

    async def _take(self, step: Step, received: Received, request: web.Request) -> web.StreamResponse:
        if step.gate is not None:
            await step.gate.wait()
        if step.close:
            return _close(request)
        if step.status != 200:
            content_type = step.headers.get("Content-Type", "application/json")
            others = {name: value for name, value in step.headers.items() if name != "Content-Type"}
            return web.Response(status=step.status, body=step.body, content_type=content_type, headers=others)
        if received.body.get("stream"):
            return await self._stream(step, received, request)
        if step.half is not None:
            return await self._send_half(step.half, received, request)
        if step.body is not None:
            return web.Response(body=step.body, content_type="application/json")
        return web.json_response(self._answer(received, step))

    async def _stream(self, step: Step, received: Received, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": step.stream_type})
        await response.prepare(request)
        await response.write(step.prelude)
        if step.pause is not None:
            await step.pause.wait()
        for number, event in enumerate(_stream_events(received, step)):
            if number == step.break_after:
                return _close(request)
            if number == step.end_after:
                await response.write_eof()
                return response
            told = _STREAM_ERROR if number == step.error_after else event
            await response.write(b"data: " + json.dumps(told).encode() + b"\n\n")
            if number == 0 and step.after_first is not None:
                await step.after_first.wait()
        if self.holds is not None and self.tells_in_streams:
            last = json.dumps({"choices": [], "kv_transfer_params": self.holds}).encode()
            await response.write(b"data: " + last + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _send_half(
        self, more: asyncio.Event, received: Received, request: web.Request
    ) -> web.StreamResponse:
        whole = json.dumps(self._answer(received, Step())).encode()
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.content_length = len(whole)
        await response.prepare(request)
        await response.write(whole[: len(whole) // 2])
        await more.wait()
        await response.write(whole[len(whole) // 2 :])
        return response

    def _source(self, received: Received) -> SourceParams:
        assert self.identity is not None
        rank = received.rank
        if rank is None:
            return self.identity
        engine = EngineId(f"{self.identity.engine}_dp{rank}")
        return msgspec.structs.replace(self.identity, engine=engine, port=self.identity.port + rank)

    def _answer(self, received: Received, step: Step) -> dict[str, Any]:
        text = "".join(step.tokens)
        prompts = _prompt_count(received.body)
        choices = [
            {"index": index, "text": f"{text}#{index}", "finish_reason": step.finish_reason}
            for index in range(prompts * received.body.get("n", 1))
        ]
        answer = {
            "id": f"cmpl-{received.headers.get('X-Request-Id')}",
            "object": "text_completion",
            "model": "tiny",
            "choices": choices,
            "usage": _usage(step),
            "kv_transfer_params": None,
        }
        if received.params.get("do_remote_decode") and self.identity is not None:
            answer["kv_transfer_params"] = self._source(received).to_params() | self.told
        elif not received.params.get("do_remote_decode"):
            answer["kv_transfer_params"] = self.holds
        return answer


def _close(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


def _stream_events(received: Received, step: Step) -> list[dict[str, Any]]:
    base = {"id": f"cmpl-{received.headers.get('X-Request-Id')}", "object": "text_completion"}
    n = received.body.get("n", 1)
    events: list[dict[str, Any]] = [
        {**base, "choices": [{"index": index, "text": token, "finish_reason": None}]}
        for token in step.tokens
        for index in range(n)
    ]
    if (received.body.get("stream_options") or {}).get("include_usage"):
        events.append({**base, "choices": [], "usage": _usage(step)})
    return events


def _usage(step: Step) -> dict[str, Any]:
    usage: dict[str, Any] = {"prompt_tokens": 5, "completion_tokens": len(step.tokens), "total_tokens": 5}
    usage["total_tokens"] += len(step.tokens)
    if step.cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": step.cached_tokens}
    return usage


def _prompt_count(body: dict[str, Any]) -> int:
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt)
    return len(prompt) if several and isinstance(prompt, list) else 1
