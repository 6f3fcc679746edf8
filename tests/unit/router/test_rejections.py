"""A leg that is refused before its engine has admitted it: the other engine must not be left with its KV."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.fake_engine import Step, failing
from tests.support.router_world import router_world, until

REASONS = {
    "a chat template that does not render": (400, "TemplateError: no messages"),
    "a model that is not served": (404, "The model `x` does not exist."),
    "bad input": (422, "prompt: Input should be a valid string"),
    "beam search that is streamed": (400, "Streaming is not supported with beam search"),
    "a previous response that is gone": (404, "Response with id 'resp_1' not found."),
    "a prompt that is too long": (400, "maximum context length is 4096 tokens"),
    "a body that is too large": (413, "Request Entity Too Large"),
}


def hanging() -> Step:
    """A step that is never answered."""
    return Step(gate=asyncio.Event())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reason", REASONS)
async def test_whatever_the_decode_engine_refuses_the_prefill_engine_stops(reason: str, stream: bool) -> None:
    """P17: no reject path of the decode engine leaves the prefill leg open: its engine aborts and frees."""
    async with router_world() as world:
        status, text = REASONS[reason]
        step = failing(status, text)
        world.p.plan(hanging())
        world.d.plan(step)
        async with world.complete(stream=stream) as response:
            assert response.status == status
            assert await response.read() == step.body
        await world.p.requests[0].disconnected.wait()
        await world.legs_ended()
        assert world.p.requests[0].params["transfer_id"] == world.d.requests[0].params["transfer_id"]
        assert world.count("none", "error", "decode_rejected") == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reason", REASONS)
async def test_whatever_the_prefill_engine_refuses_the_decode_engine_stops(reason: str, stream: bool) -> None:
    """P40: a prompt that only prefill finds too long, and every other refusal: the client gets just that."""
    async with router_world() as world:
        status, text = REASONS[reason]
        step = failing(status, text)
        world.p.plan(step)
        world.d.plan(hanging())
        async with world.complete(stream=stream) as response:
            assert response.status == status
            assert await response.read() == step.body
        await world.d.requests[0].disconnected.wait()
        await world.legs_ended()
        assert len(world.d.requests) == 1, "it is not computed there after all"
        assert world.count("none", "error", "prefill_rejected") == 1


async def test_a_client_that_leaves_while_decode_still_reads_its_request_ends_both_legs() -> None:
    """P49: cancelled in tokenization, before admission, and prefill is at work."""
    async with router_world() as world:
        world.p.plan(hanging())
        world.d.plan(hanging())
        request = asyncio.create_task(world.complete().__aenter__())
        prefill, decode = await world.p.received(1), await world.d.received(1)
        request.cancel()
        await decode.disconnected.wait()
        await prefill.disconnected.wait()
        await until(lambda: world.count("none", "cancelled", "client_gone") == 1)
        await world.legs_ended()


@pytest.mark.parametrize("reason", REASONS)
async def test_what_decode_refuses_after_prefill_has_ended_is_released_there(reason: str) -> None:
    """P17: the decode engine's core never heard of the request, so the router says that nobody will come."""
    async with router_world() as world:
        refuse = asyncio.Event()
        status, text = REASONS[reason]
        step = failing(status, text)
        world.d.plan(Step(gate=refuse, status=status, body=step.body))
        request = asyncio.create_task(world.complete().__aenter__())
        prefill = await world.p.received(1)
        await until(world.prefill_answered)
        refuse.set()
        assert (await request).status == status
        await until(lambda: world.p.releases)
        [release] = world.p.releases
        assert release.params["transfer_id"] == prefill.params["transfer_id"]
        assert release.body["max_tokens"] == 1
        await world.legs_ended()


async def test_a_client_that_leaves_after_prefill_has_ended_leaves_no_lease_behind() -> None:
    """P49: cancelled in tokenization at the decode engine."""
    async with router_world() as world:
        world.d.plan(hanging())
        request = asyncio.create_task(world.complete().__aenter__())
        prefill, decode = await world.p.received(1), await world.d.received(1)
        await until(world.prefill_answered)
        request.cancel()
        await decode.disconnected.wait()
        await until(lambda: world.p.releases)
        assert [one.params["transfer_id"] for one in world.p.releases] == [prefill.params["transfer_id"]]


async def test_a_retry_releases_what_the_first_dispatch_left() -> None:
    """X07, P17: each dispatch has its own transfer, and the old one's KV is given back."""
    async with router_world() as world:
        fail = asyncio.Event()
        broken = failing(503)
        world.d.plan(Step(gate=fail, status=503, body=broken.body), Step())
        request = asyncio.create_task(world.complete().__aenter__())
        first = await world.p.received(1)
        await first.finished.wait()
        await until(world.prefill_answered)
        fail.set()
        assert (await request).status == 200
        await until(lambda: len(world.p.releases) == 1)
        assert world.p.releases[0].params["transfer_id"] == first.params["transfer_id"]
        assert world.p.requests[1].params["transfer_id"] != first.params["transfer_id"]


async def test_a_prefill_leg_that_was_cut_off_is_released_too() -> None:
    """P17, P49: its engine may have ended it before it heard of that, and its answer was on the way."""
    async with router_world() as world:
        world.p.plan(hanging())
        world.d.plan(failing(400))
        async with world.complete() as response:
            assert response.status == 400
        await until(lambda: world.p.releases)
        transfers = [one.params["transfer_id"] for one in (*world.p.requests, *world.p.releases)]
        assert transfers[0] == transfers[1]


async def test_a_served_request_and_a_refused_prefill_are_released_by_nobody() -> None:
    """A decode engine that has answered ends the lease itself, and what was refused holds nothing."""
    async with router_world() as world:
        async with world.complete() as response:
            assert response.status == 200
        world.p.plan(failing(400))
        world.d.plan(hanging())
        async with world.complete() as response:
            assert response.status == 400
        await until(lambda: not len(world.router.dispatcher.background))
        assert len(world.p.requests) == 2
        assert world.p.releases == []
