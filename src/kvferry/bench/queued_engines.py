"""Engines that take their time: a prefill engine that serves one prompt after the other, and decode engines.

`python -m kvferry.bench.queued_engines --prefill PORT --decode PORT [PORT ...]`. They compute nothing: a
prefill takes so long as its tokens need at a given rate, more or less by a share of noise; a decode leg waits
for its prefill, then for what was not written meanwhile. `GET /held` tells the blocks times seconds for which
decode legs have waited for a prefill that had not ended, as the engines have seen it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import defaultdict
from dataclasses import dataclass, field
from random import Random
from typing import Any

from aiohttp import web

STEP_TOKENS = 2048
BLOCK_TOKENS = 16
_FIRST_SECONDS = 0.005
_BODY_BYTES_MAX = 64 << 20


@dataclass(slots=True)
class Engines:
    """What all of them share."""

    tokens_per_second: float
    transfer_seconds_per_token: float
    noise: float
    seed: int
    """The noise of a prompt follows from it and from the prompt's length: it is the same in every run."""
    free_at: float = 0.0
    """When the prefill engine has finished what it was sent."""
    prefilled: dict[str, asyncio.Event] = field(default_factory=lambda: defaultdict(asyncio.Event))
    held_block_seconds: float = 0.0

    def application(self, role: str) -> web.Application:
        """The engine of a role."""
        app = web.Application(client_max_size=_BODY_BYTES_MAX)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/held", self._held)
        app.router.add_post("/v1/completions", self._prefill if role == "prefill" else self._decode)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        del request
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        del request
        return web.json_response({"object": "list", "data": [{"id": "bench", "object": "model"}]})

    async def _held(self, request: web.Request) -> web.Response:
        del request
        return web.json_response({"block_seconds": self.held_block_seconds})

    async def _prefill(self, request: web.Request) -> web.Response:
        body = await request.json()
        params = body["kv_transfer_params"]
        if not params.get("probe"):
            tokens = len(body["prompt"])
            noise = Random(f"{self.seed} {tokens}").uniform(1 - self.noise, 1 + self.noise)
            now = asyncio.get_running_loop().time()
            # On a schedule: what a busy machine oversleeps is not added up over the queue.
            self.free_at = max(self.free_at, now) + tokens / self.tokens_per_second * noise
            await asyncio.sleep(self.free_at - now)
            self.prefilled[params["transfer_id"]].set()
        choice = {"index": 0, "text": " t", "finish_reason": "length"}
        return web.json_response({"id": "p", "choices": [choice], "kv_transfer_params": _source()})

    async def _decode(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        tokens = len(body["prompt"])
        transfer = body["kv_transfer_params"]["transfer_id"]
        prefilled = self.prefilled[transfer]
        clock = asyncio.get_running_loop().time
        since, late = clock(), prefilled.is_set()
        await prefilled.wait()
        waited = clock() - since
        if not late:
            self.held_block_seconds += waited * -(-tokens // BLOCK_TOKENS)
        written = waited / self.transfer_seconds_per_token
        left = tokens if late else max(min(tokens, STEP_TOKENS), tokens - written)
        await asyncio.sleep(left * self.transfer_seconds_per_token + _FIRST_SECONDS)
        del self.prefilled[transfer]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        event = json.dumps({"id": "d", "choices": [{"index": 0, "text": " t", "finish_reason": "length"}]})
        await response.write(f"data: {event}\n\ndata: [DONE]\n\n".encode())
        return response


def _source() -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "queued-engine",
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "pp_size": 1,
    }


async def serve(engines: Engines, prefill: int, decode: list[int]) -> None:
    """Listen on loopback until cancelled."""
    runners = []
    for role, port in [("prefill", prefill), *[("decode", port) for port in decode]]:
        runner = web.AppRunner(engines.application(role), access_log=None)
        await runner.setup()
        runners.append(runner)
        await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        await asyncio.Event().wait()
    finally:
        for runner in runners:
            await runner.cleanup()


def main() -> None:
    """Serve until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--prefill", type=int, required=True)
    add("--decode", type=int, nargs="+", required=True)
    add("--tokens-per-second", type=float, default=40_000.0)
    add("--transfer-seconds-per-token", type=float, default=5e-6)
    add("--noise", type=float, default=0.1)
    add("--seed", type=int, default=1)
    given = parser.parse_args()
    engines = Engines(given.tokens_per_second, given.transfer_seconds_per_token, given.noise, given.seed)
    asyncio.run(serve(engines, given.prefill, given.decode))


if __name__ == "__main__":
    main()
