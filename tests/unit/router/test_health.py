"""Checks and probes: who is ready, and whose coordinates are known."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from kvferry.handoff import PrefillParams, parse_request
from kvferry.router.engines.pool import Role
from kvferry.router.engines.probe import ProbeError, probe, probe_body
from kvferry.router.ground.settings import RouterSettings
from kvferry.router.server import RouterServer
from tests.support.fake_engine import FakeEngine, Step, source
from tests.support.router_world import router_world, until


async def test_a_probe_learns_the_coordinates_and_asks_to_hold_nothing() -> None:
    async with FakeEngine(source("e", "i", 7)) as engine, aiohttp.ClientSession() as session:
        assert (await probe(session, engine.url, {})).engine == "e"
        (asked,) = engine.probes
    assert asked.body["model"] == "tiny"
    assert asked.body["max_tokens"] == 1
    assert asked.params["probe"] is True
    assert isinstance(parse_request(asked.params), PrefillParams)


def test_every_probe_has_a_transfer_of_its_own() -> None:
    ids = {probe_body("m")["kv_transfer_params"]["transfer_id"] for _ in range(3)}
    assert len(ids) == 3


@contextlib.asynccontextmanager
async def engine_that_says(models: object, answer: web.Response | object) -> AsyncIterator[str]:
    async def tell_models(request: web.Request) -> web.Response:
        return web.json_response(models)

    async def tell_answer(request: web.Request) -> web.Response:
        return answer() if callable(answer) else web.json_response(answer)

    app = web.Application()
    app.router.add_get("/v1/models", tell_models)
    app.router.add_post("/v1/completions", tell_answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


MODELS = {"data": [{"id": "tiny"}]}


@pytest.mark.parametrize(
    ("models", "answer", "problem", "unsuitable"),
    [
        ({}, {}, "names no model", False),
        ([], {}, "not an object", False),
        ({"data": [5]}, {}, "names no model", False),
        (MODELS, {}, "start it with a KV connector", True),
        (MODELS, {"kv_transfer_params": None}, "start it with a KV connector", True),
        (MODELS, {"kv_transfer_params": 5}, "must be an object", True),
        (MODELS, {"kv_transfer_params": {"remote_engine_id": "e"}}, "remote_host", True),
        (MODELS, lambda: web.Response(text="<html>"), "not JSON", False),
        (MODELS, lambda: web.Response(text="[" * 100_000), "not JSON", False),
        (MODELS, lambda: web.Response(text=" " * (2 << 20)), "too long", False),
        (MODELS, lambda: web.json_response({"error": {"message": "busy"}}, status=503), "503: busy", False),
        (MODELS, lambda: web.Response(status=401), "answered 401", True),
    ],
)
async def test_a_probe_that_learns_nothing_says_why(
    models: object, answer: object, problem: str, unsuitable: bool
) -> None:
    """X02, S01: an engine's answer is hostile until validated."""
    async with engine_that_says(models, answer) as url, aiohttp.ClientSession() as session:
        with pytest.raises(ProbeError, match=problem) as caught:
            await probe(session, url, {})
    assert caught.value.unsuitable is unsuitable


@pytest.mark.parametrize(
    ("key", "value"),
    [("tp_size", 10**9), ("tp_size", -1), ("pp_size", 0), ("remote_port", "x"), ("remote_port", 70000)],
)
async def test_coordinates_are_checked_before_they_are_used(key: str, value: object) -> None:
    """S01."""
    answer = {"kv_transfer_params": source().to_params() | {key: value}}
    async with engine_that_says(MODELS, answer) as url, aiohttp.ClientSession() as session:
        with pytest.raises(ProbeError, match=key):
            await probe(session, url, {})


async def test_a_prefill_engine_without_connector_is_up_but_not_ready_and_not_asked_again() -> None:
    async with FakeEngine() as prefill, FakeEngine() as decode:
        settings = RouterSettings(
            prefill=(prefill.url,), decode=(decode.url,), health_interval_seconds=3600.0
        )
        async with RouterServer(settings) as router:
            (worker,) = router.pool.workers(Role.PREFILL)
            for _ in range(3):
                await router.monitor.check(worker)
            assert worker.up
            assert not worker.ready
            assert "KV connector" in worker.problem
            assert len(prefill.probes) == 1


