"""The emulated link: a transfer counts, and its notification leaves, when bytes and wire are both through."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvferry.emulator import link as module
from kvferry.emulator.link import LinkedAgent, Transfer, Wire
from kvferry.emulator.presets import Link
from kvferry.errors import UsageError


class Clock:
    """Time that passes when it is told to."""

    now = 10.0

    def __call__(self) -> float:
        return self.now


class Agent:
    """NIXL's methods, over transfers that land when the test says so."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, bytes]] = []
        self.notifications: list[bytes] = []
        self.landed: set[int] = set()
        self.released: list[int] = []
        self._made = 0

    def get_xfer_descs(self, descs: Any, kind: str | None = None) -> Any:
        return SimpleNamespace(descs=descs)

    def prep_xfer_dlist(self, agent_name: str, xfer_list: Any, *_: Any) -> Any:
        return self._handle()

    def make_prepped_xfer(
        self, operation: str, ours: Any, at: Any, theirs: Any, to: Any, notification: bytes = b""
    ) -> Any:
        self.notifications.append(notification)
        return self._handle()

    def initialize_xfer(
        self, operation: str, ours: Any, theirs: Any, peer: str, notification: bytes = b""
    ) -> Any:
        self.notifications.append(notification)
        return self._handle()

    def transfer(self, handle: Any, *_: Any) -> str:
        return "DONE" if handle._handle in self.landed else "PROC"

    def check_xfer_state(self, handle: Any) -> str:
        return "DONE" if handle._handle in self.landed else "PROC"

    def release_xfer_handle(self, handle: Any) -> None:
        self.released.append(handle._handle)

    def send_notif(self, peer: str, message: bytes) -> None:
        self.sent.append((peer, message))

    def _handle(self) -> Any:
        self._made += 1
        return SimpleNamespace(_handle=self._made)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def agent() -> Agent:
    return Agent()


@pytest.fixture
def linked(agent: Agent, clock: Clock) -> LinkedAgent:
    """100 bytes per second, 1 second of latency, each real byte counts twice."""
    wire = Wire(Link(latency_seconds=1.0, bytes_per_second=100.0), scale=2, clock=clock)
    return LinkedAgent(agent, wire, clock=clock)


def rows(count: int, size: int) -> Any:
    return np.array([(64 * at, size, 0) for at in range(count)], dtype=np.uint64)


