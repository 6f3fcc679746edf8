"""Whatever becomes of a request is told apart, and a wrong token is never taken for anything else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from kvferry.cli.soak_client import Kind, Reply, converse, converse_as, worth
from kvferry.cli.soak_plan import Ask
from tests.support.soak_server import ANSWER, SoakServer, serving

EXPECTED = (ANSWER,)
SECONDS = 15.0


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as opened:
        yield opened


async def judged(
    session: aiohttp.ClientSession,
    server: SoakServer,
    *,
    bound_seconds: float = SECONDS,
    direct: bool = False,
    **changes: Any,
) -> tuple[Kind, str]:
    fields: dict[str, Any] = {"prompt": (1, 2), "answer_tokens": len(ANSWER)}
    ask = Ask(**(fields | changes))
    reply = Reply()
    async with serving(server) as url:
        await converse_as(session, url, ask, "tiny", reply, bound_seconds)
    return worth(reply, EXPECTED * ask.n, direct=direct)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
async def test_a_whole_answer_is_right(session: aiohttp.ClientSession, stream: bool, n: int) -> None:
    server = SoakServer()
    assert await judged(session, server, stream=stream, n=n) == (Kind.RIGHT, "")
    assert server.bodies[0]["prompt"] == [1, 2]
    assert server.bodies[0]["model"] == "tiny"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ids", [[7, 8, 1], [7, 8], [7, 8, 9, 9], []])
async def test_another_token_more_or_fewer_of_them_are_wrong(
    session: aiohttp.ClientSession, stream: bool, ids: list[int]
) -> None:
    kind, detail = await judged(session, SoakServer(choices=lambda body: [ids]), stream=stream)
    assert kind is Kind.WRONG
    assert "instead of 7,8,9" in detail


@pytest.mark.parametrize("stream", [False, True])
async def test_a_missing_or_bad_second_choice_is_wrong(session: aiohttp.ClientSession, stream: bool) -> None:
    for choices in ([[7, 8, 9]], [[7, 8, 9], [7, 8, 1]], [[7, 8, 1], [7, 8, 9]]):
        server = SoakServer(choices=lambda body, choices=choices: choices)
        assert (await judged(session, server, n=2, stream=stream))[0] is Kind.WRONG


@pytest.mark.parametrize("status", [500, 502, 503, 504, 429])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_that_is_told_is_a_failure(
    session: aiohttp.ClientSession, status: int, stream: bool
) -> None:
    server = SoakServer(status=status, text='{"error": {"message": "P is lost"}}')
    assert await judged(session, server, stream=stream) == (Kind.FAILED, f"{status}: P is lost")


async def test_a_refusal_of_what_is_well_formed_is_no_mere_failure(session: aiohttp.ClientSession) -> None:
    server = SoakServer(status=400, text='{"error": {"message": "bad"}}')
    assert await judged(session, server) == (Kind.REJECTED, "400: bad")


@pytest.mark.parametrize("text", ["", "Internal Server Error", "[]", '{"detail": "x"}'])
async def test_a_status_without_an_error_says_nothing(session: aiohttp.ClientSession, text: str) -> None:
    assert (await judged(session, SoakServer(status=500, text=text)))[0] is Kind.SILENT


async def test_a_200_that_cannot_be_read_says_nothing(session: aiohttp.ClientSession) -> None:
    assert (await judged(session, SoakServer(text='{"choices": [')))[0] is Kind.SILENT


ERROR_EVENT = 'data: {"error": {"message": "D is lost", "code": 502}}\n\n'


@pytest.mark.parametrize("end", [ERROR_EVENT, ERROR_EVENT + "data: [DONE]\n\n"])
async def test_an_error_in_a_stream_is_a_failure(session: aiohttp.ClientSession, end: str) -> None:
    kind, detail = await judged(session, SoakServer(stream_end=end, stream_tokens_max=2), stream=True)
    assert kind is Kind.FAILED
    assert "D is lost" in detail


async def test_a_stream_that_just_ends_says_nothing(session: aiohttp.ClientSession) -> None:
    assert (await judged(session, SoakServer(stream_end=""), stream=True))[0] is Kind.SILENT


@pytest.mark.parametrize(("direct", "kind"), [(False, Kind.SILENT), (True, Kind.FAILED)])
async def test_a_broken_connection_says_nothing_but_to_who_asked_an_engine(
    session: aiohttp.ClientSession, direct: bool, kind: Kind
) -> None:
    assert (await judged(session, SoakServer(breaks=True), direct=direct))[0] is kind


@pytest.mark.parametrize("stream", [False, True])
async def test_no_end_within_the_bound_is_late(session: aiohttp.ClientSession, stream: bool) -> None:
    assert (await judged(session, SoakServer(hangs=True), bound_seconds=0.2, stream=stream))[0] is Kind.LATE


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_who_leaves_is_not_an_error(session: aiohttp.ClientSession, stream: bool) -> None:
    server = SoakServer(hangs=True)
    assert await judged(session, server, stream=stream, leaves_after_seconds=0.2) == (Kind.LEFT, "")


@pytest.mark.parametrize("how", [{"leaves_after_seconds": 1.5}, {"bound_seconds": 1.5}])
async def test_a_wrong_beginning_is_wrong_however_it_ended(
    session: aiohttp.ClientSession, how: dict[str, float]
) -> None:
    server = SoakServer(choices=lambda body: [[7, 1]], hangs=True)
    kind, detail = await judged(session, server, stream=True, **how)
    assert kind is Kind.WRONG
    assert detail == "began with 7,1 instead of 7,8,9"


async def test_a_wrong_beginning_before_an_error_is_wrong(session: aiohttp.ClientSession) -> None:
    server = SoakServer(choices=lambda body: [[8]], stream_end=ERROR_EVENT)
    assert (await judged(session, server, stream=True))[0] is Kind.WRONG


async def test_a_refused_connection_says_nothing_more(session: aiohttp.ClientSession) -> None:
    async with serving(SoakServer()) as url:
        pass
    reply = Reply()
    await converse(session, url, {}, reply, SECONDS)
    assert reply.broken is not None
    assert worth(reply, None)[0] is Kind.SILENT


async def test_the_tokens_of_a_stream_are_counted_as_they_come(session: aiohttp.ClientSession) -> None:
    reply = Reply()
    async with serving(SoakServer(stream_tokens_max=2, stream_end="")) as url:
        body = Ask(prompt=(1,), answer_tokens=3, n=2, stream=True).body("tiny")
        await converse(session, url, body, reply, SECONDS)
    assert reply.heard == 4
    assert reply.tokens == (ANSWER[:2], ANSWER[:2])


def test_tokens_without_anything_to_compare_with_are_wrong() -> None:
    reply = Reply(whole=True)
    reply.collected.add({"choices": [{"index": 0, "token_ids": [1]}]})
    assert worth(reply, None)[0] is Kind.WRONG
    reply.whole = False
    assert worth(reply, None)[0] is Kind.WRONG
