"""A request that goes well: what each engine is asked, and what the client gets."""

from __future__ import annotations

import asyncio

import pytest

from kvferry.handoff import parse_request
from kvferry.router.engines.pool import same_engine
from tests.support.fake_engine import Step, source
from tests.support.router_world import events_of, router_world, until


async def test_both_legs_start_at_once_and_share_ids() -> None:
    """X01, P20: the decode leg arrives while the prefill engine computes; one transfer id, one request id."""
    async with router_world() as world:
        computed = asyncio.Event()
        world.p.plan(Step(gate=computed))
        world.d.plan(Step(gate=computed))
        async with asyncio.TaskGroup() as group:
            request = group.create_task(world.complete(max_tokens=7).__aenter__())
            decode = await world.d.received(1)
            prefill = await world.p.received(1)
            assert not prefill.finished.is_set()
            computed.set()
        response = request.result()
        answer = await response.json()
        assert response.status == 200
        assert answer["choices"][0]["text"] == " one two#0"
        assert "kv_transfer_params" not in answer

        producing = parse_request(prefill.params)
        consuming = parse_request(decode.params)
        assert producing.transfer == consuming.transfer
        assert len(producing.transfer) == 32
        assert (producing.mode, producing.consumers) == ("push", 1)
        assert same_engine(consuming.source, source("engine-p0"))
        assert prefill.headers["X-Request-Id"] == decode.headers["X-Request-Id"]
        assert prefill.body["max_tokens"] == 1
        assert decode.body["max_tokens"] == 7
        assert world.count("push", "ok", "none") == 1
        await world.legs_ended()


async def test_every_dispatch_has_ids_of_its_own_although_the_client_repeats_its_id() -> None:
    """P20, P39: the same client id twice never meets itself at an engine."""
    async with router_world() as world:
        for _ in range(2):
            async with world.client.post(
                "/v1/completions",
                json={"model": "tiny", "prompt": "hello"},
                headers={
                    "X-Request-Id": "mine-deadbeef",
                    "traceparent": "00-1-2-01",
                    "Authorization": "Bearer k",
                },
            ) as response:
                assert response.headers["X-Request-Id"] == "mine-deadbeef"
        seen = [request.headers["X-Request-Id"] for request in world.p.requests]
        assert len(set(seen)) == 2
        assert all(each.startswith("mine-deadbeef-0-") for each in seen)
        assert len({request.params["transfer_id"] for request in world.p.requests}) == 2
        for request in world.p.requests + world.d.requests:
            assert request.headers["traceparent"] == "00-1-2-01"
            assert request.headers["Authorization"] == "Bearer k"


async def test_an_insane_client_id_is_replaced() -> None:
    async with router_world() as world:
        headers = {"X-Request-Id": "a b{}" + "x" * 200}
        async with world.client.post(
            "/v1/completions", json={"prompt": "hello"}, headers=headers
        ) as response:
            assert response.status == 200
            assert len(response.headers["X-Request-Id"]) == 32
        assert " " not in world.d.requests[0].headers["X-Request-Id"]


async def test_a_stream_reaches_the_client_event_by_event() -> None:
    async with router_world() as world:
        rest = asyncio.Event()
        world.d.plan(Step(after_first=rest, tokens=(" a", " b", " c")))
        async with world.complete(stream=True) as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            first = await response.content.readuntil(b"\n\n")
            assert b'" a"' in first
            rest.set()
            events = await events_of(response)
        assert [event["choices"][0]["text"] for event in events[:-1]] == [" b", " c"]
        assert events[-1] == "[DONE]"
        assert world.count("push", "ok", "none") == 1
        value = world.router.metrics.registry.get_sample_value
        assert value("kvferry_router_ttft_seconds_count") == 1
        assert value("kvferry_router_leg_seconds_count", {"leg": "decode", "stage": "first"}) == 1
        assert value("kvferry_router_leg_seconds_count", {"leg": "prefill", "stage": "answer"}) == 1
        await world.legs_ended()


async def test_the_client_cannot_steer_the_hand_over() -> None:
    """S01: the client's own params reach no engine, on whatever way."""
    async with router_world() as world:
        smuggled = {"do_remote_prefill": True, "tp_size": 10**9}
        fields = {
            "kv_transfer_params": smuggled,
            "vllm_xargs": {"kv_transfer_params": smuggled, "kept": 1},
        }
        async with world.complete(**fields) as response:
            assert response.status == 200
        for request in world.p.requests + world.d.requests:
            assert request.params["transfer_id"]
            assert request.params.get("tp_size") in {None, 1}
            assert request.body["vllm_xargs"] == {"kept": 1}


