"""The failure contract: what the client gets and what happens to the other leg when one of them fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import aiohttp
import pytest

from kvferry.ids import TransferId
from kvferry.router.dispatch.push import Legs
from kvferry.router.engines.breaker import FAILURES_MAX
from kvferry.router.engines.pool import Role, Worker
from kvferry.router.ground.settings import OnPrefillFailure
from kvferry.router.http.answers import Answer
from kvferry.router.legs.tasks import DecodeStream
from tests.support.fake_engine import Step, failing, source
from tests.support.router_world import RouterWorld, events_of, router_world, until

FAIL = OnPrefillFailure.FAIL
RECOMPUTE = OnPrefillFailure.RECOMPUTE


def hanging() -> Step:
    """A step that is never answered."""
    return Step(gate=asyncio.Event())


async def disconnected(world: RouterWorld) -> None:
    """Wait until every request that the engines have not answered was dropped by the router."""
    for engine in world.prefill + world.decode:
        for request in engine.requests:
            if not request.finished.is_set():
                await request.disconnected.wait()


def transfer_ids(world: RouterWorld) -> list[str]:
    return [
        request.params["transfer_id"]
        for engine in world.decode
        for request in engine.requests
        if request.params
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [400, 404, 422])
async def test_a_prefill_rejection_is_the_clients_and_ends_the_decode_leg(status: int, stream: bool) -> None:
    """X04, X05, X20: prefill answers 4xx: that status, that body, and nobody waits at the decode engine."""
    async with router_world() as world:
        step = failing(status, "too long")
        world.p.plan(step)
        world.d.plan(hanging())
        async with world.complete(stream=stream) as response:
            assert response.status == status
            assert await response.read() == step.body
            assert response.headers["X-Kvferry-Cause"] == "prefill_rejected"
        await disconnected(world)
        assert len(world.p.requests) == 1
        await world.legs_ended()
        assert world.count("none", "error", "prefill_rejected") == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_decode_rejection_is_the_clients_and_ends_the_prefill_leg(stream: bool) -> None:
    """P17: the decode engine refuses before admission: prefill learns it by its closed connection."""
    async with router_world() as world:
        step = failing(400, "unknown model")
        world.p.plan(hanging())
        world.d.plan(step)
        async with world.complete(stream=stream) as response:
            assert response.status == 400
            assert await response.read() == step.body
        await disconnected(world)
        await world.legs_ended()
        assert world.count("none", "error", "decode_rejected") == 1


async def test_an_overloaded_prefill_engine_is_asked_again_with_a_new_transfer() -> None:
    """X07: 503, 503, 200 on the only prefill engine: an answer, new transfer ids, the old legs dropped."""
    async with router_world() as world:
        world.p.plan(failing(503), failing(503))
        world.d.plan(hanging(), hanging(), Step())
        async with world.complete() as response:
            assert response.status == 200
        ids = [request.params["transfer_id"] for request in world.p.requests]
        assert len(set(ids)) == 3
        assert transfer_ids(world) == ids
        await disconnected(world)
        assert world.retries("prefill", "error") == 2
        assert world.count("push", "ok", "none") == 1


async def test_a_retry_prefers_prefill_engines_that_were_not_tried() -> None:
    """X07: each of three prefill engines is asked once."""
    async with router_world(prefill=3) as world:
        for engine in world.prefill[::2]:
            engine.plan(failing(500))
        world.d.plan(hanging(), hanging(), Step())
        async with world.complete() as response:
            assert response.status == 200
        assert [len(engine.requests) for engine in world.prefill] == [1, 1, 1]


async def test_when_the_retries_are_spent_the_decode_engine_prefills_itself() -> None:
    """X07: an overload that does not end is bounded, and no answer is lost by it."""
    async with router_world(retries=1) as world:
        world.p.plan(*[failing(503)] * 5)
        world.d.plan(hanging(), hanging(), Step())
        async with world.complete() as response:
            assert response.status == 200
        assert len(world.p.requests) == 2
        assert "kv_transfer_params" not in world.d.requests[2].body
        assert world.count("local", "ok", "prefill_failed") == 1


@pytest.mark.parametrize(
    ("step", "status", "cause"),
    [
        (failing(500, "boom"), 500, "prefill_error"),
        (failing(503, "busy"), 503, "prefill_error"),
        (Step(close=True), 502, "prefill_lost"),
        (Step(body=b"not json"), 502, "prefill_error"),
    ],
)
async def test_fail_means_fail(step: Step, status: int, cause: str) -> None:
    """X20: with `--on-prefill-failure fail` the first failing leg ends both, and the client knows why."""
    async with router_world(prefill=2, on_prefill_failure=FAIL) as world:
        world.p.plan(step)
        world.d.plan(hanging())
        async with world.complete() as response:
            assert response.status == status
            error = (await response.json())["error"]
            assert error["kvferry"] == cause
            assert error["code"] == status
            assert "prefill engine" in error["message"]
        await disconnected(world)
        await world.legs_ended()
        assert world.count("none", "error", cause) == 1


async def test_recompute_asks_no_other_prefill_engine() -> None:
    async with router_world(prefill=2, on_prefill_failure=RECOMPUTE) as world:
        world.p.plan(failing(503))
        world.d.plan(hanging(), Step())
        async with world.complete() as response:
            assert response.status == 200
        assert world.prefill[1].requests == []
        assert "kv_transfer_params" not in world.d.requests[1].body


async def test_a_decode_leg_may_recompute_when_its_prefill_engine_died() -> None:
    """X20: the only prefill engine dies in the middle: the decode leg has the good tokens and answers."""
    async with router_world() as world:
        computed, recomputed = asyncio.Event(), asyncio.Event()
        world.p.plan(Step(gate=computed, close=True))
        world.d.plan(Step(gate=recomputed))
        async with asyncio.TaskGroup() as group:
            request = group.create_task(world.complete().__aenter__())
            await world.p.received(1)
            await world.d.received(1)
            await world.p.stop()
            await prefill_known_down(world)
            recomputed.set()
        assert request.result().status == 200
        assert len(world.d.requests) == 1
        assert world.count("push", "ok", "none") == 1


async def prefill_known_down(world: RouterWorld) -> None:
    """Let the loop run until the router knows that its only prefill engine is gone."""
    await until(lambda: not world.router.pool.ready)


async def test_a_decode_leg_that_does_not_recover_is_sent_anew() -> None:
    """X04: the wait for recovery from a dead prefill engine is bounded; then decode prefills itself."""
    async with router_world(decode_recovery_seconds=0.01) as world:
        world.p.plan(hanging())
        world.d.plan(hanging(), Step())
        async with asyncio.TaskGroup() as group:
            request = group.create_task(world.complete().__aenter__())
            await world.p.received(1)
            await world.p.stop()
        assert request.result().status == 200
        await world.d.requests[0].disconnected.wait()
        assert "kv_transfer_params" not in world.d.requests[1].body
        assert world.retries("decode", "recovery") == 1
        assert world.count("local", "ok", "prefill_failed") == 1


async def test_a_prefill_engine_that_refuses_is_not_waited_for() -> None:
    """X09, X20: nothing was computed, so there is nothing to recover: decode prefills itself at once."""
    async with router_world() as world:
        world.d.plan(hanging(), Step())
        await world.p.stop()
        async with world.complete() as response:
            assert response.status == 200
        assert "kv_transfer_params" not in world.d.requests[-1].body
        assert world.count("local", "ok", "prefill_failed") == 1


async def test_without_a_ready_prefill_engine_the_decode_engine_serves_and_a_metric_says_so() -> None:
    async with router_world() as world:
        await world.p.stop()
        await world.check()
        async with world.complete() as response:
            assert response.status == 200
        assert len(world.d.requests) == 1
        assert "kv_transfer_params" not in world.d.requests[0].body
        assert world.count("local", "ok", "no_prefill") == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("step", [failing(500), failing(503), Step(close=True), Step(body=b"[]")])
async def test_a_failed_decode_leg_is_retried_elsewhere_with_its_prefill_leg(
    step: Step, stream: bool
) -> None:
    """X04: both legs are cancelled and sent anew, the decode leg to another engine."""
    if stream and step.body == b"[]":
        step = Step(end_after=0)
    async with router_world(decode=2) as world:
        world.p.plan(hanging())
        failing_first, other = world.decode
        failing_first.plan(step)
        async with world.complete(stream=stream) as response:
            assert response.status == 200
            await response.read()
        assert len(failing_first.requests) == len(other.requests) == 1
        await disconnected(world)
        assert len(set(transfer_ids(world))) == 2
        reason = "lost" if step.close or step.end_after is not None else "error"
        assert world.retries("decode", reason) == 1
        await world.legs_ended()


async def test_a_retry_prefers_a_busy_decode_engine_to_the_one_that_failed() -> None:
    async with router_world(decode=2) as world:
        world.d.plan(failing(500))
        with world.router.pool.workers(Role.DECODE)[1].leg():
            async with world.complete() as response:
                assert response.status == 200
        assert [len(engine.requests) for engine in world.decode] == [1, 1]


@pytest.mark.parametrize("step", [failing(500), Step(body=b"[1")])
@pytest.mark.parametrize("role", Role)
async def test_an_engine_that_keeps_failing_is_left_alone(role: Role, step: Step) -> None:
    """Its health check says nothing of it; its requests do."""
    policies = {"prefill_policy": "round_robin", "decode_policy": "round_robin"}
    async with router_world(prefill=2, decode=2, transfer_mode="pull", **policies) as world:
        # The breaker's time stands still.
        world.router.pool.clock = lambda: 0.0
        bad, good = world.prefill if role is Role.PREFILL else world.decode
        bad.plan(*[step] * FAILURES_MAX)
        for _ in range(4 * FAILURES_MAX):
            async with world.complete() as response:
                assert response.status == 200
        assert len(bad.requests) == FAILURES_MAX
        assert world.router.pool.workers(role)[0].ready
        assert len(good.requests) == 4 * FAILURES_MAX


async def test_an_engine_that_rejects_what_clients_ask_for_is_not_left_alone() -> None:
    async with router_world(transfer_mode="pull") as world:
        world.p.plan(*[failing(400)] * (2 * FAILURES_MAX))
        for _ in range(2 * FAILURES_MAX):
            async with world.complete() as response:
                assert response.status == 400
        async with world.complete() as response:
            assert response.status == 200
        assert world.count("pull", "ok", "none") == 1


async def test_a_stream_that_begins_with_an_error_is_retried_for_no_byte_has_gone_out() -> None:
    async with router_world(decode=2) as world:
        world.d.plan(Step(error_after=0))
        async with world.complete(stream=True) as response:
            assert response.status == 200
            assert (await events_of(response))[-1] == "[DONE]"
        assert len(world.decode[1].requests) == 1


async def test_a_comment_is_no_first_byte() -> None:
    """An engine that keeps its connection alive by comments and then fails has told the client nothing."""
    async with router_world(decode=2) as world:
        world.d.plan(Step(prelude=b": ping\n\n", error_after=0))
        async with world.complete(stream=True) as response:
            assert response.status == 200
            assert len(await events_of(response)) == 3


async def test_a_stream_that_is_none_is_an_error_of_the_engine() -> None:
    async with router_world(retries=0) as world:
        world.d.plan(Step(stream_type="application/json"))
        async with world.complete(stream=True) as response:
            assert response.status == 502
            assert "not events" in (await response.json())["error"]["message"]
        await world.legs_ended()


async def test_a_stream_that_arrives_while_its_request_ends_is_closed() -> None:
    """The client leaves in the moment between the first event and its relay: the leg must not stay open."""
    closed = asyncio.Event()

    worker, transfer = Worker("http://p", Role.PREFILL), TransferId("transfer-one")
    nowhere: Any = None
    stream = DecodeStream(worker, Answer(nowhere, asyncio.get_running_loop()), 1)
    stream.closes(closed.set)

    async def answered() -> DecodeStream:
        return stream

    decode = asyncio.create_task(answered())
    await decode
    prefill = asyncio.create_task(asyncio.Event().wait())
    legs = Legs(
        worker=worker, consumer=worker, source=source(), transfer=transfer, prefill=prefill, decode=decode
    )
    await legs.cancel()
    await closed.wait()
    assert prefill.cancelled()


async def test_the_decode_budget_ends() -> None:
    """The only decode engine keeps failing: its status and a cause, after as many retries as allowed."""
    async with router_world(retries=2) as world:
        world.d.plan(*[failing(500, "broken")] * 3)
        async with world.complete() as response:
            assert response.status == 500
            error = (await response.json())["error"]
            assert error["kvferry"] == "decode_error"
            assert "broken" in error["message"]
        assert len(world.d.requests) == 3


async def test_a_decode_engine_that_is_down_is_a_503_with_a_reason() -> None:
    """X09: refused connections are no 502 and no 500."""
    async with router_world() as world:
        world.p.plan(*[hanging()] * 3)
        await world.d.stop()
        async with world.complete() as response:
            assert response.status == 503
            assert (await response.json())["error"]["kvferry"] == "decode_refused"
        async with world.complete() as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"
            assert (await response.json())["error"]["kvferry"] == "no_decode"


@pytest.mark.parametrize("end", ["break_after", "end_after", "error_after"])
async def test_a_stream_that_breaks_ends_with_an_error_event(end: str) -> None:
    """After the first byte there is no retry and no silent end."""
    async with router_world(decode=2) as world:
        seen = asyncio.Event()
        world.d.plan(Step(after_first=seen, **{end: 1}))
        async with world.complete(stream=True) as response:
            assert response.status == 200
            assert b" one" in await response.content.readuntil(b"\n\n")
            seen.set()
            (last,) = await events_of(response)
        cause = "decode_error" if end == "error_after" else "decode_lost"
        assert last["error"]["kvferry"] == cause
        assert world.decode[1].requests == []
        assert world.count("push", "error", cause) == 1
        await world.legs_ended()


async def test_a_decode_engine_that_fails_requests_whose_kv_is_lost_prefills_itself() -> None:
    """The only prefill engine dies and the decode engine's policy is to fail: the request is saved."""
    async with router_world(retries=0) as world:
        world.p.plan(hanging())
        failed = asyncio.Event()
        world.d.plan(failing(500, "KV load failure", gate=failed), Step())
        async with asyncio.TaskGroup() as group:
            request = group.create_task(world.complete().__aenter__())
            await world.p.received(1)
            await world.d.received(1)
            await world.p.stop()
            await until(lambda: not world.router.pool.ready)
            await until(lambda: not world.router.pool.workers(Role.PREFILL)[0].in_flight)
            failed.set()
        assert request.result().status == 200
        assert world.count("local", "ok", "prefill_failed") == 1


