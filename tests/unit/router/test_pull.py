"""Pull: the prefill leg alone, then a decode engine chosen late, and what happens when one of them fails."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import aiohttp
import pytest

from kvferry.handoff import DecodeParams, PrefillParams, parse_request
from kvferry.router.engines.pool import Role
from kvferry.router.ground.settings import OnPrefillFailure
from tests.support.fake_engine import Step, failing, source
from tests.support.router_world import RouterWorld, events_of, router_world, until

PULL: dict[str, Any] = {"transfer_mode": "pull"}


def hanging() -> Step:
    """A step that is never answered."""
    return Step(gate=asyncio.Event())


async def released(world: RouterWorld, engine: int = 0) -> str:
    """The transfer that a prefill engine was told to release; it is told once."""
    await until(lambda: not len(world.router.dispatcher.background))
    (release,) = world.prefill[engine].releases
    return str(release.params["transfer_id"])


async def none_released(world: RouterWorld) -> None:
    """No prefill engine was told to release anything, nor will it be."""
    await until(lambda: not len(world.router.dispatcher.background))
    assert not any(engine.releases for engine in world.prefill)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_decode_leg_begins_when_prefill_has_ended_and_gets_its_whole_answer(stream: bool) -> None:
    """X21: the mode decides the order; what the engine says of itself reaches the other one unchanged."""
    async with router_world(**PULL) as world:
        computed = asyncio.Event()
        world.p.told = {"remote_block_ids": [[3, 4]], "remote_request_id": "cmpl-x", "remote_num_tokens": 5}
        world.p.plan(Step(gate=computed, cached_tokens=2))
        world.d.plan(Step(cached_tokens=5))
        options = {"stream_options": {"include_usage": True}} if stream else {}
        async with asyncio.TaskGroup() as group:
            request = group.create_task(world.complete(stream=stream, max_tokens=7, **options).__aenter__())
            prefill = await world.p.received(1)
            assert world.d.requests == []
            computed.set()
        response = request.result()
        assert response.status == 200
        usage = (await events_of(response))[-2]["usage"] if stream else (await response.json())["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 2

        (decode,) = world.d.requests
        producing, consuming = parse_request(prefill.params), parse_request(decode.params)
        assert isinstance(producing, PrefillParams)
        assert isinstance(consuming, DecodeParams)
        assert producing.transfer == consuming.transfer
        assert len(producing.transfer or "") == 32
        assert producing.mode == consuming.mode == "pull"
        assert consuming.source.engine == "engine-p0"
        assert consuming.source.incarnation == "first"
        assert consuming.prefilled_tokens == 5
        assert decode.params["remote_block_ids"] == [[3, 4]]
        assert decode.params["remote_request_id"] == "cmpl-x"
        assert decode.headers["X-Request-Id"] == prefill.headers["X-Request-Id"]
        assert (prefill.body["max_tokens"], decode.body["max_tokens"]) == (1, 7)
        assert not prefill.body["stream"]
        assert world.count("pull", "ok", "none") == 1
        assert world.transfers("pull", "fixed") == 1
        await none_released(world)
        await world.legs_ended()


async def test_push_is_counted_as_push() -> None:
    async with router_world() as world:
        async with world.complete() as response:
            assert response.status == 200
        assert world.transfers("push", "fixed") == 1
        assert world.transfers("pull", "fixed") == 0


async def test_the_decode_engine_is_chosen_by_what_is_known_after_prefill() -> None:
    async with router_world(decode=2, **PULL) as world:
        computed = asyncio.Event()
        world.p.plan(Step(gate=computed))
        first, _ = world.router.pool.workers(Role.DECODE)
        async with asyncio.TaskGroup() as group:
            request = group.create_task(world.complete().__aenter__())
            await world.p.received(1)
            with contextlib.ExitStack() as busy:
                for _ in range(3):
                    busy.enter_context(first.leg())
                computed.set()
                await world.decode[1].received(1)
        assert request.result().status == 200
        assert world.d.requests == []


async def test_each_prompt_of_a_list_is_a_transfer_and_says_how_many_consumers_it_has() -> None:
    """P20."""
    async with router_world(**PULL) as world:
        async with world.complete(prompt=["a", "b"], n=2) as response:
            assert [choice["index"] for choice in (await response.json())["choices"]] == [0, 1, 2, 3]
        ids = {each.body["prompt"]: each.params["transfer_id"] for each in world.p.requests}
        assert len(set(ids.values())) == 2
        for each in world.d.requests:
            assert each.params["transfer_id"] == ids[each.body["prompt"]]
            assert each.params["consumers"] == 2
        assert world.count("pull", "ok", "none") == 1


async def test_an_answer_that_names_no_kv_lets_the_decode_engine_prefill() -> None:
    """A connector that holds nothing of a short prompt answers without coordinates: no failure, no retry."""
    async with router_world(**PULL) as world:
        world.p.identity = None
        async with world.complete() as response:
            assert response.status == 200
        assert "kv_transfer_params" not in world.d.requests[0].body
        assert world.count("local", "ok", "nothing_held") == 1
        await none_released(world)


async def test_the_newest_incarnation_is_in_the_answer_itself() -> None:
    """A restart that no check has shown costs a pull nothing."""
    async with router_world(**PULL) as world:
        world.p.identity = source("engine-p0", incarnation="second")
        async with world.complete() as response:
            assert response.status == 200
        (decode,) = world.d.requests
        assert decode.params["kvferry_incarnation"] == "second"
        assert world.retries("prefill", "identity") == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [400, 422])
async def test_a_prefill_rejection_is_the_clients_and_no_decode_engine_hears_of_it(
    status: int, stream: bool
) -> None:
    """X05, X20."""
    async with router_world(**PULL) as world:
        step = failing(status, "too long")
        world.p.plan(step)
        async with world.complete(stream=stream) as response:
            assert response.status == status
            assert await response.read() == step.body
            assert response.headers["X-Kvferry-Cause"] == "prefill_rejected"
        assert world.d.requests == []
        assert world.count("none", "error", "prefill_rejected") == 1
        await none_released(world)


async def test_a_failed_prefill_leg_is_sent_to_another_engine_with_a_new_transfer() -> None:
    """X07."""
    async with router_world(prefill=2, **PULL) as world:
        world.p.plan(failing(503))
        async with world.complete() as response:
            assert response.status == 200
        (first,), (second,) = (engine.requests for engine in world.prefill)
        assert first.params["transfer_id"] != second.params["transfer_id"]
        assert world.d.requests[0].params["transfer_id"] == second.params["transfer_id"]
        assert world.d.requests[0].params["remote_engine_id"] == "engine-p1"
        assert world.retries("prefill", "error") == 1


@pytest.mark.parametrize("step", [failing(500), failing(503), Step(close=True), Step(body=b"not json")])
async def test_with_the_retries_spent_the_decode_engine_prefills_itself(step: Step) -> None:
    """X07: one P that keeps failing is bounded and costs no answer."""
    async with router_world(retries=1, **PULL) as world:
        world.p.plan(step, step)
        async with world.complete() as response:
            assert response.status == 200
        assert len(world.p.requests) == 2
        assert "kv_transfer_params" not in world.d.requests[0].body
        assert world.count("local", "ok", "prefill_failed") == 1


async def test_recompute_and_fail_mean_what_they_say() -> None:
    """X20."""
    async with router_world(prefill=2, on_prefill_failure=OnPrefillFailure.RECOMPUTE, **PULL) as world:
        world.p.plan(failing(500))
        async with world.complete() as response:
            assert response.status == 200
        assert world.prefill[1].requests == []
        assert world.count("local", "ok", "prefill_failed") == 1
    async with router_world(prefill=2, on_prefill_failure=OnPrefillFailure.FAIL, **PULL) as world:
        world.p.plan(failing(500))
        async with world.complete() as response:
            assert response.status == 500
            assert (await response.json())["error"]["kvferry"] == "prefill_error"
        assert world.d.requests == []


async def test_without_a_prefill_engine_the_decode_engine_serves() -> None:
    async with router_world(**PULL) as world:
        await world.p.stop()
        await world.check()
        async with world.complete() as response:
            assert response.status == 200
        assert "kv_transfer_params" not in world.d.requests[0].body
        assert world.count("local", "ok", "no_prefill") == 1
        assert world.transfers("pull", "fixed") == 0


async def test_without_a_decode_engine_nothing_is_prefilled() -> None:
    """X09, X10: the request ends at once, with its cause, and no prefill is wasted on it."""
    async with router_world(**PULL) as world:
        await world.d.stop()
        await world.check()
        async with world.complete() as response:
            assert response.status == 503
            assert (await response.json())["error"]["kvferry"] == "no_decode"
        assert world.p.requests == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("step", [failing(502), failing(503), failing(504)])
async def test_a_decode_engine_that_has_not_begun_is_replaced_without_a_new_prefill(
    step: Step, stream: bool
) -> None:
    """X04: the same transfer, while the lease runs."""
    async with router_world(decode=2, **PULL) as world:
        world.d.plan(step)
        async with world.complete(stream=stream) as response:
            assert response.status == 200
            await response.read()
        (prefill,) = world.p.requests
        ids = {each.params["transfer_id"] for engine in world.decode for each in engine.requests}
        assert ids == {prefill.params["transfer_id"]}
        assert [len(engine.requests) for engine in world.decode] == [1, 1]
        assert world.retries("decode", "error") == 1
        assert world.count("pull", "ok", "none") == 1
        await none_released(world)


async def test_a_decode_engine_that_died_before_its_leg_is_replaced_without_a_new_prefill() -> None:
    async with router_world(decode=2, **PULL) as world:
        computed = asyncio.Event()
        world.p.plan(Step(gate=computed))
        async with asyncio.TaskGroup() as group:
            request = group.create_task(world.complete().__aenter__())
            await world.p.received(1)
            await world.d.stop()
            computed.set()
        assert request.result().status == 200
        assert len(world.p.requests) == 1
        assert world.retries("decode", "refused") == 1


async def test_a_lease_that_has_ended_is_no_ground_for_another_decode_engine() -> None:
    """What the prefill engine may have given away is prefilled anew."""
    async with router_world(decode=2, prefill_lease_seconds=1e-9, **PULL) as world:
        world.d.plan(failing(503))
        async with world.complete() as response:
            assert response.status == 200
        first, second = world.p.requests
        assert first.params["transfer_id"] != second.params["transfer_id"]
        assert await released(world) == first.params["transfer_id"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("step", [failing(500), Step(close=True), Step(body=b"[]")])
async def test_a_decode_engine_that_may_have_begun_costs_a_new_prefill(step: Step, stream: bool) -> None:
    """X04: it may have ended the lease of what it came for. P is told that nobody comes for the old one."""
    if stream and step.body == b"[]":
        step = Step(end_after=0)
    async with router_world(decode=2, **PULL) as world:
        world.d.plan(step)
        async with world.complete(stream=stream) as response:
            assert response.status == 200
            await response.read()
        first, second = world.p.requests
        assert first.params["transfer_id"] != second.params["transfer_id"]
        assert world.decode[1].requests[0].params["transfer_id"] == second.params["transfer_id"]
        assert await released(world) == first.params["transfer_id"]
        await world.legs_ended()


async def test_a_decode_rejection_is_the_clients_and_what_is_held_is_released() -> None:
    """P17."""
    async with router_world(**PULL) as world:
        step = failing(400, "unknown model")
        world.d.plan(step)
        async with world.complete() as response:
            assert response.status == 400
            assert await response.read() == step.body
        assert await released(world) == world.p.requests[0].params["transfer_id"]
        assert len(world.p.requests) == 1


@pytest.mark.parametrize("step", [failing(503, "busy"), failing(500, "busy")])
async def test_the_decode_budget_ends(step: Step) -> None:
    async with router_world(retries=2, **PULL) as world:
        world.d.plan(step, step, step)
        async with world.complete() as response:
            assert response.status == step.status
            error = (await response.json())["error"]
            assert error["kvferry"] == "decode_error"
            assert "busy" in error["message"]
        assert len(world.d.requests) == 3


async def test_a_decode_engine_that_is_gone_after_prefill_is_a_503_with_a_reason() -> None:
    """X09: the only one died while prefill ran; what is held is given back."""
    async with router_world(retries=0, **PULL) as world:
        computed = asyncio.Event()
        world.p.plan(Step(gate=computed))
        async with asyncio.TaskGroup() as group:
            request = group.create_task(world.complete().__aenter__())
            await world.p.received(1)
            await world.d.stop()
            computed.set()
        response = request.result()
        assert response.status == 503
        assert (await response.json())["error"]["kvferry"] == "decode_refused"
        assert await released(world) == world.p.requests[0].params["transfer_id"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_during_prefill_ends_it(stream: bool) -> None:
    """P63: no decode engine hears of the request; the engine may have finished, so it is told as well."""
    async with router_world(**PULL) as world:
        world.p.plan(hanging())
        request = asyncio.create_task(world.complete(stream=stream).__aenter__())
        prefill = await world.p.received(1)
        request.cancel()
        await prefill.disconnected.wait()
        await until(lambda: world.count("none", "cancelled", "client_gone"))
        assert await released(world) == prefill.params["transfer_id"]
        assert world.d.requests == []
        await world.legs_ended()


async def test_a_client_that_leaves_between_the_legs_has_what_is_held_released() -> None:
    """P63: prefill has ended and the choice of a decode engine backs off."""
    async with router_world(retries=1, retry_backoff_seconds=1000.0, **PULL) as world:
        world.d.plan(failing(503))
        request = asyncio.create_task(world.complete().__aenter__())
        await until(lambda: world.retries("decode", "error"))
        request.cancel()
        assert await client_gone(world) == world.p.requests[0].params["transfer_id"]
        assert len(world.d.requests) == 1


async def test_a_client_that_leaves_during_decode_ends_it_and_has_what_is_held_released() -> None:
    """P63, X04: the decode engine may still be in its queue."""
    async with router_world(**PULL) as world:
        world.d.plan(hanging())
        request = asyncio.create_task(world.complete(stream=True).__aenter__())
        decode = await world.d.received(1)
        request.cancel()
        await decode.disconnected.wait()
        assert await client_gone(world) == decode.params["transfer_id"]
        await world.legs_ended()


async def client_gone(world: RouterWorld) -> str:
    """Wait until the router has noticed; the transfer that was released."""
    await until(lambda: world.count("none", "cancelled", "client_gone"))
    return await released(world)


async def test_a_prefill_whose_only_token_ends_the_text_is_fetched_all_the_same() -> None:
    """X03, in a pull."""
    async with router_world(transfer_mode="pull") as world:
        world.p.plan(Step(tokens=("",), finish_reason="stop"))
        async with world.complete(max_tokens=2) as response:
            assert (await response.json())["choices"][0]["text"] == " one two#0"
        assert world.count("pull", "ok", "none") == 1


async def test_a_request_ends_at_its_deadline_whichever_leg_hangs() -> None:
    """X04."""
    for role in ("prefill", "decode"):
        async with router_world(request_timeout_seconds=0.2, **PULL) as world:
            {"prefill": world.p, "decode": world.d}[role].plan(hanging())
            async with world.complete() as response:
                assert response.status == 504
                assert (await response.json())["error"]["kvferry"] == "timeout"
            await world.legs_ended()


async def test_an_engine_with_another_connector_is_not_asked_for_a_release() -> None:
    """It would take that for a request; its lease ends by itself."""
    async with router_world(**PULL) as world:
        world.p.told = {"kvferry_incarnation": None}
        world.d.plan(failing(400))
        async with world.complete() as response:
            assert response.status == 400
        await none_released(world)


async def test_many_requests_with_failures_and_departures_leave_nothing_behind() -> None:
    """P09, X04: every slot is given back, and nothing runs on."""
    async with router_world(prefill=2, decode=2, concurrent_requests_max=64, **PULL) as world:
        for engine in world.prefill + world.decode:
            engine.plan(*[Step(), failing(503), Step(close=True), failing(400), Step()] * 4)

        async def one(number: int) -> int:
            try:
                async with world.complete(stream=number % 2 == 0) as response:
                    if number % 5 == 0:
                        return 0
                    await response.read()
                    return response.status
            except aiohttp.ClientError:
                return -1

        statuses = await asyncio.gather(*[one(number) for number in range(40)])
        assert set(statuses) <= {0, 200, 400}
        value = world.router.metrics.registry.get_sample_value
        await until(lambda: not value("kvferry_router_requests_in_flight"))
        await world.legs_ended()
        await until(lambda: not len(world.router.dispatcher.background))
