"""One prefill and one decode engine behind the router answer as one engine does. `make compat` runs this."""

from __future__ import annotations

import asyncio
import json
import secrets
import uuid
from typing import Any

import pytest

from kvferry.cli.requests import fetch
from tests.support.live import BLOCK_TOKENS, Client, Live, completion, run, sample, token_ids

pytestmark = pytest.mark.engines

BYTES = "kvferry_transfer_bytes_total"
PROMPT_TOKENS = "vllm:prompt_tokens_by_source_total"
EARLY = "kvferry_bytes_before_prefill_end_total"
TOKEN_BYTES = 2 * 4 * 2 * 64 * 4
"""K and V, layers, KV heads, head size, float32."""


def counters(engines: Live) -> dict[str, float]:
    prefill = fetch(engines.prefill, "/metrics", seconds=10.0)
    decode = fetch(engines.decode, "/metrics", seconds=10.0)
    return {
        "pushed": sample(prefill, BYTES),
        "early": sample(prefill, EARLY),
        "received": sample(decode, BYTES),
        "read": sample(decode, BYTES, mode="pull"),
        "computed by D": sample(decode, PROMPT_TOKENS, source="local_compute"),
        "completed": sample(decode, "kvferry_transfers_total", outcome="completed"),
    }


def moved(engines: Live, before: dict[str, float]) -> dict[str, float]:
    return {name: value - before[name] for name, value in counters(engines).items()}


@pytest.mark.parametrize("tokens", [2, 100, BLOCK_TOKENS, BLOCK_TOKENS + 1, 4 * BLOCK_TOKENS, 2500])
def test_answers_equal_and_bytes_agree(engines: Live, tokens: int) -> None:
    """P56 and every boundary of a block: same tokens, whole blocks pushed, D computes one token itself."""
    prompt = engines.prompt(tokens)
    before = counters(engines)

    async def both(client: Client) -> None:
        body = completion(prompt, 16)
        assert await client.tokens(engines.endpoints.router, body) == await client.tokens(
            engines.reference, body
        )

    run(both)
    wanted = -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS * TOKEN_BYTES
    engines.wait(lambda: moved(engines, before)["pushed"] >= wanted, 10.0, "the pushed bytes")
    news = moved(engines, before)
    assert news["pushed"] == news["received"] == wanted
    assert news["computed by D"] <= 1
    if tokens >= 4 * 512:
        assert news["early"] >= news["pushed"] / 2, "half of the bytes leave before prefill ends"


@pytest.mark.parametrize("tokens", [2, BLOCK_TOKENS, BLOCK_TOKENS + 1, 2500])
def test_pulled_answers_equal_and_bytes_agree(engines: Live, pull_router: str, tokens: int) -> None:
    """P56: the same where D reads; P writes nothing."""
    prompt = engines.prompt(tokens)
    before = counters(engines)

    async def both(client: Client) -> None:
        body = completion(prompt, 16)
        assert await client.tokens(pull_router, body) == await client.tokens(engines.reference, body)

    run(both)
    engines.assert_empty()
    news = moved(engines, before)
    assert news["read"] == news["received"] == -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS * TOKEN_BYTES
    assert news["pushed"] == 0
    assert news["computed by D"] <= 1


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_one_token_prompt_moves_nothing(engines: Live, pull_router: str, mode: str) -> None:
    """P56: nothing to transfer, and still an answer and no lease left."""
    prompt = engines.prompt(1)
    router = pull_router if mode == "pull" else engines.endpoints.router

    async def both(client: Client) -> None:
        body = completion(prompt, 8)
        assert await client.tokens(router, body) == await client.tokens(engines.reference, body)

    run(both)
    engines.assert_empty()


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_chat_stream_list_and_n(engines: Live, pull_router: str, mode: str) -> None:
    """P19, P20: n=2 and a list of prompts: every choice is the reference's, each prompt paired to itself."""
    router, reference = pull_router if mode == "pull" else engines.endpoints.router, engines.reference

    async def work(client: Client) -> None:
        prompts = [engines.prompt(length) for length in (3, 130, 700)]
        listed = completion(prompts)
        assert await client.tokens(router, listed) == await client.tokens(reference, listed)
        double = completion(engines.prompt(300), n=2, temperature=1, top_k=1)
        assert await client.tokens(router, double) == await client.tokens(reference, double)
        messages = [{"role": "user", "content": "vuni lanu paku puju sege kolu jamo " * 30}]
        chat = {"model": "tiny", "messages": messages, "max_tokens": 12, "temperature": 0}
        answers = [await client.post(url, chat, "/v1/chat/completions") for url in (router, reference)]
        texts = [answer["choices"][0]["message"]["content"] for answer in answers]
        assert texts[0] == texts[1]
        assert answers[0]["usage"]["prompt_tokens"] == answers[1]["usage"]["prompt_tokens"]
        async with client.session.post(
            router + "/v1/chat/completions", json=chat | {"stream": True}
        ) as response:
            events = [line async for line in response.content if line.startswith(b"data: {")]
        deltas = [json.loads(event[6:])["choices"][0]["delta"].get("content") or "" for event in events]
        assert "".join(deltas) == texts[0]

    run(work)


