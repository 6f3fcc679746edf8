"""The modelled engines as a router meets them: OpenAI's completions over HTTP, on loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from kvferry.bench.pool_model import ModelledPool, PoolModel
from kvferry.handoff import DecodeParams, PrefillParams, SourceParams, parse_request
from kvferry.ids import EngineId, Incarnation

MODEL = "modelled"
TOKEN_BYTES = 4
"""A prompt is a text of so many bytes for each of its tokens, which is what routers assume of texts."""
_LONG_BYTES = 1 << 22
_SOURCE = SourceParams(
    engine=EngineId("prefill"), host="127.0.0.1", port=5600, incarnation=Incarnation("modelled")
)
_EVENT = b'data: {"choices": [{"text": " a"}]}\n\n'


class _Completion(msgspec.Struct):
    prompt: str
    max_tokens: int
    kv_transfer_params: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class PoolUrls:
    """Where the engines answer."""

    prefill: tuple[str, ...]
    decode: tuple[str, ...]


@asynccontextmanager
async def serving(model: PoolModel, pool: ModelledPool) -> AsyncIterator[PoolUrls]:
    """Serve every engine of the pool on a port of its own."""
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(_listening(_Prefill(pool).complete))
        decode = [
            await stack.enter_async_context(_listening(_Decode(pool, number).complete))
            for number in range(len(model.decode))
        ]
        yield PoolUrls((prefill,), tuple(decode))


@dataclass(frozen=True, slots=True)
class _Prefill:
    pool: ModelledPool

    async def complete(self, request: web.Request) -> web.StreamResponse:
        asked = msgspec.json.decode(await request.read(), type=_Completion)
        params = parse_request(asked.kv_transfer_params)
        # Probes and releases name a transfer, too, and compute nothing.
        told = asked.kv_transfer_params or {}
        if isinstance(params, PrefillParams) and params.transfer and not told.keys() & {"probe", "release"}:
            await self.pool.prefill(params.transfer, len(asked.prompt) // TOKEN_BYTES)
        answer = {"choices": [{"text": " a"}], "kv_transfer_params": _SOURCE.to_params()}
        return web.json_response(answer)


@dataclass(frozen=True, slots=True)
class _Decode:
    pool: ModelledPool
    number: int

    async def complete(self, request: web.Request) -> web.StreamResponse:
        asked = msgspec.json.decode(await request.read(), type=_Completion)
        params = parse_request(asked.kv_transfer_params)
        if not isinstance(params, DecodeParams) or params.transfer is None:
            # The model has no decode engine that prefills: a router that asks for it must be seen.
            return web.json_response({"error": {"message": "nothing to receive", "code": 500}}, status=500)
        tokens = len(asked.prompt) // TOKEN_BYTES
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        async with self.pool.decode(self.number, params.transfer, tokens) as step_seconds:
            await response.prepare(request)
            await response.write(_EVENT)
            await asyncio.sleep(step_seconds * (asked.max_tokens - 1))
        await response.write(_EVENT + _usage(tokens, asked.max_tokens) + b"data: [DONE]\n\n")
        return response


def _usage(prompt_tokens: int, completion_tokens: int) -> bytes:
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"


@asynccontextmanager
async def _listening(complete: Any) -> AsyncIterator[str]:
    application = web.Application(client_max_size=_LONG_BYTES)
    application.router.add_get("/health", _health)
    application.router.add_get("/v1/models", _models)
    application.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(
        application, handler_cancellation=True, access_log=None, shutdown_timeout=0.1, handle_signals=False
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def _health(request: web.Request) -> web.Response:
    del request
    return web.Response()


async def _models(request: web.Request) -> web.Response:
    del request
    return web.json_response({"object": "list", "data": [{"id": MODEL}]})
