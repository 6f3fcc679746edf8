"""Late against eager decode legs: the load, the engines that queue, and the verdict."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import ClientSession
from aiohttp.test_utils import TestServer

from kvferry.bench.late import Load, Measured, problems, table
from kvferry.bench.queued_engines import BLOCK_TOKENS, Engines

LOAD = Load(requests=10, requests_per_second=1000.0, tokens=(16, 64), seed=1)


def test_a_seed_decides_the_prompts() -> None:
    assert LOAD.prompts() == LOAD.prompts()
    assert all(16 <= tokens <= 64 for tokens in LOAD.prompts())


def kind(held: float, *ttfts: float) -> Measured:
    return Measured(tuple(sorted(ttfts)), held)


def test_the_verdict_names_what_is_missed() -> None:
    eager = kind(100.0, 1.0, 2.0)
    assert problems(eager, kind(50.0, 1.0, 2.1)) == []
    (held,) = problems(eager, kind(60.0, 1.0, 2.0))
    assert "0.60 of eager's block-seconds" in held
    (slow,) = problems(eager, kind(0.0, 1.0, 2.2))
    assert "1.100 of eager's" in slow
    assert len(problems(kind(0.0, 1.0), kind(1.0, 1.0))) == 1


def test_the_table_has_a_line_for_each_kind() -> None:
    head, eager, late = table({"eager": kind(1234.5, 0.1, 0.2), "late": kind(3.0, 0.1)})
    assert "held block-seconds" in head
    assert eager.split() == ["eager", "1234", "200", "ms", "200", "ms"]
    assert late.split()[:2] == ["late", "3"]


@asynccontextmanager
async def engines(tokens_per_second: float = 1e9) -> AsyncIterator[tuple[Engines, str, str]]:
    made = Engines(tokens_per_second, 1e-9, 0.0, 0)
    async with TestServer(made.application("prefill")) as p, TestServer(made.application("decode")) as d:
        yield made, str(p.make_url("")).rstrip("/"), str(d.make_url("")).rstrip("/")


async def test_a_decode_leg_waits_for_its_prefill_and_what_it_held_is_counted() -> None:
    async with engines() as (made, prefill, decode), ClientSession() as session:
        body = {"prompt": [1] * 40, "kv_transfer_params": {"transfer_id": "t"}}
        leg = asyncio.create_task(session.post(f"{decode}/v1/completions", json=body))
        while not made.prefilled:  # noqa: ASYNC110 - the test's time-out is the bound
            await asyncio.sleep(0)
        assert not leg.done()
        async with session.post(f"{prefill}/v1/completions", json=body) as response:
            assert (await response.json())["kv_transfer_params"]["remote_engine_id"]
        response = await leg
        assert b"[DONE]" in await response.read()
        async with session.get(f"{decode}/held") as response:
            held = (await response.json())["block_seconds"]
        assert held == made.held_block_seconds > 0
        assert -(-40 // BLOCK_TOKENS) == 3


async def test_a_late_decode_leg_holds_nothing() -> None:
    async with engines() as (made, prefill, decode), ClientSession() as session:
        body = {"prompt": [1] * 40, "kv_transfer_params": {"transfer_id": "t"}}
        for url in (prefill, decode):
            async with session.post(f"{url}/v1/completions", json=body) as response:
                assert response.status == 200
        assert made.held_block_seconds == 0.0
        assert not made.prefilled


async def test_a_probe_takes_no_turn() -> None:
    async with engines(tokens_per_second=1e-9) as (_, prefill, _), ClientSession() as session:
        body = {"prompt": "probe", "kv_transfer_params": {"transfer_id": "t", "probe": True}}
        async with session.post(f"{prefill}/v1/completions", json=body) as response:
            assert response.status == 200