async def test_a_late_prefill_answer_still_shows_a_restart() -> None:
    """The decode engine was first; the next request is sent to the new incarnation without a detour."""
    async with router_world() as world:
        world.p.identity = source("engine-p0", incarnation="second")
        late = asyncio.Event()
        world.p.plan(Step(gate=late))
        async with world.complete() as response:
            assert response.status == 200
        late.set()
        await world.legs_ended()
        async with world.complete() as response:
            assert response.status == 200
        assert world.d.requests[-1].params["kvferry_incarnation"] == "second"
        assert len(world.d.requests) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_does_not_read_is_hung_up_on_at_its_deadline(stream: bool) -> None:
    """Hostile or stuck: its connection, its slot and what is buffered for it are given back."""
    async with router_world(request_timeout_seconds=3600.0) as world:
        world.d.plan(Step(tokens=("x" * 1_000_000,) * 15))
        body = json.dumps({"prompt": "a", "stream": stream}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        port = int(world.router.url.split(":")[-1])
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
        writer.write(head.encode() + body)
        await world.d.received(1)
        await world.client_stuck()
        assert len(world.router.api.deadlines) == 1
        world.router.api.deadlines.expire()
        await until(lambda: world.count("push", "error", "timeout"))
        await world.legs_ended()
        received = bytearray()
        with contextlib.suppress(ConnectionResetError):
            while data := await reader.read(1 << 20):
                received += data
        # Neither whole nor ended in order: whoever reads it later sees that it was cut.
        assert len(received) < 15_000_000
        assert not received.endswith(b"0\r\n\r\n")
        assert b"HTTP/1.1 504" not in received
        writer.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_first_byte_cancels_both_legs(stream: bool) -> None:
    """P63, X04: queue and compute."""
    async with router_world() as world:
        world.p.plan(hanging())
        world.d.plan(hanging())
        request = asyncio.create_task(world.complete(stream=stream).__aenter__())
        prefill, decode = await world.p.received(1), await world.d.received(1)
        request.cancel()
        await prefill.disconnected.wait()
        await decode.disconnected.wait()
        await in_flight_ended(world)
        assert world.count("none", "cancelled", "client_gone") == 1
        await world.legs_ended()


async def test_a_client_that_leaves_after_prefill_cancels_the_decode_leg() -> None:
    """P63: transfer, and decode of an answer that is not streamed."""
    async with router_world() as world:
        world.d.plan(hanging())
        request = asyncio.create_task(world.complete().__aenter__())
        await (await world.p.received(1)).finished.wait()
        decode = await world.d.received(1)
        request.cancel()
        await decode.disconnected.wait()


async def test_a_client_that_leaves_a_stream_cancels_both_legs() -> None:
    """P63: decode, with a prefill leg still open."""
    async with router_world() as world:
        world.p.plan(hanging())
        world.d.plan(Step(after_first=asyncio.Event()))
        response = await world.complete(stream=True).__aenter__()
        await response.content.readuntil(b"\n\n")
        response.close()
        await (await world.p.received(1)).disconnected.wait()
        await (await world.d.received(1)).disconnected.wait()
        await in_flight_ended(world)
        assert world.count("push", "cancelled", "client_gone") == 1
        await world.legs_ended()


async def in_flight_ended(world: RouterWorld) -> None:
    """Let the loop run until the router has no request in flight."""
    value = world.router.metrics.registry.get_sample_value
    await until(lambda: not value("kvferry_router_requests_in_flight"))


async def test_a_request_ends_at_its_deadline_with_status_and_cause() -> None:
    """X04: nobody answers: 504 within the bound, both legs dropped."""
    async with router_world(request_timeout_seconds=0.2) as world:
        world.p.plan(hanging())
        world.d.plan(hanging())
        async with world.complete() as response:
            assert response.status == 504
            assert (await response.json())["error"]["kvferry"] == "timeout"
        await disconnected(world)
        await world.legs_ended()


async def test_the_time_in_the_queue_counts_for_the_deadline() -> None:
    hour = 3600.0
    settings = {"concurrent_requests_max": 1, "queue_timeout_seconds": hour, "request_timeout_seconds": 0.1}
    async with router_world(**settings) as world, world.router.admission.enter(b"another"):
        async with world.complete() as response:
            assert response.status == 504
            assert (await response.json())["error"]["kvferry"] == "timeout"
        assert world.router.admission.waiting == 0
        assert world.p.requests == world.d.requests == []


async def test_a_stream_ends_at_its_deadline_with_an_error_event() -> None:
    async with router_world(request_timeout_seconds=1.0) as world:
        world.d.plan(Step(after_first=asyncio.Event()))
        async with world.complete(stream=True) as response:
            events = await events_of(response)
        assert events[-1]["error"]["kvferry"] == "timeout"


async def test_a_huge_event_or_answer_ends_in_an_error_not_in_memory() -> None:
    async with router_world(retries=0, event_bytes_max=100, answer_bytes_max=400) as world:
        world.d.plan(Step(tokens=("x" * 100_000,)), Step(tokens=("x" * 10_000,)))
        async with world.complete(stream=True) as response:
            assert response.status == 502
        async with world.complete() as response:
            assert response.status == 502
            assert "more than 400 bytes" in json.loads(await response.read())["error"]["message"]


async def test_the_only_prefill_engine_lost_a_connection_but_lives() -> None:
    """X07, X20: a reset that the engine survives is a retry on it, not a prefill by the decode engine."""
    async with router_world() as world:
        world.p.plan(Step(close=True))
        world.d.plan(hanging(), Step())
        async with world.complete() as response:
            assert response.status == 200
        assert len(world.p.requests) == 2
        assert world.count("push", "ok", "none") == 1


async def test_the_first_request_after_a_restart_of_the_prefill_engine_is_pushed() -> None:
    """The engine was down and is back at its address under its engine id before any check saw it."""
    async with router_world() as world:
        await world.p.stop()
        world.d.plan(hanging())
        async with world.complete() as response:
            assert response.status == 200
        world.p.identity = source("engine-p0", incarnation="second")
        await world.p.start()
        async with world.complete() as response:
            assert response.status == 200
        assert world.d.requests[-1].params["kvferry_incarnation"] == "second"
        assert world.count("push", "ok", "none") == 1


async def test_an_answer_that_shows_another_incarnation_sends_both_legs_anew() -> None:
    """A restart that no check and no error has shown: the prefill answer shows it, and no request is lost."""
    async with router_world() as world:
        world.p.identity = source("engine-p0", incarnation="second")
        world.d.plan(hanging(), Step())
        async with world.complete() as response:
            assert response.status == 200
        first, second = world.d.requests
        assert first.params["kvferry_incarnation"] == "first"
        assert second.params["kvferry_incarnation"] == "second"
        assert first.params["transfer_id"] != second.params["transfer_id"]
        await disconnected(world)
        assert world.retries("prefill", "identity") == 1


async def test_both_legs_at_once_in_many_requests_leave_nothing_behind() -> None:
    """P09, X04: mixed success, failure and departure at concurrency; every slot is given back."""
    async with router_world(prefill=2, decode=2, concurrent_requests_max=64) as world:
        for engine in world.prefill + world.decode:
            engine.plan(*[Step(), failing(503), Step(close=True), failing(400), Step()] * 4)

        async def one(number: int) -> int:
            try:
                async with world.complete(stream=number % 2 == 0) as response:
                    if number % 5 == 0:
                        return 0
                    await response.read()
                    return response.status
            except aiohttp.ClientError:
                return -1

        statuses = await asyncio.gather(*[one(number) for number in range(40)])
        assert set(statuses) <= {0, 200, 400}
        await in_flight_ended(world)
        await world.legs_ended()
