"""`--transfer-mode auto`: what the router measures, and the modes that come of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvferry.router.engines.late_choice import LateChoice
from kvferry.router.engines.pool import Model, Role
from kvferry.router.ground.settings import RouterMode
from tests.support.fake_engine import Step, failing
from tests.support.router_world import RouterWorld, router_world, until

AUTO: dict[str, Any] = {"transfer_mode": "auto", "decode_policy": "least_wait"}


def measured(world: RouterWorld, *seconds: float, gain: float = 0.0) -> None:
    """The decode engines are known to add so much to the first token, and late choices to gain so much."""
    pool = world.router.pool
    for worker, wait in zip(pool.workers(Role.DECODE), seconds, strict=True):
        worker.pace.note(wait, pool.clock())
    pool.late_choice = LateChoice()
    pool.late_choice.note(gain, pool.clock())


async def served(world: RouterWorld, **fields: Any) -> None:
    async with world.complete(**fields) as response:
        assert response.status == 200
        await response.read()


async def test_with_one_decode_engine_every_transfer_is_pushed() -> None:
    async with router_world(**AUTO) as world:
        await served(world)
        assert world.transfers("push", "one_decode") == 1
        assert world.d.requests[0].params["transfer_mode"] == "push"
        assert world.p.requests[0].params["transfer_mode"] == "push"


async def test_engines_that_nobody_knows_are_pulled_to_until_streams_have_shown_them() -> None:
    async with router_world(decode=2, **AUTO) as world:
        await served(world, stream=True)
        await served(world, stream=True)
        assert [len(engine.requests) for engine in world.decode] == [1, 1]
        assert world.transfers("pull", "unknown") == 2
        for engine in world.router.pool.workers(Role.DECODE):
            engine.pace.forget()
        measured(world, 0.01, 0.01)
        await served(world, stream=True)
        assert world.transfers("push", "overlap") == 1
        assert world.count("pull", "ok", "none") == 2
        assert world.count("push", "ok", "none") == 1


async def test_where_late_choices_have_gained_it_is_pull() -> None:
    async with router_world(decode=2, **AUTO) as world:
        measured(world, 0.001, 0.001, gain=5.0)
        await served(world)
        assert world.transfers("pull", "late") == 1
        assert world.p.requests[0].params["transfer_mode"] == "pull"


async def test_engines_that_merely_differ_are_pushed_to() -> None:
    """The early choice takes the better one, too."""
    async with router_world(decode=2, **AUTO) as world:
        measured(world, 5.0, 0.001)
        await served(world)
        assert world.transfers("push", "overlap") == 1
        assert [len(engine.requests) for engine in world.decode] == [0, 1]


async def test_only_engines_of_the_prompts_model_are_a_choice() -> None:
    async with router_world(decode=2, **AUTO) as world:
        measured(world, 0.001, 0.001, gain=5.0)
        other = world.router.pool.workers(Role.DECODE)[1]
        other.models = (Model("another"),)
        await served(world)
        assert world.transfers("push", "one_decode") == 1


async def test_a_session_that_has_settled_its_engine_is_pushed() -> None:
    """By its name, as one that goes on by its last turn; see `test_affinity`."""
    async with router_world(decode=2, affinity="session", **AUTO) as world:
        measured(world, 0.001, 0.001, gain=5.0)
        body = {"model": "tiny", "prompt": "hello"}
        for _ in range(2):
            headers = {"X-Session-Id": "mine"}
            async with world.client.post("/v1/completions", json=body, headers=headers) as response:
                assert response.status == 200
        assert world.transfers("push", "affinity") == 2
        assert sorted(len(engine.requests) for engine in world.decode) == [0, 2]


async def test_a_prompt_so_long_that_overlap_is_worth_more_is_pushed() -> None:
    async with router_world(decode=2, **AUTO) as world:
        measured(world, 0.01, 0.01, gain=0.03)
        await served(world, prompt=[7] * 20_000)
        assert world.transfers("push", "overlap") == 1
        measured(world, 0.01, 0.01, gain=0.03)
        await served(world, prompt=[7] * 20)
        assert world.transfers("pull", "late") == 1


@pytest.mark.parametrize("mode", ["push", "pull"])
async def test_what_a_late_choice_gains_is_measured_in_either_mode(mode: str) -> None:
    """While a prompt is prefilled, the engine that an early choice takes gets slow."""
    async with router_world(decode=2, **AUTO) as world:
        measured(world, 0.001, 0.002, gain=0.0 if mode == "push" else 1.0)
        pool = world.router.pool
        before = pool.late_choice.worth(pool.clock()) or 0.0
        ended = asyncio.Event()
        world.p.plan(Step(gate=ended))
        hold = asyncio.Event()
        for engine in world.decode:
            engine.plan(Step(gate=hold))
        async with asyncio.TaskGroup() as group:
            group.create_task(served(world))
            await world.p.received(1)
            first, _ = pool.workers(Role.DECODE)
            first.pace.forget()
            first.pace.note(100.0, pool.clock(), 0)
            ended.set()
            await until(lambda: pool.late_choice.worth(pool.clock()) != before)
            hold.set()
        assert (pool.late_choice.worth(pool.clock()) or 0.0) > before
        assert sum(world.transfers(mode, reason) for reason in ("overlap", "late")) == 1


async def test_a_decode_engine_that_answers_before_prefill_has_ended_leaves_the_gain_known() -> None:
    """Otherwise auto would forget it where push is at its best, and pull."""
    async with router_world(decode=2, **AUTO) as world:
        measured(world, 0.001, 0.001, gain=0.001)
        world.p.plan(Step(gate=asyncio.Event()))
        await served(world, stream=True)
        assert world.router.pool.late_choice.worth(world.router.pool.clock()) == pytest.approx(0.0005)


async def test_a_fixed_mode_measures_no_gain() -> None:
    async with router_world(decode=2, transfer_mode="pull") as world:
        await served(world, stream=True)
        assert world.router.pool.late_choice.worth(world.router.pool.clock()) is None


async def test_a_pushed_stream_shows_what_its_engine_adds_after_prefill() -> None:
    async with router_world() as world:
        (worker,) = world.router.pool.workers(Role.DECODE)
        first = asyncio.Event()
        world.d.plan(Step(gate=first))
        async with asyncio.TaskGroup() as group:
            group.create_task(served(world, stream=True))
            await (await world.p.received(1)).finished.wait()
            await world.d.received(1)
            await until(world.prefill_answered)
            await asyncio.sleep(0)
            first.set()
        assert (worker.pace.recent(world.router.pool.clock()) or 0.0) > 0.0


@pytest.mark.parametrize(("overlap", "adds"), [(0.0, True), (3600.0, False)])
async def test_a_pulled_stream_shows_what_its_engine_adds_to_what_push_would_overlap(
    monkeypatch: pytest.MonkeyPatch, overlap: float, adds: bool
) -> None:
    monkeypatch.setattr("kvferry.router.dispatch.pull.overlap_seconds", lambda tokens: overlap)
    async with router_world(transfer_mode="pull") as world:
        (worker,) = world.router.pool.workers(Role.DECODE)
        await served(world, stream=True)
        known = worker.pace.recent(world.router.pool.clock())
        assert known is not None
        assert (known > 0.0) is adds


@pytest.mark.parametrize("mode", ["push", "pull"])
async def test_a_stream_that_waits_for_its_engine_counts_before_it_has_ended(mode: RouterMode) -> None:
    """An engine that has just become slow is seen by who waits for it, not by who has waited."""
    async with router_world(transfer_mode=mode) as world:
        (worker,) = world.router.pool.workers(Role.DECODE)
        clock = world.router.pool.clock
        first = asyncio.Event()
        world.d.plan(Step(gate=first))
        async with asyncio.TaskGroup() as group:
            group.create_task(served(world, stream=True))
            await world.d.received(1)
            await until(world.prefill_answered)
            worker.pace.note(0.0, clock())
            await until(lambda: worker.pace.recent(clock()) or 0.0)
            first.set()


async def test_an_engine_that_answers_before_prefill_has_ended_adds_nothing() -> None:
    async with router_world() as world:
        (worker,) = world.router.pool.workers(Role.DECODE)
        world.p.plan(Step(gate=asyncio.Event()))
        await served(world, stream=True)
        assert worker.pace.recent(world.router.pool.clock()) == 0.0


@pytest.mark.parametrize("mode", ["push", "pull"])
async def test_an_answer_in_one_piece_shows_nothing(mode: str) -> None:
    """It contains the decode of all tokens."""
    async with router_world(transfer_mode=mode) as world:
        await served(world)
        (worker,) = world.router.pool.workers(Role.DECODE)
        assert worker.pace.recent(world.router.pool.clock()) is None


async def test_an_engine_that_fails_is_no_fast_engine() -> None:
    async with router_world(retries=0) as world:
        world.d.plan(failing(500))
        async with world.complete(stream=True) as response:
            assert response.status == 500
        (worker,) = world.router.pool.workers(Role.DECODE)
        assert worker.pace.recent(world.router.pool.clock()) is None


async def test_each_dispatch_of_a_retried_prompt_is_counted() -> None:
    async with router_world(decode=2, **AUTO) as world:
        measured(world, 0.01, 0.01)
        world.d.plan(failing(500))
        await served(world)
        assert world.transfers("push", "overlap") == 2


async def test_modes_change_from_request_to_request_under_load_and_departures() -> None:
    """Sixteen at once, some leave; nothing stays open, and each transfer has one mode at both engines."""
    async with router_world(prefill=2, decode=2, **AUTO) as world:

        async def one(number: int) -> None:
            if number % 3 == 0:
                measured(world, 0.01, 0.01, gain=5.0)
            elif number % 3 == 1:
                for worker in world.router.pool.workers(Role.DECODE):
                    worker.pace.forget()
                measured(world, 0.01, 0.01)
            async with world.complete(stream=number % 2 == 0) as response:
                if number % 5:
                    await response.read()

        for start in range(0, 48, 16):
            await asyncio.gather(*[one(number) for number in range(start, start + 16)])
        value = world.router.metrics.registry.get_sample_value
        await until(lambda: not value("kvferry_router_requests_in_flight"))
        await world.legs_ended()
        await until(lambda: not len(world.router.dispatcher.background))
        modes: dict[str, set[str]] = {}
        for engine in world.prefill + world.decode:
            for each in engine.requests:
                modes.setdefault(each.params["transfer_id"], set()).add(each.params["transfer_mode"])
        assert all(len(of_one) == 1 for of_one in modes.values())
        assert {"push", "pull"} == set.union(*modes.values())