def legs(
    engines: Live, prompt: list[int], max_tokens: int = 8
) -> tuple[dict[str, object], dict[str, object]]:
    """Both legs of one transfer, for a test that sends them itself."""
    workers = json.loads(fetch(engines.endpoints.router, "/workers", seconds=10.0))["workers"]
    engine = next(worker["engine"] for worker in workers if worker["url"] == engines.prefill)
    transfer = secrets.token_hex(16)
    prefill = {"do_remote_decode": True, "transfer_id": transfer}
    decode = {
        "do_remote_prefill": True,
        "transfer_id": transfer,
        "remote_engine_id": engine["id"],
        "remote_host": engine["host"],
        "remote_port": engine["port"],
    }
    return (
        completion(prompt, 1, kv_transfer_params=prefill),
        completion(prompt, max_tokens, kv_transfer_params=decode),
    )


FIRST_LEG: dict[str, object] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("mode", ["push", "pull"])
def test_a_proxy_made_for_vllms_connectors(engines: Live, mode: str, path: str) -> None:
    """P20: prefill, then decode with the answer as it is; no `transfer_id`, eight requests at a time.

    `transfer_mode` in the first leg stands for the setting of an engine that is there for such proxies.
    """
    texts = [" ".join(["vuni lanu paku puju"] * count) for count in range(3, 83, 10)]

    async def through_proxy(client: Client, body: dict[str, Any]) -> dict[str, Any]:
        name = str(uuid.uuid4())
        leg = body | {"max_tokens": 1, "stream": False}
        leg["kv_transfer_params"] = FIRST_LEG | {"transfer_mode": mode}
        answer = await client.post(engines.prefill, leg, path, X_Request_Id=name)
        params = answer["kv_transfer_params"]
        assert (params["transfer_mode"], params["do_remote_prefill"]) == (mode, True)
        return await client.post(
            engines.decode, body | {"kv_transfer_params": params}, path, X_Request_Id=name
        )

    async def both(client: Client, text: str) -> None:
        content = (
            {"prompt": text}
            if path == "/v1/completions"
            else {"messages": [{"role": "user", "content": text}]}
        )
        body = {"model": "tiny", "max_tokens": 8, "temperature": 0, **content}
        found = await asyncio.gather(through_proxy(client, body), client.post(engines.reference, body, path))
        ours, theirs = (
            [choice.get("text") or choice["message"]["content"] for choice in a["choices"]] for a in found
        )
        assert ours == theirs

    async def work(client: Client) -> None:
        await asyncio.gather(*(both(client, text) for text in texts))

    before = counters(engines)
    run(work)
    engines.assert_empty()
    news = moved(engines, before)
    assert news["completed"] == len(texts)
    assert (news["read"] > 0) is (mode == "pull")


def test_a_reference_that_nobody_has_given_out_is_computed_at_once(engines: Live) -> None:
    """V01, P14: it names blocks that P holds for another request; nothing is read of them."""
    prompt, other = engines.prompt(300), engines.prompt(300)

    async def work(client: Client) -> None:
        prefill_leg, _ = legs(engines, other)
        held = (await client.post(engines.prefill, prefill_leg))["kv_transfer_params"]
        forged = held | {
            "transfer_id": "guessed-by-somebody",
            "transfer_mode": "pull",
            "remote_block_ids": [[1, 2]],
        }
        expected = await client.tokens(engines.reference, completion(prompt))
        assert await client.tokens(engines.decode, completion(prompt, kv_transfer_params=forged)) == expected
        expected = await client.tokens(engines.reference, completion(other))
        assert await client.tokens(engines.decode, completion(other, kv_transfer_params=held)) == expected

    before = counters(engines)
    refused = engines.metric(
        engines.decode, "kvferry_transfers_total", mode="pull", reason="unknown_transfer"
    )
    run(work)
    engines.assert_empty()
    assert moved(engines, before)["read"] == 0
    counted = engines.metric(
        engines.decode, "kvferry_transfers_total", mode="pull", reason="unknown_transfer"
    )
    assert counted == refused + 1


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_registration_and_kv_meet_in_either_order(engines: Live, first: str) -> None:
    """One leg is over, or waits, before the other is sent."""
    prompt = engines.prompt(900)
    prefill_leg, decode_leg = legs(engines, prompt)

    async def work(client: Client) -> None:
        expected = await client.tokens(engines.reference, completion(prompt))
        if first == "prefill":
            await client.post(engines.prefill, prefill_leg)
            assert await client.tokens(engines.decode, decode_leg) == expected
            return
        waiting = asyncio.create_task(client.tokens(engines.decode, decode_leg))
        await engines.until(
            lambda: engines.metric(engines.decode, "kvferry_transfers_in_flight", state="receiving")
        )
        await client.post(engines.prefill, prefill_leg)
        assert await waiting == expected

    before = counters(engines)
    run(work)
    engines.assert_empty()
    assert moved(engines, before)["completed"] == 1


