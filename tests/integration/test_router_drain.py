"""Shutting down with work in flight, and taking an engine out of service."""

from __future__ import annotations

import asyncio

from kvferry.router.engines.pool import Role
from tests.support.fake_engine import Step
from tests.support.router_world import router_world, until


async def test_a_shutdown_with_ten_holds_serves_or_ends_each_and_tells_who_holds() -> None:
    """X18: half of them are served while it drains; of the rest, what was prefilled is given back at once."""
    async with router_world(transfer_mode="pull", drain_seconds=3600.0) as world:
        served = asyncio.Event()
        gates = [served] * 5 + [asyncio.Event()] * 5
        world.d.plan(*[Step(gate=gate) for gate in gates])

        async def one() -> tuple[int, str]:
            async with world.complete() as response:
                return response.status, response.headers.get("X-Kvferry-Cause", "")

        requests = [asyncio.create_task(one()) for _ in gates]
        await world.d.received(len(gates))
        drained = asyncio.create_task(world.router.drain())
        await until(lambda: world.router.admission.closed)
        assert await one() == (503, "shutting_down")
        async with world.client.get("/readiness") as response:
            assert response.status == 503
        served.set()
        assert [await request for request in requests[:5]] == [(200, "")] * 5
        # What happens when the drain's time is over.
        world.router.api.deadlines.end_all()
        await drained
        answers = [await request for request in requests]
        assert sorted(answers) == [(200, "")] * 5 + [(503, "shutting_down")] * 5
        await until(lambda: len(world.p.releases) == 5)
        held = {request.params["transfer_id"] for request in world.p.requests}
        assert {release.params["transfer_id"] for release in world.p.releases} < held
        for request in world.d.requests:
            if not request.finished.is_set():
                await request.disconnected.wait()
        await world.legs_ended()


async def test_a_drained_engine_finishes_what_it_has_and_is_known_to_be_done() -> None:
    """X18: a prefill engine whose KV is still to be fetched is not done, though no leg is open there."""
    async with router_world(prefill=2, transfer_mode="pull", api_key="k") as world:
        world.client.headers["Authorization"] = "Bearer k"
        fetched = asyncio.Event()
        world.d.plan(Step(gate=fetched))
        request = asyncio.create_task(world.complete().__aenter__())
        await world.d.received(1)
        worker = world.router.pool.workers(Role.PREFILL)[0]
        async with world.client.post("/workers/drain", json={"url": world.p.url}) as response:
            assert response.status == 200
            (shown,) = (await response.json())["workers"]
        assert (shown["in_flight"], shown["transfers"], shown["drained"]) == (0, 1, False)
        for _ in range(3):
            async with world.complete() as response:
                assert response.status == 200
        assert len(world.prefill[1].requests) == 3
        fetched.set()
        assert (await request).status == 200
        assert worker.drained
        async with world.client.delete("/workers", json={"url": world.p.url}) as response:
            assert response.status == 200
        assert [each.url for each in world.router.pool.workers(Role.PREFILL)] == [world.prefill[1].url]


async def test_an_engine_that_is_added_serves_without_a_restart() -> None:
    async with router_world(decode=2, api_key="k") as world:
        world.client.headers["Authorization"] = "Bearer k"
        first, second = world.decode
        async with world.client.delete("/workers", json={"url": second.url}) as response:
            assert response.status == 200
        async with world.complete() as response:
            assert response.status == 200
        assert second.requests == []
        body = {"role": "decode", "url": second.url}
        async with world.client.post("/workers", json=body) as response:
            assert response.status == 200
        await until(lambda: all(worker.ready for worker in world.router.pool.workers()))
        async with world.client.delete("/workers", json={"url": first.url, "now": True}) as response:
            assert response.status == 200
        async with world.complete() as response:
            assert response.status == 200
        assert len(second.requests) == 1


async def test_removing_an_engine_now_sends_its_legs_elsewhere() -> None:
    async with router_world(decode=2, api_key="k") as world:
        world.client.headers["Authorization"] = "Bearer k"
        world.d.plan(Step(gate=asyncio.Event()))
        request = asyncio.create_task(world.complete().__aenter__())
        leg = await world.d.received(1)
        body = {"url": world.d.url, "now": True}
        async with world.client.delete("/workers", json=body) as response:
            assert response.status == 200
        assert (await request).status == 200
        await leg.disconnected.wait()
        assert world.retries("decode", "lost") == 1
        await world.legs_ended()
