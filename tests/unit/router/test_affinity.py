"""Conversations: the same engines for the next turn, and what the last one's decode engine keeps of it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from kvferry.handoff import HeldParams, PrefillParams, SourceParams, parse_request
from kvferry.ids import EngineId, Incarnation, TransferId
from kvferry.router.api.conversation import fingerprint
from kvferry.router.api.openai import Endpoint
from kvferry.router.dispatch.affinity import HELD_BYTES_MAX, Turns
from kvferry.router.dispatch.prompt import Route
from kvferry.router.engines.pool import Role, Worker
from tests.support.fake_engine import Step, failing
from tests.support.router_world import RouterWorld, events_of, router_world, until

LONG = "once upon a time " * 60
HELD = HeldParams(
    source=SourceParams(
        engine=EngineId("engine-d"), host="10.0.0.2", port=5700, incarnation=Incarnation("of-d")
    ),
    transfer=TransferId("what-d-keeps"),
    tokens=300,
    lease_seconds=60.0,
)
KEPT = HELD.to_params() | {"remote_block_ids": [[1, 2]]}


async def turn(world: RouterWorld, prompt: str, session: str | None = None, **fields: Any) -> None:
    """One request, served."""
    headers = {} if session is None else {"X-Session-Id": session}
    body = {"model": "tiny", "prompt": prompt} | fields
    async with world.client.post("/v1/completions", json=body, headers=headers) as response:
        assert response.status == 200
        await response.read()


def served_by(world: RouterWorld) -> list[int]:
    """How many requests each decode engine had."""
    return [len(engine.requests) for engine in world.decode]


# --- the table -----------------------------------------------------------------------------------


def prompt(text: str, session: str | None = None) -> Any:
    return fingerprint(Endpoint.COMPLETIONS, {"prompt": text}, session)


def route() -> Route:
    decode = Worker("http://d", Role.DECODE, up=True)
    return Route(decode, Worker("http://p", Role.PREFILL), "push")


def test_a_turn_is_found_by_its_session_and_by_the_longest_beginning() -> None:
    turns = Turns(100, 10.0)
    early, late, named = route(), route(), route()
    turns.remember(prompt(LONG), early, None, 0.0)
    turns.remember(prompt(LONG * 2), late, None, 0.0)
    turns.remember(prompt("short", "mine"), named, None, 0.0)
    assert turns.recall(prompt(LONG + "x"), 1.0).decode is early.decode
    assert turns.recall(prompt(LONG * 3), 1.0).decode is late.decode
    assert turns.recall(prompt(LONG * 3, "mine"), 1.0).decode is named.decode
    assert turns.recall(prompt(LONG * 3, "unknown"), 1.0).decode is late.decode
    assert turns.recall(prompt("another " * 200), 1.0) is None


def test_a_turn_is_forgotten_with_time() -> None:
    turns = Turns(100, 10.0)
    turns.remember(prompt(LONG, "mine"), route(), None, 0.0)
    assert turns.recall(prompt(LONG, "mine"), 9.9) is not None
    assert turns.recall(prompt(LONG, "mine"), 10.0) is None
    turns.remember(prompt("short", "other"), route(), None, 10.0)
    assert len(turns) == 1


def test_the_table_is_bounded_and_gives_the_oldest_up() -> None:
    turns = Turns(3, 10.0)
    for number in range(9):
        turns.remember(prompt("short", f"session {number}"), route(), None, float(number) / 10)
        assert len(turns) <= 3
    assert turns.recall(prompt("", "session 5"), 1.0) is None
    assert turns.recall(prompt("", "session 6"), 1.0) is not None


def test_a_session_that_goes_on_is_no_longer_the_oldest() -> None:
    turns = Turns(2, 10.0)
    turns.remember(prompt("", "mine"), route(), None, 0.0)
    turns.remember(prompt("", "other"), route(), None, 1.0)
    turns.remember(prompt("", "mine"), route(), None, 2.0)
    turns.remember(prompt("", "third"), route(), None, 3.0)
    assert turns.recall(prompt("", "mine"), 4.0) is not None
    assert turns.recall(prompt("", "other"), 4.0) is None


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"do_remote_decode": False},
        KEPT | {"remote_num_tokens": 0},
        KEPT | {"remote_port": "x"},
        KEPT | {"remote_block_ids": list(range(HELD_BYTES_MAX))},
    ],
)
def test_what_makes_no_sense_or_is_too_long_is_not_kept(params: dict[str, Any] | None) -> None:
    turns = Turns(10, 10.0)
    turns.remember(prompt(LONG), route(), params, 0.0)
    assert turns.recall(prompt(LONG), 1.0).held is None


def test_what_is_kept_is_taken_once_within_its_lease() -> None:
    turns = Turns(10, 100.0)
    turns.remember(prompt(LONG), route(), KEPT, 0.0)
    found = turns.recall(prompt(LONG), 1.0)
    assert found.take_held(59.9) == KEPT
    assert found.take_held(59.9) is None
    turns.remember(prompt(LONG), route(), KEPT, 0.0)
    assert turns.recall(prompt(LONG), 1.0).take_held(60.0) is None


@pytest.mark.parametrize("loss", ["down", "lost since"])
def test_what_is_kept_does_not_outlive_its_engine(loss: str) -> None:
    turns = Turns(10, 100.0)
    served = route()
    turns.remember(prompt(LONG), served, KEPT, 0.0)
    if loss == "down":
        served.decode.up = False
    else:
        served.decode.losses += 1
    assert turns.recall(prompt(LONG), 1.0).take_held(1.0) is None


# --- through the router --------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("session", [None, "mine"])
async def test_the_next_turn_goes_to_the_same_engines(mode: str, session: str | None) -> None:
    """By its session, or by what it begins with; others take turns."""
    async with router_world(prefill=3, decode=3, transfer_mode=mode) as world:
        text = LONG if session is None else "short"
        for number in range(4):
            await turn(world, text * (number + 1), session)
            await turn(world, "another")
        of_turns = [
            {
                at
                for at, engine in enumerate(engines)
                for each in engine.requests
                if each.body["prompt"][:7] == text[:7]
            }
            for engines in (world.prefill, world.decode)
        ]
        assert [len(each) for each in of_turns] == [1, 1]
        assert world.turns("kept") == 3
        assert world.turns("new") == 5


async def test_a_chat_is_known_by_its_messages() -> None:
    async with router_world(decode=2) as world:
        messages = [{"role": "user", "content": LONG}]
        for _ in range(3):
            async with world.complete("/v1/chat/completions", messages=messages) as response:
                assert response.status == 200
            messages += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "go on"}]
        assert sorted(served_by(world)) == [0, 3]


async def test_sessions_of_different_keys_are_different() -> None:
    async with router_world(decode=2) as world:
        for key in ("one", "two"):
            headers = {"X-Session-Id": "mine", "Authorization": f"Bearer {key}"}
            async with world.client.post(
                "/v1/completions", json={"prompt": "a"}, headers=headers
            ) as response:
                assert response.status == 200
        assert world.turns("new") == 2


@pytest.mark.parametrize("session", ["", "x" * 257, "caf\u00e9"])
async def test_an_insane_session_is_none(session: str) -> None:
    async with router_world(decode=2) as world:
        await turn(world, "short", session)
        await turn(world, "short", session)
        assert world.turns("new") == 2


async def test_of_many_prompts_none_is_the_sessions() -> None:
    async with router_world() as world:
        async with world.client.post(
            "/v1/completions", json={"prompt": ["a", "b"]}, headers={"X-Session-Id": "mine"}
        ) as response:
            assert response.status == 200
        assert len(world.router.dispatcher.turns) == 0


async def test_a_prompt_is_counted_once_however_often_it_is_dispatched() -> None:
    async with router_world(decode=2) as world:
        world.d.plan(failing(500))
        world.decode[1].plan(failing(500))
        await turn(world, LONG)
        assert (world.turns("new"), world.turns("kept"), world.turns("moved")) == (1, 0, 0)


async def test_an_overloaded_engine_loses_the_conversation() -> None:
    async with router_world(decode=2) as world:
        await turn(world, LONG)
        before = served_by(world).index(1)
        worker = world.router.pool.workers(Role.DECODE)[before]
        with contextlib.ExitStack() as busy:
            for _ in range(4):
                busy.enter_context(worker.leg())
            await turn(world, LONG)
            assert served_by(world)[before] == 2
            busy.enter_context(worker.leg())
            await turn(world, LONG)
        assert served_by(world)[1 - before] == 1
        assert world.turns("moved") == 1


async def test_an_engine_that_is_gone_or_has_failed_loses_the_conversation() -> None:
    async with router_world(decode=2) as world:
        await turn(world, LONG)
        before = served_by(world).index(1)
        world.decode[before].plan(failing(500))
        await turn(world, LONG)
        assert served_by(world) == ([2, 1] if before == 0 else [1, 2])
        await turn(world, LONG)
        assert served_by(world)[1 - before] == 2


async def test_affinity_can_be_off() -> None:
    async with router_world(decode=2, affinity="off") as world:
        world.d.holds = KEPT
        for _ in range(4):
            await turn(world, LONG, "mine")
        assert served_by(world) == [2, 2]
        assert len(world.router.dispatcher.turns) == 0
        assert all("remote_transfer_id" not in each.params for each in world.p.requests)


async def test_auto_pushes_to_an_engine_that_is_settled() -> None:
    async with router_world(decode=2, transfer_mode="auto") as world:
        await turn(world, LONG)
        await turn(world, LONG)
        assert world.transfers("pull", "unknown") == 1
        assert world.transfers("push", "affinity") == 1


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("told", ["in the answer", "in the stream", "when asked"])
async def test_the_next_turns_prefill_leg_carries_what_the_decode_engine_keeps(mode: str, told: str) -> None:
    """KV that flows back: unchanged but for what makes it a prefill leg; the client sees none of it."""
    stream = told != "in the answer"
    async with router_world(transfer_mode=mode) as world:
        world.d.holds = KEPT
        world.d.tells_in_streams = told == "in the stream"
        headers = {"X-Session-Id": "mine"}
        body = {"model": "tiny", "prompt": LONG, "stream": stream}
        async with world.client.post("/v1/completions", json=body, headers=headers) as response:
            events = await events_of(response) if stream else [await response.json()]
        assert not any("kv_transfer_params" in each for each in events)
        await until(lambda: not len(world.router.dispatcher.background))
        of = [each.params["held_of"] for each in world.d.questions]
        assert of == ([world.p.requests[0].params["transfer_id"]] if told == "when asked" else [])
        await turn(world, LONG * 2, "mine")
        first, second = world.p.requests
        assert parse_request(first.params).history is None
        producing = parse_request(second.params)
        assert isinstance(producing, PrefillParams)
        assert producing.history == HELD
        assert producing.mode == mode
        assert producing.transfer not in {None, HELD.transfer}
        assert second.params["remote_block_ids"] == [[1, 2]]
        assert world.histories("sent") == 1
        # The decode leg is about the new transfer alone.
        assert world.d.requests[-1].params["remote_engine_id"] == "engine-p0"
        assert "remote_transfer_id" not in world.d.requests[-1].params


async def test_an_engine_that_keeps_nothing_is_asked_once() -> None:
    """After it was lost it is asked again: another may have come back."""
    async with router_world() as world:
        worker = world.router.pool.workers(Role.DECODE)[0]
        for asked in (1, 1, 2):
            await turn(world, LONG, "mine", stream=True)
            await until(lambda: not len(world.router.dispatcher.background))
            assert len(world.d.questions) == asked
            assert worker.holds is False
            if asked == 1 and len(world.d.requests) == 2:
                world.router.pool.down(worker, "planned")
                await world.check()


@pytest.mark.parametrize("affinity", ["session", "off"])
async def test_where_no_turns_are_remembered_nobody_is_asked_what_it_keeps(affinity: str) -> None:
    async with router_world(affinity=affinity) as world:
        world.d.holds = KEPT
        for _ in range(2):
            await turn(world, LONG, "mine", stream=True)
            await until(lambda: not len(world.router.dispatcher.background))
        assert world.d.questions == []
        assert parse_request(world.p.requests[1].params).history is None


async def test_without_engines_that_keep_anything_nothing_flows_back() -> None:
    async with router_world() as world:
        await turn(world, LONG, "mine")
        await turn(world, LONG * 2, "mine")
        assert parse_request(world.p.requests[1].params).history is None
        assert world.histories("sent") == 0


async def test_a_session_whose_prompt_is_another_gets_no_history() -> None:
    """S01: the KV of other text is never offered, whatever the client calls its conversation."""
    async with router_world() as world:
        world.d.holds = KEPT
        await turn(world, LONG, "mine")
        await turn(world, "something else " * 100, "mine")
        await turn(world, "short", "mine")
        assert all(parse_request(each.params).history is None for each in world.p.requests)


async def test_a_lease_that_has_ended_means_plain_prefill() -> None:
    async with router_world() as world:
        world.d.holds = KEPT | {"remote_lease_seconds": 1e-9}
        await turn(world, LONG)
        await turn(world, LONG * 2)
        assert parse_request(world.p.requests[1].params).history is None
        assert world.histories("expired") == 1


async def test_a_restarted_decode_engine_means_plain_prefill() -> None:
    async with router_world() as world:
        world.d.holds = KEPT
        await turn(world, LONG)
        await world.d.stop()
        await world.check()
        await world.d.start()
        await world.check()
        await turn(world, LONG * 2)
        assert parse_request(world.p.requests[1].params).history is None
        assert world.histories("expired") == 1


@pytest.mark.parametrize("mode", ["push", "pull"])
async def test_a_retry_is_a_plain_prefill(mode: str) -> None:
    """What was offered once may be gone; the second leg does not hang on it."""
    async with router_world(prefill=2, transfer_mode=mode) as world:
        world.d.holds = KEPT
        await turn(world, LONG)
        first = next(engine for engine in world.prefill if engine.requests)
        first.plan(failing(503))
        if mode == "push":
            world.d.plan(Step(gate=asyncio.Event()))
        await turn(world, LONG * 2)
        other = next(engine for engine in world.prefill if engine is not first)
        assert parse_request(first.requests[-1].params).history == HELD
        assert parse_request(other.requests[-1].params).history is None


async def test_what_one_of_many_children_keeps_is_not_offered() -> None:
    async with router_world() as world:
        world.d.holds = KEPT
        await turn(world, LONG, n=2)
        await turn(world, LONG * 2)
        assert parse_request(world.p.requests[1].params).history is None


async def test_the_client_cannot_name_a_history() -> None:
    """S01: params in its body reach no engine."""
    async with router_world() as world:
        await turn(world, LONG, kv_transfer_params=KEPT)
        assert parse_request(world.p.requests[0].params).history is None
        assert world.d.requests[0].params["remote_engine_id"] == "engine-p0"
