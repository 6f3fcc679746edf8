"""`kvferry up`: its arguments, what it says, and how it ends."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.cli import engines, main, up
from kvferry.cli.engines import Deployment, Endpoints
from kvferry.cli.fleet import Fleet
from kvferry.cli.processes import ServerProcess
from kvferry.errors import UsageError
from tests.support.stub_fleet import ends, stub_spec


def parse(*arguments: str) -> Deployment:
    parser = argparse.ArgumentParser()
    up.add_arguments(parser)
    return up.read_deployment(parser.parse_args(arguments))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "tiny"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory


def test_defaults(model: Path) -> None:
    plan = parse("--model", str(model))
    assert (plan.model, plan.served_name) == (str(model), "tiny")
    assert (plan.prefill, plan.decode, plan.reference) == (1, 1, False)
    assert (plan.host, plan.port) == ("127.0.0.1", 8000)
    assert plan.cache_gib is None


def test_everything_that_can_be_said(model: Path) -> None:
    plan = parse(
        *("--model", str(model), "--served-model-name", "m", "--prefill", "2", "--decode", "3"),
        *("--prefill-args", "--max-num-batched-tokens 512", "--decode-args=--enforce-eager"),
        *("--router-args", "--policy 'round_robin'", "--host", "0.0.0.0", "--port", "0"),
        *("--transfer-mode", "auto"),
        *("--log-dir", "logs", "--kv-cache-gib", "2", "--gpus-per-engine", "4", "--reference"),
        "--both-directions",
        *("--accelerators", "0", "1", "2", "3", "4", "5,6"),
    )
    assert plan == Deployment(
        model=str(model),
        served_name="m",
        prefill=2,
        decode=3,
        reference=True,
        prefill_arguments=("--max-num-batched-tokens", "512"),
        decode_arguments=("--enforce-eager",),
        router_arguments=("--transfer-mode", "auto", "--policy", "round_robin"),
        host="0.0.0.0",
        port=0,
        logs=Path("logs"),
        cache_gib=2,
        accelerators=("0", "1", "2", "3", "4", "5,6"),
        gpus_per_engine=4,
        both_directions=True,
    )


def test_a_model_of_the_hub_is_served_under_its_last_name() -> None:
    plan = parse("--model", "Qwen/Qwen3-32B")
    assert (plan.model, plan.served_name) == ("Qwen/Qwen3-32B", "Qwen3-32B")


def test_a_directory_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--model .* has no config\.json"):
        parse("--model", str(tmp_path))


@pytest.mark.parametrize("name", ["./nothing", "/no/such/dir", "a/b/c"])
def test_a_path_that_is_not_there(name: str) -> None:
    with pytest.raises(UsageError, match="there is no such directory; `kvferry tiny-model"):
        parse("--model", name)


def test_arguments_with_an_open_quote(model: Path) -> None:
    with pytest.raises(UsageError, match=r"--prefill-args .*closing quotation"):
        parse("--model", str(model), "--prefill-args", "--x 'y")


@pytest.mark.parametrize("option", ["--prefill-args", "--decode-args"])
@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ("--port 9000", "--port"),
        ("--enforce-eager --port=9000", "--port"),
        ("--host 0.0.0.0", "--host"),
        ("--model=other", "--model"),
        ("--served-model-name m", "--served-model-name"),
        ("--served_model_name=m", "--served-model-name"),
        ("--kv-transfer-config '{}'", "--kv-transfer-config"),
        ("--kv-transfer-config.kv_role kv_both", "--kv-transfer-config"),
    ],
)
def test_what_up_sets_itself_is_refused_before_anything_starts(
    model: Path, capsys: pytest.CaptureFixture[str], option: str, arguments: str, name: str
) -> None:
    assert main.main(["up", "--model", str(model), f"{option}={arguments}"]) == 2
    captured = capsys.readouterr()
    assert captured.err == f"kvferry: {name} is set by kvferry up; leave it out of {option}\n"
    assert captured.out == ""


def test_options_that_only_begin_like_those_of_up_are_passed_on(model: Path) -> None:
    plan = parse("--model", str(model), "--prefill-args", "--model-impl vllm --max-model-len 512")
    assert plan.prefill_arguments == ("--model-impl", "vllm", "--max-model-len", "512")


def test_the_help_says_how_to_write_a_single_option(monkeypatch: pytest.MonkeyPatch) -> None:
    # Wide enough that no option is broken at its dashes.
    monkeypatch.setenv("COLUMNS", "300")
    parser = argparse.ArgumentParser()
    up.add_arguments(parser)
    text = parser.format_help()
    assert "--prefill-args='--option'" in text
    assert "--router-args='--option'" in text


@pytest.mark.parametrize("port", ["99999", "-1"])
def test_a_port_that_is_none_is_wrong_use(model: Path, capsys: pytest.CaptureFixture[str], port: str) -> None:
    assert main.main(["up", "--model", str(model), "--port", port]) == 2
    captured = capsys.readouterr()
    assert captured.err == f"kvferry: --port must be a port from 0 to 65535, not {port}\n"
    assert captured.out == ""


def test_a_taken_port_is_said_before_anything_starts(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """O01."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        assert main.main(["up", "--model", str(model), "--port", port]) == 2
    captured = capsys.readouterr()
    assert f"cannot listen on 127.0.0.1 port {port}" in captured.err
    assert captured.out == ""


def test_the_summary_has_a_command_that_a_shell_understands() -> None:
    endpoints = Endpoints("http://127.0.0.1:8000", ("http://p",), ("http://d",), "http://r")
    text = up.summary(endpoints, "it's")
    (curl,) = [line for line in text.splitlines() if "curl" in line]
    words = shlex.split(curl)
    assert words[:3] == ["curl", "-s", "http://127.0.0.1:8000/v1/completions"]
    assert '"model": "it\'s"' in words[-1]
    assert "Reference engine: http://r/v1" in text
    assert "Reference" not in up.summary(Endpoints("http://a", (), (), None), "m")


def bring_up_stub(directory: Path, started: list[ServerProcess], *extra: str):
    def bring_up(fleet: Fleet, plan: Deployment, *, startup_seconds: float) -> Endpoints:
        fleet.start([stub_spec(directory, "prefill-0", *extra)])
        fleet.wait_ready(startup_seconds)
        started.extend(fleet.servers)
        return Endpoints("http://127.0.0.1:8000", (), (), None)

    return bring_up


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Also where a shell has started the tests in the background, with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_stops_everything_and_is_a_good_end(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
) -> None:
    started: list[ServerProcess] = []
    monkeypatch.setattr(up, "bring_up", bring_up_stub(tmp_path, started))
    monkeypatch.setattr(up, "summary", lambda *_: os.kill(os.getpid(), number) or "Ready")
    assert main.main(["up", "--model", str(model)]) == 0
    assert capsys.readouterr().out.endswith("All servers are stopped.\n")
    assert all(ends(server.pid) for server in started)


def test_a_server_that_dies_ends_the_command_with_its_reason(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(up, "bring_up", bring_up_stub(tmp_path, [], "--exit-code", "9"))
    assert main.main(["up", "--model", str(model)]) == 1
    message = capsys.readouterr().err
    assert "kvferry: prefill-0 ended with exit code 9" in message
    assert "the port of this stub is cursed" in message
    assert "Traceback" not in message


def test_a_missing_vllm_is_said(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> bool:
        raise UsageError("vLLM is not installed in this environment")

    monkeypatch.setattr(engines, "vllm_runs_on_cpu", missing)
    assert main.main(["up", "--model", str(model), "--port", "0"]) == 2
    assert "vLLM is not installed" in capsys.readouterr().err
