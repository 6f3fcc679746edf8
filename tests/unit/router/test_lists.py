"""A list of prompts: one transfer each, one answer."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.fake_engine import Step, failing
from tests.support.router_world import events_of, router_world


@pytest.mark.parametrize("prompt", [["a", "b", "c"], [[1], [2, 3], [4]]])
async def test_each_prompt_is_a_transfer_and_the_answer_is_one(prompt: list[object]) -> None:
    """P20: three prompts, n=2: three transfers of two consumers; indices in order, usage summed."""
    async with router_world() as world:
        async with world.complete(prompt=prompt, n=2) as response:
            assert response.status == 200
            request_id = response.headers["X-Request-Id"]
            answer = await response.json()
        assert answer["id"] == f"cmpl-{request_id}"
        assert [choice["index"] for choice in answer["choices"]] == list(range(6))
        assert answer["usage"] == {"prompt_tokens": 15, "completion_tokens": 6, "total_tokens": 21}
        assert "kv_transfer_params" not in answer
        by_prompt = {str(each.body["prompt"]): each for each in world.p.requests}
        assert set(by_prompt) == {str(each) for each in prompt}
        for each in world.d.requests:
            prefill = by_prompt[str(each.body["prompt"])]
            assert each.params["transfer_id"] == prefill.params["transfer_id"]
            assert each.headers["X-Request-Id"] == prefill.headers["X-Request-Id"]
            assert each.params["consumers"] == prefill.params["consumers"] == 2
        assert len({each.params["transfer_id"] for each in world.d.requests}) == 3
        assert world.count("push", "ok", "none") == 1


async def test_a_list_with_one_prompt_is_no_list_to_the_answer() -> None:
    async with router_world() as world:
        async with world.complete(prompt=["a"]) as response:
            assert len((await response.json())["choices"]) == 1
        assert world.d.requests[0].body["prompt"] == ["a"]


async def test_answers_keep_their_order_whichever_is_first() -> None:
    async with router_world() as world:
        late = asyncio.Event()
        world.d.plan(Step(gate=late, tokens=("late",)), Step(tokens=("early",)))
        async with asyncio.TaskGroup() as group:
            request = group.create_task(world.complete(prompt=["a", "b"]).__aenter__())
            await (await world.d.received(2)).finished.wait()
            late.set()
        choices = (await request.result().json())["choices"]
        positions = {each.body["prompt"]: number for number, each in enumerate(world.d.requests)}
        texts = ["late#0", "early#0"]
        assert [choice["text"] for choice in choices] == [texts[positions["a"]], texts[positions["b"]]]


async def test_streams_are_interleaved_by_index_with_one_usage_and_one_end() -> None:
    async with router_world() as world:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        async with world.complete(prompt=["a", "b"], n=2, **options) as response:
            request_id = response.headers["X-Request-Id"]
            events = await events_of(response)
        assert events.count("[DONE]") == 1
        assert events[-1] == "[DONE]"
        usage = events[-2]
        assert usage["choices"] == []
        assert usage["usage"] == {"prompt_tokens": 10, "completion_tokens": 4, "total_tokens": 14}
        assert {event["id"] for event in events[:-1]} == {f"cmpl-{request_id}"}
        texts: dict[int, str] = {}
        for event in events[:-2]:
            (choice,) = event["choices"]
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        assert texts == dict.fromkeys(range(4), " one two")


async def test_a_slow_prompt_does_not_hold_the_others_back() -> None:
    async with router_world() as world:
        rest = asyncio.Event()
        world.d.plan(Step(gate=rest), Step())
        async with world.complete(prompt=["a", "b"], stream=True) as response:
            first = await response.content.readuntil(b"\n\n")
            assert b" one" in first
            rest.set()
            events = await events_of(response)
        assert events[-1] == "[DONE]"


async def test_a_long_stream_of_many_prompts_passes_its_bounded_lane() -> None:
    async with router_world() as world:
        world.d.plan(*[Step(tokens=("x" * 20_000,) * 60)] * 2)
        async with world.complete(prompt=["a", "b"], stream=True) as response:
            events = await events_of(response)
        assert len(events) == 121


@pytest.mark.parametrize("stream", [False, True])
async def test_one_rejected_prompt_ends_all(stream: bool) -> None:
    """X05: the client gets the rejection; no leg of any prompt is left."""
    async with router_world() as world:
        step = failing(400, "too long")
        world.p.plan(Step(gate=asyncio.Event()), step)
        world.d.plan(Step(gate=asyncio.Event()), Step(gate=asyncio.Event()))
        async with world.complete(prompt=["a", "b"], stream=stream) as response:
            assert response.status == 400
            assert await response.read() == step.body
        await world.legs_ended()
        assert world.count("none", "error", "prefill_rejected") == 1


async def test_a_prompt_that_breaks_after_the_first_byte_ends_the_stream_with_an_error() -> None:
    async with router_world() as world:
        others, seen = asyncio.Event(), asyncio.Event()
        world.d.plan(Step(after_first=others), Step(after_first=seen, break_after=1))
        async with world.complete(prompt=["a", "b"], stream=True) as response:
            assert response.status == 200
            for _ in range(2):
                await response.content.readuntil(b"\n\n")
            seen.set()
            events = await events_of(response)
        assert events[-1]["error"]["kvferry"] == "decode_lost"
        await world.legs_ended()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_every_leg(stream: bool) -> None:
    """P63."""
    async with router_world() as world:
        world.p.plan(*[Step(gate=asyncio.Event())] * 3)
        world.d.plan(*[Step(gate=asyncio.Event())] * 3)
        request = asyncio.create_task(world.complete(prompt=["a", "b", "c"], stream=stream).__aenter__())
        await world.p.received(3)
        await world.d.received(3)
        request.cancel()
        for each in world.p.requests + world.d.requests:
            await each.disconnected.wait()
        await world.legs_ended()


async def test_one_prompt_of_many_may_be_retried() -> None:
    """X07: only the prompt whose decode leg failed is sent anew."""
    async with router_world(decode=2) as world:
        world.d.plan(failing(503))
        async with world.complete(prompt=["a", "b", "c"]) as response:
            assert response.status == 200
            assert len((await response.json())["choices"]) == 3
        assert len(world.decode[0].requests + world.decode[1].requests) == 4
