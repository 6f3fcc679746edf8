"""A stage is what the metrics show, and the engine that is struck is the one that they show it on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from kvferry.cli import soak_stages
from kvferry.cli.engines import Endpoints
from kvferry.cli.soak_client import Reply
from kvferry.cli.soak_plan import Ask, Fault, Mix, RoundPlan, Stage, Target
from kvferry.cli.soak_stages import ATTEMPTS, Gauges, StageError, Stages, parse_gauges, source_of
from kvferry.handoff import DecodeParams, PrefillParams, parse_request

CONTEXT = 8192
TOKEN_BYTES = 10.0
ENDPOINTS = Endpoints("router", ("p0", "p1"), ("d0", "d1"), "reference")
ENGINE = {"id": "prefill-x", "incarnation": "i", "host": "h", "port": 7, "tp": 1, "pp": 1}
WORKERS = {"workers": [{"url": url, "engine": ENGINE} for url in ("p0", "p1")]}

EXPOSITION = """
# HELP kvferry_transfers_in_flight Transfers by state
# TYPE kvferry_transfers_in_flight gauge
kvferry_transfers_in_flight{engine="0",model_name="m",state="sending"} 2.0
kvferry_transfers_in_flight{engine="1",model_name="m",state="sending"} 1.0
kvferry_transfers_in_flight{engine="0",model_name="m",state="held"} 4.0
kvferry_transfers_in_flight{engine="0",model_name="m",state="receiving"} 5.0
kvferry_quarantined_blocks{engine="0",model_name="m"} 6.0
kvferry_transfers_total{engine="0",mode="push",outcome="completed",reason="written"} 7.0
kvferry_transfers_total{engine="0",mode="push",outcome="failed",reason="peer_lost"} 8.0
kvferry_transfer_bytes_total{engine="0",mode="push"} 9e3
kvferry_transfer_bytes_created{engine="0",mode="push"} 1.7e9
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 9.0
"""


def test_gauges_are_read_from_the_exposition() -> None:
    assert parse_gauges(EXPOSITION) == Gauges(
        sending=3, held=4, receiving=5, quarantined=6, completed=7, bytes=9000, usage=0.25, running=3
    )
    assert parse_gauges("") == Gauges()


def test_an_engine_is_empty_when_nothing_of_it_is_in_use() -> None:
    assert Gauges(bytes=5, completed=5, running=1).is_empty
    for used in (
        Gauges(receiving=1),
        Gauges(sending=1),
        Gauges(held=1),
        Gauges(quarantined=1),
        Gauges(usage=0.001),
    ):
        assert not used.is_empty
        assert used.text != Gauges().text


class FakeLoad:
    """Remembers what is asked; a request ends when `answers` says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[Ask, Reply, Future[Any]]] = []
        self.legs: list[tuple[str, str, dict[str, Any]]] = []
        self.answers = False
        self.is_open = True
        self.idle = True
        self.gate: list[str] = []
        self.prefill_reply = Reply(whole=True)

    def ask(self, ask: Ask, reply: Reply, what: str) -> Future[Any]:
        assert what == "victim"
        self.gate.append("asked")
        return self._future(ask, reply)

    def decode_leg(self, url: str, ask: Ask, params: dict[str, Any], reply: Reply) -> Future[Any]:
        self.legs.append(("decode", url, params))
        return self._future(ask, reply)

    def prefill_leg(self, url: str, ask: Ask, params: dict[str, Any]) -> Future[Any]:
        self.legs.append(("prefill", url, params))
        return self._future(ask, self.prefill_reply)

    def wait(self, asked: Future[Any]) -> Reply:
        return next(reply for _, reply, future in self.asked if future is asked)

    def open(self) -> None:
        self.is_open = True
        self.gate.append("open")

    def shut(self) -> None:
        self.is_open = False
        self.gate.append("shut")

    def is_idle(self) -> bool:
        return self.idle

    def _future(self, ask: Ask, reply: Reply) -> Future[Any]:
        future: Future[Any] = Future()
        if self.answers:
            future.set_result(None)
        self.asked.append((ask, reply, future))
        return future


