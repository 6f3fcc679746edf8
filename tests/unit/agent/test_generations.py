"""Peers that die, come back, stall or come late: what the agents of the others do about it."""

from __future__ import annotations

import threading
import time
from random import Random

import msgspec
import numpy as np
import pytest

from kvferry.agent.agent import Agent
from kvferry.agent.directory import Directory, RankEntry
from kvferry.agent.loop import Close
from kvferry.errors import TransportError
from kvferry.ids import TransferId
from kvferry.layout.runs import Runs
from kvferry.layout.spec import encode_spec
from kvferry.protocol.codec import Encoder
from kvferry.protocol.commands import (
    Abandon,
    Advance,
    Expect,
    Finish,
    Received,
    ReceiveFailed,
    Released,
)
from kvferry.protocol.limits import Limits
from kvferry.transport.faults import Link, MessageFault, PostFault
from kvferry.transport.memory import MemoryFabric, MemoryTransport, Traffic
from tests.support.ranks import BLOCK_TOKENS, DirectResolver, TestRank, World, prefill, receive, source_of

WAIT_SECONDS = 10.0


def transfer(number: int) -> TransferId:
    return TransferId(f"transfer-{number:04}")


def pair(world: World) -> tuple[TestRank, TestRank]:
    [producer] = world.engine("P", 1)
    [consumer] = world.engine("D", 2)
    return producer, consumer


def ask(producer: TestRank, consumer: TestRank, number: int, block: int = 20) -> None:
    """Both legs of one transfer of one block."""
    producer.do(*prefill(transfer(number), [3], BLOCK_TOKENS))
    consumer.do(receive(transfer(number), "r", source_of(producer, 1), [block], BLOCK_TOKENS))


def ends_of(consumer: TestRank, number: int) -> list[Received | ReceiveFailed]:
    """Every end of one transfer that the consumer has reported."""
    found = [result for result in consumer.results if isinstance(result, Received | ReceiveFailed)]
    return [result for result in found if result.transfer == transfer(number)]


def has_come(world: World, producer: TestRank, consumer: TestRank, number: int, block: int = 20) -> bool:
    """Ask for one block: whether it arrived, when the transfer has ended."""
    ask(producer, consumer, number, block)
    world.until(lambda: ends_of(consumer, number), 60.0)
    if not isinstance(ends_of(consumer, number)[0], Received):
        return False
    assert consumer.block(block) == producer.block(3)
    return True


# --- engines that are killed and replaced ----------------------------------------------------------


@pytest.mark.parametrize("role", ["consumer", "producer"])
def test_three_replacements_cost_at_most_a_request_each(role: str) -> None:
    """A02: killed under a write and replaced at its address, three times: the survivor serves on by itself,
    and keeps nothing of those that are gone."""
    world = World()
    producer, consumer = pair(world)
    assert has_come(world, producer, consumer, 0)
    number = 0
    for _ in range(3):
        number += 10
        world.fabric.hold(producer.peer, consumer.peer, Traffic.POSTS)
        ask(producer, consumer, number, 21)
        world.until(producer.loop.producer.in_flight)
        if role == "consumer":
            world.kill(consumer)
            [consumer] = world.engine("D", 2)
        else:
            world.kill(producer)
            [producer] = world.engine("P", 1)
        # The first request after it may be the one that finds out.
        came = [has_come(world, producer, consumer, number + more, 22 + more) for more in (1, 2, 3)]
        assert came.count(False) <= 1, came
        assert came[1:] == [True, True]
    world.until(lambda: world.ranks and not any(rank.loop.producer.states() for rank in alive(world)), 60.0)
    world.until(lambda: not any(rank.loop.consumer.states() for rank in alive(world)), 60.0)
    survivor = producer if role == "consumer" else consumer
    if role == "consumer":
        connections = world.fabric.exchange.nodes[survivor.peer].connections
        assert set(connections) == {consumer.peer}
    assert len(survivor.of(Released)) == (13 if role == "consumer" else 0)


def alive(world: World) -> list[TestRank]:
    return [rank for rank in world.ranks if not rank.dead]


