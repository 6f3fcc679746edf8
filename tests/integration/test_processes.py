"""A server can be stopped and continued with all its children, and its memory counted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.cli import processes
from kvferry.cli.fleet import Fleet
from kvferry.cli.processes import ServerProcess
from tests.support.stub_fleet import ends, eventually, stub_spec

SECONDS = 10.0


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with Fleet(report=lambda line: None) as fleet:
        fleet.start([stub_spec(tmp_path, "stub", "--child", str(tmp_path / "child"))])
        fleet.wait_ready(SECONDS)
        yield fleet["stub"]


def test_its_members_are_the_server_and_its_children(tmp_path: Path, server: ServerProcess) -> None:
    child = int((tmp_path / "child").read_text())
    stub = int(server.log_tail().split()[1])
    assert sorted(server.members()) == sorted([stub, child])
    assert server.pid not in server.members()
    assert os.getpid() not in server.members()


def test_a_pause_stops_all_but_the_guard_until_it_is_over(server: ServerProcess) -> None:
    assert server.answers()
    server.pause()
    assert {state(pid) for pid in server.members()} == {"T"}
    assert state(server.pid) != "T"
    server.resume()
    assert server.answers()
    assert eventually(lambda: "T" not in {state(pid) for pid in server.members()})
    server.resume()


def test_a_stopped_server_can_be_killed(server: ServerProcess) -> None:
    server.pause()
    members = server.members()
    server.kill()
    assert all(ends(pid) for pid in members)
    assert server.members() == []
    assert server.memory_bytes() == 0
    assert not server.answers()
    server.pause()
    server.resume()


def test_a_fleet_that_is_left_ends_a_stopped_server_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "STOP_SECONDS_MAX", 0.1)
    with Fleet(report=lambda line: None) as fleet:
        fleet.start([stub_spec(tmp_path, "stub")])
        fleet.wait_ready(SECONDS)
        fleet["stub"].pause()
        members = fleet["stub"].members()
    assert len(members) == 1
    assert ends(members[0])


def test_memory_is_that_of_all_members(server: ServerProcess) -> None:
    # An interpreter and a server's modules need more than this, and far less than that.
    assert 4 << 20 < server.memory_bytes() < 1 << 30
