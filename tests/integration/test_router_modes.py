"""Modes and conversations through the real router: `auto` under mixed load, four turns in either mode."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.cli.requests import fetch
from tests.support.live import (
    Client,
    Live,
    completion,
    make_deployment,
    one_more_engine,
    one_more_router,
    run,
    sample,
)

pytestmark = pytest.mark.engines

TRANSFERS = "kvferry_router_transfers_total"


@pytest.fixture(scope="module")
def another(engines: Live, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A second decode engine."""
    two = make_deployment(
        Path(engines.deployment.model), tmp_path_factory.mktemp("logs"), decode=2, reference=False
    )
    with one_more_engine(two, "decode-1", place=2) as url:
        yield url


def test_auto_under_mixed_load(engines: Live, another: str) -> None:
    """P02, P16: short and long prompts, second turns, departures; every answer is one engine's, no leak."""
    chance = random.Random(5)
    gate = asyncio.Semaphore(12)

    async def turn(client: Client, router: str, prompt: list[int], session: str) -> list[int]:
        body = completion(prompt, chance.randrange(2, 10))
        headers = {"x-session-id": session}
        async with gate:
            tokens = await client.streamed(router, body, headers)
        assert tokens == (await client.tokens(engines.reference, body))[0]
        return tokens

    async def conversation(client: Client, router: str, number: int) -> str:
        prompt = engines.prompt(chance.choice((20, 300, 900, 2500)))
        if number % 4 == 3:
            left = await client.abandon(router, completion(prompt, 8), chance.random())
            return "left" if left else "answered"
        answer = await turn(client, router, prompt, f"auto-{number}")
        await turn(client, router, prompt + answer + engines.prompt(30), f"auto-{number}")
        return "equal"

    with one_more_router(engines, "router-auto", "--transfer-mode", "auto", decode=(another,)) as router:

        async def work(client: Client) -> list[str]:
            return list(await asyncio.gather(*(conversation(client, router, number) for number in range(32))))

        outcomes = run(work)
        told = fetch(router, "/metrics", seconds=10.0)
    assert outcomes.count("equal") == 24
    assert sample(told, TRANSFERS, mode="pull") > 0
    assert sample(told, TRANSFERS, mode="push", reason="affinity") > 0
    engines.assert_empty()
    engines.wait(
        lambda: engines.metric(another, "kvferry_transfers_in_flight") == 0, what="the second D's table"
    )