def posted(linked: LinkedAgent, size: int, notification: bytes = b"done") -> Any:
    """A transfer of `size` bytes in two descriptors, posted."""
    ours, theirs = linked.get_xfer_descs(rows(2, size // 2)), linked.get_xfer_descs(rows(2, size // 2))
    handle = linked.initialize_xfer("WRITE", ours, theirs, "peer", notification)
    assert linked.transfer(handle) == "PROC"
    return handle


def test_a_transfer_takes_its_bytes_and_the_latency(agent: Agent, clock: Clock, linked: LinkedAgent) -> None:
    handle = posted(linked, 50)
    agent.landed.add(handle._handle)
    clock.now += 1.99
    assert linked.check_xfer_state(handle) == "PROC"
    assert agent.sent == []
    clock.now += 0.01
    assert linked.check_xfer_state(handle) == "DONE"
    assert agent.sent == [("peer", b"done")]
    assert agent.notifications == [b""], "NIXL itself was given no notification to send"


def test_the_wire_runs_while_the_post_is_under_way(agent: Agent, clock: Clock, linked: LinkedAgent) -> None:
    def slow(handle: Any, *_: Any) -> str:
        clock.now += 1.5
        return "DONE"

    agent.transfer = slow  # type: ignore[method-assign]
    handle = posted(linked, 50)
    clock.now += 0.49
    assert linked.check_xfer_state(handle) == "PROC"
    clock.now += 0.01
    assert linked.check_xfer_state(handle) == "DONE"


def test_the_wire_alone_is_not_enough(agent: Agent, clock: Clock, linked: LinkedAgent) -> None:
    handle = posted(linked, 50)
    clock.now += 100.0
    assert linked.check_xfer_state(handle) == "PROC"
    assert agent.sent == []
    agent.landed.add(handle._handle)
    assert linked.check_xfer_state(handle) == "DONE"
    assert agent.sent == [("peer", b"done")]


def test_transfers_take_turns_and_only_their_bytes_add_up(
    agent: Agent, clock: Clock, linked: LinkedAgent
) -> None:
    first, second = posted(linked, 50, b"1"), posted(linked, 100, b"2")
    agent.landed |= {first._handle, second._handle}
    clock.now += 2.0
    assert [linked.check_xfer_state(one) for one in (first, second)] == ["DONE", "PROC"]
    clock.now += 2.0
    assert linked.check_xfer_state(second) == "DONE"
    assert agent.sent == [("peer", b"1"), ("peer", b"2")]


def test_a_notification_leaves_once(agent: Agent, clock: Clock, linked: LinkedAgent) -> None:
    handle = posted(linked, 50)
    agent.landed.add(handle._handle)
    clock.now += 5.0
    for _ in range(3):
        assert linked.check_xfer_state(handle) == "DONE"
    assert len(agent.sent) == 1


def test_no_notification_is_sent_for_a_transfer_without_one(
    agent: Agent, clock: Clock, linked: LinkedAgent
) -> None:
    handle = posted(linked, 50, b"")
    agent.landed.add(handle._handle)
    clock.now += 5.0
    assert linked.check_xfer_state(handle) == "DONE"
    assert agent.sent == []


def test_prepared_lists_are_counted_by_their_indices(agent: Agent, clock: Clock, linked: LinkedAgent) -> None:
    """vLLM's way: long lists once per peer, transfers of some of their descriptors."""
    ours = linked.prep_xfer_dlist("NIXL_INIT_AGENT", linked.get_xfer_descs(rows(8, 25)))
    theirs = linked.prep_xfer_dlist("peer", linked.get_xfer_descs(rows(8, 25)))
    handle = linked.make_prepped_xfer("WRITE", ours, [0, 1], theirs, np.array([4, 5]), notif_msg=b"n")
    assert linked.transfer(handle) == "PROC"
    agent.landed.add(handle._handle)
    clock.now += 1.99
    assert linked.check_xfer_state(handle) == "PROC"
    clock.now += 0.01
    assert linked.check_xfer_state(handle) == "DONE"
    assert agent.sent == [("peer", b"n")]
    assert agent.notifications == [b""]


def test_a_list_of_tuples_counts_too(agent: Agent, clock: Clock, linked: LinkedAgent) -> None:
    descs = [linked.get_xfer_descs([(0, 25, 0, ""), (64, 25, 0, "")]) for _ in range(2)]
    handle = linked.initialize_xfer("READ", *descs, "peer")
    linked.transfer(handle)
    agent.landed.add(handle._handle)
    clock.now += 1.99
    assert linked.check_xfer_state(handle) == "PROC"
    clock.now += 0.01
    assert linked.check_xfer_state(handle) == "DONE"


def test_a_failure_is_told_as_it_is(agent: Agent, linked: LinkedAgent) -> None:
    handle = posted(linked, 50)
    agent.check_xfer_state = lambda handle: "ERR"  # type: ignore[method-assign]
    for _ in range(2):
        assert linked.check_xfer_state(handle) == "ERR"
    assert agent.sent == []
    assert not linked._transfers


def test_a_released_transfer_is_forgotten(agent: Agent, linked: LinkedAgent) -> None:
    handle = posted(linked, 50)
    linked.release_xfer_handle(handle)
    assert agent.released == [handle._handle]
    assert not linked._transfers


def test_transfers_that_nobody_releases_do_not_pile_up(
    agent: Agent, clock: Clock, linked: LinkedAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TRANSFERS_MAX", 4)
    under_way = posted(linked, 2)
    for _ in range(20):
        handle = posted(linked, 2)
        agent.landed.add(handle._handle)
        clock.now += 5.0
        assert linked.check_xfer_state(handle) == "DONE"
    assert len(linked._transfers) <= 4 + 1
    assert linked.check_xfer_state(under_way) == "PROC", "what is under way is never forgotten"


def test_lists_that_are_never_used_do_not_pile_up(linked: LinkedAgent) -> None:
    kept = [linked.get_xfer_descs(rows(1, 8)) for _ in range(3 * module.DESCRIPTOR_LISTS_MAX)]
    assert len(linked._lists) == module.DESCRIPTOR_LISTS_MAX
    assert len(kept) == 3 * module.DESCRIPTOR_LISTS_MAX


class TestWithoutAWire:
    """Then a transfer is NIXL's alone, and a witness may watch it."""

    def witnessed(self, agent: Agent, clock: Clock) -> tuple[LinkedAgent, list[Transfer]]:
        seen: list[Transfer] = []
        return LinkedAgent(agent, None, seen.append, clock), seen

    def test_states_and_notifications_are_nixls(self, agent: Agent, clock: Clock) -> None:
        linked, _ = self.witnessed(agent, clock)
        handle = posted(linked, 50, b"n")
        assert agent.notifications == [b"n"]
        assert linked.check_xfer_state(handle) == "PROC"
        agent.landed.add(handle._handle)
        assert linked.check_xfer_state(handle) == "DONE"
        assert agent.sent == [], "NIXL sends it itself"

    def test_the_witness_sees_each_transfer_once_when_it_is_done(self, agent: Agent, clock: Clock) -> None:
        linked, seen = self.witnessed(agent, clock)
        handle = posted(linked, 50, b"n")
        linked.check_xfer_state(handle)
        assert seen == []
        agent.landed.add(handle._handle)
        for _ in range(2):
            linked.check_xfer_state(handle)
        (one,) = seen
        assert (one.operation, one.peer, one.notification) == ("WRITE", "peer", b"n")
        assert (one.moved, one.descriptors, one.posted) == (50, 2, 10.0)

    def test_a_transfer_that_is_done_at_once_is_seen_too(self, agent: Agent, clock: Clock) -> None:
        linked, seen = self.witnessed(agent, clock)
        descs = [linked.get_xfer_descs(rows(2, 25)) for _ in range(2)]
        handle = linked.initialize_xfer("READ", *descs, "peer")
        agent.landed.add(handle._handle)
        assert linked.transfer(handle) == "DONE"
        assert len(seen) == 1

    def test_the_witness_learns_where_on_our_side_it_begins(self, agent: Agent, clock: Clock) -> None:
        linked, seen = self.witnessed(agent, clock)
        for ours in (rows(2, 25) + np.array([4096, 0, 0], dtype=np.uint64), [(8192, 25, 0, "")]):
            theirs = linked.get_xfer_descs(rows(2, 25))
            handle = linked.initialize_xfer("READ", linked.get_xfer_descs(ours), theirs, "peer")
            agent.landed.add(handle._handle)
            linked.transfer(handle)
        assert [one.address for one in seen] == [4096, 8192]


class TestInstalling:
    """Classes are changed in place, once, and agents that existed before use the link too."""

    def make(self) -> type[Agent]:
        return type("Fresh", (Agent,), dict(Agent.__dict__))

    def test_methods_go_through_the_link(self) -> None:
        fresh = self.make()
        agent = fresh()
        module._link(fresh, Wire(Link(bytes_per_second=1.0)))
        handle = agent.initialize_xfer("WRITE", agent.get_xfer_descs(rows(1, 8)), None, "peer", b"n")
        agent.transfer(handle)
        agent.landed.add(handle._handle)
        assert agent.check_xfer_state(handle) == "DONE", "the unknown target list counts 0 bytes"
        assert agent.sent == [("peer", b"n")]

    def test_a_second_time_changes_nothing(self) -> None:
        fresh = self.make()
        module._link(fresh, Wire(Link(bytes_per_second=1.0)))
        methods = {name: getattr(fresh, name) for name in module._LINKED}
        module._link(fresh, Wire(Link(bytes_per_second=2.0)))
        assert methods == {name: getattr(fresh, name) for name in module._LINKED}

    def test_without_nixl_only_a_link_is_a_problem(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "nixl._api", None)
        module.install(None, scale=1, patience_microseconds=100, witness=None)
        with pytest.raises(UsageError, match="NIXL, which cannot be imported"):
            module.install(Link(bytes_per_second=1.0), scale=1, patience_microseconds=None, witness=None)

    def test_patience_holds_against_the_interfaces_own_setting(self) -> None:
        class Config:
            pthrDelay = 1
            other = 1

        bindings = SimpleNamespace(nixlAgentConfig=Config)
        module._make_patient(bindings, 100)
        patient = bindings.nixlAgentConfig
        module._make_patient(bindings, 200)
        assert bindings.nixlAgentConfig is patient
        config = patient()
        config.pthrDelay = 0
        config.other = 7
        assert (config.pthrDelay, config.other) == (100, 7)
