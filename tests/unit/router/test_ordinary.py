"""An ordinary push is served by callbacks, and handed over to tasks as soon as it is not ordinary any more.

What each failure leads to is the fault matrix's affair, which begins by callbacks wherever that is possible.
Here: what is ordinary, and that nothing is lost on the way from the one to the other.
"""

from __future__ import annotations

import asyncio
import gc
import json
import ssl
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp
import pytest

from kvferry.bench.virtual_time import run_virtually
from kvferry.router.api.openai import Endpoint, decode_body, with_params
from kvferry.router.dispatch.open_legs import OpenLeg
from kvferry.router.ground.randoms import Randoms
from kvferry.router.ground.settings import OnPrefillFailure
from kvferry.router.ground.timeouts import Timeouts
from kvferry.router.http import awaiting
from kvferry.router.http.client import HttpClient
from kvferry.router.http.server import ClientConnection, Reply
from kvferry.router.record.counts import Count
from kvferry.router.serving.ordinary_push import OrdinaryPush
from tests.support.fake_engine import FakeEngine, Step, failing
from tests.support.router_world import RouterWorld, events_of, router_world, until


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The requests that are served by a task."""
    seen: list[Any] = []
    serve = awaiting.serve

    def counted(connection: ClientConnection, reply: Reply, begun: object) -> Coroutine[Any, Any, None]:
        if reply.request.path in {each.value for each in Endpoint}:
            seen.append(reply.request)
        return serve(connection, reply, begun)

    monkeypatch.setattr(awaiting, "serve", counted)
    return seen


def nothing_stays(world: RouterWorld) -> bool:
    """Whether no leg, no place and no deadline is taken."""
    workers = world.router.pool.workers()
    taken = any(each.legs or each.waits or each.tokens or each.transfers for each in workers)
    waiting = any(each.queue._waiting or each.pace._waiting for each in workers)
    return not (taken or waiting or world.router.admission.serving or len(world.router.api.deadlines))


@pytest.mark.parametrize(
    "asked",
    [
        {"prompt": "a"},
        {"prompt": "a", "stream": True},
        {"prompt": [1, 2, 3], "stream": True, "stream_options": {"include_usage": True}},
        {"prompt": ["a"], "n": 2},
        {"messages": [{"role": "user", "content": "a"}], "stream": True},
        {"prompt": "a", "kv_transfer_params": {"do_remote_prefill": True}},
    ],
)
async def test_what_is_ordinary_needs_no_task(asked: dict[str, Any], tasks: list[Any]) -> None:
    path = "/v1/chat/completions" if "messages" in asked else "/v1/completions"
    async with router_world() as world:
        async with world.client.post(path, json=asked) as response:
            assert response.status == 200
            text = await response.text()
        assert text.endswith("data: [DONE]\n\n") == bool(asked.get("stream"))
        assert tasks == []
        await until(lambda: nothing_stays(world))
        assert world.count("push", "ok", "none") == 1
        prefill, decode = world.p.requests[0].params, world.d.requests[0].params
        assert prefill["transfer_id"] == decode["transfer_id"]
        assert (prefill["do_remote_decode"], decode["do_remote_prefill"]) == (True, True)
        assert (prefill["consumers"], decode["transfer_mode"]) == (asked.get("n", 1), "push")


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_over_is_freed_without_a_collection(stream: bool) -> None:
    """What is left to the collector costs a fifth of the CPU, in pauses that all streams notice."""
    gc.collect()
    gc.disable()
    try:
        async with router_world() as world:
            for _ in range(2):
                async with world.complete(stream=stream) as response:
                    assert response.status == 200
                    await response.read()
            await until(lambda: nothing_stays(world))
            assert world.count("push", "ok", "none") == 2
            assert not [each for each in gc.get_objects() if isinstance(each, (OrdinaryPush, OpenLeg))]
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("settings", "asked"),
    [
        ({"transfer_mode": "pull"}, {"prompt": "a"}),
        ({"transfer_mode": "auto"}, {"prompt": "a"}),
        ({"decode_dispatch": "late"}, {"prompt": "a"}),
        ({"leg_timeout_seconds": 9.0}, {"prompt": "a"}),
        ({"local_prefill_below": 2}, {"prompt": "a"}),
        ({}, {"prompt": ["a", "b"]}),
        ({}, {"prompt": "a", "prompt_logprobs": 1}),
        ({}, {"prompt": 5}),
    ],
)
async def test_what_is_not_ordinary_gets_a_task(
    settings: dict[str, Any], asked: dict[str, Any], tasks: list[Any]
) -> None:
    async with router_world(**settings) as world:
        async with world.client.post("/v1/completions", json=asked) as response:
            assert response.status == (400 if asked["prompt"] == 5 else 200)
        assert len(tasks) == 1
        await until(lambda: nothing_stays(world))


async def test_an_answer_that_may_have_to_wait_for_its_client_gets_a_task(tasks: list[Any]) -> None:
    async with router_world() as world:
        world.d.plan(Step(tokens=("x" * 40_000,)))
        async with world.complete() as response:
            assert "x" * 40_000 in await response.text()
        assert len(tasks) == 1
        assert world.count("push", "ok", "none") == 1
        await until(lambda: nothing_stays(world))


@pytest.mark.parametrize("stream", [False, True])
async def test_what_has_come_of_an_answer_is_not_lost_when_tasks_go_on(stream: bool) -> None:
    """X04: the decode leg has begun to answer when the prefill leg fails, and recovers."""
    async with router_world(on_prefill_failure=OnPrefillFailure.RECOMPUTE) as world:
        more, fails = asyncio.Event(), asyncio.Event()
        world.p.plan(Step(gate=fails, close=True))
        # Of a stream: half of a comment, which swallows the first event.
        world.d.plan(Step(prelude=b": half", pause=more) if stream else Step(half=more))
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(world.complete(stream=stream).__aenter__())
            await world.d.received(1)
            (leg,) = world.router.pool.workers()[1].legs
            assert isinstance(leg, OpenLeg)
            await until(lambda: leg._pieces)
            fails.set()
            await until(lambda: world.router.api.deadlines.bounds)
            assert world.router.pool.workers()[0].transfers == 1
            more.set()
        response = asking.result()
        assert response.status == 200
        if stream:
            assert [each["choices"][0]["text"] for each in (await events_of(response))[:-1]] == [" two"]
        else:
            assert (await response.json())["choices"][0]["text"].startswith(" one two")
        response.release()
        assert len(world.d.requests) == 1
        await until(lambda: nothing_stays(world))


async def test_a_client_that_leaves_before_the_task_has_begun_takes_nothing_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A task that is cancelled before it has begun runs nothing of itself."""
    serve = awaiting.serve

    def gone(connection: ClientConnection, reply: Reply, begun: object) -> Coroutine[Any, Any, None]:
        if begun is not None:
            assert connection.transport is not None
            connection.transport.abort()
            # Before the task's first step, which its maker asks for after this.
            asyncio.get_running_loop().call_soon(lambda: connection.serving and connection.serving.cancel())
        return serve(connection, reply, begun)

    monkeypatch.setattr(awaiting, "serve", gone)
    async with router_world() as world:
        world.p.plan(failing(503))
        world.d.plan(Step(gate=asyncio.Event()))
        with pytest.raises(aiohttp.ClientConnectionError):
            await world.complete().__aenter__()
        await until(lambda: nothing_stays(world))
        await world.d.requests[0].disconnected.wait()
        assert world.count("none", "cancelled", "client_gone") == 1


