"""The fault matrix: each leg fails in each way, in each way of dispatching, and clients leave at each stage.

Goal: the client's status and cause, the end of the other leg, the retry or its absence, and that nothing
stays taken. Method: two prefill and two decode engines, the first of the failing role is planned to fail.
Every bound of the router is an hour unless a cell is about it: what ends, ends because the router reacts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest

from kvferry.router.engines.pool import Role, Worker
from tests.support.fake_engine import FakeEngine, Received, Step, failing, source
from tests.support.router_world import RouterWorld, events_of, router_world, until

Way = Literal["eager", "late", "pull"]
WAYS: tuple[Way, ...] = ("eager", "late", "pull")
HOUR = 3600.0
SLOW_SECONDS = 0.1
"""A busy machine may make a good leg slow, too: cells about time-outs count no legs and have many retries."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """How an engine fails one request, and what the router makes of it."""

    step: Callable[[], Step] | None = None
    """None: the engine is gone before the request comes."""
    slow: bool = False
    """Only a time-out can tell."""
    reason: str | None = None
    """Of the retry; None when there is none."""
    begun: bool = True
    """Whether the engine may have begun."""
    status: int = 200


FAULTS = {
    "refuses": Fault(reason="refused", begun=False),
    "400": Fault(step=lambda: failing(400, "too long"), status=400),
    "500": Fault(step=lambda: failing(500), reason="error"),
    "503": Fault(step=lambda: failing(503), reason="error", begun=False),
    "hangs before headers": Fault(step=lambda: Step(gate=asyncio.Event()), slow=True, reason="slow"),
    "hangs in its answer": Fault(step=lambda: Step(half=asyncio.Event()), slow=True, reason="slow"),
    "closes": Fault(step=lambda: Step(close=True), reason="lost"),
    "answers nonsense": Fault(step=lambda: Step(body=b"[1"), reason="error"),
}


@asynccontextmanager
async def matrix_world(way: Way, **settings: Any) -> AsyncIterator[RouterWorld]:
    chosen: dict[str, Any] = {
        "transfer_mode": "pull" if way == "pull" else "push",
        "decode_dispatch": "late" if way == "late" else "eager",
        "decode_policy": "round_robin",
        "request_timeout_seconds": HOUR,
        "decode_recovery_seconds": HOUR,
        "prefill_linger_seconds": HOUR,
    }
    async with router_world(prefill=2, decode=2, **(chosen | settings)) as world:
        if way == "late":
            for worker in world.router.pool.workers(Role.PREFILL):
                # Decode legs are held back until prefill has ended.
                for _ in range(3):
                    worker.queue.times.note(1, HOUR)
        yield world


def patience(fault: Fault) -> dict[str, Any]:
    return {"leg_timeout_seconds": SLOW_SECONDS, "retries": 50} if fault.slow else {}


async def nothing_stays(world: RouterWorld) -> None:
    """Every leg is over at the router and at the engines, and every place is given back."""
    for engine in world.prefill + world.decode:
        for request in engine.requests:
            if not request.finished.is_set():
                await request.disconnected.wait()
    workers = world.router.pool.workers()
    await until(lambda: not any(worker.legs or worker.waits or worker.tokens for worker in workers))
    await until(lambda: not in_flight(world))
    await until(lambda: not any(worker.queue._waiting for worker in workers))


def in_flight(world: RouterWorld) -> float:
    return world.router.metrics.registry.get_sample_value("kvferry_router_requests_in_flight") or 0.0


def asked(engines: list[FakeEngine]) -> list[int]:
    return [len(engine.requests) for engine in engines]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FAULTS)
async def test_a_prefill_leg_fails(name: str, way: Way) -> None:
    """X04, X05, X07, X09, X20: the decode leg, if there is one, ends; another prefill engine is asked."""
    fault = FAULTS[name]
    async with matrix_world(way, **patience(fault)) as world:
        if fault.step is not None:
            world.p.plan(fault.step())
        else:
            await world.p.stop()
        world.d.plan(Step(gate=asyncio.Event()) if way == "eager" else Step())
        async with world.complete() as response:
            assert response.status == fault.status
            if fault.status != 200:
                assert fault.step is not None
                assert await response.read() == fault.step().body
        await nothing_stays(world)
        if fault.slow:
            assert world.retries("prefill", "slow") >= 1
            return
        retried = fault.reason is not None
        assert asked(world.prefill) == [int(fault.step is not None), int(retried)]
        legs = sum(asked(world.decode))
        # A refused connection may be known before the decode leg has arrived.
        assert legs == (way == "eager") + retried or (fault.step is None and legs == 1)
        ids = {request.params["transfer_id"] for engine in world.decode for request in engine.requests}
        assert len(ids) == legs
        if fault.reason is not None:
            assert world.retries("prefill", fault.reason) == 1
            assert world.count("pull" if way == "pull" else "push", "ok", "none") == 1
        else:
            assert world.count("none", "error", "prefill_rejected") == 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FAULTS)
async def test_a_decode_leg_fails(name: str, way: Way) -> None:
    """X04, X09: the prefill leg ends, and both are sent anew; a pull keeps what is prefilled if it can."""
    fault = FAULTS[name]
    async with matrix_world(way, **patience(fault)) as world:
        if fault.step is not None:
            world.d.plan(fault.step())
        else:
            await world.d.stop()
        if way == "eager" and not fault.slow:
            # Of a hanging decode leg nothing is known before prefill has ended.
            world.p.plan(Step(gate=asyncio.Event()))
        async with world.complete() as response:
            assert response.status == fault.status
            if fault.status != 200:
                assert fault.step is not None
                assert await response.read() == fault.step().body
        await nothing_stays(world)
        if fault.slow:
            assert world.retries("decode", "slow") >= 1
            return
        retried = fault.reason is not None
        assert asked(world.decode) == [int(fault.step is not None), int(retried)]
        kept = way == "pull" and not fault.begun
        legs = sum(asked(world.prefill))
        assert legs == 1 + (retried and not kept) or (fault.step is None and way == "eager" and legs == 1)
        if fault.reason is not None:
            assert world.retries("decode", fault.reason) == 1
            assert world.count("pull" if way == "pull" else "push", "ok", "none") == 1
        else:
            assert world.count("none", "error", "decode_rejected") == 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("leg", Role)
async def test_an_engine_restarts_with_another_id_under_its_leg(leg: Role, way: Way) -> None:
    """The engine dies with the leg and is back, as another incarnation, before the legs are sent anew."""
    async with matrix_world(way, request_timeout_seconds=HOUR) as world:
        failing_engine = world.p if leg is Role.PREFILL else world.d
        failing_engine.plan(Step(gate=asyncio.Event()))
        if way == "eager":
            other = world.d if leg is Role.PREFILL else world.p
            other.plan(Step(gate=asyncio.Event()))
        async with asyncio.TaskGroup() as group:
            request = group.create_task(world.complete().__aenter__())
            await failing_engine.received(1)
            await failing_engine.stop()
            if leg is Role.PREFILL:
                failing_engine.identity = source("engine-p0", incarnation="second")
            await failing_engine.start()
        assert request.result().status == 200
        await nothing_stays(world)
        assert world.retries(leg.value, "lost") == 1
        await world.check()
        for _ in range(2):
            async with world.complete() as response:
                assert response.status == 200
        assert world.retries(leg.value, "lost") == 1
        assert world.retries("prefill", "identity") == 0
        await nothing_stays(world)


@pytest.mark.parametrize("way", WAYS)
async def test_an_answer_shows_another_incarnation(way: Way) -> None:
    """A restart that no check has seen: only a decode leg that was told the old coordinates is sent anew."""
    async with matrix_world(way) as world:
        world.p.identity = source("engine-p0", incarnation="second")
        world.d.plan(Step(gate=asyncio.Event()) if way == "eager" else Step())
        async with world.complete() as response:
            assert response.status == 200
        assert world.retries("prefill", "identity") == (way == "eager")
        told = [request for engine in world.decode for request in engine.requests][-1]
        assert told.params["kvferry_incarnation"] == ("first" if way == "eager" else "second")
        await nothing_stays(world)


@pytest.mark.parametrize("end", ["closes", "ends", "error", "hangs", "engine silent"])
async def test_a_stream_fails_after_its_first_byte(end: str) -> None:
    """X04: no retry, the cause as the last event, and the prefill leg that is still open ends."""
    async with matrix_world("eager") as world:
        hangs = {"closes": {"break_after": 1}, "ends": {"end_after": 1}, "error": {"error_after": 1}}
        seen = asyncio.Event()
        world.p.plan(Step(gate=asyncio.Event()))
        world.d.plan(Step(after_first=seen, **hangs.get(end, {})))
        async with world.complete(stream=True) as response:
            assert response.status == 200
            assert b" one" in await response.content.readuntil(b"\n\n")
            if end in hangs:
                seen.set()
            if end == "hangs":
                assert len(world.router.api.deadlines) == 1
                world.router.api.deadlines.expire()
            if end == "engine silent":
                await fallen_silent(world, world.d, Role.DECODE)
            last = (await events_of(response))[-1]
        cause = {"error": "decode_error", "hangs": "timeout"}.get(end, "decode_lost")
        assert last["error"]["kvferry"] == cause
        await nothing_stays(world)
        assert world.decode[1].requests == world.prefill[1].requests == []
        assert world.count("push", "error", cause) == 1


async def fallen_silent(world: RouterWorld, engine: FakeEngine, role: Role) -> None:
    """Let an engine's health check go unanswered until the router gives up what waits there."""
    worker = falling_silent(world, engine, role)
    while worker.waits or worker.legs:
        await world.router.monitor.check(worker)