# --- told at once ----------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_failure_of_prefill_is_told_within_a_second(when: str) -> None:
    """P36: prefill breaks off before the consumer registers, or after; told twice, it ends once."""
    world = World()
    producer, consumer = pair(world)
    assert has_come(world, producer, consumer, 0)
    wait = receive(transfer(1), "r", source_of(producer, 1), [21, 22], 2 * BLOCK_TOKENS)
    fail = Abandon(transfer(1), "abandoned: out of memory")
    producer.do(Expect(transfer(1), 2 * BLOCK_TOKENS))
    world.fabric.inject(producer.peer, consumer.peer, MessageFault.DOUBLE, MessageFault.DOUBLE)
    first, second = ((producer, fail), (consumer, wait))
    if when == "after":
        first, second = second, first
    first[0].do(first[1])
    world.run(0.1)
    second[0].do(second[1])
    assert world.until(lambda: ends_of(consumer, 1)) < 1.0
    world.run(1.0)
    [failed] = ends_of(consumer, 1)
    assert isinstance(failed, ReceiveFailed)
    assert failed.reason == "abandoned: out of memory"
    assert failed.fenced
    world.assert_empty()


# --- handshakes that take long ---------------------------------------------------------------------


def test_a_handshake_longer_than_the_lease_ends_in_one_failure_and_no_write() -> None:
    """P08: the blocks are another request's when the consumer gets through; the id can be used again."""
    world = World(Limits(lease_seconds=4.0))
    producer, consumer = pair(world)
    before = consumer.memory.copy()
    world.resolver.held.add(1)
    ask(producer, consumer, 1)
    world.run(world.limits.lease_seconds + 0.5)
    assert producer.of(Released) == [Released(transfer(1), "lease_expired")]
    producer.do(Expect(transfer(2), BLOCK_TOKENS), Advance(transfer(2), BLOCK_TOKENS, 0, (((3, 1),),)))
    world.resolver.free(1)
    world.until(lambda: ends_of(consumer, 1))
    world.run(1.0)
    [failed] = ends_of(consumer, 1)
    assert isinstance(failed, ReceiveFailed)
    assert failed.reason == "lease_expired"
    assert producer.stats.bytes_posted == 0
    assert (consumer.memory == before).all()
    producer.do(Abandon(transfer(2), "abandoned"))
    world.clock.advance(600.0)
    world.run(0.1)
    producer.do(*prefill(transfer(1), [3], BLOCK_TOKENS))
    consumer.do(receive(transfer(1), "again", source_of(producer, 1), [20], BLOCK_TOKENS))
    world.until(lambda: consumer.of(Received), 30.0)


def test_a_consumer_whose_hello_takes_seconds_holds_no_other_consumer_up() -> None:
    """P05: its KV is computed and waits; a hundred pushes to another engine go on, then its own fires."""
    world = World()
    producer, consumer = pair(world)
    [slow] = world.engine("D2", 3)
    # Its registration overtakes its Hello, so the producer knows that somebody waits.
    world.fabric.set_link(slow.peer, producer.peer, Link(delay_seconds=8.0, overtaking=True))
    world.fabric.inject(slow.peer, producer.peer, MessageFault.DELAY)
    producer.do(*prefill(TransferId("transfer-slow"), [5], BLOCK_TOKENS))
    slow.do(receive(TransferId("transfer-slow"), "s", source_of(producer, 1), [9], BLOCK_TOKENS))
    for number in range(100):
        ask(producer, consumer, number)
        assert world.until(lambda number=number: ends_of(consumer, number)) < 0.05
    assert not slow.results
    world.until(lambda: slow.results, 10.0)
    assert slow.of(Received)
    assert slow.block(9) == producer.block(5)
    assert len(consumer.of(Received)) == 100


