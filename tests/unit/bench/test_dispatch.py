"""What each engine is sent, in which order, and what happens when a leg fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from kvferry.bench.dispatch import Ask, Direct, Dispatch, FerryPull, FerryPush, Style, VllmPull, VllmPush
from kvferry.bench.prompts import token_prompts
from kvferry.bench.stream import LegError, Seen
from kvferry.handoff import DecodeParams, PrefillParams, parse_request
from tests.support.stub_engines import StubEngine, serving

SOURCE = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "prefill-0",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "pp_size": 1,
}
VLLM = SOURCE | {"remote_block_ids": [[3, 4]], "remote_request_id": "cmpl-warm-0-0123abcd", "dcp_size": 1}
STYLE = Style(model="tiny", extra={"ignore_eos": True}, headers={"Authorization": "Bearer k"})


@dataclass
class Stage:
    """Two engines, a client and one kind of dispatch."""

    prefill: StubEngine
    decode: StubEngine
    session: aiohttp.ClientSession
    dispatch: Dispatch

    async def prepare(self) -> None:
        """Warm up, and forget what was asked for it."""
        await self.dispatch.prepare(self.session, ask("warm"))
        for engine in (self.prefill, self.decode):
            engine.asked.clear()
            engine.order.clear()

    async def asked(self, count: int) -> None:
        """Wait until so many legs have reached their engines."""
        async with self.prefill.news:
            await self.prefill.news.wait_for(lambda: len(self.prefill.order) >= count)

    async def send(self, name: str = "r-0") -> Seen:
        """Send one request."""
        seen = Seen(asyncio.get_running_loop().time)
        await self.dispatch.send(self.session, ask(name), seen)
        return seen


@asynccontextmanager
async def staged(kind: Callable[[str, str, Style], Dispatch], told: dict[str, Any]) -> AsyncIterator[Stage]:
    prefill, decode = StubEngine("prefill", told), StubEngine("decode")
    decode.order, decode.news = prefill.order, prefill.news
    async with (
        serving(prefill) as prefill_url,
        serving(decode) as decode_url,
        aiohttp.ClientSession() as session,
    ):
        yield Stage(prefill, decode, session, kind(prefill_url, decode_url, STYLE))


def ask(name: str) -> Ask:
    (prompt,) = token_prompts(1, 20, (5, 90), seed=1)
    return Ask(request=name, prompt=prompt, output_tokens=4)


async def test_one_endpoint_gets_what_a_client_would_send() -> None:
    engine = StubEngine()
    async with serving(engine) as url, aiohttp.ClientSession() as session:
        seen = Seen(asyncio.get_running_loop().time)
        await Direct(url, STYLE).send(session, ask("r-7"), seen)
    (body, headers) = engine.asked[0]
    assert len(body.pop("prompt")) == 20
    assert body == {
        "model": "tiny",
        "max_tokens": 4,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    assert (headers["X-Request-Id"], headers["Authorization"]) == ("r-7", "Bearer k")
    assert (len(seen.chunks), seen.completion_tokens, seen.prompt_tokens) == (4, 4, 20)


async def test_ferry_push_sends_both_legs_with_a_transfer_id_of_their_own() -> None:
    async with staged(FerryPush, SOURCE | {"kvferry_incarnation": "i1"}) as stage:
        await stage.prepare()
        await stage.send("r-0")
        await stage.send("r-1")
        produced = [parse_request(body["kv_transfer_params"]) for body in stage.prefill.bodies]
        consumed = [parse_request(body["kv_transfer_params"]) for body in stage.decode.bodies]
    assert len({leg.transfer for leg in produced if leg is not None}) == 2
    for leg, other in zip(produced, consumed, strict=True):
        assert isinstance(leg, PrefillParams)
        assert isinstance(other, DecodeParams)
        assert leg.transfer == other.transfer is not None
        assert (leg.mode, other.mode) == ("push", "push")
        assert (other.source.engine, other.source.port, other.source.incarnation) == ("prefill-0", 5600, "i1")


async def test_ferry_pull_sends_the_answer_on_with_a_transfer_id_of_its_own_and_the_mode() -> None:
    told = SOURCE | {"kvferry_incarnation": "i1", "remote_num_tokens": 20, "transfer_mode": "push", "x": 1}
    async with staged(FerryPull, told) as stage:
        await stage.prepare()
        await stage.send("r-0")
        await stage.send("r-1")
        produced = [parse_request(body["kv_transfer_params"]) for body in stage.prefill.bodies]
        consumed = [parse_request(body["kv_transfer_params"]) for body in stage.decode.bodies]
        passed_on = [body["kv_transfer_params"]["x"] for body in stage.decode.bodies]
    assert len({leg.transfer for leg in produced if leg is not None}) == 2
    assert passed_on == [1, 1], "what only the engines understand goes on too"
    for leg, other in zip(produced, consumed, strict=True):
        assert isinstance(leg, PrefillParams)
        assert isinstance(other, DecodeParams)
        assert leg.transfer == other.transfer is not None
        assert (leg.mode, other.mode) == ("pull", "pull")
        assert (other.source.engine, other.source.incarnation, other.prefilled_tokens) == (
            "prefill-0",
            "i1",
            20,
        )


async def test_ferrys_coordinates_are_asked_for_without_holding_anything() -> None:
    async with staged(FerryPush, SOURCE) as stage:
        await stage.dispatch.prepare(stage.session, ask("warm"))
        assert stage.prefill.bodies[0]["kv_transfer_params"]["probe"] is True
        assert stage.decode.bodies == []


async def test_the_prefill_leg_makes_one_token_of_the_same_prompt() -> None:
    async with staged(FerryPush, SOURCE) as stage:
        await stage.prepare()
        await stage.send()
        (prefill,), (decode,) = stage.prefill.bodies, stage.decode.bodies
        assert prefill["prompt"] == decode["prompt"]
        assert (prefill["max_tokens"], prefill["stream"], prefill["ignore_eos"]) == (1, False, True)
        assert "stream_options" not in prefill
        assert (decode["max_tokens"], decode["stream"]) == (4, True)


@pytest.mark.parametrize(("kind", "told"), [(FerryPush, SOURCE), (VllmPush, VLLM)])
async def test_push_waits_for_neither_leg(
    kind: Callable[[str, str, Style], Dispatch], told: dict[str, Any]
) -> None:
    """Decode is asked although prefill never answers, and the other way round."""
    async with staged(kind, told) as stage:
        await stage.prepare()
        stage.prefill.gate.clear()
        stage.decode.gate.clear()
        sending = asyncio.create_task(stage.send())
        await stage.asked(2)
        assert sorted(stage.prefill.order) == ["decode", "prefill"]
        stage.prefill.gate.set()
        stage.decode.gate.set()
        await sending


async def test_vllm_push_pairs_its_legs_by_the_request_id() -> None:
    async with staged(VllmPush, VLLM) as stage:
        await stage.prepare()
        await stage.send("r-5")
        (prefill_body, prefill_headers), (decode_body, decode_headers) = (
            stage.prefill.asked[0],
            stage.decode.asked[0],
        )
    assert prefill_headers["X-Request-Id"] == decode_headers["X-Request-Id"] == "r-5"
    assert prefill_body["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
    assert decode_body["kv_transfer_params"] == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_request_id": "cmpl-r-5-0",
        "remote_engine_id": "prefill-0",
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "pp_size": 1,
        "dcp_size": 1,
    }


async def test_vllm_push_warms_up_with_a_whole_hand_over_so_that_no_lease_is_left() -> None:
    async with staged(VllmPush, VLLM) as stage:
        await stage.dispatch.prepare(stage.session, ask("warm"))
        assert stage.prefill.order == ["prefill", "decode"]
        assert stage.decode.bodies[0]["kv_transfer_params"] == VLLM
        assert stage.decode.asked[0][1]["X-Request-Id"] == stage.prefill.asked[0][1]["X-Request-Id"] == "warm"


@pytest.mark.parametrize("kind", [FerryPull, VllmPull])
async def test_pull_sends_the_decode_leg_when_prefill_has_answered(
    kind: Callable[[str, str, Style], Dispatch],
) -> None:
    async with staged(kind, VLLM) as stage:
        await stage.prepare()
        stage.prefill.gate.clear()
        sending = asyncio.create_task(stage.send())
        await stage.asked(1)
        assert stage.prefill.order == ["prefill"]
        stage.prefill.gate.set()
        await sending
        assert stage.prefill.order == ["prefill", "decode"]
        assert stage.decode.bodies[0]["kv_transfer_params"].items() >= VLLM.items()


async def test_under_pull_a_request_is_sent_when_its_prefill_leg_is() -> None:
    ticks = iter(range(100))
    async with staged(VllmPull, VLLM) as stage:
        seen = Seen(lambda: float(next(ticks)))
        await stage.dispatch.send(stage.session, ask("r-0"), seen)
    assert seen.sent == 0.0
    assert seen.chunks[0] > 0.0


@pytest.mark.parametrize(("kind", "told"), [(FerryPush, SOURCE), (VllmPush, VLLM)])
async def test_a_failed_leg_ends_the_other(
    kind: Callable[[str, str, Style], Dispatch], told: dict[str, Any]
) -> None:
    async with staged(kind, told) as stage:
        await stage.prepare()
        stage.prefill.status = 500
        stage.decode.gate.clear()
        with pytest.raises(LegError, match="prefill is unwell"):
            await stage.send()
        await asyncio.wait_for(stage.decode.dropped.wait(), 10)


@pytest.mark.parametrize("kind", [FerryPush, VllmPush])
async def test_nothing_is_sent_to_engines_that_are_not_known(
    kind: Callable[[str, str, Style], Dispatch],
) -> None:
    async with staged(kind, SOURCE) as stage:
        with pytest.raises(LegError, match="call prepare first"):
            await stage.send()


@pytest.mark.parametrize("kind", [FerryPull, VllmPush, VllmPull])
async def test_an_engine_without_a_producing_connector_is_told(
    kind: Callable[[str, str, Style], Dispatch],
) -> None:
    async with staged(kind, SOURCE) as stage:
        stage.prefill.params = None
        with pytest.raises(LegError, match="is its KV connector a producer"):
            await stage.dispatch.prepare(stage.session, ask("warm"))


async def test_coordinates_that_make_no_sense_are_told() -> None:
    async with staged(FerryPush, SOURCE | {"remote_port": 0}) as stage:
        with pytest.raises(LegError, match=r"does not tell where its KV can be had: .*remote_port"):
            await stage.dispatch.prepare(stage.session, ask("warm"))