def falling_silent(world: RouterWorld, engine: FakeEngine, role: Role) -> Worker:
    """From now on its health check is not answered, and the router has little patience."""
    engine.stuck = asyncio.Event()
    monitor = world.router.monitor
    monitor._settings = replace(monitor._settings, health_timeout_seconds=0.01, silence_seconds=0.015)
    return next(each for each in world.router.pool.workers(role) if each.url == engine.url)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("leg", Role)
async def test_a_leg_at_an_engine_that_has_fallen_silent_is_sent_anew(leg: Role, way: Way) -> None:
    """X04: the process hangs, its connections stay open, and no deadline is near."""
    async with matrix_world(way) as world:
        silent = world.p if leg is Role.PREFILL else world.d
        silent.plan(Step(gate=asyncio.Event()))
        if way == "eager" and leg is Role.PREFILL:
            world.d.plan(Step(gate=asyncio.Event()))
        async with asyncio.TaskGroup() as group:
            request = group.create_task(world.complete().__aenter__())
            await silent.received(1)
            await fallen_silent(world, silent, leg)
        assert request.result().status == 200
        assert world.retries(leg.value, "lost") == 1
        await nothing_stays(world)


@pytest.mark.parametrize("way", WAYS)
async def test_a_silent_engine_whose_stream_goes_on_keeps_it(way: Way) -> None:
    """A health check that hangs says less than an answer that comes."""
    async with matrix_world(way) as world:
        more = asyncio.Event()
        world.d.plan(Step(after_first=more))
        async with world.complete(stream=True) as response:
            await response.content.readuntil(b"\n\n")
            worker = falling_silent(world, world.d, Role.DECODE)
            await world.router.monitor.check(worker)
            (leg,) = worker.legs
            assert leg.stream is not None
            # Something has come since the engine was found silent.
            leg.stream.reads += 1
            while not worker.problem:
                await world.router.monitor.check(worker)
            more.set()
            assert (await events_of(response))[-1] == "[DONE]"
        await nothing_stays(world)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", ["prefill", "decode", "stream"])