async def test_a_loading_prefill_engine_becomes_ready_by_itself() -> None:
    """X10: the checks go on; nobody has to ask."""
    async with FakeEngine(source()) as prefill, FakeEngine() as decode:
        prefill.healthy = False
        settings = RouterSettings(prefill=(prefill.url,), decode=(decode.url,), health_interval_seconds=0.01)
        async with RouterServer(settings) as router:
            (worker,) = router.pool.workers(Role.PREFILL)
            await until(lambda: worker.problem.endswith("503"))
            prefill.healthy = True
            await until(lambda: router.pool.ready)
            assert len(prefill.probes) == 1


async def test_an_engine_that_was_down_is_asked_for_its_identity_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="kvferry.router.engines.health")
    async with router_world() as world:
        await world.p.stop()
        await world.check()
        (worker,) = world.router.pool.workers(Role.PREFILL)
        assert worker.source is None
        assert f"prefill {worker.url} is not ready: cannot be reached: " in caplog.text
        world.p.identity = source("engine-p0", incarnation="second")
        await world.p.start()
        await world.check()
        assert worker.source.incarnation == "second"


async def test_checks_of_one_worker_share_one_probe() -> None:
    async with FakeEngine(source()) as prefill, FakeEngine() as decode:
        settings = RouterSettings(
            prefill=(prefill.url,), decode=(decode.url,), health_interval_seconds=3600.0
        )
        async with RouterServer(settings) as router:
            (worker,) = router.pool.workers(Role.PREFILL)
            await asyncio.gather(*[router.monitor.check(worker) for _ in range(5)])
            assert len(prefill.probes) == 1


async def test_a_slow_health_check_takes_a_worker_down_when_it_happens_twice() -> None:
    async with router_world(health_timeout_seconds=0.3) as world:
        world.d.stuck = asyncio.Event()
        (worker,) = world.router.pool.workers(Role.DECODE)
        await world.router.monitor.check(worker)
        assert worker.ready
        await world.router.monitor.check(worker)
        assert not worker.ready
        assert "in time" in worker.problem
        world.d.stuck.set()
        await world.router.monitor.check(worker)
        assert worker.ready


async def test_a_request_waits_for_a_hanging_engine_once_and_for_a_bounded_time() -> None:
    """No prefill engine is ready and the only one does not answer: the second request does not wait."""
    async with router_world(recheck_seconds=0.05, health_timeout_seconds=3600.0) as world:
        (worker,) = world.router.pool.workers(Role.PREFILL)
        world.router.pool.down(worker, "planned")
        world.p.stuck = asyncio.Event()
        for _ in range(2):
            async with world.complete() as response:
                assert response.status == 200
        assert worker.hanging
        assert world.p.health_checks == 2
        assert world.count("local", "ok", "no_prefill") == 2
        world.p.stuck.set()
        await world.check()
        assert worker.ready


async def test_no_request_waits_for_an_engine_that_is_known_to_hang() -> None:
    """A wait would be longer than the test's time-out."""
    async with router_world(recheck_seconds=3600.0, health_timeout_seconds=3600.0) as world:
        (worker,) = world.router.pool.workers(Role.PREFILL)
        world.router.pool.down(worker, "planned")
        world.p.stuck = asyncio.Event()
        worker.hanging = True
        async with world.complete() as response:
            assert response.status == 200
        assert world.count("local", "ok", "no_prefill") == 1


async def test_the_first_request_finds_an_engine_that_no_check_has_seen_yet() -> None:
    async with router_world() as world:
        (worker,) = world.router.pool.workers(Role.PREFILL)
        world.router.pool.down(worker, "planned")
        world.d.plan(Step())
        async with world.complete() as response:
            assert response.status == 200
        assert world.count("push", "ok", "none") == 1
