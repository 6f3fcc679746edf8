"""The agent's face and its thread, over the memory transport, in real time.

Waits are for conditions, with a bound that only a broken build reaches.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from random import Random
from types import SimpleNamespace

import pytest

from kvferry.agent.agent import THREAD_NAME, Agent
from kvferry.agent.directory import Directory, RankEntry
from kvferry.agent.links import Identity
from kvferry.agent.parent import ParentWatch
from kvferry.errors import TransportError
from kvferry.ids import ConsumerId, EngineId, Incarnation, PeerName, Rank, TransferId
from kvferry.layout.spec import encode_spec
from kvferry.protocol.commands import (
    Advance,
    Expect,
    Finish,
    Received,
    ReceiveFailed,
    Released,
    Result,
)
from kvferry.protocol.limits import Limits
from kvferry.transport.memory import MemoryFabric, MemoryTransport, Traffic
from tests.support.ranks import BLOCK_TOKENS, DirectResolver, TestRank, World, prefill, receive, source_of

T1 = TransferId("transfer-0001")
WAIT_SECONDS = 10.0


class Threaded:
    """Two agents with their threads, joined by a fabric on the real clock. Memory comes from a `World`."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.fabric = MemoryFabric(random=Random(1), clock=time.monotonic)
        self.resolver = DirectResolver()
        world = World()
        [self.p] = world.engine("P", 1)
        [self.d] = world.engine("D", 2)
        self.producer = self._agent(self.p, limits or Limits())
        self.consumer = self._agent(self.d, limits or Limits())
        self.results: dict[Agent, list[Result]] = {self.producer: [], self.consumer: []}
        metadata = self.producer.start()
        self.consumer.start()
        rank = self.p.identity.rank
        entry = RankEntry(
            pp=rank.pp, tp=rank.tp, peer=self.p.peer, metadata=metadata, cache=encode_spec(self.p.cache)
        )
        self.resolver.engines[1] = Directory(
            engine=self.p.identity.engine,
            incarnation=self.p.identity.incarnation,
            tp_size=1,
            pp_size=1,
            ranks=(entry,),
        )

    def _agent(self, rank: TestRank, limits: Limits) -> Agent:
        return Agent(
            rank.identity,
            rank.cache,
            lambda name: MemoryTransport(self.fabric, name),
            limits,
            self.resolver,
        )

    def wait(self, agent: Agent, kind: type[Result]) -> Result:
        """The next result of a kind."""
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            self.results[agent] += agent.results()
            for result in self.results[agent]:
                if isinstance(result, kind):
                    self.results[agent].remove(result)
                    return result
            threading.Event().wait(0.001)
        raise AssertionError(f"no {kind.__name__} within {WAIT_SECONDS} s")


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.001)


@pytest.fixture
def agents() -> Iterator[Threaded]:
    threaded = Threaded()
    yield threaded
    threaded.fabric.release(threaded.p.peer, threaded.d.peer)
    assert threaded.consumer.close(WAIT_SECONDS)
    assert threaded.producer.close(WAIT_SECONDS)
    assert not [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]


def test_commands_in_results_out(agents: Threaded) -> None:
    source = source_of(agents.p, 1)
    assert agents.consumer.submit(receive(T1, "r1", source, [20], BLOCK_TOKENS))
    for command in prefill(T1, [3], BLOCK_TOKENS):
        assert agents.producer.submit(command)
    assert agents.wait(agents.consumer, Received) == Received(
        T1, ConsumerId("r1"), agents.p.cache.groups[0].block_bytes
    )
    assert agents.wait(agents.producer, Released) == Released(T1, "written")
    assert agents.d.block(20) == agents.p.block(3)
    assert agents.producer.snapshot()["bytes_posted"] == agents.p.cache.groups[0].block_bytes


def test_nothing_is_posted_before_the_device_event(agents: Threaded) -> None:
    """P41: the frontier counts only once the event of the producing stream is complete; order stays."""
    event = threading.Event()
    asked = threading.Event()

    def ready() -> bool:
        asked.set()
        return event.is_set()

    agents.consumer.submit(receive(T1, "r1", source_of(agents.p, 1), [20], BLOCK_TOKENS))
    agents.producer.submit(Expect(T1, BLOCK_TOKENS))
    agents.producer.submit(Advance(T1, BLOCK_TOKENS, 0, (((3, 1),),)), ready)
    agents.producer.submit(Finish(T1))
    assert asked.wait(WAIT_SECONDS)
    steps = agents.producer.snapshot()["steps"]
    eventually(lambda: agents.producer.snapshot()["steps"] > steps + 20)
    assert agents.producer.snapshot()["bytes_posted"] == 0
    event.set()
    assert agents.wait(agents.producer, Released) == Released(T1, "written")