def test_a_lease_that_ends_under_a_write_fails_both_sides_after_the_write() -> None:
    """P14: the consumer's signs of life are lost. It hears that the reference is dead, and only then may its
    blocks, and the producer's, be another's."""
    patient = Limits(lease_seconds=4.0, silence_seconds=60.0, write_seconds=60.0, slice_seconds=60.0)
    world = World(msgspec.structs.replace(patient, slice_bytes=1, in_flight_per_peer=1))
    producer, consumer = pair(world)
    assert has_come(world, producer, consumer, 0)
    world.fabric.hold(producer.peer, consumer.peer, Traffic.POSTS)
    producer.do(*prefill(transfer(1), [3, 4], 2 * BLOCK_TOKENS))
    consumer.do(receive(transfer(1), "r", source_of(producer, 1), [21, 22], 2 * BLOCK_TOKENS))
    world.until(producer.loop.producer.in_flight)
    world.fabric.hold(consumer.peer, producer.peer, Traffic.MESSAGES)
    world.run(world.limits.lease_seconds + 1.0)
    assert len(producer.of(Released)) == 1
    assert not ends_of(consumer, 1)
    world.fabric.release(producer.peer, consumer.peer, Traffic.POSTS)
    world.until(lambda: ends_of(consumer, 1) and len(producer.of(Released)) == 2)
    world.fabric.release(consumer.peer, producer.peer, Traffic.MESSAGES)
    world.run(1.0)
    assert producer.of(Released)[1].outcome == "lease_expired"
    [failed] = ends_of(consumer, 1)
    assert isinstance(failed, ReceiveFailed)
    assert failed.reason == "lease_expired"
    assert failed.fenced
    assert failed.valid_until == BLOCK_TOKENS, "what the write in flight has brought is good"
    assert consumer.block(21) == producer.block(3)


# --- a port that flaps -----------------------------------------------------------------------------


def test_a_write_that_is_refused_and_breaks_is_written_in_the_end() -> None:
    """A25: within the budget of tries an error of the transport costs nothing but time."""
    world = World()
    producer, consumer = pair(world)
    assert has_come(world, producer, consumer, 0)
    faults = (PostFault.REFUSE, PostFault.BREAK, PostFault.REFUSE, PostFault.BREAK)
    world.fabric.inject(producer.peer, consumer.peer, *faults)
    assert has_come(world, producer, consumer, 1, 21)
    assert len(ends_of(consumer, 1)) == 1


def test_five_seconds_without_a_single_post_end_in_requests_not_in_the_agent() -> None:
    """A25: every post is refused for five seconds. Each transfer ends once, and the link works afterwards."""
    world = World()
    producer, consumer = pair(world)
    assert has_come(world, producer, consumer, 0)
    world.fabric.set_link(producer.peer, consumer.peer, Link(refuse_rate=1.0))
    for number in range(1, 11):
        ask(producer, consumer, number, 20 + number)
    world.run(5.0)
    world.fabric.set_link(producer.peer, consumer.peer, Link())
    world.until(lambda: all(ends_of(consumer, number) for number in range(1, 11)), 30.0)
    world.until(lambda: len(producer.of(Released)) == 11, 60.0)
    assert all(len(ends_of(consumer, number)) == 1 for number in range(1, 11))
    assert has_come(world, producer, consumer, 11)
    world.until(lambda: len(producer.of(Released)) == 12)
    world.assert_empty()


# --- memory that is dropped and registered again -----------------------------------------------------


def test_buffers_are_dropped_after_three_writes_have_ended_and_come_back_as_another_engine() -> None:
    """P66: around a weight update the rank closes and starts anew. What is in flight ends first; what was
    agreed with the rank as it was is void with the rank as it is; peers meet it again by themselves."""
    world = World()
    producer, consumer = pair(world)
    assert has_come(world, producer, consumer, 0)
    world.fabric.hold(producer.peer, consumer.peer, Traffic.POSTS)
    for number in (1, 2, 3):
        ask(producer, consumer, number, 20 + number)
    world.until(lambda: producer.loop.producer.in_flight() == 3)
    metadata = producer.transport.local_metadata()
    producer.do(Close())
    world.run(2.0)
    assert not producer.loop.quiet, "its memory is being read"
    assert not any(ends_of(consumer, number) for number in (1, 2, 3))
    world.fabric.release(producer.peer, consumer.peer, Traffic.POSTS)
    world.until(lambda: producer.loop.quiet and all(ends_of(consumer, number) for number in (1, 2, 3)))
    assert all(consumer.block(20 + number) == producer.block(3) for number in (1, 2, 3)), "whole, not cut off"
    producer.transport.close()
    producer.dead = True

    [resumed] = world.engine("P", 1)
    before = producer.memory.copy()
    addresses = (consumer.memory.ctypes.data, producer.memory.ctypes.data, 64)
    whole = Runs(*(np.array([number], dtype=np.uint64) for number in addresses))
    for _ in range(2):
        with pytest.raises(TransportError):
            consumer.transport.write(producer.peer, whole)
        with pytest.raises(TransportError):
            consumer.transport.send(producer.peer, b"to the rank as it was")
        # Nor does it help to meet it again by what it once said of itself.
        consumer.transport.connect(producer.peer, metadata)
    consumer.transport.disconnect(producer.peer)
    assert (producer.memory == before).all()
    came = [has_come(world, resumed, consumer, number, 30 + number) for number in (4, 5, 6)]
    assert came.count(False) <= 1
    assert came[-1]
    assert resumed.peer != producer.peer


