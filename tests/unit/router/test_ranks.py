"""Data-parallel ranks as workers of their own, and what else an engine tells of itself."""

from __future__ import annotations

import pytest

from kvferry.router.engines.pool import Model, Role
from tests.support.fake_engine import FakeEngine
from tests.support.router_world import RouterWorld, router_world, until


async def with_ranks(world: RouterWorld, engine: FakeEngine, ranks: int) -> None:
    """The engine was down and is back with so many ranks."""
    engine.ranks = ranks
    pool = world.router.pool
    for worker in pool.workers():
        if worker.url == engine.url:
            pool.down(worker, "planned")
    await world.check()
    await world.check()
    await until(lambda: all(worker.ready for worker in pool.workers()))


def names(world: RouterWorld, role: Role) -> list[str]:
    return [worker.name for worker in world.router.pool.workers(role)]


async def test_each_rank_is_a_worker_with_its_own_coordinates() -> None:
    async with router_world() as world:
        await with_ranks(world, world.p, 2)
        workers = world.router.pool.workers(Role.PREFILL)
        assert [worker.name for worker in workers] == [f"{world.p.url}@0", f"{world.p.url}@1"]
        assert [worker.source.engine for worker in workers if worker.source] == [
            "engine-p0_dp0",
            "engine-p0_dp1",
        ]
        assert [worker.source.port for worker in workers if worker.source] == [5600, 5601]
        for _ in range(4):
            async with world.complete() as response:
                assert response.status == 200
        assert sorted(request.rank or 0 for request in world.p.requests) == [0, 0, 1, 1]
        # The decode leg is told the coordinates of the very rank that prefills.
        for prefill, decode in zip(world.p.requests, world.d.requests, strict=True):
            assert decode.params["remote_engine_id"] == f"engine-p0_dp{prefill.rank}"
        up = world.router.metrics.registry.get_sample_value
        assert up("kvferry_router_worker_up", {"role": "prefill", "worker": f"{world.p.url}@1"}) == 1.0
        assert up("kvferry_router_worker_up", {"role": "prefill", "worker": world.p.url}) is None


async def test_decode_ranks_are_chosen_by_the_router_too() -> None:
    async with router_world() as world:
        await with_ranks(world, world.d, 3)
        for _ in range(3):
            async with world.complete() as response:
                assert response.status == 200
        assert {request.rank for request in world.d.requests} == {0, 1, 2}


async def test_the_rank_that_has_decoded_is_asked_what_it_keeps() -> None:
    async with router_world() as world:
        await with_ranks(world, world.d, 3)
        for number in range(3):
            async with world.complete(stream=True, prompt=f"{number} times upon " * 60) as response:
                await response.read()
            await until(lambda: not len(world.router.dispatcher.background))
        asked = [question.rank for question in world.d.questions]
        assert asked == [request.rank for request in world.d.requests]
        assert len(set(asked)) > 1


async def test_an_engine_that_comes_back_with_fewer_ranks_loses_workers() -> None:
    """X16."""
    async with router_world() as world:
        await with_ranks(world, world.d, 3)
        await with_ranks(world, world.d, 2)
        assert names(world, Role.DECODE) == [f"{world.d.url}@0", f"{world.d.url}@1"]
        await with_ranks(world, world.d, 1)
        assert names(world, Role.DECODE) == [world.d.url]


async def test_a_rank_that_the_engine_does_not_have_any_more_is_rerouted() -> None:
    """X16: rank 9 of 8: another one is asked, and the client sees nothing of it."""
    async with router_world() as world:
        await with_ranks(world, world.d, 2)
        world.d.ranks = 1
        for _ in range(2):
            async with world.complete() as response:
                assert response.status == 200
        assert world.retries("decode", "error") == 1
        gone = world.router.pool.workers(Role.DECODE)[1]
        assert "out of range" in gone.problem


async def test_a_clients_own_rank_reaches_no_engine() -> None:
    """X16: ranks are the router's affair, for only it knows what there is."""
    async with router_world() as world:
        headers = {"X-data-parallel-rank": "9"}
        async with world.client.post("/v1/completions", json={"prompt": "a"}, headers=headers) as response:
            assert response.status == 200
        assert world.p.requests[0].rank is None
        assert world.d.requests[0].rank is None


async def test_ranks_can_be_left_to_the_engine() -> None:
    async with router_world(data_parallel=False) as world:
        await with_ranks(world, world.p, 2)
        assert names(world, Role.PREFILL) == [world.p.url]


async def test_an_engine_tells_its_models_its_limits_and_its_version() -> None:
    async with router_world() as world:
        world.d.models, world.d.length_max, world.d.version = ["tiny", "tiny-lora"], 4096, "0.32.0"
        (worker,) = world.router.pool.workers(Role.DECODE)
        world.router.pool.down(worker, "planned")
        await world.check()
        assert worker.models == (Model("tiny", 4096), Model("tiny-lora", 4096))
        assert worker.version == "0.32.0"


async def test_limits_that_differ_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """X05."""
    async with router_world() as world:
        world.p.length_max, world.d.length_max = 2048, 4096
        for _ in range(2):
            for worker in world.router.pool.workers():
                world.router.pool.down(worker, "planned")
            await world.check()
        told = [record.getMessage() for record in caplog.records if "max_model_len" in record.getMessage()]
        assert len(told) == 1
        assert "2048, 4096" in told[0]


async def test_a_request_goes_to_engines_that_serve_its_model() -> None:
    async with router_world(prefill=2, decode=2) as world:
        for engine, name in zip(world.prefill + world.decode, ["a", "b"] * 2, strict=True):
            engine.models = [name]
        for worker in world.router.pool.workers():
            world.router.pool.down(worker, "planned")
        await world.check()
        assert world.router.pool.ready
        for name in ("a", "b", "b"):
            async with world.complete(model=name) as response:
                assert response.status == 200
        assert [len(engine.requests) for engine in world.prefill + world.decode] == [1, 2, 1, 2]


async def test_engines_of_different_models_cannot_serve_together() -> None:
    """X10: a prefill and a decode engine are up, but no prompt could be handed over."""
    async with router_world() as world:
        world.p.models = ["other"]
        (worker,) = world.router.pool.workers(Role.PREFILL)
        world.router.pool.down(worker, "planned")
        await world.check()
        assert worker.ready
        assert not world.router.pool.ready
        async with world.client.get("/readiness") as response:
            assert response.status == 503
