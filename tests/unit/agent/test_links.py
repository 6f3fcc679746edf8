"""Whom a rank links to: engines of unequal shapes, contradicting descriptions, plans in bounds."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest

from kvferry.agent import links as links_module
from kvferry.agent.directory import Directory
from kvferry.ids import ConsumerId, TransferId
from kvferry.layout.plans import PLAN_OVERHEAD_BYTES, PlanCache
from kvferry.layout.ranks import Meeting, meetings
from kvferry.layout.spec import decode_spec, encode_spec
from kvferry.protocol.commands import Receive, Received, ReceiveFailed, Released
from tests.support.engines import Sizes
from tests.support.ranks import World
from tests.support.shaped import ShapedEngine, ShapedRank, hand_over

TOKENS = range(7)


def world_of(ours: Sizes, *theirs: Sizes) -> tuple[World, ShapedEngine, list[ShapedEngine]]:
    world = World()
    producer = ShapedEngine(world, "P", 1, ours)
    return world, producer, [ShapedEngine(world, f"D{n}", 2 + n, sizes) for n, sizes in enumerate(theirs)]


def failure(world: World, consumer: ShapedEngine, producer: ShapedEngine) -> str:
    """Why a rank's request fails, in less than a second."""
    rank = consumer.ranks[0]
    rank.do(Receive(TransferId("t"), ConsumerId("r"), producer.source, 0, 2, (((0, 1),),)))
    assert world.until(lambda: rank.of(ReceiveFailed)) < 1.0
    [failed] = rank.of(ReceiveFailed)
    assert isinstance(failed, ReceiveFailed)
    assert failed.fenced
    world.assert_empty()
    return failed.reason


def with_cache(directory: Directory, rank: ShapedRank, number: int) -> Directory:
    """A directory in which one entry has the cache of another rank."""
    entries = list(directory.ranks)
    entries[number] = msgspec.structs.replace(entries[number], cache=encode_spec(rank.cache))
    return msgspec.structs.replace(directory, ranks=tuple(entries))


def test_one_replica_serves_and_the_others_let_go_at_once() -> None:
    """MLA, P TP4 to D TP1: three ranks hear that they need not send, and none waits for its lease."""
    world, producer, [consumer] = world_of(Sizes(tp=4, heads=1, blocks=24), Sizes(heads=1, blocks=24))
    expected = hand_over(world, producer, consumer, TOKENS, Random(1))
    world.until(lambda: len(producer.results(Released)) == 4, 1.0)
    assert np.array_equal(consumer.ranks[0].memory, expected[0])
    assert sorted(rank.stats.bytes_posted > 0 for rank in producer.ranks) == [False, False, False, True]
    [received] = consumer.results(Received)
    assert isinstance(received, Received)
    assert received.bytes == 4 * consumer.ranks[0].cache.groups[0].block_bytes
    world.assert_empty()


def test_many_small_consumers_use_all_replicas() -> None:
    sizes = Sizes(heads=1, blocks=24)
    world, producer, consumers = world_of(Sizes(tp=4, heads=1, blocks=24), *[sizes] * 12)
    for number, consumer in enumerate(consumers):
        hand_over(world, producer, consumer, TOKENS, Random(number), f"r{number}")
        world.until(lambda consumer=consumer: consumer.results(Received), 1.0)
    assert all(rank.stats.bytes_posted for rank in producer.ranks)


def test_a_rank_that_describes_another_one_is_refused() -> None:
    world, producer, [consumer] = world_of(Sizes(tp=2), Sizes())
    book = world.resolver.engines
    book[1] = with_cache(book[1], producer.ranks[0], 1)
    reason = failure(world, consumer, producer)
    assert reason.startswith("handshake: kvferry/P/first/pp0/tp1 describes the cache of Rank(pp=0, tp=0)")


def test_ranks_that_differ_in_what_their_engine_is_are_refused() -> None:
    """V11: stages that do not agree on who has which layer."""
    world, producer, [consumer] = world_of(Sizes(split=(2, 1)), Sizes(split=(3,)))
    book = world.resolver.engines
    other = ShapedEngine(World(), "P", 1, Sizes(split=(1, 2)))
    book[1] = with_cache(book[1], other.ranks[1], 1)
    assert failure(world, consumer, producer) == (
        "handshake: ranks of P differ in what they say of their engine"
    )


