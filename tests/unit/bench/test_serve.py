"""One load against one endpoint, end to end over HTTP, and its result."""

from __future__ import annotations

import json
import math

import pytest

from kvferry.bench.serve import ServeOptions, planned, result, serve
from kvferry.errors import UsageError
from tests.support.stub_engines import StubEngine, serving

EASY = {"model": "tiny", "prompts": 6, "input_tokens": 12, "output_tokens": 3}


async def test_every_prompt_is_sent_once_and_answered() -> None:
    engine = StubEngine()
    heard = []
    async with serving(engine) as url:
        options = ServeOptions(url=url + "/v1", **EASY)
        load = await serve(options, heard.append)
    assert len(heard) == 6
    assert load.failures == []
    assert len({tuple(body["prompt"]) for body in engine.bodies}) == 6
    assert {body["max_tokens"] for body in engine.bodies} == {3}
    told = result(options, load, ("ttft", "tpot"))
    assert told["totals"]["completion_tokens"] == 18
    assert told["milliseconds"].keys() == {"ttft", "tpot"}
    assert len(told["requests"]) == 6
    assert told["options"]["rate"] == "inf"
    json.dumps(told, allow_nan=False)


async def test_texts_are_sent_where_they_are_asked_for() -> None:
    engine = StubEngine()
    async with serving(engine) as url:
        await serve(ServeOptions(url=url, kind="text", rate=1000.0, **EASY), lambda record: None)
    assert {len(body["prompt"].split()) for body in engine.bodies} == {12}


def test_the_result_holds_no_key() -> None:
    options = ServeOptions(url="http://h:1", headers={"Authorization": "Bearer secret"}, **EASY)
    assert "secret" not in json.dumps(options_told(options))


def options_told(options: ServeOptions) -> object:
    from kvferry.bench.records import Load

    return result(options, Load(started_ns=0, seconds=1.0, records=()), ("ttft",))


def test_requests_of_two_runs_have_different_ids_and_the_same_prompts() -> None:
    options = ServeOptions(url="http://h:1", **EASY)
    first, again = planned(options), planned(options)
    assert [ask.prompt for ask in first] == [ask.prompt for ask in again]
    assert not {ask.request for ask in first} & {ask.request for ask in again}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"url": "localhost:8000"}, "--base-url must be http://HOST:PORT, not 'localhost:8000'"),
        ({"prompts": 0}, "--num-prompts must be from 1 to 1000000, not 0"),
        ({"output_tokens": 0}, "--random-output-len must be at least 1, not 0"),
        ({"prompts": 10**6, "input_tokens": 10**6}, "--num-prompts times --random-input-len must be at most"),
    ],
)
def test_impossible_options_say_what_is_possible(changed: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        ServeOptions(**({"url": "http://h:1", **EASY} | changed))
    assert str(refused.value).startswith(said)


def test_an_endless_rate_is_the_default() -> None:
    assert math.isinf(ServeOptions(url="http://h:1", **EASY).rate)
