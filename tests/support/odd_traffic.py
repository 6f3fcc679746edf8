"""Odd requests, odd answers of engines and odd streams, sent through a router; what the client got, as JSON.

    python -m tests.support.odd_traffic

Run once with the router's compiled modules and once without, it must tell the same: see
tests/integration/test_compiled_alike.py.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import sys
from typing import Any

from kvferry.router import code_state
from tests.support.fake_engine import Step
from tests.support.router_world import RouterWorld, router_world

VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    1.5,
    2**70,
    -(2**70),
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "\ud800",
    "\0",
    "data: [DONE]\n\n",
    "true",
    [],
    [1],
    [-1],
    [True],
    [None],
    ["a"],
    [["a"]],
    [[]],
    [[1, 2]],
    [1, "a"],
    {},
    {"a": 1},
    {"include_usage": True},
    {"include_usage": "x"},
    [{"role": "user", "content": "a"}],
    [{"role": 1}],
]
FIELDS = (
    "prompt",
    "messages",
    "n",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "model",
    "logprobs",
    "echo",
    "tools",
    "kv_transfer_params",
    "vllm_xargs",
    "prompt_embeds",
    "use_beam_search",
    "prompt_logprobs",
    "min_tokens",
    "stop",
    "seed",
    "cache_salt",
    "response_format",
)
BODIES = (
    b"",
    b"{}",
    b"[]",
    b"null",
    b"1",
    b'"a"',
    b'{"prompt":"a","prompt":"b"}',
    b'{"prompt":NaN}',
    b'{"prompt":"a"',
    b'\xef\xbb\xbf{"prompt":"a"}',
    b' {"prompt":"a"} ',
    b'{"prompt":"a"}\n\n',
    b'{"prompt":"\\ud800"}',
    b'{"prompt":"\xff"}',
    b"[" * 3000,
    b'{"prompt":"a","x":' + b"[" * 900 + b"]" * 900 + b"}",
    b'{"prompt":"a"}}',
    b'{"prompt":"}"}',
    b'{"prompt":"a","stream":true,"n":1e0}',
    b'{"prompt":"a","max_tokens":1e400}',
)
EVENTS = (
    b'data: {"choices":[{"index":0,"text":"a"}]}\n\n',
    b'data:{"choices":[]}\n\n',
    b": comment\n\n",
    b'event: x\ndata: {"a":1}\n\n',
    b'data: {"a":\ndata: 1}\n\n',
    b'data: {"choices":[]}\r\n\r\n',
    b"\xef\xbb\xbfdata: {}\n\n",
    b"data: [DONE] not\n\n",
    b'data: {"text":"[DONE]"}\n\n',
    b'data: {"text":"kv_transfer_params"}\n\n',
    b'data: {"text":"\\"usage\\""}\n\n',
    b'data: {"usage":5}\n\n',
    b'data: {"usage":{"prompt_tokens":1}}\n\n',
    b'data: {"kv_transfer_params":7}\n\n',
    b"data: nonsense\n\n",
    b'data: {"error":{"message":"m","code":400}}\n\n',
    b'data: {"error":"x"}\n\n',
    b"data: \xff\xfe\n\n",
    b"id: 5\n\n",
    b"\n\n",
    b"\n",
    b"data: [1,2]\n\n",
    b"retry: 5\n\n",
)
PROMPTS = {
    "/v1/completions": {"prompt": "hello there"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
}


class Traffic:
    """One router and what was got from it."""

    def __init__(self, world: RouterWorld) -> None:
        self.world = world
        self.got: list[tuple[str, int, str]] = []

    async def ask(self, name: str, body: bytes, path: str = "/v1/completions") -> None:
        async with self.world.client.post(path, data=body) as response:
            text = (await response.read()).decode(errors="replace")
        # Ids are drawn anew each time.
        self.got.append((name, response.status, re.sub(r"[0-9a-f]{16,32}", "<id>", text)))

    async def fields(self) -> None:
        stream = itertools.cycle((True, False, False, True, True))
        for (path, prompt), field, (number, value) in itertools.product(
            PROMPTS.items(), FIELDS, enumerate(VALUES)
        ):
            # A fake engine makes as many choices as it is asked for.
            if field == "n" and isinstance(value, int) and value > 100:
                continue
            body = {"model": "tiny", **prompt, "stream": next(stream), field: value}
            await self.ask(f"{path} {field} {number}", json.dumps(body).encode(), path)
        for number, raw in enumerate(BODIES):
            await self.ask(f"body {number}", raw)

    async def answers(self) -> None:
        for engine, value in itertools.product((self.world.p, self.world.d), VALUES):
            told: list[Any] = [
                value,
                {"choices": value},
                {"choices": [], "usage": value},
                {"choices": [], "usage": {"prompt_tokens_details": value}},
                {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": value}}},
                {"choices": [], "kv_transfer_params": value},
                {"kv_transfer_params": dict.fromkeys(("remote_engine_id", "remote_host", "tp_size"), value)},
            ]
            for number, each in enumerate(told):
                engine.plan(
                    Step(body=json.dumps(each).encode(), headers={"Content-Type": "application/json"})
                )
                await self.ask(f"answer {number} of {value!r}", b'{"prompt":"a"}')
                await self.world.check()

    async def streams(self, chance: random.Random) -> None:
        for number in range(150):
            events = [chance.choice(EVENTS) for _ in range(chance.randint(0, 5))]
            tokens = tuple(f"t{position}" for position in range(chance.randint(0, 3)))
            ends, breaks = chance.choice((None, None, None, 1)), chance.choice((None, None, 1))
            self.world.d.plan(
                Step(prelude=b"".join(events), tokens=tokens, break_after=breaks, end_after=ends)
            )
            options = {"stream_options": {"include_usage": True}} if number % 3 == 0 else {}
            body = {"prompt": "a", "stream": True, **options}
            await self.ask(f"stream {number} {events}", json.dumps(body).encode())
            await self.world.check()


async def _run() -> list[tuple[str, int, str]]:
    async with router_world(retries=0) as world:
        traffic = Traffic(world)
        await traffic.fields()
        await traffic.answers()
        await traffic.streams(random.Random(5))
        await world.legs_ended()
        return traffic.got


if __name__ == "__main__":
    json.dump({"code": code_state(), "got": asyncio.run(_run())}, sys.stdout)