async def test_a_fault_behind_an_answer_is_counted_and_breaks_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with router_world() as world:

        def broken(*_: object) -> None:
            raise ZeroDivisionError("inner detail")

        monkeypatch.setattr(world.router.dispatcher, "remember", broken)
        async with world.complete(stream=True) as response:
            assert response.status == 200
            assert (await events_of(response))[-1] == "[DONE]"
        await until(lambda: nothing_stays(world))
        assert world.count("push", "error", "internal") == 1


@pytest.mark.parametrize("failing_leg", ["prefill", "decode", "stream"])
async def test_a_lost_leg_is_one_loss_of_its_engine(failing_leg: str) -> None:
    """X05: whoever notes losses, such as what a turn has left there, counts each once."""
    async with router_world() as world:
        prefill, decode = world.router.pool.workers()
        if failing_leg == "prefill":
            world.p.plan(Step(close=True))
            world.d.plan(Step(gate=asyncio.Event()))
        else:
            world.d.plan(Step(close=True) if failing_leg == "decode" else Step(end_after=0))
        async with world.complete(stream=failing_leg == "stream") as response:
            assert response.status == 200
        lost = prefill if failing_leg == "prefill" else decode
        assert lost.losses == 1


# --- what it is made of -------------------------------------------------------


@pytest.mark.parametrize(
    "raw", [b'{"prompt": "}"}', b' {"a": {"b": [{}]}, "prompt": "a"} \r\n', b'{"prompt":"\xc3\xa9","n":1.0}']
)
def test_params_are_written_behind_a_clients_own_bytes(raw: bytes) -> None:
    params = {"transfer_id": "0" * 32, "consumers": 1}
    told = with_params(raw, json.dumps(params).encode())
    assert json.loads(told) == decode_body(json.loads(raw), params)


