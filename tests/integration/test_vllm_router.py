"""`vllm-router` from PyPI drives both modes: what it sends, and that two kvferry engines serve it.

It does what the prefill engine's answers say: with `transfer_mode` "push" in them it sends both legs of every
request but the first at once, else the decode leg after the prefill leg's answer, with that answer's params.
"""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvferry.cli.fleet import Fleet
from tests.support.fake_engine import FakeEngine, Received, Step, source
from tests.support.live import (
    BLOCK_TOKENS,
    STARTUP_SECONDS,
    Client,
    Live,
    completion,
    make_deployment,
    one_more_engine,
    one_more_server,
    run,
)
from tests.support.vllm_router import spec_of

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="vllm-router's wheel is for x86-64"),
]
PROMPT_TOKENS = "vllm:prompt_tokens_by_source_total"
TRANSFERS = "kvferry_transfers_total"


# --- what it sends -------------------------------------------------------------------------------


async def both_legs(
    client: aiohttp.ClientSession, engines: tuple[FakeEngine, FakeEngine], number: int
) -> tuple[Received, Received]:
    """Send one request; its two legs as the engines saw them."""
    body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 8, "kv_transfer_params": {"forged": 1}}
    async with client.post("/v1/completions", json=body, headers={"X-Request-Id": "client"}) as response:
        assert response.status == 200, await response.text()
    return await engines[0].received(number), await engines[1].received(number)


@pytest.mark.parametrize("mode", ["push", "pull"])
async def test_what_it_sends(tmp_path: Path, mode: str) -> None:
    """The sequences that the engines' side is made for; a newer version may send others."""
    prefill, decode = FakeEngine(source()), FakeEngine()
    prefill.told = {"transfer_mode": mode, "remote_num_tokens": 3, "remote_request_id": "internal"}
    async with AsyncExitStack() as stack:
        for engine in (prefill, decode):
            await stack.enter_async_context(engine)
        fleet = stack.enter_context(Fleet())
        spec = spec_of([prefill.url], [decode.url], tmp_path / "router.log")
        fleet.start([spec])
        await asyncio.to_thread(fleet.wait_ready, STARTUP_SECONDS)
        client = await stack.enter_async_context(aiohttp.ClientSession(spec.url))
        first = await both_legs(client, (prefill, decode), 1)
        if mode == "push":
            # P answers only when D has been asked: both legs are sent at once.
            asked = asyncio.Event()
            prefill.plan(Step(gate=asked))
            waiting = asyncio.ensure_future(both_legs(client, (prefill, decode), 2))
            await decode.received(2)
            asked.set()
        else:
            waiting = asyncio.ensure_future(both_legs(client, (prefill, decode), 2))
        second = await waiting
    for legs in (first, second):
        check_legs(legs, mode)
    ids = {leg.headers["X-Request-Id"] for leg in (*first, *second)}
    assert len(ids) == 2, "the legs of one request share an id, which is another for each request"


def check_legs(legs: tuple[Received, Received], mode: str) -> None:
    prefill, decode = legs
    shared = prefill.headers["X-Request-Id"]
    assert decode.headers["X-Request-Id"] == shared != "client"
    assert prefill.body["max_tokens"] == 1
    assert decode.body["max_tokens"] == 8
    assert prefill.params["do_remote_decode"] is True
    assert prefill.params.get("transfer_id") is None
    told: dict[str, Any] = source().to_params() | {"transfer_mode": "pull"}
    if mode == "push":
        # It writes these itself: no incarnation, no pipeline size, no mode.
        told = {key: told[key] for key in told if key in PUSH_KEYS} | {"remote_request_id": shared}
    else:
        told |= {"remote_num_tokens": 3, "remote_request_id": "internal"}
    assert decode.params == told


PUSH_KEYS = (
    "do_remote_prefill",
    "do_remote_decode",
    "remote_engine_id",
    "remote_host",
    "remote_port",
    "tp_size",
)


# --- two engines of ours behind it ---------------------------------------------------------------