def test_answer_of_the_prefill_leg_tells_where_the_kv_is(engines: Live) -> None:
    """The keys that routers made for vLLM's own connectors read."""
    leg, _ = legs(engines, engines.prompt(10))
    answer = run(lambda client: client.post(engines.prefill, leg))
    params = answer["kv_transfer_params"]
    assert params["do_remote_prefill"] is True
    assert params["remote_engine_id"] == "prefill-0"
    assert (params["tp_size"], params["pp_size"]) == (1, 1)
    assert params["transfer_id"] == leg["kv_transfer_params"]["transfer_id"]  # type: ignore[index]
    assert len(token_ids(answer)[0]) == 1


BAD_VALUES = [-1, 0, 10**9, "x", [1], {"a": 1}, 1.5, True]


@pytest.mark.parametrize("key", ["remote_port", "tp_size", "pp_size", "consumers"])
def test_malformed_numbers_are_that_requests_error(engines: Live, key: str) -> None:
    """S01, X02: 400 with the key's name, and the engine serves on."""
    _, decode_leg = legs(engines, engines.prompt(5))

    async def work(client: Client) -> None:
        for value in BAD_VALUES:
            params = decode_leg["kv_transfer_params"] | {key: value}  # type: ignore[operator]
            status, answer = await client.attempt(engines.decode, decode_leg | {"kv_transfer_params": params})
            assert status == 400, (value, answer)
            assert key in answer["error"]["message"]
        await client.post(engines.decode, completion(engines.prompt(5)))

    run(work)


def test_missing_and_mistyped_keys_are_that_requests_error(engines: Live) -> None:
    """X02, P39: each needed key removed in turn, each text replaced; both engines serve on."""
    prefill_leg, decode_leg = legs(engines, engines.prompt(5))
    params = dict(decode_leg["kv_transfer_params"])  # type: ignore[call-overload]

    async def work(client: Client) -> None:
        for key in ("remote_engine_id", "remote_host", "remote_port"):
            for broken in ({k: v for k, v in params.items() if k != key}, params | {key: {"x": 1}}):
                status, answer = await client.attempt(
                    engines.decode, decode_leg | {"kv_transfer_params": broken}
                )
                assert status == 400, (key, answer)
                assert key in answer["error"]["message"]
        for transfer in ("short", "has spaces in it", "x" * 300, 7, ["x"]):
            for url, leg in ((engines.prefill, prefill_leg), (engines.decode, decode_leg)):
                broken = leg["kv_transfer_params"] | {"transfer_id": transfer}  # type: ignore[operator]
                status, answer = await client.attempt(url, leg | {"kv_transfer_params": broken})
                assert status == 400, answer
                assert "transfer_id" in answer["error"]["message"]
                assert "x" * 300 not in answer["error"]["message"], "the id is a secret"
        shove = {"kv_transfer_params": prefill_leg["kv_transfer_params"] | {"transfer_mode": "shove"}}  # type: ignore[operator]
        status, answer = await client.attempt(engines.prefill, prefill_leg | shove)
        assert status == 400
        assert "transfer_mode" in answer["error"]["message"]
        for url in (engines.prefill, engines.decode):
            await client.post(url, completion(engines.prompt(5)))

    run(work)
    engines.assert_empty()


def test_unknown_producer_is_recomputed_here(engines: Live) -> None:
    """V01, V03, O10: a forged or dead address: no connection, D computes the prompt itself."""
    prompt = engines.prompt(300)
    _, decode_leg = legs(engines, prompt)
    params = decode_leg["kv_transfer_params"] | {"remote_engine_id": "nobody"}  # type: ignore[operator]

    async def work(client: Client) -> None:
        expected = await client.tokens(engines.reference, completion(prompt))
        answer = await client.tokens(engines.decode, decode_leg | {"kv_transfer_params": params})
        assert answer == expected

    run(work)
    engines.assert_empty()