def test_drain_waits_for_the_writes_and_only_within_its_bound(agents: Threaded) -> None:
    """G12, P44: a write that does not end holds a preemption for the bound, not for ever."""
    agents.fabric.hold(agents.p.peer, agents.d.peer, Traffic.POSTS)
    agents.consumer.submit(receive(T1, "r1", source_of(agents.p, 1), [20, 21], 2 * BLOCK_TOKENS))
    agents.producer.submit(Expect(T1, 2 * BLOCK_TOKENS))
    agents.producer.submit(Advance(T1, BLOCK_TOKENS, 0, (((3, 1),),)))
    eventually(lambda: agents.producer.snapshot()["bytes_posted"] > 0)
    assert not agents.producer.drain((T1,), 0.05)
    agents.fabric.release(agents.p.peer, agents.d.peer)
    assert agents.producer.drain((T1,), WAIT_SECONDS)
    assert agents.producer.drain((), 0.0)


def test_drain_leaves_nothing_behind(agents: Threaded) -> None:
    agents.producer.submit(Expect(T1, BLOCK_TOKENS))
    assert agents.producer.drain((T1,), WAIT_SECONDS)
    assert agents.producer.drains_waiting == 0
    assert agents.producer.results() == []


def test_close_waits_for_what_is_in_flight(agents: Threaded) -> None:
    """A11, X18: the transport stays open, and its memory registered, while a write reads it."""
    agents.fabric.hold(agents.p.peer, agents.d.peer, Traffic.POSTS)
    agents.consumer.submit(receive(T1, "r1", source_of(agents.p, 1), [20], BLOCK_TOKENS))
    for command in prefill(T1, [3], BLOCK_TOKENS):
        agents.producer.submit(command)
    eventually(lambda: agents.producer.snapshot()["bytes_posted"] > 0)
    assert not agents.producer.close(0.05)
    agents.fabric.release(agents.p.peer, agents.d.peer)
    assert agents.producer.close(WAIT_SECONDS)
    assert agents.d.block(20) == agents.p.block(3)


def test_a_full_agent_refuses_new_transfers_and_takes_what_belongs_to_old_ones() -> None:
    limits = Limits(transfers_max=1)
    world = World()
    [rank] = world.engine("P", 1)
    blocked = threading.Event()
    started = threading.Event()

    class Stuck(MemoryTransport):
        def receive(self) -> list[object]:  # type: ignore[override]
            started.set()
            assert blocked.wait(WAIT_SECONDS)
            return []

    fabric = MemoryFabric(random=Random(1), clock=time.monotonic)
    agent = Agent(rank.identity, rank.cache, lambda name: Stuck(fabric, name), limits, DirectResolver())
    agent.start()
    assert started.wait(WAIT_SECONDS)
    taken = [agent.submit(Expect(TransferId(f"transfer-{n:04}"), 16)) for n in range(6)]
    assert taken == [True] * 4 + [False] * 2
    assert agent.submit(Finish(TransferId("transfer-0000")))
    blocked.set()
    assert agent.close(WAIT_SECONDS)
    assert not agent.submit(Expect(T1, 16))


def test_a_start_that_fails_says_why() -> None:
    world = World()
    [rank] = world.engine("P", 1)

    def no_transport(name: PeerName) -> MemoryTransport:
        raise TransportError(f"no device for {name}")

    agent = Agent(rank.identity, rank.cache, no_transport, Limits(), DirectResolver())
    with pytest.raises(TransportError, match="no device for kvferry/P/i1/pp0/tp0"):
        agent.start()


