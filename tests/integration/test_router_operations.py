"""What operators see: the access log, the status, the stages of a request, spans, TLS, options' sources."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvferry.errors import UsageError
from kvferry.router.ground.settings import OnPrefillFailure, RouterSettings
from kvferry.router.operation.advisories import advisories_for
from kvferry.router.operation.listening import Listening
from kvferry.router.operation.options import OPTIONS, add_arguments, listening_of, settings_of
from kvferry.router.record.accesslog import AccessLog
from kvferry.router.record.tracing import Tracing, open_tracing
from kvferry.router.server import RouterServer
from tests.support.fake_engine import Step, failing
from tests.support.router_world import router_world, until

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def logged(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_each_request_leaves_one_line_that_says_where_its_time_went(tmp_path: Path) -> None:
    """O06: by stages that follow each other."""
    path = tmp_path / "access.log"
    async with router_world(listening=Listening(access_log=str(path))) as world:
        prefilled = asyncio.Event()
        world.d.plan(Step(gate=prefilled))
        async with asyncio.TaskGroup() as group:
            headers = {"X-Request-Id": "mine-1"}
            body = {"prompt": "a", "stream": True}
            asked = world.client.post("/v1/completions", json=body, headers=headers)
            request = group.create_task(asked.__aenter__())
            await world.p.received(1)
            await until(world.prefill_answered)
            prefilled.set()
        await request.result().read()
        world.d.plan(failing(400, "no"))
        async with world.complete() as response:
            assert response.status == 400
        async with world.client.get("/health") as response:
            assert response.status == 200
    served, rejected = logged(path)
    assert served["request_id"] == "mine-1"
    assert (served["status"], served["outcome"], served["path"]) == (200, "ok", "push")
    assert (served["prefill"], served["decode"]) == (world.p.url, world.d.url)
    assert set(served["seconds"]) == {"queue", "prefill", "hand_over", "first_token", "total"}
    seconds = served["seconds"]
    assert min(seconds.values()) >= 0
    until_answered = seconds["queue"] + seconds["prefill"] + seconds["hand_over"]
    assert until_answered <= seconds["first_token"] + 1e-6
    assert seconds["first_token"] <= seconds["total"]
    assert (rejected["status"], rejected["cause"]) == (400, "decode_rejected")


async def test_a_log_that_cannot_be_written_costs_lines_and_no_request(tmp_path: Path) -> None:
    async with router_world(listening=Listening(access_log=str(tmp_path / "no" / "log"))) as world:
        async with world.complete() as response:
            assert response.status == 200
        value = world.router.metrics.registry.get_sample_value
        await until(lambda: value("kvferry_router_log_lines_dropped_total") == 1)


async def test_a_log_that_is_behind_drops_and_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("kvferry.router.record.accesslog._LINES_MAX", 2)
    dropped: list[int] = []
    log = AccessLog(str(tmp_path / "log"), dropped.append)
    for number in range(5):
        log.note({"number": number})
    await log.close()
    assert [entry["number"] for entry in logged(tmp_path / "log")] == [0, 1]
    assert sum(dropped) == 3


async def test_the_stages_are_histograms() -> None:
    async with router_world() as world:
        # Of a stream that comes in one piece there is no time between tokens.
        rest = asyncio.Event()
        world.d.plan(Step(after_first=rest))
        async with world.complete(stream=True) as response:
            await response.content.readuntil(b"\n\n")
            rest.set()
            await response.read()
        async with world.complete() as response:
            await response.read()
        value = world.router.metrics.registry.get_sample_value
        for stage in ("queue", "prefill", "hand_over", "first_token"):
            assert value("kvferry_router_stage_seconds_count", {"stage": stage}) == 2
        assert value("kvferry_router_e2e_seconds_count", {"outcome": "ok"}) == 2
        assert value("kvferry_router_ttft_seconds_count") == 1
        assert value("kvferry_router_itl_seconds_count") > 0
        async with world.client.get("/metrics") as response:
            text = await response.text()
        assert text.count('kvferry_router_stage_seconds_bucket{le="+Inf",stage="queue"} 2.0') == 1
        assert "# TYPE kvferry_router_stage_seconds histogram" in text


async def test_the_status_for_programs_and_for_people() -> None:
    async with router_world() as world:
        (decode,) = (w for w in world.router.pool.workers() if w.url == world.d.url)
        decode.version = "0.13.0<script>"
        world.d.healthy = False
        await world.check()
        async with world.client.get("/status") as response:
            status = await response.json()
        assert status["ready"] is False
        assert [worker["name"] for worker in status["workers"]] == [world.p.url, world.d.url]
        told = "\n".join(status["warnings"])
        assert "no decode engine is ready" in told
        assert "its health check answers 503" in told
        assert "CVE-2026-22807" in told
        assert "CVE-2026-48746" in told
        async with world.client.get("/status", headers={"Accept": "text/html,*/*"}) as response:
            assert response.content_type == "text/html"
            page = await response.text()
        assert "<h1>kvferry router" in page
        assert "<script>" not in page
        assert world.d.url in page


@pytest.mark.parametrize(
    ("version", "names"),
    [
        ("0.32.0", set()),
        ("0.21.9+cu130", {"CVE-2026-48746"}),
        ("0.22.0", set()),
        ("0.14.1", {"CVE-2026-48746"}),
        ("0.14", {"CVE-2026-48746", "CVE-2026-22778"}),
        ("0.11.1", {"CVE-2026-48746", "CVE-2026-22778", "CVE-2026-22807"}),
        ("v0.11.0", {"CVE-2026-48746", "CVE-2026-22778", "CVE-2026-22807", "CVE-2025-62164"}),
        ("0.10.1.1", {"CVE-2026-48746", "CVE-2026-22778", "CVE-2026-22807"}),
        ("0.10.0", {"CVE-2026-48746", "CVE-2026-22778"}),
        ("0.8.2", {"CVE-2026-48746"}),
        ("0.2.7", set()),
        ("dev", set()),
        ("", set()),
    ],
)
def test_advisories_follow_from_the_version(version: str, names: set[str]) -> None:
    assert {advisory.name for advisory in advisories_for(version)} == names


async def test_the_clients_trace_context_reaches_both_legs() -> None:
    async with router_world() as world:
        headers = {"traceparent": PARENT, "tracestate": "vendor=1"}
        async with world.client.post("/v1/completions", json={"prompt": "a"}, headers=headers) as response:
            assert response.status == 200
        for engine in (world.p, world.d):
            assert engine.requests[0].headers["traceparent"] == PARENT
            assert engine.requests[0].headers["tracestate"] == "vendor=1"


@pytest.mark.parametrize("stream", [False, True])
async def test_spans_of_a_request_and_its_legs_hang_below_the_clients(stream: bool) -> None:
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = memory.InMemorySpanExporter()
    tracing = Tracing(exporter)
    async with router_world() as world:
        world.router.api._tracing = tracing
        world.p.plan(failing(503), Step())
        headers = {"traceparent": PARENT, "X-Request-Id": "mine-1"}
        async with world.client.post(
            "/v1/completions", json={"prompt": "a", "stream": stream}, headers=headers
        ) as response:
            await response.read()
        await world.legs_ended()
        await asyncio.to_thread(tracing.close)
        spans = {span.name: span for span in exporter.get_finished_spans()}
        request, decode = spans["POST /v1/completions"], spans["decode"]
        assert f"{request.context.trace_id:032x}" == PARENT[3:35]
        assert f"{request.parent.span_id:016x}" == PARENT[36:52]
        assert decode.parent.span_id == request.context.span_id
        assert request.attributes["kvferry.request_id"] == "mine-1"
        assert request.attributes["http.response.status_code"] == 200
        told = world.d.requests[-1].headers["traceparent"]
        assert told == f"00-{decode.context.trace_id:032x}-{decode.context.span_id:016x}-01"
        failed = [
            span for span in exporter.get_finished_spans() if span.name == "prefill" and not span.status.is_ok
        ]
        assert failed


def test_spans_need_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_tracing("") is None
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(UsageError, match=r"--otlp-endpoint: needs .*kvferry\[otel\]"):
        open_tracing("http://collector:4318/v1/traces")


# --- options ---------------------------------------------------------------------------------------

URLS = ["--prefill", "http://p:1", "--decode", "http://d:1"]


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


def test_every_option_has_a_variable_and_a_key(tmp_path: Path) -> None:
    samples: dict[Any, tuple[str, str]] = {int: ("7", "7"), float: ("7.5", "7.5"), bool: ("true", "true")}
    for option in OPTIONS:
        if option.kind is list:
            text, toml = "http://a:1", '["http://a:1"]'
        elif option.choices:
            text, toml = option.choices[-1], f'"{option.choices[-1]}"'
        else:
            text, toml = samples.get(option.kind, ("text", '"text"'))
        by_variable = option.read_text(text)
        path = tmp_path / "router.toml"
        path.write_text(f"{option.key.replace('_', '-')} = {toml}\n")
        from kvferry.router.operation.options import file_values

        assert file_values(str(path)) == {option.key: by_variable}
        assert option.variable == "KVFERRY_" + option.flag[2:].replace("-", "_").upper()


def test_a_flag_goes_before_its_variable_and_that_before_the_file(tmp_path: Path) -> None:
    path = tmp_path / "router.toml"
    path.write_text(
        'prefill = ["http://p:1/"]\ndecode = "http://d:1"\nretries = 1\nmax-turns = 5\n'
        "request_timeout_secs = 9\n"
        'fair-queue = true\non-prefill-failure = "fail"\nport = 1234\npolicy = "random"\n'
    )
    environment = {"KVFERRY_RETRIES": "3", "KVFERRY_MAX_TURNS": "6", "KVFERRY_CONFIG": str(path)}
    settings = settings_of(parsed("--retries=4"), environment)
    assert (settings.prefill, settings.decode) == (("http://p:1",), ("http://d:1",))
    assert (settings.retries, settings.turns_max, settings.request_timeout_seconds) == (4, 6, 9.0)
    assert (settings.fair_queue, settings.on_prefill_failure) == (True, OnPrefillFailure.FAIL)
    assert (settings.prefill_policy, settings.decode_policy) == ("random", "random")
    assert listening_of(parsed(), environment).port == 1234
    assert settings_of(parsed("--no-fair-queue"), environment).fair_queue is False
    several = settings_of(parsed(), environment | {"KVFERRY_PREFILL": "http://a:1, http://b:1"})
    assert several.prefill == ("http://a:1", "http://b:1")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("retries = 'x'", "retries"),
        ("retries = true", "retries"),
        ("policy = 'best'", "policy"),
        ("nonsense = 1", "nonsense"),
        ("prefill = [1]", "prefill"),
        ("fair-queue = 1", "fair_queue"),
        ("= 1", "TOML"),
    ],
)
def test_a_file_that_says_something_else_is_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "router.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=named):
        settings_of(parsed(*URLS, f"--config={path}"), {})


@pytest.mark.parametrize(
    ("variable", "value"),
    [("KVFERRY_RETRIES", "x"), ("KVFERRY_FAIR_QUEUE", "perhaps"), ("KVFERRY_TRANSFER_MODE", "both")],
)
def test_a_variable_that_says_something_else_is_refused_by_name(variable: str, value: str) -> None:
    with pytest.raises(UsageError, match=variable):
        settings_of(parsed(*URLS), {variable: value})


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--config: /nowhere/router\.toml cannot be read"):
        settings_of(parsed(*URLS, "--config=/nowhere/router.toml"), {})


# --- keys and TLS ----------------------------------------------------------------------------------


async def test_engines_may_have_a_key_of_their_own() -> None:
    async with router_world(api_key="clients", engine_api_key="engines") as world:
        headers = {"Authorization": "Bearer clients"}
        async with world.client.post("/v1/completions", json={"prompt": "a"}, headers=headers) as response:
            assert response.status == 200
        for engine in (world.p, world.d):
            assert engine.requests[0].headers["Authorization"] == "Bearer engines"
        assert world.p.probes[0].headers["Authorization"] == "Bearer engines"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    subprocess.run(
        f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext"
        f" subjectAltName=IP:127.0.0.1 -keyout {path} -out {path}.crt".split(),
        check=True,
        capture_output=True,
    )
    path.write_text(path.read_text() + Path(f"{path}.crt").read_text())
    return path


async def test_tls_by_certificate_files(certificate: Path) -> None:
    async with router_world(listening=Listening(ssl_certfile=str(certificate))) as world:
        assert world.router.url.startswith("https://127.0.0.1:")
        trusted = ssl.create_default_context(cafile=f"{certificate}.crt")
        async with aiohttp.ClientSession(world.router.url) as client:
            for stream in (False, True):
                body = {"prompt": "a", "stream": stream}
                async with client.post("/v1/completions", json=body, ssl=trusted) as response:
                    assert response.status == 200
                    await response.read()
            world.router.reload((world.p.url,), (world.d.url,))
            async with client.get("/liveness", ssl=trusted) as response:
                assert response.status == 200


def test_certificates_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--ssl-keyfile: needs --ssl-certfile"):
        Listening(ssl_keyfile="key.pem")
    (tmp_path / "bad.pem").write_text("no certificate")
    for name in ("bad.pem", "missing.pem"):
        with pytest.raises(UsageError, match=f"{name} cannot be used"):
            Listening(ssl_certfile=str(tmp_path / name)).tls()
        with pytest.raises(UsageError, match=f"{name} cannot be used"):
            Listening(engine_ca_file=str(tmp_path / name)).engine_tls()


async def test_engines_behind_tls_are_checked(certificate: Path) -> None:
    """A router in front of routers: its engines speak TLS."""
    async with router_world(listening=Listening(ssl_certfile=str(certificate))) as inner:
        settings = RouterSettings(
            prefill=(inner.p.url,), decode=(inner.router.url,), health_interval_seconds=3600.0
        )
        for authorities, ready in ((f"{certificate}.crt", True), ("", False)):
            async with RouterServer(settings, Listening(engine_ca_file=authorities)) as outer:
                for worker in outer.pool.workers():
                    await outer.monitor.check(worker)
                assert outer.pool.ready is ready
                async with (
                    aiohttp.ClientSession(outer.url) as client,
                    client.post("/v1/completions", json={"prompt": "a"}) as response,
                ):
                    assert response.status == (200 if ready else 503)


# --- the process -----------------------------------------------------------------------------------


async def test_a_hangup_reads_the_engines_again(tmp_path: Path) -> None:
    path = tmp_path / "router.toml"
    path.write_text('prefill = "http://127.0.0.1:1"\ndecode = "http://127.0.0.1:1"\nport = 0\n')
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kvferry.cli.main",
        "router",
        f"--config={path}",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        url = (await process.stdout.readline()).decode().split()[-1]
        path.write_text('prefill = "http://127.0.0.1:2"\ndecode = "http://127.0.0.1:1"\n')
        process.send_signal(signal.SIGHUP)
        while b"SIGHUP: read" not in await process.stderr.readline():
            pass
        async with aiohttp.ClientSession(url) as client, client.get("/workers") as response:
            urls = [worker["url"] for worker in (await response.json())["workers"]]
        assert urls == ["http://127.0.0.1:2", "http://127.0.0.1:1"]
        path.write_text("prefill = []\n")
        process.send_signal(signal.SIGHUP)
        while b"nothing has been changed" not in await process.stderr.readline():
            pass
        process.terminate()
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