async def test_a_chat_keeps_what_shapes_its_prompt_on_both_legs() -> None:
    """X13, X15: the prefill leg is valid with one token, ends by length; the decode leg is the client's."""
    fields = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "chat_template_kwargs": {"thinking": True},
        "response_format": {"type": "json_object"},
        "min_tokens": 100,
        "max_completion_tokens": 500,
        "n": 3,
        "stop": ["x"],
        "logprobs": True,
        "top_logprobs": 2,
        "ignore_eos": False,
        "stream_options": {"include_usage": True},
        "stream": True,
    }
    async with router_world() as world:
        async with world.complete("/v1/chat/completions", **fields) as response:
            assert response.status == 200
            await events_of(response)
        prefill, decode = world.p.requests[0], world.d.requests[0]
        assert prefill.path == decode.path == "/v1/chat/completions"
        assert {key: value for key, value in decode.body.items() if key != "kv_transfer_params"} == fields
        kept = {"model", "messages", "tools", "chat_template_kwargs", "response_format"}
        assert {key: prefill.body.pop(key) for key in kept} == {key: fields[key] for key in kept}
        assert prefill.body.pop("kv_transfer_params")["consumers"] == 3
        assert decode.params["consumers"] == 3
        assert prefill.body == {
            "max_tokens": 1,
            "max_completion_tokens": 1,
            "n": 1,
            "stream": False,
            "ignore_eos": True,
        }


@pytest.mark.parametrize("stream", [False, True])
async def test_cached_tokens_are_the_prefill_engines(stream: bool) -> None:
    """X03, X12: the decode engine counts what was transferred as cached; the client is told what was."""
    async with router_world() as world:
        rest = asyncio.Event()
        world.p.plan(Step(cached_tokens=2))
        world.d.plan(Step(cached_tokens=4, gate=None if stream else rest, after_first=rest))
        options = {"stream_options": {"include_usage": True}} if stream else {}
        async with asyncio.TaskGroup() as group:
            request = group.create_task(world.complete(stream=stream, **options).__aenter__())
            await (await world.p.received(1)).finished.wait()
            await prefill_answer_seen(world)
            rest.set()
        response = request.result()
        usage = (await events_of(response))[-2]["usage"] if stream else (await response.json())["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 2
        assert usage["prompt_tokens"] == 5


@pytest.mark.parametrize("decode_dispatch", ["eager", "late"])
async def test_a_prefill_whose_only_token_ends_the_text_is_handed_over_all_the_same(
    decode_dispatch: str,
) -> None:
    """X03: the decode leg is not spared, and the client gets its tokens."""
    async with router_world(decode_dispatch=decode_dispatch) as world:
        world.p.plan(Step(tokens=("",), finish_reason="stop"))
        async with world.complete(max_tokens=2) as response:
            choice = (await response.json())["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (" one two#0", "length")
        assert world.d.requests[0].params["transfer_id"] == world.p.requests[0].params["transfer_id"]
        assert world.count("push", "ok", "none") == 1


async def prefill_answer_seen(world: object) -> None:
    """Let the loop run until the router has read the prefill engine's answer."""
    value = world.router.metrics.registry.get_sample_value
    labels = {"leg": "prefill", "stage": "answer"}
    await until(lambda: value("kvferry_router_leg_seconds_count", labels))


async def test_the_decode_engine_may_be_first() -> None:
    """The decode engine needs nothing of the prefill engine: the client is served, that leg may finish."""
    async with router_world() as world:
        computed = asyncio.Event()
        world.p.plan(Step(gate=computed))
        async with world.complete() as response:
            assert response.status == 200
        prefill = await world.p.received(1)
        assert not prefill.disconnected.is_set()
        assert len(world.router.dispatcher.background) == 1
        computed.set()
        await prefill.finished.wait()


async def test_a_prefill_leg_outlives_its_request_for_a_bounded_time() -> None:
    async with router_world(prefill_linger_seconds=0.01) as world:
        world.p.plan(Step(gate=asyncio.Event()))
        async with world.complete() as response:
            assert response.status == 200
        await (await world.p.received(1)).disconnected.wait()


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_logprobs": 1},
        {"echo": True, "logprobs": 0},
        {"use_beam_search": True},
        {"prompt_embeds": "AAAA"},
        {"n": 129},
    ],
)
async def test_what_needs_the_whole_prompt_is_served_by_the_decode_engine_alone(
    fields: dict[str, object],
) -> None:
    async with router_world() as world:
        async with world.complete(**fields) as response:
            assert response.status == 200
        assert world.p.requests == []
        assert "kv_transfer_params" not in world.d.requests[0].body
        assert world.count("local", "ok", "needs_whole_prompt") == 1
