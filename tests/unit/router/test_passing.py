"""Requests that one engine answers whole: embeddings, the tokenizer, responses, Anthropic's messages."""

from __future__ import annotations

import asyncio
import json

import pytest

from kvferry.router.serving.passing import PASSED
from tests.support.fake_engine import Step, failing
from tests.support.router_world import router_world

PARAMS = {"do_remote_prefill": True, "remote_host": "10.6.6.6"}


@pytest.mark.parametrize("path", sorted(PASSED))
async def test_a_request_and_its_answer_are_passed_as_they_are(path: str) -> None:
    async with router_world() as world:
        raw = b'{"model":"tiny","input":"a", "unknown": [1.50, {"x": null}]}'
        told = b'{"data":[{"embedding":[0.10,1e-3]}],"unknown":1}'
        world.d.plan(Step(body=told))
        headers = {"X-Request-Id": "mine-1", "anthropic-version": "2023-06-01", "Authorization": "Bearer k"}
        async with world.client.post(path, data=raw, headers=headers) as response:
            assert response.status == 200
            assert await response.read() == told
            assert response.headers["X-Request-Id"] == "mine-1"
        (asked,) = world.d.requests
        assert asked.path == path
        assert asked.body == json.loads(raw)
        assert asked.headers["anthropic-version"] == "2023-06-01"
        assert asked.headers["Authorization"] == "Bearer k"
        assert world.p.requests == []
        assert world.count("passed", "ok", "none") == 1
        await world.legs_ended()


async def test_coordinates_are_neither_taken_from_clients_nor_told_to_them() -> None:
    """Hostile: a client that names an engine to fetch KV from."""
    async with router_world() as world:
        world.d.plan(
            Step(
                body=json.dumps(
                    {"id": "1", "kv_transfer_params": PARAMS, "response": {"kv_transfer_params": 1}}
                ).encode()
            )
        )
        body = {
            "input": "a",
            "kv_transfer_params": PARAMS,
            "vllm_xargs": {"kv_transfer_params": PARAMS, "k": 1},
        }
        async with world.client.post("/v1/responses", json=body) as response:
            assert await response.json() == {"id": "1", "response": {}}
        assert world.d.requests[0].body == {"input": "a", "vllm_xargs": {"k": 1}}


async def test_a_stream_is_passed_event_by_event() -> None:
    async with router_world() as world:
        hidden = json.dumps({"type": "end", "response": {"kv_transfer_params": PARAMS, "n": 1}})
        prelude = f": hello\n\nevent: message_start\ndata: {{}}\n\nevent: end\ndata: {hidden}\n\n"
        first = asyncio.Event()
        world.d.plan(Step(prelude=prelude.encode(), tokens=("a", "b"), after_first=first))
        async with world.client.post("/v1/messages", json={"stream": True}) as response:
            assert response.content_type == "text/event-stream"
            begun = await response.content.readuntil(b'"n":1}}\n\n')
            first.set()
            rest = await response.read()
        assert begun.startswith(b": hello\n\nevent: message_start\ndata: {}\n\nevent: end\n")
        assert b"remote_host" not in begun + rest
        assert rest.endswith(b"data: [DONE]\n\n")


async def test_an_engine_that_is_gone_is_replaced_by_another() -> None:
    async with router_world(decode=2) as world:
        await world.decode[0].stop()
        for _ in range(2):
            async with world.client.post("/tokenize", json={"prompt": "a"}) as response:
                assert response.status == 200
        await world.decode[1].stop()
        async with world.client.post("/tokenize", json={"prompt": "a"}) as response:
            assert response.status == 503
            assert (await response.json())["error"]["kvferry"] in {"decode_refused", "no_decode"}


@pytest.mark.parametrize(
    ("step", "status", "cause"),
    [
        (failing(404, "no such endpoint"), 404, "decode_rejected"),
        (failing(500), 500, "decode_error"),
        (Step(close=True), 502, "decode_lost"),
    ],
)
async def test_an_engines_failure_is_told_and_not_tried_again(step: Step, status: int, cause: str) -> None:
    """What it has begun may have done what was asked: a stored response, a tool that was called."""
    async with router_world(decode=2) as world:
        for engine in world.decode:
            engine.plan(step)
        async with world.client.post("/v1/responses", json={"input": "a"}) as response:
            assert response.status == status
            assert response.headers["X-Kvferry-Cause"] == cause
        assert sum(len(engine.requests) for engine in world.decode) == 1
        assert world.count("passed", "error", cause) == 1


async def test_with_nobody_ready_a_client_is_told_when_to_come_back() -> None:
    async with router_world() as world:
        await world.d.stop()
        await world.check()
        for asked in (
            world.client.post("/v1/embeddings", json={"input": "a"}),
            world.client.get("/v1/models"),
            world.complete(),
        ):
            async with asked as response:
                assert response.status == 503
                assert response.headers["Retry-After"] == "1"
                assert (await response.json())["error"]["kvferry"] == "no_decode"


async def test_a_client_that_leaves_ends_the_engines_work() -> None:
    async with router_world() as world:
        world.d.plan(Step(after_first=asyncio.Event()))
        async with world.client.post("/v1/messages", json={"stream": True}) as response:
            await response.content.readuntil(b"\n\n")
        await world.d.requests[0].disconnected.wait()
        await world.legs_ended()


@pytest.mark.parametrize("raw", [b"", b"[1]", b"nonsense"])
async def test_a_body_that_is_no_object_reaches_no_engine(raw: bytes) -> None:
    async with router_world() as world:
        async with world.client.post("/v1/embeddings", data=raw) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == "body"
        assert world.d.requests == []