@pytest.mark.parametrize(("times", "coming"), [(0, 16), (2, 48)])
def test_ranks_that_do_not_bring_all_or_bring_it_twice_are_refused(
    monkeypatch: pytest.MonkeyPatch, times: int, coming: int
) -> None:
    """V07: what comes is added up before the first request; a rule that forgets a rank does not lose KV."""

    def wrong(*of: Any) -> tuple[Meeting, ...]:
        first, second = meetings(*of)
        return first, *[second] * times

    monkeypatch.setattr(links_module, "meetings", wrong)
    world, producer, [consumer] = world_of(Sizes(tp=2), Sizes())
    reason = failure(world, consumer, producer)
    assert reason.startswith(
        f"geometry: groups[0].bytes differs: ours is '32 per block', theirs is '{coming} per block from "
    )


def test_two_ranks_that_chose_differently_never_take_nothing_for_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Promise 5: were a release to choose another replica, the registration would be refused."""
    world, producer, [consumer] = world_of(Sizes(tp=2, heads=1), Sizes(heads=1))
    turns = iter([0, 1, 1])
    monkeypatch.setattr(links_module, "turn_of", lambda engine: next(turns))
    rank = consumer.ranks[0]
    rank.do(Receive(TransferId("t"), ConsumerId("r"), producer.source, 0, 2, (((0, 1),),)))
    world.until(lambda: rank.of(ReceiveFailed))
    [failed] = rank.of(ReceiveFailed)
    assert isinstance(failed, ReceiveFailed)
    assert failed.reason == "malformed: (16,) bytes expected per block, we would write (0,)"
    world.assert_empty()


def test_a_hello_that_describes_another_rank_is_refused() -> None:
    world, producer, [consumer] = world_of(Sizes(tp=2), Sizes(tp=2))
    one, other = consumer.ranks
    one.loop._peers.links.ours = other.cache
    one.transport.connect(producer.ranks[0].peer, producer.ranks[0].transport.local_metadata())
    one.loop._peers.send(producer.ranks[0].peer, one.loop._peers.links.hello())
    world.until(lambda: one.stats.hellos_refused)
    assert producer.ranks[0].stats.hellos_refused == 1


def test_a_plan_that_was_dropped_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of many peers have one bound; a transfer to any of them works at any time."""
    sizes = Sizes(blocks=24)
    world, producer, consumers = world_of(sizes, *[sizes] * 3)
    links = producer.ranks[0].loop._peers.links
    links._plans = PlanCache(bytes_max=PLAN_OVERHEAD_BYTES)
    for turn in range(2):
        for number, consumer in enumerate(consumers):
            expected = hand_over(world, producer, consumer, TOKENS, Random(number), f"r{turn}{number}")
            world.until(lambda consumer=consumer, turn=turn: len(consumer.results(Received)) > turn, 1.0)
            assert np.array_equal(consumer.ranks[0].memory, expected[0])
            assert len(links._plans) == 1
    assert len(links._writable) == 3


def test_a_peer_that_is_gone_leaves_no_plan() -> None:
    world, producer, [consumer] = world_of(Sizes(blocks=24), Sizes(blocks=24))
    hand_over(world, producer, consumer, TOKENS, Random(1))
    world.until(lambda: consumer.results(Received), 1.0)
    links = producer.ranks[0].loop._peers.links
    assert len(links._plans) == 1
    links.forget(consumer.ranks[0].peer)
    assert len(links._plans) == 0


def test_descriptions_say_what_was_built() -> None:
    """The directory's text and the rank's own description are one."""
    world, producer, _ = world_of(Sizes(tp=2, split=(1, 1), scales=True, window=8))
    for entry, rank in zip(world.resolver.engines[1].ranks, producer.ranks, strict=True):
        assert decode_spec(entry.cache) == rank.cache
