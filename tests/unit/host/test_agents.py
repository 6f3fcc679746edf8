"""Making a rank's agent: on the agent's own thread, with its engine's settings."""

from __future__ import annotations

import sys
import threading
from random import Random
from typing import Any

import pytest

from kvferry.host import agents
from kvferry.host.settings import read_settings
from kvferry.ids import PeerName
from kvferry.transport.memory import MemoryFabric, MemoryTransport
from tests.support.fabric import FakeClock
from tests.support.ranks import World


def test_the_transport_gets_the_settings_after_its_thread_was_prepared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    happened: list[tuple[str, str]] = []
    given: dict[str, Any] = {}

    def transport(name: PeerName, **options: Any) -> MemoryTransport:
        happened.append(("transport", threading.current_thread().name))
        given.update(options)
        return MemoryTransport(MemoryFabric(random=Random(1), clock=FakeClock()), name)

    monkeypatch.setattr(agents, "NixlTransport", transport)
    [rank] = World().engine("P", 1)
    extra = {"backends": ["LIBFABRIC"], "progress_thread": True, "num_threads": 2}
    extra |= {"retry_bound_seconds": 7.0, "allow_untested_nixl": True}
    settings = read_settings(extra, environment={})
    agent = agents.make_agent(
        rank.identity,
        rank.cache,
        settings,
        lambda: happened.append(("prepared", threading.current_thread().name)),
    )
    agent.start()
    assert agent.close(10.0)
    assert happened == [("prepared", "kvferry-transfer"), ("transport", "kvferry-transfer")]
    assert given == {
        "backends": ("LIBFABRIC",),
        "progress_thread": True,
        "num_threads": 2,
        "retry_bound_seconds": 7.0,
        "allow_untested": True,
    }


@pytest.mark.parametrize(
    ("extra", "before", "after"),
    [
        ({}, 0.005, 0.0005),
        ({"switch_seconds": 0.002}, 0.005, 0.002),
        ({"switch_seconds": 0}, 0.005, 0.005),
        ({"switch_seconds": 0.002}, 0.001, 0.001),
    ],
)
def test_the_interpreter_is_shared_in_short_turns(monkeypatch, extra, before, after) -> None:
    """The engine's thread keeps the agent's waiting for half a millisecond, not for two slices' time."""
    interval = [before]
    monkeypatch.setattr(sys, "getswitchinterval", lambda: interval[0])
    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: interval.__setitem__(0, seconds))
    # Neither is used: the turns are those of the whole process.
    monkeypatch.setattr(agents, "DirectoryClient", lambda **_: None)
    monkeypatch.setattr(agents, "Agent", lambda *_: None)
    [rank] = World().engine("P", 1)
    agents.make_agent(rank.identity, rank.cache, read_settings(extra, environment={}))
    assert interval == [pytest.approx(after)]
