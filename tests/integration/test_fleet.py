"""Servers that live and die together, with stub servers as children."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.cli import fleet as fleet_module
from kvferry.cli import processes
from kvferry.cli.fleet import Fleet, FleetError
from kvferry.cli.processes import ServerSpec, wait_for_exit
from kvferry.cli.requests import RequestError, fetch
from kvferry.errors import UsageError
from tests.support import stub_fleet
from tests.support.stub_fleet import ends, eventually, stub_spec

SECONDS = 10.0


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def fleet(lines: list[str]) -> Iterator[Fleet]:
    with Fleet(report=lines.append) as started:
        yield started


def test_servers_become_ready_and_are_gone_after_the_block(tmp_path: Path, lines: list[str]) -> None:
    with Fleet(report=lines.append) as fleet:
        fleet.start([stub_spec(tmp_path, "a"), stub_spec(tmp_path, "b")])
        fleet.wait_ready(SECONDS)
        servers = fleet.servers
        assert [server.spec.name for server in servers] == ["a", "b"]
        assert all(fetch(server.spec.url, "/health", seconds=SECONDS) == "ok" for server in servers)
    assert all(ends(server.pid) for server in servers)
    assert fleet.servers == []
    assert any("a: starting on http://127.0.0.1:" in line and "a.log" in line for line in lines)
    assert any(line.startswith("b: ready after") for line in lines)


def test_a_server_that_dies_while_loading_is_named_with_the_end_of_its_log(
    tmp_path: Path, fleet: Fleet
) -> None:
    fleet.start([stub_spec(tmp_path, "good"), stub_spec(tmp_path, "bad", "--exit-code", "3")])
    with pytest.raises(FleetError, match=r"(?s)bad ended with exit code 3.*bad\.log.*stub is cursed"):
        fleet.wait_ready(SECONDS)


def test_a_server_that_dies_later_ends_the_watch(tmp_path: Path, fleet: Fleet) -> None:
    fleet.start([stub_spec(tmp_path, "good"), stub_spec(tmp_path, "bad")])
    fleet.wait_ready(SECONDS)
    with pytest.raises(RequestError):
        fetch(fleet["bad"].spec.url, "/die", seconds=SECONDS)
    with pytest.raises(FleetError, match=r"(?s)bad ended with exit code 7.*asked to die"):
        fleet.watch()


def test_a_server_killed_by_a_signal_is_said_to_be(tmp_path: Path, fleet: Fleet) -> None:
    fleet.start([stub_spec(tmp_path, "stub")])
    fleet.wait_ready(SECONDS)
    stub = int(fleet["stub"].log_tail().split()[1])
    processes.os.kill(stub, signal.SIGKILL)
    with pytest.raises(FleetError, match="stub ended with signal SIGKILL"):
        fleet.watch()


def program_spec(directory: Path, program: str) -> ServerSpec:
    command = (sys.executable, "-c", program)
    return ServerSpec(name="x", command=command, host="127.0.0.1", port=1, log=directory / "x.log")


def test_the_cause_comes_before_the_end_of_the_log(tmp_path: Path, fleet: Fleet) -> None:
    """However much was logged after it."""
    program = """