class World:
    """Engines whose metrics are a list of readings per engine; the last one stays."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.load = FakeLoad()
        self.readings: dict[str, Sequence[Gauges]] = {}
        self.reads: dict[str, int] = {}
        monkeypatch.setattr(soak_stages, "read_gauges", self.read)
        monkeypatch.setattr(soak_stages, "fetch", lambda url, path, seconds: json.dumps(WORKERS))
        monkeypatch.setattr(soak_stages, "POLL_SECONDS", 0.0)
        monkeypatch.setattr(soak_stages, "STAGE_SECONDS_MAX", 0.2)
        self.stages = Stages(ENDPOINTS, self.load, Mix("x", CONTEXT), TOKEN_BYTES)  # type: ignore[arg-type]

    def read(self, url: str) -> Gauges:
        readings = self.readings.get(url, [Gauges()])
        number = self.reads.get(url, 0)
        self.reads[url] = number + 1
        return readings[min(number, len(readings) - 1)]

    def reach(self, stage: Stage, target: Target = Target.PREFILL) -> soak_stages.Victim:
        plan = RoundPlan(number=1, stage=stage, target=target, fault=Fault.KILL, seconds=1.0)
        return self.stages.reach(plan)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


@pytest.mark.parametrize("target", list(Target))
def test_waiting_is_a_decode_leg_alone_and_its_other_leg_follows_later(world: World, target: Target) -> None:
    waits = Gauges(receiving=3)
    # One of the three is unknown to both P; the first reading is torn: it must show twice in a row.
    world.readings = {
        "d0": [waits, Gauges(receiving=2), waits, waits, waits],
        "p0": [Gauges(sending=1)],
        "p1": [Gauges(held=1)],
    }
    victim = world.reach(Stage.WAITING, target)
    assert world.reads["d0"] == 4
    ((leg, decode_url, params),) = world.load.legs
    assert leg == "decode"
    decode = parse_request(params)
    assert isinstance(decode, DecodeParams)
    assert decode.source.engine == "prefill-x"
    assert victim.server == f"{target.value}-{victim.server[-1]}"
    if target is Target.DECODE:
        assert decode_url == f"d{victim.server[-1]}"
    assert len(victim.open) == 1
    victim.send_other_leg()
    victim.send_other_leg()
    _, (leg, prefill_url, params) = world.load.legs
    prefill = parse_request(params)
    assert isinstance(prefill, PrefillParams)
    assert prefill.transfer == decode.transfer
    assert victim.late_server == f"prefill-{prefill_url[-1]}"
    assert len(victim.open) == 2


@pytest.mark.parametrize("target", list(Target))
def test_held_is_a_prefill_leg_alone(world: World, target: Target) -> None:
    world.readings = {url: [Gauges(), Gauges(held=1)] for url in ("p0", "p1")}
    victim = world.reach(Stage.HELD, target)
    ((leg, prefill_url, _),) = world.load.legs
    assert leg == "prefill"
    assert victim.late_server.startswith("decode-")
    if target is Target.PREFILL:
        assert victim.server == f"prefill-{prefill_url[-1]}"
    victim.send_other_leg()
    assert world.load.legs[1][0] == "decode"
    assert world.load.legs[1][1] == f"d{victim.late_server[-1]}"


def test_a_prefill_that_is_refused_is_no_stage(world: World) -> None:
    world.load.prefill_reply = Reply(error="no")
    with pytest.raises(StageError, match=r"prefill-\d refused a prefill: no"):
        world.reach(Stage.HELD)


PROMPT_BYTES = int(CONTEXT * 0.75 * TOKEN_BYTES)


def pushed(prompts: float, *, sending: int = 1) -> Gauges:
    """What P shows when so many prompts have been pushed since it had pushed 100 bytes."""
    return Gauges(bytes=100 + int(prompts * PROMPT_BYTES), sending=sending)


def test_half_is_a_part_of_a_long_prompt_in_an_empty_queue(world: World) -> None:
    quiet = Gauges(bytes=100)
    world.readings = {
        "p0": [Gauges(bytes=500)],
        # Others' prompts end; the first victim has begun, but too little or nearly all of it is pushed; the
        # second one has come so far.
        "p1": [pushed(0), quiet, quiet, quiet, pushed(0), pushed(0.1), pushed(0.95), pushed(1.5)],
        "d1": [Gauges(receiving=1), quiet, Gauges(receiving=1)],
    }
    victim = world.reach(Stage.HALF)
    assert victim.server == "prefill-1"
    assert world.reads["p1"] == 8
    assert len(victim.open) == 2
    # The load is back when the strike comes, and behind the victims.
    assert world.load.gate == ["shut", "asked", "asked", "open"]
    assert world.load.is_open


def test_at_half_the_consumer_that_receives_can_be_struck(world: World) -> None:
    world.readings = {
        "p0": [Gauges(bytes=100), Gauges(bytes=100), pushed(0.5)],
        "d1": [Gauges(), Gauges(receiving=1)],
    }
    assert world.reach(Stage.HALF, Target.DECODE).server == "decode-1"


def test_the_load_goes_on_although_its_prompts_do_not_end(world: World) -> None:
    world.readings = {"p0": [Gauges(sending=1)]}
    with pytest.raises(StageError):
        world.reach(Stage.HALF)
    assert world.load.gate == ["shut", "open"]


def test_half_is_over_when_nothing_is_sent_any_more(world: World) -> None:
    world.readings = {"p0": [Gauges(), Gauges(bytes=10**9)]}
    with pytest.raises(StageError, match=r"stage half did not show in \d attempts and 0 s"):
        world.reach(Stage.HALF)


def test_a_request_that_was_too_quick_is_followed_by_another(world: World) -> None:
    world.load.answers = True
    with pytest.raises(StageError):
        world.reach(Stage.HALF)
    assert len(world.load.asked) == 2 * ATTEMPTS


@pytest.mark.parametrize("target", list(Target))
def test_decoding_shows_by_the_first_tokens(world: World, target: Target) -> None:
    world.readings = {"d1": [Gauges(running=1)], "p1": [Gauges(running=2)]}
    original = world.load.ask

    def ask(ask: Ask, reply: Reply, what: str) -> Future[Any]:
        reply.heard = 2
        return original(ask, reply, what)

    world.load.ask = ask  # type: ignore[method-assign]
    assert world.reach(Stage.DECODING, target).server == f"{target.value}-1"


def test_without_tokens_nothing_decodes(world: World) -> None:
    world.readings = {"d0": [Gauges(running=1)]}
    with pytest.raises(StageError):
        world.reach(Stage.DECODING)


def test_idle_is_when_no_request_runs_and_all_is_empty(world: World) -> None:
    world.readings = {"p1": [Gauges(held=1), Gauges(usage=0.1), Gauges()]}
    victim = world.reach(Stage.IDLE, Target.DECODE)
    assert victim.server in ("decode-0", "decode-1")
    assert world.reads["p1"] == 3
    assert not world.load.is_open
    assert victim.open == []
    world.load.idle = False
    with pytest.raises(StageError):
        world.reach(Stage.IDLE)


def test_what_is_left_over_is_named(world: World) -> None:
    world.readings = {"p1": [Gauges(held=1)], "d0": [Gauges(completed=3)], "d1": [Gauges(completed=4)]}
    assert world.stages.left_over() == (
        "prefill-1: receiving 0, sending 0, held 1, quarantined 0, cache used 0.0000"
    )
    assert world.stages.completed() == 7


def test_where_the_kv_is_comes_from_the_router() -> None:
    source = source_of(WORKERS["workers"], "p0")
    assert source is not None
    assert (source.engine, source.incarnation, source.host, source.port) == ("prefill-x", "i", "h", 7)
    assert source_of([], "p0") is None
    assert source_of([{"url": "p0"}], "p0") is None


def test_a_router_that_has_forgotten_an_engine_is_asked_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgetful = [{"workers": [{"url": url} for url in ("p0", "p1")]}] * 3
    monkeypatch.setattr(
        soak_stages,
        "fetch",
        lambda url, path, seconds: json.dumps(forgetful.pop() if forgetful else WORKERS),
    )
    world.readings = {url: [Gauges(held=1)] for url in ("p0", "p1")}
    world.reach(Stage.HELD)
    assert forgetful == []
    nobody: dict[str, Any] = {"workers": []}
    monkeypatch.setattr(soak_stages, "fetch", lambda url, path, seconds: json.dumps(nobody))
    with pytest.raises(StageError, match=r"does not know who the prefill engine at p\d is"):
        world.reach(Stage.HELD)
