"""The clients of a soak: they begin when let, are judged against the reference, and leave nothing behind."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvferry.cli import soak_load
from kvferry.cli.soak_client import Kind, Reply
from kvferry.cli.soak_load import Addresses, Load, LoadError
from kvferry.cli.soak_plan import Ask, Mix
from tests.support.soak_server import ANSWER, SoakServer, serving
from tests.support.stub_fleet import eventually

SECONDS = 10.0
LINGER_SECONDS = 0.05
ASK = Ask(prompt=(1, 2, 3), answer_tokens=len(ANSWER))


class Patient(Mix):
    """Clients that never leave and hardly pause."""

    def draw(self) -> Ask:
        """Every second one is streamed."""
        return Ask(prompt=self.prompt(5), answer_tokens=len(ANSWER), stream=self.pick(2) == 0)

    def pause_seconds(self) -> float:
        """Hardly."""
        return 0.001


@dataclass
class World:
    """A router and a reference engine in a thread of their own."""

    router: SoakServer = field(default_factory=SoakServer)
    reference: SoakServer = field(default_factory=SoakServer)
    addresses: Addresses | None = None

    def load(self, bound_seconds: float = SECONDS) -> Load:
        assert self.addresses is not None
        return Load(self.addresses, Patient("seed", 4096), bound_seconds=bound_seconds, clients=2)


@pytest.fixture
def world() -> Iterator[World]:
    made, loop, begun, ended = World(), asyncio.new_event_loop(), threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with serving(made.router) as router, serving(made.reference) as reference:
            made.addresses = Addresses(router, reference, "tiny")
            begun.set()
            await ended.wait()
            # What the clients have left behind on their way out is accepted and closed by its own handlers.
            await asyncio.sleep(LINGER_SECONDS)
        await asyncio.sleep(0)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert begun.wait(SECONDS)
    yield made
    loop.call_soon_threadsafe(ended.set)
    thread.join(SECONDS)
    loop.close()


def test_clients_begin_when_let_and_stop_when_told(world: World) -> None:
    with world.load() as load:
        assert load.is_idle()
        assert world.router.bodies == []
        load.open()
        assert eventually(lambda: load.count_right_since(0.0) >= 6)
        load.shut()
        assert eventually(load.is_idle)
        taken = load.take()
        assert {outcome.kind for outcome in taken} == {Kind.RIGHT}
        assert load.take() == []
        assert len(world.router.bodies) == len(taken)
        # The reference engine was asked the same, never streamed.
        asked = [body["prompt"] for body in world.router.bodies]
        assert sorted(body["prompt"] for body in world.reference.bodies) == sorted(asked)
        assert not any(body["stream"] for body in world.reference.bodies)


def test_an_answer_that_the_reference_does_not_give_is_wrong(world: World) -> None:
    world.router.choices = lambda body: [[7, 8, 1]]
    with world.load() as load:
        outcome = load.wait(load.ask(ASK, Reply(), "victim"))
    assert outcome.kind is Kind.WRONG
    assert outcome.what == "victim: 3 tokens, n=1"


def test_a_failure_needs_no_reference(world: World) -> None:
    world.router.status, world.router.text = 503, '{"error": {"message": "nobody"}}'
    with world.load() as load:
        outcome = load.wait(load.ask(ASK, Reply(), "victim"))
    assert (outcome.kind, outcome.detail) == (Kind.FAILED, "503: nobody")
    assert world.reference.bodies == []


AWAY = {"ready": False, "prefill": 1, "decode": 0}
NO_PREFILL = {"ready": False, "prefill": 0, "decode": 1}


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak_load, "_AFTER_FAILURE_SECONDS", 0.0)
    monkeypatch.setattr(soak_load, "_PAUSE_SECONDS_MIN", 0.001)
    monkeypatch.setattr(soak_load, "_PAUSE_SECONDS_MAX", 0.01)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("says", [AWAY, None, {}])
def test_clients_that_are_refused_wait_until_somebody_decodes(
    world: World, says: dict[str, Any] | None
) -> None:
    world.router.status, world.router.text = 503, '{"error": {"message": "nobody"}}'
    world.router.health = says
    with world.load() as load:
        load.open()
        # Each asks once, and then only for the router's health; what that says goes on to be asked.
        assert eventually(lambda: world.router.health_asked >= 20)
        assert len(world.router.bodies) == 2
        assert load.is_idle(), "who waits has no request"
        world.router.status, world.router.text = 200, None
        world.router.health = NO_PREFILL
        assert eventually(lambda: load.count_right_since(0.0) >= 6)
        taken = load.take()
    assert [outcome.kind for outcome in taken][:2] == [Kind.FAILED, Kind.FAILED]
    assert {outcome.kind for outcome in taken[2:]} == {Kind.RIGHT}


@pytest.mark.usefixtures("hasty")
def test_a_client_that_waits_in_vain_asks_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak_load, "PATIENCE_SECONDS", 0.05)
    world.router.status, world.router.text = 503, '{"error": {"message": "nobody"}}'
    world.router.health = AWAY
    with world.load() as load:
        load.open()
        assert eventually(lambda: len(world.router.bodies) >= 6)
        assert world.router.health_asked > 6


def test_what_runs_is_known_and_what_began_before_is_not(world: World) -> None:
    world.router.hangs = True
    with world.load(bound_seconds=0.5) as load:
        asked = load.ask(ASK, Reply(), "victim")
        assert eventually(lambda: not load.is_idle())
        assert load.wait(asked).kind is Kind.LATE
        assert load.is_idle()
        world.router.hangs = False
        load.wait(load.ask(ASK, Reply(), "victim"))
        assert load.count_right_since(0.0) == 1
        assert load.count_right_since(time.monotonic()) == 0


def test_both_legs_go_to_the_engines_with_their_params(world: World) -> None:
    assert world.addresses is not None
    engine = world.addresses.router
    with world.load() as load:
        reply = load.wait(load.prefill_leg(engine, ASK, {"do_remote_decode": True}))
        assert reply.whole
        assert (world.router.bodies[0]["max_tokens"], world.router.bodies[0]["stream"]) == (1, False)
        assert world.router.bodies[0]["kv_transfer_params"] == {"do_remote_decode": True}
        world.router.breaks = True
        outcome = load.wait(load.decode_leg(engine, ASK, {"do_remote_prefill": True}, Reply()))
        assert outcome.kind is Kind.FAILED, "an engine that dies cannot say more"
        assert world.router.bodies[1]["kv_transfer_params"] == {"do_remote_prefill": True}


def test_a_prefill_leg_without_an_end_is_told(world: World) -> None:
    assert world.addresses is not None
    world.router.hangs = True
    with world.load(bound_seconds=0.2) as load:
        assert load.wait(load.prefill_leg(world.addresses.router, ASK, {"do_remote_decode": True})).late
        (outcome,) = load.take()
    assert (outcome.kind, outcome.what) == (Kind.LATE, "prefill leg: 3 tokens")


def test_a_reference_that_does_not_answer_is_an_error_of_the_soak(world: World) -> None:
    world.reference.status, world.reference.text = 500, '{"error": {"message": "broken"}}'
    with world.load() as load:
        with pytest.raises(LoadError, match="the reference engine gave no answer: broken"):
            load.wait(load.ask(ASK, Reply(), "victim"))
        load.open()

        def has_failed() -> bool:
            try:
                load.is_idle()
            except LoadError as error:
                return "the reference engine gave no answer" in str(error)
            return False

        assert eventually(has_failed)


def test_a_request_without_an_end_is_an_error_of_the_soak(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.cli.soak_load._REFERENCE_SECONDS_MAX", 0.0)
    never: Future[Any] = Future()
    with world.load(bound_seconds=0.01) as load, pytest.raises(LoadError, match="did not end within 0 s"):
        load.wait(never)


def test_leaving_ends_what_runs(world: World) -> None:
    world.router.hangs = True
    before = threading.active_count()
    with world.load() as load:
        load.open()
        assert eventually(lambda: len(world.router.bodies) == 2)
    assert threading.active_count() == before
