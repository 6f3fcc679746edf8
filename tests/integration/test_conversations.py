"""Conversations on real engines with KV both ways: one engine's tokens, and only what is new is computed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.cli.requests import fetch
from tests.support.live import (
    BLOCK_TOKENS,
    Client,
    Live,
    completion,
    live,
    make_deployment,
    one_more_router,
    run,
)

pytestmark = pytest.mark.engines

HOLD_SECONDS = 60.0
"""Longer than a turn takes where cores are short, with the same turn on the reference engine."""
PROMPT_TOKENS = "vllm:prompt_tokens_by_source_total"
TURNS = 4


@pytest.fixture(scope="module")
def both_ways(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A prefill and a decode engine with KV both ways, and a router that pushes."""
    deployment = make_deployment(
        model,
        tmp_path_factory.mktemp("both-ways"),
        reference=False,
        both_directions=True,
        decode_config={"decoder_kv_blocks_ttl": HOLD_SECONDS},
    )
    with live(deployment) as running:
        yield running


@pytest.fixture(scope="module")
def routers(both_ways: Live) -> Iterator[dict[str, str]]:
    """A router of each mode over the same engines."""
    with one_more_router(both_ways, "router-pulls-both-ways", "--transfer-mode", "pull") as url:
        yield {"push": both_ways.endpoints.router, "pull": url}


def workers(router: str) -> list[dict[str, object]]:
    """What the router says of its engines."""
    return list(json.loads(fetch(router, "/workers", seconds=10.0))["workers"])


def computed(engines: Live) -> float:
    """Prompt tokens that P has computed."""
    return engines.metric(engines.prefill, PROMPT_TOKENS, source="local_compute")


def is_empty_after_a_step(engines: Live) -> bool:
    """An idle engine hears of the end of what it keeps with its next step."""
    run(lambda client: client.post(engines.decode, completion(engines.prompt(3), 2)))
    return engines.metric(engines.decode, "kvferry_held_blocks") == 0 and engines.is_empty()


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_each_turn_computes_only_what_is_new(
    engines: Live, both_ways: Live, routers: dict[str, str], mode: str
) -> None:
    """Four turns: P computes the new tokens and at most one block, whether D's answer was kept or P's own."""

    async def work(client: Client) -> list[float]:
        prompt, news = both_ways.prompt(700), []
        new = len(prompt)
        for _ in range(TURNS):
            before = computed(both_ways)
            body = completion(prompt, BLOCK_TOKENS + 20)
            [answer] = await client.tokens(routers[mode], body)
            assert [answer] == await client.tokens(engines.reference, body)
            # The prefill leg's metric may come a moment later than the decode leg's answer.
            await both_ways.until(lambda before=before: computed(both_ways) > before)
            news.append(computed(both_ways) - before - new)
            more = both_ways.prompt(90)
            prompt, new = [*prompt, *answer, *more], len(more)
        return news

    before = both_ways.metric(both_ways.prefill, "kvferry_histories_total", outcome="asked")
    surplus = run(work)
    assert surplus[0] == 0
    assert all(0 <= tokens <= BLOCK_TOKENS for tokens in surplus), surplus
    asked = both_ways.metric(both_ways.prefill, "kvferry_histories_total", outcome="asked") - before
    assert asked == TURNS - 1
    assert both_ways.metric(both_ways.decode, "kvferry_holds_total", outcome="used") >= TURNS - 1


def test_a_streamed_turn_is_asked_about(both_ways: Live, engines: Live) -> None:
    """vLLM's streams carry no params: the router asks D, and the next turn has its history."""
    router = both_ways.endpoints.router

    async def stream(client: Client, prompt: list[int]) -> list[int]:
        body = completion(prompt, 150, stream=True)
        async with client.session.post(router + "/v1/completions", json=body) as response:
            assert response.status == 200
            lines = [line async for line in response.content if line.startswith(b"data: {")]
        assert not any(b"kv_transfer_params" in line for line in lines)
        return [t for line in lines for t in json.loads(line[6:])["choices"][0]["token_ids"]]

    async def work(client: Client) -> None:
        prompt = both_ways.prompt(300)
        answer = await stream(client, prompt)
        await both_ways.until(lambda: any(worker.get("holds") for worker in workers(router)))
        prompt = [*prompt, *answer, *both_ways.prompt(20)]
        before = both_ways.metric(both_ways.prefill, "kvferry_histories_total", outcome="asked")
        body = completion(prompt, 8)
        assert await client.tokens(router, body) == await client.tokens(engines.reference, body)
        assert both_ways.metric(both_ways.prefill, "kvferry_histories_total", outcome="asked") == before + 1

    run(work)


@pytest.mark.long
def test_nothing_is_kept_for_longer_than_its_time(both_ways: Live) -> None:
    """P63: what nobody came for goes back, and each hold has ended under one name."""
    router = both_ways.endpoints.router
    run(lambda client: client.post(router, completion(both_ways.prompt(400), 8)))
    both_ways.wait(lambda: both_ways.metric(both_ways.decode, "kvferry_held_blocks") > 0, what="a kept turn")
    both_ways.wait(lambda: is_empty_after_a_step(both_ways), 2 * HOLD_SECONDS, "what was kept")
    assert both_ways.metric(both_ways.decode, "kvferry_holds_total", outcome="expired") > 0