# --- one thread ------------------------------------------------------------------------------------


class Watched(MemoryTransport):
    """Notes which thread makes each call."""

    METHODS = frozenset(
        ("register", "local_metadata", "connect", "send", "receive", "write", "poll", "release", "close")
    )
    calls: dict[str, set[int]]

    def __getattribute__(self, name: str) -> object:
        if name in Watched.METHODS:
            type(self).calls.setdefault(name, set()).add(threading.get_ident())
        return super().__getattribute__(name)


def test_every_call_of_a_whole_life_is_made_by_the_agents_thread() -> None:
    """A10: the engine's thread submits, drains, asks for results and figures, and closes meanwhile."""

    class Producing(Watched):
        calls: dict[str, set[int]] = {}  # noqa: RUF012 - one per test

    class Consuming(Watched):
        calls: dict[str, set[int]] = {}  # noqa: RUF012 - one per test

    world, resolver = World(), DirectResolver()
    [p], [d] = world.engine("P", 1), world.engine("D", 2)
    fabric = MemoryFabric(random=Random(1), clock=time.monotonic)
    producer = Agent(p.identity, p.cache, lambda name: Producing(fabric, name), Limits(), resolver)
    consumer = Agent(d.identity, d.cache, lambda name: Consuming(fabric, name), Limits(), resolver)
    resolver.engines[1] = directory_of(world, p, producer.start())
    consumer.start()
    for number in range(20):
        consumer.submit(receive(transfer(number), "r", source_of(p, 1), [20], BLOCK_TOKENS))
        for command in prefill(transfer(number), [3], BLOCK_TOKENS)[:2]:
            producer.submit(command)
        assert producer.drain((transfer(number),), WAIT_SECONDS)
        producer.submit(Advance(transfer(number), BLOCK_TOKENS, 0, (((3, 1),),)))
        producer.submit(Finish(transfer(number)))
        deadline = time.monotonic() + WAIT_SECONDS
        while not any(isinstance(result, Received) for result in consumer.results()):
            assert time.monotonic() < deadline
            producer.results()
            producer.snapshot()
            threading.Event().wait(0.001)
    assert producer.close(WAIT_SECONDS)
    assert consumer.close(WAIT_SECONDS)
    for calls in (Producing.calls, Consuming.calls):
        assert len(set().union(*calls.values())) == 1, calls
        assert threading.get_ident() not in calls["close"]
    assert set(Producing.calls) | set(Consuming.calls) == Watched.METHODS


