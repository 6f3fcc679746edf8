"""Raw NIXL's loop, against a native agent whose answers the test writes."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvferry.errors import TransportError
from kvferry.layout.runs import Region, Runs
from kvferry.microbench.raw import RawAgent, raw_transfer


class Native:
    """Records calls; `posts` and `polls` are what the next posts and polls answer, "DONE" after these."""

    def __init__(self, name: str, config: Any) -> None:
        self.config = config
        self.calls: list[str] = []
        self.descriptors: list[Any] = []
        self.posts: list[str] = []
        self.polls: list[str] = []
        self.released = 0

    def create_backend(self, name: str, params: dict[str, str]) -> None:
        self.calls.append(f"backend {name} {params}")

    def register_memory(self, rows: Any, kind: str) -> Any:
        return rows, kind

    def add_remote_agent(self, blob: bytes) -> bytes:
        return blob

    def get_xfer_descs(self, rows: Any, kind: str) -> Any:
        self.descriptors.append((rows.tolist(), kind))
        return rows

    def initialize_xfer(self, operation: str, local: Any, remote: Any, peer: str, notify: bytes) -> Any:
        self.calls.append(f"make {operation} {peer} {notify.decode()}")
        return SimpleNamespace(release=self._release)

    def _release(self) -> None:
        self.released += 1

    def transfer(self, flight: Any) -> str:
        self.calls.append("post")
        return self.posts.pop(0) if self.posts else "PROC"

    def check_xfer_state(self, flight: Any) -> str:
        self.calls.append("poll")
        return self.polls.pop(0) if self.polls else "DONE"

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        return {"one": [b"1", b"2"], "other": [b"3"]}


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> list[Native]:
    made: list[Native] = []

    def agent(name: str, config: Any) -> Native:
        made.append(Native(name, config))
        return made[-1]

    api = SimpleNamespace(nixl_agent=agent, nixl_agent_config=lambda **options: options)
    monkeypatch.setitem(sys.modules, "nixl", SimpleNamespace(_api=api))
    monkeypatch.setitem(sys.modules, "nixl._api", api)
    return made


@pytest.fixture
def raw(native: list[Native]) -> RawAgent:
    agent = RawAgent("we", Region(4096, 4096))
    agent.connect(b"peer")
    return agent


def runs(*starts: int) -> Runs:
    source = np.array(starts, np.uint64)
    return Runs(source, source + np.uint64(1000), np.full(len(starts), 8, np.uint64))


def test_the_agent_is_as_kvferrys_no_thread_of_its_own(native: list[Native], raw: RawAgent) -> None:
    assert native[0].config == {"enable_prog_thread": False, "backends": []}
    assert native[0].calls == ["backend UCX {}"]


def test_each_transfer_is_posted_once_and_polled_at_once(native: list[Native], raw: RawAgent) -> None:
    native[0].polls = ["PROC", "PROC", "DONE"]
    raw.write([raw_transfer(runs(5000, 4200), b"a"), raw_transfer(runs(4100), b"b")], 10.0)
    made = ["make WRITE peer a", "post", "poll", "make WRITE peer b", "post"]
    assert native[0].calls[1:] == [*made, "poll", "poll", "poll"]
    assert native[0].released == 2
    assert native[0].descriptors[0] == ([[5000, 8, 0], [4200, 8, 0]], "DRAM")
    assert native[0].descriptors[1] == ([[6000, 8, 0], [5200, 8, 0]], "DRAM")


@pytest.mark.parametrize(("posts", "polls"), [(["ERR"], []), ([], ["ERR"])])
def test_a_transfer_that_fails_ends_the_measurement(
    native: list[Native], raw: RawAgent, posts: list[str], polls: list[str]
) -> None:
    native[0].posts, native[0].polls = posts, polls
    with pytest.raises(TransportError, match="raw NIXL: a transfer "):
        raw.write([raw_transfer(runs(5000), b"a")], 10.0)


def test_a_transfer_that_does_not_end_is_not_waited_for_for_ever(native: list[Native], raw: RawAgent) -> None:
    native[0].polls = ["PROC"] * 1000
    with pytest.raises(TransportError, match="has not ended within 0 s"):
        raw.write([raw_transfer(runs(5000), b"a")], 0.0)


def test_notifications_of_all_peers_are_heard(raw: RawAgent) -> None:
    assert raw.heard() == [b"1", b"2", b"3"]