async def test_a_client_leaves(stage: str, way: Way) -> None:
    """P63, X04: both legs end, whatever they are at."""
    async with matrix_world(way) as world:
        if stage == "prefill":
            world.p.plan(Step(gate=asyncio.Event()))
        world.d.plan(Step(after_first=asyncio.Event()) if stage == "stream" else Step(gate=asyncio.Event()))
        request = asyncio.create_task(world.complete(stream=True).__aenter__())
        await world.p.received(1)
        if stage != "prefill" or way == "eager":
            await world.d.received(1)
        if stage == "stream":
            response = await request
            await response.content.readuntil(b"\n\n")
            response.close()
        else:
            request.cancel()
        await nothing_stays(world)
        assert sum(asked(world.decode)) == (0 if stage == "prefill" and way != "eager" else 1)
        path = {"pull": "pull"}.get(way, "push") if stage == "stream" else "none"
        assert world.count(path, "cancelled", "client_gone") == 1


async def test_a_client_leaves_the_queue() -> None:
    async with matrix_world("eager", concurrent_requests_max=1) as world:
        world.d.plan(Step(gate=asyncio.Event()))
        served = asyncio.create_task(world.complete().__aenter__())
        await world.d.received(1)
        waiting = asyncio.create_task(world.complete().__aenter__())
        queued = world.router.metrics.registry.get_sample_value
        await until(lambda: queued("kvferry_router_requests_queued"))
        waiting.cancel()
        await until(lambda: not queued("kvferry_router_requests_queued"))
        served.cancel()
        await nothing_stays(world)
        assert sum(asked(world.prefill)) == 1


async def test_a_client_leaves_while_engines_are_looked_for() -> None:
    async with matrix_world("eager", recheck_seconds=HOUR, health_timeout_seconds=HOUR) as world:
        for worker in world.router.pool.workers(Role.DECODE):
            world.router.pool.down(worker, "planned")
        for engine in world.decode:
            engine.stuck = asyncio.Event()
        checks = sum(engine.health_checks for engine in world.decode)
        request = asyncio.create_task(world.complete().__aenter__())
        await until(lambda: sum(engine.health_checks for engine in world.decode) == checks + 2)
        request.cancel()
        await nothing_stays(world)
        assert asked(world.prefill) == [0, 0]