def test_the_engines_thread_waits_for_no_post() -> None:
    """G04: the transport takes its time over a post; commands, results and figures pass meanwhile."""
    posting, may_go_on = threading.Event(), threading.Event()

    class Slow(MemoryTransport):
        def write(self, *arguments: object) -> int:
            posting.set()
            assert may_go_on.wait(WAIT_SECONDS)
            return super().write(*arguments)  # type: ignore[arg-type]

    world, resolver = World(), DirectResolver()
    [p], [d] = world.engine("P", 1), world.engine("D", 2)
    fabric = MemoryFabric(random=Random(1), clock=time.monotonic)
    producer = Agent(p.identity, p.cache, lambda name: Slow(fabric, name), Limits(), resolver)
    consumer = Agent(d.identity, d.cache, lambda name: MemoryTransport(fabric, name), Limits(), resolver)
    resolver.engines[1] = directory_of(world, p, producer.start())
    consumer.start()
    consumer.submit(receive(transfer(0), "r", source_of(p, 1), [20], BLOCK_TOKENS))
    for command in prefill(transfer(0), [3], BLOCK_TOKENS):
        producer.submit(command)
    assert posting.wait(WAIT_SECONDS)
    for number in range(1, 101):
        assert producer.submit(Expect(transfer(number), BLOCK_TOKENS))
        assert producer.submit(Abandon(transfer(number), "abandoned"))
        assert producer.results() == []
        assert producer.snapshot()["bytes_posted"] == 0
    may_go_on.set()
    released: list[object] = []
    deadline = time.monotonic() + WAIT_SECONDS
    while len(released) < 101:
        assert time.monotonic() < deadline
        released += [result for result in producer.results() if isinstance(result, Released)]
        threading.Event().wait(0.001)
    assert producer.close(WAIT_SECONDS)
    assert consumer.close(WAIT_SECONDS)


def directory_of(world: World, rank: TestRank, metadata: bytes) -> Directory:
    """The directory of a world's engine, for an agent over another fabric."""
    directory = world.resolver.engines[1]
    [entry] = directory.ranks
    changed = RankEntry(
        pp=entry.pp, tp=entry.tp, peer=entry.peer, metadata=metadata, cache=encode_spec(rank.cache)
    )
    return Directory(
        engine=directory.engine,
        incarnation=directory.incarnation,
        tp_size=1,
        pp_size=1,
        ranks=(changed,),
    )


# --- messages from before ----------------------------------------------------------------------------


@pytest.mark.parametrize("late", ["nothing", "registration", "hello and registration"])
def test_what_an_earlier_life_of_the_consumer_has_said_is_void_in_the_end(late: str) -> None:
    """A21, P66: its successor has spoken for longer than the silence limit. Nothing is written to it, though
    its host still answers: whether its registration stood before, comes now, or comes with another Hello."""
    world = World()
    producer, consumer = pair(world)
    assert has_come(world, producer, consumer, 0)
    if late != "nothing":
        world.fabric.hold(consumer.peer, producer.peer, Traffic.MESSAGES)
    if late == "hello and registration":
        for payload in Encoder(1 << 16).encode(consumer.loop._peers.links.hello()):
            consumer.transport.send(producer.peer, payload)
    consumer.do(receive(transfer(1), "r", source_of(producer, 1), [21], BLOCK_TOKENS))
    world.run(0.1)
    before = consumer.memory.copy()
    # Its process is stopped, and replaced, but its memory can still be written to.
    consumer.dead = True
    [again] = world.engine("D", 2)
    for second in range(int(world.limits.silence_seconds) + 2):
        assert has_come(world, producer, again, 100 + second, 22)
        world.run(1.0)
    world.fabric.release(consumer.peer, producer.peer, Traffic.MESSAGES)
    world.run(0.1)
    posted = producer.stats.bytes_posted
    producer.do(*prefill(transfer(1), [3], BLOCK_TOKENS))
    world.run(1.0)
    assert producer.stats.bytes_posted == posted
    assert (consumer.memory == before).all()
    assert has_come(world, producer, again, 3, 23)


def test_the_first_hello_of_an_earlier_life_may_be_read_after_its_successors() -> None:
    """A02, A21: it was on its way, or the producer's thread stood still, while the consumer was killed and
    started again. At most one request of the living one is lost by that."""
    world = World()
    producer, consumer = pair(world)
    world.fabric.hold(consumer.peer, producer.peer, Traffic.MESSAGES)
    consumer.do(receive(transfer(1), "r", source_of(producer, 1), [21], BLOCK_TOKENS))
    world.run(0.1)
    world.kill(consumer)
    [again] = world.engine("D", 2)
    assert has_come(world, producer, again, 2, 22)
    world.fabric.release(consumer.peer, producer.peer, Traffic.MESSAGES)
    world.run(0.1)
    came = [has_come(world, producer, again, number, 23) for number in (3, 4, 5, 6)]
    assert came.count(False) <= 1
    assert came[-1]
