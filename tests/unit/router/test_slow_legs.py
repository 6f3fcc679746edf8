"""Legs that take too long, on virtual time: who is blamed, and when the next one is asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from kvferry.bench.virtual_time import run_virtually
from kvferry.router.api.openai import Endpoint
from kvferry.router.dispatch.dispatcher import Dispatcher
from kvferry.router.dispatch.prompt import Prompt
from kvferry.router.engines.pool import Pool, Role, Worker
from kvferry.router.ground.errors import RequestError
from kvferry.router.ground.settings import RouterSettings
from kvferry.router.legs.tasks import Call, PrefillAnswer
from kvferry.router.record.metrics import RouterMetrics
from tests.support.fake_engine import source

SECONDS = 5.0


class Engines:
    """Stand where the router's do: a leg takes what its engine takes, a decode leg after its prefill."""

    def __init__(self, takes: dict[str, float]) -> None:
        self.takes = takes
        self.asked: list[tuple[str, float]] = []
        self.prefilled: dict[str, asyncio.Event] = {}

    async def prefill(self, worker: Worker, call: Call) -> PrefillAnswer:
        transfer = self._ask(worker, call)
        with worker.leg(call.tokens):
            await asyncio.sleep(self.takes.get(worker.url, 0.1))
        self.prefilled.setdefault(transfer, asyncio.Event()).set()
        return PrefillAnswer(source(), None, source().to_params())

    async def answer(self, worker: Worker, call: Call) -> dict[str, Any]:
        transfer = self._ask(worker, call)
        with worker.leg(call.tokens):
            if transfer:
                await self.prefilled.setdefault(transfer, asyncio.Event()).wait()
            await asyncio.sleep(self.takes.get(worker.url, 0.1))
        return {"by": worker.url}

    async def release(self, worker: Worker, call: Call) -> None:
        """Nothing is held here."""

    def _ask(self, worker: Worker, call: Call) -> str:
        self.asked.append((worker.url, asyncio.get_running_loop().time()))
        assert call.body is not None
        transfer: str = json.loads(call.body).get("kv_transfer_params", {}).get("transfer_id", "")
        return transfer


class World:
    """Two engines of each role, all ready."""

    def __init__(self, takes: dict[str, float], **settings: Any) -> None:
        clock = asyncio.get_running_loop().time
        self.engines = Engines(takes)
        chosen = RouterSettings(
            prefill=("http://p0", "http://p1"),
            decode=("http://d0", "http://d1"),
            decode_policy="round_robin",
            affinity="off",
            **{"leg_timeout_seconds": SECONDS, **settings},
        )
        self.pool = Pool(chance=Random(0), changed=lambda worker: None, clock=clock)
        self.pool.add(Role.PREFILL, chosen.prefill, chosen.prefill_policy)
        self.pool.add(Role.DECODE, chosen.decode, chosen.decode_policy)
        for worker in self.pool.workers():
            self.pool.alive(worker)
            if worker.role is Role.PREFILL:
                self.pool.learn(worker, source())
        engines: Any = self.engines
        nobody: Any = None
        self.metrics = RouterMetrics()
        self.dispatcher = Dispatcher(chosen, self.pool, engines, nobody, self.metrics)
        self.start = clock()

    async def serve(self) -> tuple[Any, float]:
        """Who has answered, and after how long."""
        prompt = Prompt(
            endpoint=Endpoint.COMPLETIONS,
            body={"prompt": "a"},
            n=1,
            stream=False,
            whole_prompt=False,
            request_id="r",
            headers={},
        )
        served = await self.dispatcher.serve(prompt)
        served.finish()
        served.close()
        assert isinstance(served.decode, dict)
        return served.decode["by"], asyncio.get_running_loop().time() - self.start

    def retries(self, leg: str) -> float:
        labels = {"leg": leg, "reason": "slow"}
        return self.metrics.registry.get_sample_value("kvferry_router_retries_total", labels) or 0.0

    def urls(self) -> list[str]:
        return [url for url, _ in self.engines.asked]


def virtually(test: Callable[..., Any]) -> Callable[..., None]:
    def run(way: str) -> None:
        run_virtually(test(way))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return pytest.mark.parametrize("way", ["eager", "late", "pull"])(run)


def dispatching(way: str) -> dict[str, Any]:
    return {"transfer_mode": "pull"} if way == "pull" else {"decode_dispatch": way}


@virtually
async def test_a_slow_prefill_engine_is_left_for_another_and_nobody_else_is_blamed(way: str) -> None:
    """The decode leg of a push waits as long as the prefill leg, and is not what is late."""
    world = World({"http://p0": 3600.0}, **dispatching(way))
    _, seconds = await world.serve()
    assert seconds == pytest.approx(SECONDS + 0.2)
    assert (world.retries("prefill"), world.retries("decode")) == (1.0, 0.0)
    assert world.urls().count("http://p0") == world.urls().count("http://p1") == 1


@virtually
async def test_a_slow_decode_engines_time_begins_when_prefill_has_ended(way: str) -> None:
    world = World({"http://p0": SECONDS - 1, "http://d0": 3600.0}, **dispatching(way))
    by, seconds = await world.serve()
    assert by == "http://d1"
    assert seconds == pytest.approx(SECONDS - 1 + SECONDS + 0.2)
    assert (world.retries("prefill"), world.retries("decode")) == (0.0, 1.0)


@virtually
async def test_when_every_engine_is_slow_the_client_is_told_in_a_bounded_time(way: str) -> None:
    world = World({"http://d0": 3600.0, "http://d1": 3600.0}, retries=1, **dispatching(way))
    with pytest.raises(RequestError) as caught:
        await world.serve()
    assert (caught.value.status, caught.value.cause.value) == (504, "decode_slow")
    assert asyncio.get_running_loop().time() - world.start == pytest.approx(2 * (SECONDS + 0.1), rel=0.02)
    assert not any(worker.legs or worker.waits or worker.tokens for worker in world.pool.workers())


@virtually
async def test_without_a_bound_a_leg_has_as_long_as_its_request(way: str) -> None:
    world = World({"http://p0": 3600.0}, leg_timeout_seconds=0.0, **dispatching(way))
    _, seconds = await world.serve()
    assert seconds == pytest.approx(3600.1, abs=0.2)
