"""The modelled pool: what takes how long, and who waits for whom."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvferry.bench.pool_model import DecodeModel, ModelledPool, PoolModel, PrefillModel
from kvferry.bench.virtual_time import run_virtually

PREFILL = PrefillModel(
    tokens_per_second=1000.0, step_tokens=100, transfer_seconds_per_token=0.001, fetch_seconds=0.5
)
# A token's jitter is a multiple of the golden ratio: a step of 0 s leaves it out of the sums.
STEPLESS = DecodeModel(step_seconds=0.0)


def timed(work: Any) -> float:
    async def run() -> float:
        clock = asyncio.get_running_loop().time
        started = clock()
        await work
        return clock() - started

    return run_virtually(run())


def pool(*decode: DecodeModel) -> ModelledPool:
    return ModelledPool(PoolModel(prefill=PREFILL, decode=decode), seed=0)


async def first_token(pool: ModelledPool, transfer: str, tokens: int, hold_seconds: float = 0.0) -> None:
    async with pool.decode(0, transfer, tokens):
        await asyncio.sleep(hold_seconds)


def test_one_prompt_is_computed_after_the_other() -> None:
    model = pool(STEPLESS)

    async def two() -> None:
        await asyncio.gather(model.prefill("a", 1000), model.prefill("b", 500))

    assert timed(two()) == pytest.approx(1.5)


def test_a_push_leaves_the_last_step_to_be_moved_and_a_pull_everything_and_the_search() -> None:
    pushed, pulled = pool(STEPLESS), pool(STEPLESS)

    async def push() -> None:
        await asyncio.gather(first_token(pushed, "a", 1000), pushed.prefill("a", 1000))

    async def pull() -> None:
        await pulled.prefill("a", 1000)
        await first_token(pulled, "a", 1000)

    assert timed(push()) == pytest.approx(1.0 + 0.1)
    assert timed(pull()) == pytest.approx(1.0 + 1.0 + 0.5)


def test_a_pushed_prompt_holds_its_place_through_its_prefill() -> None:
    model = pool(DecodeModel(step_seconds=0.0, room=1))

    async def waits_behind_it() -> None:
        pushed = asyncio.ensure_future(first_token(model, "a", 1000))
        await asyncio.sleep(0)
        await model.prefill("b", 0)
        second = asyncio.ensure_future(first_token(model, "b", 0))
        await asyncio.sleep(0)
        await model.prefill("a", 1000)
        await asyncio.gather(pushed, second)

    assert timed(waits_behind_it()) == pytest.approx(1.0 + 0.1 + 0.5)


def test_a_step_is_longer_the_more_an_engine_decodes() -> None:
    model = pool(DecodeModel(step_seconds=0.1, room=2))
    told: list[float] = []

    async def one(transfer: str) -> None:
        async with model.decode(0, transfer, 0) as step_seconds:
            told.append(step_seconds)
            await asyncio.sleep(10.0)

    async def two() -> None:
        for transfer in ("a", "b"):
            await model.prefill(transfer, 0)
        await asyncio.gather(one("a"), one("b"))

    run_virtually(two())
    assert told == pytest.approx([0.15, 0.2])


def test_others_take_room_that_no_router_sees() -> None:
    """Half of the time: in the first half of each period."""
    busy = DecodeModel(
        step_seconds=0.01,
        room=1000,
        other_requests_per_second=100.0,
        other_tokens=1,
        other_period_seconds=10.0,
    )
    model = pool(busy)
    steps: list[float] = []

    async def watch() -> None:
        others = asyncio.ensure_future(model.others())
        for moment in range(1000):
            await asyncio.sleep(0.02)
            await model.prefill(str(moment), 0)
            async with model.decode(0, str(moment), 0) as step_seconds:
                steps.append(step_seconds)
        others.cancel()

    run_virtually(watch())
    alone = min(steps)
    assert 0.2 < sum(step > alone for step in steps) / len(steps) < 0.5
