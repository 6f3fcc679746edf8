"""Settings, arguments, and the router as a process."""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
import sys
from typing import Any

import aiohttp
import pytest

from kvferry.errors import UsageError
from kvferry.router.ground.settings import OnPrefillFailure, RouterSettings
from kvferry.router.server import add_arguments, run, settings_of

URLS = ["--prefill", "http://p:1/", "--decode", "http://d:2"]


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args([*URLS, *arguments])


def test_arguments_become_settings() -> None:
    settings = settings_of(
        parsed(
            "--prefill=http://p:3",
            "--policy=random",
            "--decode-policy=power_of_two",
            "--request-timeout-secs=5",
            "--max-concurrent-requests=7",
            "--retries=0",
            "--on-prefill-failure=fail",
            "--transfer-mode=pull",
            "--affinity=off",
            "--turn-seconds=9",
            "--max-turns=3",
            "--prefill-lease-seconds=7",
            "--api-key=k",
        )
    )
    assert settings.prefill == ("http://p:1", "http://p:3")
    assert settings.decode == ("http://d:2",)
    assert (settings.prefill_policy, settings.decode_policy) == ("random", "power_of_two")
    assert settings.request_timeout_seconds == 5.0
    assert settings.concurrent_requests_max == 7
    assert settings.retries == 0
    assert settings.on_prefill_failure is OnPrefillFailure.FAIL
    assert settings.api_key == "k"
    assert (settings.affinity, settings.turn_seconds, settings.turns_max) == ("off", 9.0, 3)
    assert (settings.transfer_mode, settings.prefill_lease_seconds) == ("pull", 7.0)


def test_the_defaults_are_the_settings_own() -> None:
    assert settings_of(parsed()) == RouterSettings(prefill=("http://p:1",), decode=("http://d:2",))


def test_auto_chooses_decode_engines_by_what_it_measures_unless_told_otherwise() -> None:
    assert settings_of(parsed("--transfer-mode=auto")).decode_policy == "least_wait"
    assert settings_of(parsed("--transfer-mode=auto", "--policy=random")).decode_policy == "random"
    assert settings_of(parsed("--transfer-mode=pull")).decode_policy == "least_load"


def test_the_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_API_KEY", "from-there")
    assert settings_of(parsed()).api_key == "from-there"


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("prefill", (), "--prefill"),
        ("decode", (), "--decode"),
        ("decode", ("d:1",), "--decode"),
        ("decode", ("ftp://d",), "--decode"),
        ("decode", ("http://",), "--decode"),
        ("decode", ("http://d:99999",), "--decode"),
        ("decode", ("http://d/?x=1",), "--decode"),
        ("decode", ("http://d", "http://d"), "--decode"),
        ("prefill_policy", "best", "--prefill-policy"),
        ("transfer_mode", "both", "--transfer-mode"),
        ("affinity", "sticky", "--affinity"),
        ("turns_max", 0, "turns_max"),
        ("turn_seconds", 0.0, "turn_seconds"),
        ("prefill_lease_seconds", 0.0, "prefill_lease_seconds"),
        ("request_timeout_seconds", 0.0, "request_timeout_seconds"),
        ("request_timeout_seconds", float("nan"), "request_timeout_seconds"),
        ("concurrent_requests_max", 0, "concurrent_requests_max"),
        ("retries", -1, "retries"),
    ],
)
def test_an_impossible_setting_is_refused_by_name(field: str, value: object, named: str) -> None:
    values: dict[str, Any] = {"prefill": ("http://p",), "decode": ("http://d",), field: value}
    with pytest.raises(UsageError, match=named):
        RouterSettings(**values)


def test_a_taken_port_is_an_error_that_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        before = [signal.getsignal(number) for number in ROUTER_SIGNALS]
        assert run(parsed(f"--port={port}")) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
    # Whoever called it gets later signals.
    assert [signal.getsignal(number) for number in ROUTER_SIGNALS] == before


def test_an_impossible_argument_ends_with_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(parsed("--decode=nowhere")) == 2
    assert "--decode" in capsys.readouterr().err


ROUTER_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PROGRAM = """
import argparse, sys
from kvferry.router.server import add_arguments, run
parser = argparse.ArgumentParser()
add_arguments(parser)
sys.exit(run(parser.parse_args(sys.argv[1:])))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_process_tells_its_url_and_stops_in_order(number: signal.Signals) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PROGRAM,
        "--prefill=http://127.0.0.1:1",
        "--decode=http://127.0.0.1:1",
        "--port=0",
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        line = (await process.stdout.readline()).decode()
        url = line.split()[-1]
        async with aiohttp.ClientSession(url) as client:
            async with client.get("/liveness") as response:
                assert response.status == 200
            async with client.get("/readiness") as response:
                assert response.status == 503
        process.send_signal(number)
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