print("(EngineCore pid=4) kvferry.errors.UsageError: buffer_bytes: too small")
print("shutting down\\n" * 200)
print("nanobind: leaked 3 instances!")
raise SystemExit(3)
"""
    fleet.start([program_spec(tmp_path, program)])
    with pytest.raises(FleetError) as raised:
        fleet.wait_ready(SECONDS)
    lines = str(raised.value).splitlines()
    assert lines[0] == (
        "x ended with exit code 3. The cause, as far as its log tells: "
        "kvferry.errors.UsageError: buffer_bytes: too small"
    )
    assert lines[1] == f"The end of its log ({tmp_path / 'x.log'}):"
    assert "shutting down" in lines
    assert len(lines) <= 2 + fleet_module.FAILURE_LOG_LINES
    assert "nanobind" not in str(raised.value)


def test_a_server_that_ends_without_an_error_ended_unexpectedly(tmp_path: Path, fleet: Fleet) -> None:
    fleet.start([program_spec(tmp_path, "print('bye')")])
    with pytest.raises(FleetError) as raised:
        fleet.wait_ready(SECONDS)
    assert str(raised.value) == (
        f"x ended unexpectedly (exit code 0). The end of its log ({tmp_path / 'x.log'}):\nbye"
    )


def test_a_server_that_ends_without_a_log_is_still_named(tmp_path: Path, fleet: Fleet) -> None:
    fleet.start([stub_spec(tmp_path, "stub")])
    fleet["stub"].spec.log.unlink()
    fleet["stub"].kill()
    with pytest.raises(FleetError, match=r"stub ended with signal SIGKILL\. The end .*\n\(no log: "):
        fleet.watch()


def test_a_watch_with_a_bound_returns(tmp_path: Path, fleet: Fleet) -> None:
    fleet.start([stub_spec(tmp_path, "stub")])
    fleet.watch(seconds=0.01)
    assert not fleet["stub"].exited


def test_a_server_that_never_answers_ok_is_late(tmp_path: Path, fleet: Fleet) -> None:
    fleet.start([stub_spec(tmp_path, "slow", "--status", "503")])
    assert eventually(lambda: "listens" in fleet["slow"].log_tail())
    with pytest.raises(FleetError, match=r"(?s)slow is not ready after 0 s.*--startup-seconds.*listens"):
        fleet.wait_ready(0.0)


def test_whoever_is_waited_for_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "REPORT_INTERVAL_SECONDS", -1.0)
    lines: list[str] = []
    with Fleet(report=lines.append) as fleet:
        fleet.start([stub_spec(tmp_path, "stub")])
        fleet.wait_ready(SECONDS)
    *_, last = lines
    assert last.startswith("stub: ready after ")
    assert all(line.startswith("waiting for stub (") for line in lines[1:-1])


def test_a_program_that_does_not_exist_is_said_to_be(tmp_path: Path, fleet: Fleet) -> None:
    spec = ServerSpec(name="x", command=("/no/such/program",), host="::1", port=1, log=tmp_path / "x.log")
    assert spec.url == "http://[::1]:1"
    fleet.start([spec])
    with pytest.raises(FleetError, match=r"(?s)exit code 127.*/no/such/program cannot be started"):
        fleet.wait_ready(SECONDS)


def test_a_log_that_cannot_be_written_is_wrong_use(tmp_path: Path, fleet: Fleet) -> None:
    (tmp_path / "stub.log").mkdir()
    with pytest.raises(UsageError, match=r"stub cannot be started.*stub\.log"):
        fleet.start([stub_spec(tmp_path, "stub")])


def test_a_name_is_free_again_after_its_server_was_killed(tmp_path: Path, fleet: Fleet) -> None:
    fleet.start([stub_spec(tmp_path, "stub")])
    first = fleet["stub"]
    with pytest.raises(UsageError, match="stub is already running"):
        fleet.start([first.spec])
    first.kill()
    first.kill()
    assert first.exited
    assert first.exit_text == "signal SIGKILL"
    fleet.start([first.spec])
    fleet.wait_ready(SECONDS)
    assert fleet["stub"].pid != first.pid


def test_waiting_sees_an_end_that_came_before(tmp_path: Path, fleet: Fleet) -> None:
    fleet.start([stub_spec(tmp_path, "stub"), stub_spec(tmp_path, "other")])
    fleet["stub"].kill()
    assert wait_for_exit(fleet.servers, None) == [fleet["stub"]]


def test_the_tail_of_a_missing_log_says_so(tmp_path: Path, fleet: Fleet) -> None:
    fleet.start([stub_spec(tmp_path, "stub")])
    fleet["stub"].spec.log.unlink()
    assert fleet["stub"].log_tail().startswith("(no log:")


def test_what_ignores_sigterm_is_killed_after_the_grace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "STOP_SECONDS_MAX", 0.1)
    child = tmp_path / "child"
    with Fleet(report=lambda line: None) as fleet:
        fleet.start([stub_spec(tmp_path, "stub", "--ignore-sigterm", "--child", str(child))])
        fleet.wait_ready(SECONDS)
        server = fleet["stub"]
    assert "SIGTERM ignored" in server.log_tail()
    assert ends(server.pid)
    assert ends(int(child.read_text()))


def test_children_of_a_server_that_died_are_ended(tmp_path: Path, fleet: Fleet) -> None:
    child = tmp_path / "child"
    fleet.start([stub_spec(tmp_path, "stub", "--child", str(child))])
    fleet.wait_ready(SECONDS)
    with pytest.raises(RequestError):
        fetch(fleet["stub"].spec.url, "/die", seconds=SECONDS)
    assert wait_for_exit(fleet.servers, SECONDS) == fleet.servers
    fleet.stop()
    assert ends(int(child.read_text()))


class Program:
    """`tests/support/stub_fleet.py` as a process."""

    def __init__(self, directory: Path, *extra: str) -> None:
        self.directory = directory
        command = [sys.executable, "-m", "tests.support.stub_fleet", str(directory), *extra]
        root = Path(stub_fleet.__file__).parents[2]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root)
        assert self.process.stdout is not None
        self.output = self.process.stdout
        assert self.output.readline() == "ready\n"
        self.server = int((directory / "stub.log").read_text().split()[1])
        self.child = int((directory / "child").read_text())


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    started = Program(tmp_path)
    yield started
    started.process.kill()
    started.process.wait()
    started.output.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_program_stops_its_servers_in_order(program: Program, number: signal.Signals) -> None:
    program.process.send_signal(number)
    assert program.output.readline() == "stopped\n"
    assert program.process.wait(SECONDS) == 0
    assert ends(program.server)
    assert ends(program.child)


def test_a_killed_program_leaves_nothing_behind(program: Program) -> None:
    program.process.kill()
    assert ends(program.server)
    assert ends(program.child)


def test_a_second_interrupt_ends_the_patience(tmp_path: Path) -> None:
    program = Program(tmp_path, "--ignore-sigterm")
    program.process.send_signal(signal.SIGINT)
    assert eventually(lambda: "SIGTERM ignored" in (tmp_path / "stub.log").read_text())
    program.process.send_signal(signal.SIGINT)
    # Well before the grace of 15 s is over.
    assert ends(program.server, fleet_module.STOP_WAIT_SECONDS / 2)
    assert ends(program.child)
    program.process.wait(SECONDS)
    program.output.close()