async def test_a_client_leaves_while_a_retry_backs_off() -> None:
    async with router_world(retry_backoff_seconds=HOUR, request_timeout_seconds=HOUR) as world:
        world.d.plan(failing(500))
        request = asyncio.create_task(world.complete().__aenter__())
        await until(lambda: world.retries("decode", "error"))
        request.cancel()
        await nothing_stays(world)
        assert asked(world.decode) == [1]


@pytest.mark.parametrize("way", WAYS)
async def test_without_a_retry_left_the_client_is_told(way: Way) -> None:
    async with matrix_world(way, retries=0) as world:
        world.d.plan(failing(503, "busy"))
        async with world.complete() as response:
            assert response.status == 503
            assert (await response.json())["error"]["kvferry"] == "decode_error"
        assert world.decode[1].requests == []
        await nothing_stays(world)


async def test_when_the_routers_budget_is_spent_nothing_is_retried() -> None:
    """A fleet that fails is not asked three times as much."""
    async with matrix_world("eager", retry_budget=0.0) as world:
        budget = world.router.dispatcher.budget
        while budget.allows:
            budget.spend()
        world.d.plan(failing(500))
        async with world.complete() as response:
            assert response.status == 500
        assert sum(asked(world.decode)) == 1
        denied = world.router.metrics.registry.get_sample_value("kvferry_router_retries_denied_total")
        assert denied == 1
        await nothing_stays(world)


def first_request(engines: list[FakeEngine]) -> Received:
    return next(request for engine in engines for request in engine.requests)


async def test_a_short_prompt_is_prefilled_where_it_is_decoded() -> None:
    async with matrix_world("eager", local_prefill_below=100) as world:
        async with world.complete(prompt="short") as response:
            assert response.status == 200
        assert asked(world.prefill) == [0, 0]
        assert "kv_transfer_params" not in first_request(world.decode).body
        assert world.count("local", "ok", "short_prompt") == 1
        async with world.complete(prompt="x" * 400) as response:
            assert response.status == 200
        assert sum(asked(world.prefill)) == 1


async def test_late_legs_are_sent_at_once_while_nothing_is_known_of_the_queue() -> None:
    async with router_world(decode_dispatch="late", request_timeout_seconds=HOUR) as world:
        world.p.plan(Step(gate=asyncio.Event()))
        async with world.complete() as response:
            assert response.status == 200
        assert asked(world.decode) == [1]


async def test_a_late_leg_is_sent_when_prefill_ends_before_it_was_expected_to() -> None:
    async with matrix_world("late") as world:
        prefilled = asyncio.Event()
        world.p.plan(Step(gate=prefilled))
        request = asyncio.create_task(world.complete().__aenter__())
        await world.p.received(1)
        assert asked(world.decode) == [0, 0]
        prefilled.set()
        assert (await request).status == 200
        assert sum(asked(world.decode)) == 1
        held = world.router.metrics.registry.get_sample_value
        assert held("kvferry_router_decode_held_block_seconds_total") == 0.0


async def test_a_late_leg_is_sent_before_prefill_is_expected_to_end() -> None:
    """So that the decode engine has room by then, and what can be overlapped is."""
    async with matrix_world("late") as world:
        for worker in world.router.pool.workers(Role.PREFILL):
            worker.queue.forget()
            for _ in range(3):
                worker.queue.times.note(1, 0.1)
        never = asyncio.Event()
        for engine in world.prefill:
            engine.plan(Step(gate=never))
        request = asyncio.create_task(world.complete().__aenter__())
        await until(lambda: sum(asked(world.decode)) == 1)
        assert (await request).status == 200
        assert sum(asked(world.prefill)) == 1


async def test_late_with_no_decode_engine_computes_nothing() -> None:
    async with matrix_world("late") as world:
        for engine in world.decode:
            await engine.stop()
        await world.check()
        async with world.complete() as response:
            assert response.status == 503
        assert asked(world.prefill) == [0, 0]


async def test_what_was_chosen_together_is_spread() -> None:
    """Requests that come in one moment know of each other before any leg is open."""
    async with matrix_world("eager", decode_policy="power_of_two") as world:
        gate = asyncio.Event()
        for engine in world.decode:
            engine.plan(*[Step(gate=gate)] * 10)
        requests = [asyncio.create_task(world.complete().__aenter__()) for _ in range(10)]
        await until(lambda: sum(asked(world.decode)) == 10)
        assert asked(world.decode) == [5, 5]
        gate.set()
        for request in requests:
            assert (await request).status == 200
        await nothing_stays(world)