class Waiting:
    def __init__(self, name: str, late: list[str]) -> None:
        self.name = name
        self._late = late

    def late(self) -> None:
        self._late.append(self.name)


class Faulty(Waiting):
    def late(self) -> None:
        raise ZeroDivisionError


def test_those_whose_time_is_over_are_told_in_their_order_and_others_not() -> None:
    async def run() -> list[tuple[float, list[str]]]:
        loop = asyncio.get_running_loop()
        late: list[str] = []
        seen = []
        timeouts = Timeouts(10.0)
        faults: list[object] = []
        loop.set_exception_handler(lambda _, context: faults.append(context["exception"]))
        began = loop.time()
        waiting = [Waiting(name, late) for name in "abcd"]
        timeouts.add(Faulty("", late), loop.time())
        for each in waiting[:3]:
            timeouts.add(each, loop.time())
            await asyncio.sleep(1.0)
        timeouts.discard(waiting[1])
        timeouts.discard(waiting[3])
        for until_seconds in (9.5, 10.5, 11.5, 12.5):
            await asyncio.sleep(began + until_seconds - loop.time())
            seen.append((until_seconds, list(late)))
        assert len(timeouts) == 0
        timeouts.add(waiting[3], loop.time())
        timeouts.close()
        await asyncio.sleep(20.0)
        assert late == ["a", "c"]
        assert len(faults) == 1
        return seen

    assert run_virtually(run()) == [(9.5, []), (10.5, ["a"]), (11.5, ["a"]), (12.5, ["a", "c"])]


def test_no_digit_is_given_out_twice() -> None:
    randoms = Randoms()
    given = [randoms.digits(16) for _ in range(2000)]
    assert len(set(given)) == 2000
    assert {len(each) for each in given} == {16}
    assert len(randoms.digits(10_000)) == 10_000


def test_counts_are_told_as_prometheus_counters_are() -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    Count("plain_total", "Of no labels.", (), registry).inc(2.5)
    labelled = Count("labelled_total", "Of two.", ("one", "two"), registry)
    labelled.labels("a", "b").inc()
    labelled.labels("a", "b").inc()
    text = generate_latest(registry).decode()
    assert "# TYPE plain_total counter\nplain_total 2.5\n" in text
    assert 'labelled_total{one="a",two="b"} 2.0' in text


def test_a_connection_that_is_given_up_while_it_is_made_is_forgotten() -> None:
    """X20: uvloop tells no protocol of the end of such a connection."""
    uvloop = pytest.importorskip("uvloop")
    given_up: list[Callable[[], None]] = []

    class Opened(asyncio.Protocol):
        """Stands before a new connection, and does something as soon as it is there."""

        def __init__(self, connection: asyncio.BaseProtocol) -> None:
            self.connection = connection

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.connection.connection_made(transport)
            given_up.pop()()

    class Loop(uvloop.Loop):  # type: ignore[misc]
        async def create_connection(self, factory: Callable[[], Any], *where: Any, **how: Any) -> Any:
            return await super().create_connection(lambda: Opened(factory()), *where, **how)

    async def run() -> None:
        engine = FakeEngine()
        async with engine:
            client = HttpClient(5.0, 5.0, ssl.create_default_context())
            answer = client.start(engine.url, "/health", b"")
            given_up.append(answer.close)
            await until(lambda: not client.connecting)
            # It waits for the end of every connection that it knows of.
            async with asyncio.timeout(10.0):
                await client.close()

    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(run())
