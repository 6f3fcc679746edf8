"""The endpoints beside the legs: admission, keys, readiness, errors in OpenAI's shape, stopping."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from kvferry.errors import UsageError
from kvferry.router.ground.settings import RouterSettings
from tests.support.fake_engine import Step
from tests.support.router_world import events_of, router_world, until


async def test_ready_means_a_prefill_and_a_decode_engine() -> None:
    """X10: alive is not ready; a decode engine alone is not ready, nor a prefill engine alone."""
    async with router_world() as world:
        for path in ("/readiness", "/health"):
            async with world.client.get(path) as response:
                assert response.status == 200
                assert await response.json() == {"ready": True, "draining": False, "prefill": 1, "decode": 1}
        for engine in (world.p, world.d):
            await engine.stop()
            await world.check()
            for path in ("/readiness", "/health"):
                async with world.client.get(path) as response:
                    assert response.status == 503
            async with world.client.get("/liveness") as response:
                assert response.status == 200
            await engine.start()
            await world.check()
        async with world.client.get("/readiness") as response:
            assert response.status == 200


async def test_workers_say_why_they_are_not_ready() -> None:
    async with router_world() as world:
        world.d.healthy = False
        await world.check()
        async with world.client.get("/workers") as response:
            prefill, decode = (await response.json())["workers"]
        assert prefill["engine"]["id"] == "engine-p0"
        assert prefill["engine"]["incarnation"] == "first"
        assert (prefill["ready"], prefill["problem"]) == (True, "")
        assert (decode["ready"], decode["problem"]) == (False, "its health check answers 503")
        async with world.client.post("/workers", json={}) as response:
            assert response.status == 403


async def test_models_are_a_decode_engines() -> None:
    async with router_world(decode=2) as world:
        await world.d.stop()
        async with world.client.get("/v1/models") as response:
            assert response.status == 200
            assert (await response.json())["data"] == [{"id": "tiny"}]
        await world.decode[1].stop()
        async with world.client.get("/v1/models") as response:
            assert response.status == 503


async def test_metrics_have_their_names_and_bounded_labels() -> None:
    async with router_world() as world:
        async with world.complete(stream=True) as response:
            await response.read()
        async with world.client.get("/metrics") as response:
            assert response.status == 200
            text = await response.text()
        assert 'kvferry_router_requests_total{cause="none",outcome="ok",path="push"} 1.0' in text
        assert f'kvferry_router_worker_up{{role="prefill",worker="{world.p.url}"}} 1.0' in text
        for name in (
            "kvferry_router_ttft_seconds_bucket",
            "kvferry_router_itl_seconds_bucket",
            'kvferry_router_leg_seconds_bucket{le="0.005",leg="decode",stage="first"}',
            "kvferry_router_retries_total",
            "kvferry_router_requests_in_flight",
        ):
            assert name in text
        await world.p.stop()
        await world.check()
        async with world.client.get("/metrics") as response:
            down = f'kvferry_router_worker_up{{role="prefill",worker="{world.p.url}"}} 0.0'
            assert down in await response.text()


async def test_too_many_requests_are_refused_with_a_time_to_retry() -> None:
    async with router_world(concurrent_requests_max=1, queue_max=0) as world:
        answered = asyncio.Event()
        world.d.plan(Step(gate=answered))
        async with asyncio.TaskGroup() as group:
            first = group.create_task(world.complete().__aenter__())
            await world.d.received(1)
            async with world.complete() as response:
                assert response.status == 429
                assert response.headers["Retry-After"] == "1"
                error = (await response.json())["error"]
                assert error["kvferry"] == "overloaded"
                assert "--max-concurrent-requests" in error["message"]
            answered.set()
        assert first.result().status == 200
        async with world.complete() as response:
            assert response.status == 200


async def test_a_key_guards_what_costs_and_what_tells() -> None:
    async with router_world(api_key="secret") as world:
        for path in ("/v1/models", "/workers"):
            async with world.client.get(path) as response:
                assert response.status == 401
        for given in ("", "Bearer ", "Bearer wrong", "secret", "Bearer s\xe9cret"):
            async with world.client.post(
                "/v1/completions", json={}, headers={"Authorization": given}
            ) as response:
                assert response.status == 401
                assert response.headers["WWW-Authenticate"] == "Bearer"
                assert (await response.json())["error"]["type"] == "authentication_error"
        for path in ("/health", "/liveness", "/readiness", "/metrics"):
            async with world.client.get(path) as response:
                assert response.status == 200
        headers = {"Authorization": "Bearer secret"}
        async with world.client.post("/v1/completions", json={"prompt": "a"}, headers=headers) as response:
            assert response.status == 200
        assert world.p.probes[0].headers["Authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    ("raw", "field"),
    [(b"not json", "body"), (b"", "body"), (b'{"prompt": 1}', "prompt"), (b'{"prompt":"a","n":"x"}', "n")],
)
async def test_a_bad_body_reaches_no_engine(raw: bytes, field: str) -> None:
    """S01: the error names the field; the router serves on."""
    async with router_world() as world:
        async with world.client.post("/v1/completions", data=raw) as response:
            assert response.status == 400
            error = (await response.json())["error"]
            assert (error["param"], error["kvferry"]) == (field, "invalid_request")
        assert world.p.requests == world.d.requests == []
        async with world.complete() as response:
            assert response.status == 200


async def test_a_body_has_a_limit() -> None:
    async with router_world(body_bytes_max=1000) as world:
        async with world.complete(prompt="x" * 2000) as response:
            assert response.status == 413
            assert (await response.json())["error"]["kvferry"] == "body_too_large"
        assert world.count("none", "error", "body_too_large") == 1
        assert world.d.requests == []


async def test_a_client_that_does_not_send_its_body_is_not_waited_for() -> None:
    async with router_world(body_timeout_seconds=0.1) as world:
        never = asyncio.Event()

        async def body() -> object:
            yield b"{"
            await never.wait()

        async with world.client.post("/v1/completions", data=body()) as response:
            assert response.status == 408
            assert (await response.json())["error"]["kvferry"] == "timeout"


async def test_a_body_that_cannot_be_decoded_is_the_clients_fault() -> None:
    async with router_world() as world:
        headers = {"Content-Encoding": "gzip"}
        async with world.client.post("/v1/completions", data=b"no gzip", headers=headers) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == "body"


@pytest.mark.parametrize("key", [None, "secret"])
async def test_headers_may_hold_any_bytes(key: str | None) -> None:
    """Hostile bytes in what is compared and passed on: no fault of the router, and no engine sees them."""
    async with router_world(api_key=key) as world:
        body = b'{"prompt": "a"}'
        reader, writer = await asyncio.open_connection("127.0.0.1", int(world.router.url.split(":")[-1]))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 15\r\n"
            b"Authorization: Bearer \xff\xfe\r\ntraceparent: \xff\r\nX-Request-Id: \xff\r\n\r\n" + body
        )
        status = (await reader.read()).split(b" ")[1]
        writer.close()
        assert status == (b"200" if key is None else b"401")
        for request in world.p.requests + world.d.requests:
            assert "traceparent" not in request.headers
            assert "Authorization" not in request.headers


async def test_an_unknown_path_has_openais_error_shape() -> None:
    async with router_world() as world, world.client.get("/v1/nothing") as response:
        assert response.status == 404
        assert (await response.json())["error"]["kvferry"] == "not_found"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/completions", "POST"),
        ("PUT", "/v1/responses", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("POST", "/v1/models/tiny", "GET, HEAD"),
        ("PATCH", "/workers", "GET, POST, DELETE, HEAD"),
    ],
)
async def test_a_method_that_a_path_has_not_is_told_which_it_has(
    method: str, path: str, allowed: str
) -> None:
    """Before the body is read, whatever it is."""
    async with router_world() as world:
        async with world.client.request(method, path, data=b"no JSON") as response:
            assert response.status == 405
            assert response.headers["Allow"] == allowed
            assert method in (await response.json())["error"]["message"]
        async with world.client.head("/v1/models") as response:
            assert response.status == 200


async def test_a_fault_of_the_router_is_a_500_that_tells_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with router_world() as world:

        def broken() -> float:
            raise ZeroDivisionError("inner detail")

        monkeypatch.setattr(world.router.pool, "clock", broken)
        async with world.complete() as response:
            assert response.status == 500
            text = await response.text()
        assert "inner detail" not in text
        assert '"kvferry":"internal"' in text


async def test_draining_lets_requests_end_and_refuses_new_ones() -> None:
    """X18: an orderly stop cuts nothing."""
    async with router_world() as world:
        answered = asyncio.Event()
        world.d.plan(Step(gate=answered))
        async with asyncio.TaskGroup() as group:
            first = group.create_task(world.complete().__aenter__())
            await world.d.received(1)
            drained = group.create_task(world.router.drain())
            await until(lambda: world.router.admission.closed)
            async with world.complete() as response:
                assert response.status == 503
                assert (await response.json())["error"]["kvferry"] == "shutting_down"
            async with world.client.get("/readiness") as response:
                assert response.status == 503
            assert not drained.done()
            answered.set()
        assert first.result().status == 200


async def test_a_drain_that_takes_too_long_ends_requests_with_an_error() -> None:
    """X18: the bound of a stop; a stream gets its error event, a plain request its status."""
    async with router_world(drain_seconds=0.05) as world:
        world.d.plan(Step(after_first=asyncio.Event()), Step(gate=asyncio.Event()))
        async with world.complete(stream=True) as stream:
            assert stream.status == 200
            await stream.content.readuntil(b"\n\n")
            async with asyncio.TaskGroup() as group:
                plain = group.create_task(world.complete().__aenter__())
                await world.d.received(2)
                group.create_task(world.router.drain())
            (last,) = await events_of(stream)
        assert last["error"]["kvferry"] == "shutting_down"
        assert plain.result().status == 503
        await world.legs_ended()


async def test_stopping_at_once_leaves_no_leg() -> None:
    async with router_world() as world:
        world.p.plan(Step(gate=asyncio.Event()))
        world.d.plan(Step(gate=asyncio.Event()))
        request = asyncio.create_task(world.complete().__aenter__())
        prefill, decode = await world.p.received(1), await world.d.received(1)
        await world.router.__aexit__(None, None, None)
        await prefill.disconnected.wait()
        await decode.disconnected.wait()
        with pytest.raises(aiohttp.ClientError):
            await request


async def test_errors_carry_the_request_id_too() -> None:
    """It is with a failed request that one looks for its line in the log."""
    async with router_world() as world:
        for path, body in (("/v1/completions", b"not JSON"), ("/v1/nothing", b"{}")):
            async with world.client.post(path, data=body, headers={"X-Request-Id": "mine-1"}) as response:
                assert response.status in {400, 404}
                assert response.headers["X-Request-Id"] == "mine-1"
        async with world.client.post("/v1/completions", data=b"not JSON") as response:
            assert len(response.headers["X-Request-Id"]) == 32


@pytest.mark.parametrize("depth", [200, 900, 950, 999, 5000])
async def test_a_body_that_is_nested_too_deeply_is_the_clients_error(depth: int) -> None:
    async with router_world() as world:
        nested = b'{"a":' * depth + b"1" + b"}" * depth
        body = b'{"model":"tiny","prompt":"x","max_tokens":1,"extra":' + nested + b"}"
        async with world.client.post("/v1/completions", data=body) as response:
            assert response.status in ({200} if depth == 200 else {200, 400})


def test_a_base_url_with_v1_is_refused_with_the_right_one() -> None:
    with pytest.raises(UsageError, match=r"ends in /v1; give the engine's base URL, http://a:1$"):
        RouterSettings(prefill=("http://a:1/v1",), decode=("http://b:1",))