def test_an_agent_that_breaks_fails_its_receptions_and_calls_no_block_safe(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A08, V03: after an unforeseen error the host is told, unfenced, and new transfers are refused."""
    broken = threading.Event()

    class Breaking(MemoryTransport):
        def receive(self):  # type: ignore[no-untyped-def]
            if broken.is_set():
                raise RuntimeError("planted")
            return super().receive()

    world = World()
    [rank] = world.engine("D", 1)
    fabric = MemoryFabric(random=Random(1), clock=time.monotonic)
    resolver = DirectResolver()
    resolver.held.add(7)
    agent = Agent(rank.identity, rank.cache, lambda name: Breaking(fabric, name), Limits(), resolver)
    agent.start()
    agent.submit(receive(T1, "r1", source_of(rank, 7), [20], BLOCK_TOKENS))
    eventually(lambda: resolver.asked)
    broken.set()
    results: list[Result] = []
    eventually(lambda: results.extend(agent.results()) or results)
    assert results[0].reason == "closed: planted"  # type: ignore[attr-defined]
    assert not results[0].fenced  # type: ignore[attr-defined]
    assert not agent.alive
    assert not agent.submit(Expect(T1, 16))
    assert "the transfer agent has stopped" in caplog.text


def test_an_orphan_posts_nothing_though_it_has_just_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    """P46: the engine's end is looked for before each post, however lately it was looked for before."""
    looks: list[int] = []

    def gone(_: ParentWatch) -> None:
        looks.append(agents.producer.snapshot()["posted_slices"])
        if len(looks) > 1:
            raise TransportError("the engine that started this rank is gone")

    monkeypatch.setattr(ParentWatch, "check_now", gone)
    agents = Threaded()
    stop = 2 * BLOCK_TOKENS
    agents.consumer.submit(receive(T1, "r1", source_of(agents.p, 1), [20, 21], stop))
    for command in (Expect(T1, stop), Advance(T1, BLOCK_TOKENS, 0, (((3, 1),),))):
        agents.producer.submit(command)
    eventually(lambda: agents.producer.snapshot()["posted_slices"] == 1)
    agents.producer.submit(Advance(T1, stop, 1, (((4, 1),),)))
    eventually(lambda: not agents.producer.alive)
    assert looks == [0, 1]
    assert agents.producer.snapshot()["posted_slices"] == 1
    assert agents.producer.close(WAIT_SECONDS)
    assert agents.consumer.close(WAIT_SECONDS)


def test_an_agent_whose_engine_is_gone_stops_and_calls_no_block_safe(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """P04, P46: peers count the rank as dead a moment after its engine, so it must post nothing more."""
    gone = threading.Event()
    parent = SimpleNamespace(pid=1, is_alive=lambda: not gone.is_set())
    monkeypatch.setattr("multiprocessing.parent_process", lambda: parent)
    world = World()
    [rank] = world.engine("D", 1)
    fabric = MemoryFabric(random=Random(1), clock=time.monotonic)
    resolver = DirectResolver()
    resolver.held.add(7)
    transport = functools.partial(MemoryTransport, fabric)
    agent = Agent(rank.identity, rank.cache, transport, Limits(), resolver)
    agent.start()
    agent.submit(receive(T1, "r1", source_of(rank, 7), [20], BLOCK_TOKENS))
    eventually(lambda: resolver.asked)
    assert agent.alive
    gone.set()
    results: list[Result] = []
    eventually(lambda: results.extend(agent.results()) or results)
    reason = "closed: the engine that started this rank is gone"
    assert results == [ReceiveFailed(T1, ConsumerId("r1"), reason, 0, fenced=False)]
    assert not agent.alive
    assert "the transfer agent has stopped" in caplog.text


def test_identity_names_its_incarnation() -> None:
    """V24: ranks and generations never share a name."""
    names = {
        Identity(EngineId(f"e{dp}"), Incarnation(i), Rank(0, tp)).peer
        for dp in range(4)
        for i in ("a", "b")
        for tp in range(2)
    }
    assert len(names) == 16


def test_a_reception_that_a_breaking_agent_had_not_taken_ends_too() -> None:
    """Promise 6: it was admitted, so it ends; and a preemption does not wait for a dead agent."""
    broken, started = threading.Event(), threading.Event()

    class Breaking(MemoryTransport):
        def receive(self):  # type: ignore[no-untyped-def]
            started.set()
            assert broken.wait(WAIT_SECONDS)
            raise RuntimeError("planted")

    world = World()
    [rank] = world.engine("D", 1)
    fabric = MemoryFabric(random=Random(1), clock=time.monotonic)
    agent = Agent(rank.identity, rank.cache, lambda name: Breaking(fabric, name), Limits(), DirectResolver())
    agent.start()
    assert started.wait(WAIT_SECONDS)
    assert agent.submit(receive(T1, "r1", source_of(rank, 7), [20], BLOCK_TOKENS))
    broken.set()
    results: list[Result] = []
    eventually(lambda: results.extend(agent.results()) or results)
    assert [(one.transfer, one.fenced) for one in results] == [(T1, False)]  # type: ignore[attr-defined]
    assert not agent.drain((T1,), WAIT_SECONDS)
