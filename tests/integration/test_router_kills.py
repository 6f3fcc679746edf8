"""Each of two prefill and two decode engines is killed and started again under load, behind one router.

Goal: a client sees only what no retry could have saved: a stream that had begun at the engine that died.
Method: emulated engines, whole requests and streams at random moments for as long as it takes; one engine
after the other is killed in the moment when it serves something. While it is away there is another of its
role, so whoever has got no byte yet is to be served.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import aiohttp
import pytest

from kvferry.cli.emulated import SERVED_NAME, EmulatedEngine, write_emulated_model
from kvferry.cli.requests import fetch
from tests.support.live import Client, Live, live, make_deployment, run, sample

REQUESTS_PER_SECOND = 8.0
SECONDS = 300.0
"""At least: as long as engines are away, the load goes on."""
SETTLE_SECONDS = 10.0
"""Between an engine's return and the next one's end."""
PROMPT_TOKENS = (20, 1500)
PREFILL_TOKENS_PER_SECOND = 8000.0
"""Slow enough that a prefill engine has something to lose, quick enough that one can stand in for two."""
ANSWER_TOKENS = 32
AT_WORK = {"prefill": 2, "decode": 3}
"""So many legs at an engine when it is killed: some have got no byte yet."""
NAMES = ("prefill-0", "decode-0", "prefill-1", "decode-1")


@dataclass(frozen=True)
class Outcome:
    """What a client has seen of one request."""

    request: str
    streamed: bool
    status: int
    cause: str
    """What the router says of an error, before or in the stream; empty for a whole answer."""
    begun: bool
    """Whether a byte of an answer had come."""
    started: float
    ended: float


@dataclass(frozen=True)
class Absence:
    """One engine's, in seconds of the monotonic clock."""

    name: str
    killed: float
    back: float


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """The engines, and a router that notes each request."""
    files = tmp_path_factory.mktemp("fleet")
    write_emulated_model(files / "model")
    engine = EmulatedEngine(
        name="any",
        transfer=None,
        options={"costs": {"prefill_tokens_per_second": PREFILL_TOKENS_PER_SECOND}},
        cache_bytes=1 << 30,
        step_tokens=2048,
        context_tokens_max=8192,
    )
    deployment = make_deployment(
        files / "model",
        files,
        served_name=SERVED_NAME,
        prefill=2,
        decode=2,
        reference=False,
        prefill_arguments=engine.arguments,
        decode_arguments=engine.arguments,
        router_arguments=("--access-log", str(files / "access.log"), "--health-interval-seconds", "1"),
        environment=engine.full_environment,
    )
    with live(deployment) as running:
        yield running


@pytest.mark.engines
@pytest.mark.long
@pytest.mark.timeout(1500)
def test_killed_and_started_again_under_load(fleet: Live) -> None:
    """P04, X04, X20, A02: no request fails that had got no byte, and every other one tells its cause."""
    outcomes, absences = run(lambda client: under_load(fleet, client))
    print(told(outcomes, absences))
    assert [outcome for outcome in outcomes if outcome.status != 200] == []
    assert [outcome for outcome in outcomes if outcome.cause and not lost_with(outcome, absences)] == []
    fleet.wait(lambda: len(access_log(fleet)) >= len(outcomes), what="the router's log")
    log = access_log(fleet)
    served_by = {line["cause"] for line in log if line["outcome"] == "ok"}
    assert served_by <= {"none", "prefill_failed", "no_prefill"}
    assert told_as_logged(outcomes, log) == []
    metrics = fetch(fleet.endpoints.router, "/metrics", seconds=10.0)
    for leg in ("prefill", "decode"):
        assert sample(metrics, "kvferry_router_retries_total", leg=leg) > 0, "every kill has met something"
    workers = json.loads(fetch(fleet.endpoints.router, "/workers", seconds=10.0))["workers"]
    assert [worker["in_flight"] + worker["transfers"] for worker in workers] == [0, 0, 0, 0]
    fleet.assert_empty()


async def under_load(fleet: Live, client: Client) -> tuple[list[Outcome], list[Absence]]:
    """Every request's outcome, and when each engine was away."""
    kills = asyncio.create_task(kill_each(fleet))
    chance = Random(7)
    requests: list[asyncio.Task[Outcome]] = []
    began = due = time.monotonic()
    while not kills.done() or time.monotonic() < began + SECONDS:
        requests.append(asyncio.create_task(ask(fleet, client, len(requests), chance)))
        # On schedule, whatever is late.
        due += chance.expovariate(REQUESTS_PER_SECOND)
        await asyncio.sleep(due - time.monotonic())
    return await asyncio.gather(*requests), kills.result()