@pytest.fixture(scope="module")
def pulled_from(engines: Live, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A second prefill engine, whose default mode is pull."""
    two = make_deployment(
        Path(engines.deployment.model),
        tmp_path_factory.mktemp("logs"),
        prefill=2,
        reference=False,
        prefill_config={"transfer_mode": "pull"},
    )
    with one_more_engine(two, "prefill-1", place=1) as url:
        yield url


@pytest.fixture(scope="module", params=["push", "pull"])
def routed(request: pytest.FixtureRequest, engines: Live) -> Iterator[tuple[str, str, str]]:
    """The mode, the prefill engine of that mode, and where the router answers."""
    prefill = engines.prefill if request.param == "push" else request.getfixturevalue("pulled_from")
    log = engines.deployment.logs / f"vllm-router-{request.param}.log"
    with one_more_server(spec_of([prefill], [engines.decode], log)) as url:
        yield request.param, prefill, url


def test_answers_equal_one_engines_and_kv_travels(engines: Live, routed: tuple[str, str, str]) -> None:
    """X02, P20: every length, one after the other and together; D computes one token of each prompt."""
    mode, _, router = routed
    lengths = (2, BLOCK_TOKENS, BLOCK_TOKENS + 1, 700, 2500)
    done = engines.metric(engines.decode, TRANSFERS, mode=mode, outcome="completed")
    computed = engines.metric(engines.decode, PROMPT_TOKENS, source="local_compute")

    async def one(client: Client, tokens: int) -> None:
        body = completion(engines.prompt(tokens), 12)
        assert await client.tokens(router, body) == await client.tokens(engines.reference, body)

    async def work(client: Client) -> None:
        for tokens in lengths:
            await one(client, tokens)
        await asyncio.gather(*(one(client, tokens) for tokens in lengths * 2))

    run(work)
    count = 3 * len(lengths)
    engines.wait(
        lambda: engines.metric(engines.decode, TRANSFERS, mode=mode, outcome="completed") >= done + count,
        10.0,
        "a transfer for every request",
    )
    news = engines.metric(engines.decode, PROMPT_TOKENS, source="local_compute") - computed
    assert news <= count
    engines.assert_empty()


def test_streams_and_chat(engines: Live, routed: tuple[str, str, str]) -> None:
    """The tokens of a stream and a chat's text are one engine's."""
    _, _, router = routed

    async def work(client: Client) -> None:
        body = completion(engines.prompt(400), 12)
        expected = await client.tokens(engines.reference, body)
        assert [await client.streamed(router, body, {})] == expected
        messages = [{"role": "user", "content": "vuni lanu paku puju sege kolu jamo " * 30}]
        chat = {"model": "tiny", "messages": messages, "max_tokens": 12, "temperature": 0}
        answers = [
            await client.post(url, chat, "/v1/chat/completions") for url in (router, engines.reference)
        ]
        assert answers[0]["choices"][0]["message"] == answers[1]["choices"][0]["message"]

    run(work)
    engines.assert_empty()


def test_lists_and_several_answers_are_right(engines: Live, routed: tuple[str, str, str]) -> None:
    """P19, P20: it tells neither transfers nor `consumers` apart; what is not handed over is computed."""
    _, _, router = routed

    async def work(client: Client) -> None:
        listed = completion([engines.prompt(length) for length in (3, 130, 700)])
        assert await client.tokens(router, listed) == await client.tokens(engines.reference, listed)
        double = completion(engines.prompt(300), n=2, temperature=1, top_k=1)
        assert await client.tokens(router, double) == await client.tokens(engines.reference, double)

    run(work)


def test_a_client_that_leaves_leaks_nothing(engines: Live, routed: tuple[str, str, str]) -> None:
    """P16, P63: half of sixteen leave; what they left behind ends by itself."""
    _, prefill, router = routed

    async def work(client: Client) -> list[bool]:
        bodies = [completion(engines.prompt(1500), 24) for _ in range(16)]
        return list(
            await asyncio.gather(
                *(client.abandon(router, body, 0.2 + place % 2 * 60) for place, body in enumerate(bodies))
            )
        )

    assert any(run(work))
    engines.wait(lambda: not engines.metric(prefill, "kvferry_transfers_in_flight"), what="P's table")
    engines.wait(lambda: not engines.metric(prefill, "vllm:kv_cache_usage_perc"), what="P's cache")
    engines.assert_empty()