async def kill_each(fleet: Live) -> list[Absence]:
    """Kill one after the other amid its work, and start it again at once."""
    absences = []
    for name in NAMES:
        await asyncio.sleep(SETTLE_SECONDS)
        server = fleet.server(name)
        legs = AT_WORK[name.partition("-")[0]]
        await fleet.until(lambda url=server.spec.url, legs=legs: in_flight(fleet, url) >= legs)
        killed = time.monotonic()
        server.kill()
        await asyncio.to_thread(fleet.restart, name)
        await fleet.until(lambda url=server.spec.url: worker_of(fleet, url)["ready"])
        absences.append(Absence(name, killed, time.monotonic()))
        await fleet.until(lambda url=server.spec.url: in_flight(fleet, url) > 0)
    return absences


async def ask(fleet: Live, client: Client, number: int, chance: Random) -> Outcome:
    """Send one request; every second one has its answer streamed."""
    streamed = bool(number % 2)
    prompt = [chance.randrange(300, 1000) for _ in range(chance.randint(*PROMPT_TOKENS))]
    body: dict[str, Any] = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": ANSWER_TOKENS}
    body |= {"ignore_eos": True, "stream": streamed}
    started = time.monotonic()
    status, cause, begun = await answered(client.session, fleet.endpoints.router, body, f"kills-{number}")
    return Outcome(f"kills-{number}", streamed, status, cause, begun, started, time.monotonic())


async def answered(
    session: aiohttp.ClientSession, router: str, body: dict[str, Any], request: str
) -> tuple[int, str, bool]:
    """Status, the cause of an error, and whether an answer had begun."""
    headers = {"X-Request-Id": request}
    begun, done = False, False
    try:
        async with session.post(f"{router}/v1/completions", json=body, headers=headers) as response:
            if response.status != 200 or not body["stream"]:
                answer = await response.json()
                return response.status, cause_in(answer), response.status == 200
            async for line in response.content:
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    done = True
                elif data:
                    event = json.loads(data)
                    if cause := cause_in(event):
                        return 200, cause, begun
                    begun = True
    except aiohttp.ClientError as error:
        return 0, f"no cause: {error!r}", begun
    return 200, "" if done else "no cause: the stream ended without [DONE]", begun


def cause_in(answer: dict[str, Any]) -> str:
    """The router's word for what went wrong; empty when nothing did."""
    error = answer.get("error")
    return "" if error is None else str(error.get("kvferry", f"no cause: {error}"))


def lost_with(outcome: Outcome, absences: list[Absence]) -> bool:
    """Whether it is a stream that had begun at a decode engine that was killed while it ran."""
    killed = [absence.killed for absence in absences if absence.name.startswith("decode")]
    amid = any(outcome.started <= instant <= outcome.ended for instant in killed)
    return outcome.cause == "decode_lost" and outcome.streamed and outcome.begun and amid


def access_log(fleet: Live) -> list[dict[str, Any]]:
    """One line for each request of the test, as far as it is written."""
    path = fleet.deployment.logs / "access.log"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line["request_id"].startswith("kills-")]


def told_as_logged(outcomes: list[Outcome], log: list[dict[str, Any]]) -> list[Outcome]:
    """Those of which the router's log says something else than the client was told."""
    logged = {line["request_id"]: line for line in log}
    return [
        outcome
        for outcome in outcomes
        if outcome.request not in logged
        or logged[outcome.request]["outcome"] != ("error" if outcome.cause else "ok")
        or (outcome.cause and logged[outcome.request]["cause"] != outcome.cause)
    ]


def worker_of(fleet: Live, url: str) -> dict[str, Any]:
    """What the router knows of an engine."""
    workers = json.loads(fetch(fleet.endpoints.router, "/workers", seconds=10.0))["workers"]
    return next(worker for worker in workers if worker["url"] == url)


def in_flight(fleet: Live, url: str) -> int:
    """Legs that are open at an engine."""
    return int(worker_of(fleet, url)["in_flight"])


def told(outcomes: list[Outcome], absences: list[Absence]) -> str:
    """What has happened, for whoever looks."""
    began = min(outcome.started for outcome in outcomes)
    lines = [
        f"{absence.name}: away from {absence.killed - began:.0f} to {absence.back - began:.0f} s"
        for absence in absences
    ]
    kinds = Counter((outcome.status, outcome.cause, outcome.begun) for outcome in outcomes)
    return "\n".join([*lines, *(f"{count:6d} x {kind}" for kind, count in kinds.most_common())])
