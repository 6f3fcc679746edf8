"""Agents on a fake clock of which one reads: real bytes over the memory transport."""

from __future__ import annotations

import pytest

from kvferry.agent.loop import POSTING_SECONDS, Close
from kvferry.ids import ConsumerId, TransferId
from kvferry.protocol.commands import (
    AnnounceCommand,
    BlocksSafe,
    Drained,
    Preempt,
    Receive,
    Received,
    ReceiveFailed,
    Released,
    Withdraw,
)
from kvferry.protocol.limits import Limits
from kvferry.protocol.messages import Offer
from kvferry.transport.faults import Link, MessageFault, PostFault
from kvferry.transport.memory import Traffic
from tests.support.ranks import BLOCK_TOKENS, TestRank, World, prefill, receive, source_of

T1, T2 = TransferId("transfer-0001"), TransferId("transfer-0002")
R1 = ConsumerId("r1")


def pair(world: World, order_p: str = "LBHNC", order_d: str = "LBHNC") -> tuple[TestRank, TestRank]:
    [producer] = world.engine("P", 1, order=order_p)
    [consumer] = world.engine("D", 2, order=order_d)
    return producer, consumer


def pull(producer: TestRank, blocks: range | list[int], stop: int, start: int = 0) -> Receive:
    return receive(T1, "r1", source_of(producer, 1), blocks, stop, start, mode="pull")


def assert_copied(producer: TestRank, consumer: TestRank, pairs: dict[int, int]) -> None:
    for source, target in pairs.items():
        assert consumer.block(target) == producer.block(source), f"block {source} -> {target}"


def small(**limits: float) -> Limits:
    """Two blocks per slice of a rank."""
    return Limits(slice_bytes=2 * 3 * 2 * BLOCK_TOKENS * 8, **limits)  # type: ignore[arg-type]


@pytest.mark.parametrize("first", ["kv", "request"])
@pytest.mark.parametrize("orders", [("LBHNC", "LBHNC"), ("LBHNC", "BLHNC"), ("BHLNC", "LBNHC")])
def test_bytes_are_read_in_either_order_of_arrival(first: str, orders: tuple[str, str]) -> None:
    world = World()
    producer, consumer = pair(world, *orders)
    untouched, source = consumer.block(40), producer.memory.copy()
    compute, wait = prefill(T1, [3, 4, 9], 40), (pull(producer, [20, 30, 31], 40),)
    steps = [(producer, compute), (consumer, wait)]
    for rank, commands in steps if first == "kv" else reversed(steps):
        rank.do(*commands)
        world.run(0.05)
    world.until(lambda: consumer.of(Received) and producer.of(Released))
    assert_copied(producer, consumer, {3: 20, 4: 30, 9: 31})
    assert consumer.block(40) == untouched
    assert (producer.memory == source).all()
    size = 3 * producer.cache.groups[0].block_bytes
    assert consumer.results == [Received(T1, R1, size)]
    assert producer.of(Released) == [Released(T1, "fetched")]
    assert (consumer.stats.bytes_read, consumer.stats.bytes_received) == (size, size)
    assert (producer.stats.bytes_posted, consumer.stats.bytes_posted) == (0, 0)
    world.assert_empty()


def test_a_prefix_on_the_consumer_is_aligned_by_token() -> None:
    """P01: P holds blocks [10..17], D has five cached and reads the rest into [3, 4, 5]."""
    world = World()
    producer, consumer = pair(world)
    producer.do(*prefill(T1, range(10, 18), 8 * BLOCK_TOKENS))
    consumer.do(pull(producer, [3, 4, 5], 8 * BLOCK_TOKENS, start=5 * BLOCK_TOKENS))
    world.until(lambda: consumer.of(Received) and producer.of(Released))
    assert_copied(producer, consumer, {15: 3, 16: 4, 17: 5})


def test_slices_are_several_in_flight_and_bounded() -> None:
    """G04: eight slices, of which never more than the limit are under way."""
    world = World(small(in_flight_per_peer=3))
    producer, consumer = pair(world)
    most = 0
    world.fabric.hold(producer.peer, consumer.peer, Traffic.POSTS)
    producer.do(*prefill(T1, range(16), 16 * BLOCK_TOKENS))
    consumer.do(pull(producer, range(20, 36), 16 * BLOCK_TOKENS))
    world.run(0.1)
    assert consumer.loop.consumer.reader.in_flight() == 3
    world.fabric.release(producer.peer, consumer.peer, Traffic.POSTS)
    while not consumer.of(Received):
        most = max(most, consumer.loop.consumer.reader.in_flight())
        world.step()
    assert most == 3
    assert consumer.stats.posted_slices == 8
    assert_copied(producer, consumer, {n: 20 + n for n in range(16)})


def test_an_engine_of_both_roles_reads_while_it_writes() -> None:
    """A step has time for one post here, and each post ends at once: there is always one more."""
    world = World(small(in_flight_per_peer=100))
    one, other = pair(world)
    other.loop._before_post = lambda: world.clock.advance(POSTING_SECONDS)
    one.do(*prefill(T1, range(32), 32 * BLOCK_TOKENS))
    other.do(*prefill(T2, range(32), 32 * BLOCK_TOKENS))
    one.do(receive(T2, "r2", source_of(other, 2), range(32, 64), 32 * BLOCK_TOKENS))
    other.do(pull(one, range(32, 64), 32 * BLOCK_TOKENS))
    world.until(lambda: one.of(Received) or other.of(Received))
    half = 16 * one.cache.groups[0].block_bytes
    assert min(other.stats.bytes_posted, other.stats.bytes_read) >= half
    world.until(lambda: one.of(Received) and other.of(Received))


def test_an_abort_waits_for_our_own_read_and_for_nobody_else() -> None:
    """P02, A11: the producer is dead by then; the blocks are safe when the READ has ended, and not before."""
    world = World(small())
    producer, consumer = pair(world)
    producer.do(*prefill(T1, range(4), 4 * BLOCK_TOKENS))
    world.fabric.hold(producer.peer, consumer.peer, Traffic.POSTS)
    consumer.do(pull(producer, range(20, 24), 4 * BLOCK_TOKENS))
    world.until(lambda: consumer.loop.consumer.reader.in_flight() == 2)
    consumer.do(Withdraw(T1, R1, source_of(producer, 1), "client left"))
    world.run(1.0)
    assert consumer.results == []
    assert producer.loop.producer.lent() == 1
    world.kill(producer)
    world.until(lambda: consumer.results)
    assert consumer.results == [ReceiveFailed(T1, R1, "client left", 0, fenced=True, cancelled=True)]


def test_a_read_that_never_ends_is_told_and_then_torn_down() -> None:
    """P46: the host hears that nothing is safe yet; the connection's end brings the fence."""
    world = World(Limits(silence_seconds=5, slice_seconds=20))
    producer, consumer = pair(world)
    producer.do(*prefill(T1, range(2), 2 * BLOCK_TOKENS))
    world.fabric.inject(consumer.peer, producer.peer, PostFault.STALL)
    consumer.do(pull(producer, range(20, 22), 2 * BLOCK_TOKENS))
    world.until(lambda: consumer.loop.consumer.reader.in_flight() == 1)
    consumer.do(Withdraw(T1, R1, source_of(producer, 1), "client left"))
    took = world.until(lambda: consumer.of(ReceiveFailed), seconds=10)
    assert 4 < took < 8
    [failed] = consumer.of(ReceiveFailed)
    assert (failed.fenced, consumer.of(BlocksSafe)) == (False, [])
    world.until(lambda: consumer.of(BlocksSafe), seconds=20)
    world.until(lambda: producer.of(Released), seconds=35)
    world.run(3.0)
    world.assert_empty()


@pytest.mark.parametrize(("fault", "refused"), [(PostFault.REFUSE, 1), (PostFault.BREAK, 0)])
def test_a_read_that_fails_for_now_is_tried_again(fault: PostFault, refused: int) -> None:
    world = World()
    producer, consumer = pair(world)
    producer.do(*prefill(T1, range(2), 2 * BLOCK_TOKENS))
    world.fabric.inject(consumer.peer, producer.peer, fault)
    consumer.do(pull(producer, range(20, 22), 2 * BLOCK_TOKENS))
    world.until(lambda: consumer.of(Received) and producer.of(Released))
    assert_copied(producer, consumer, {0: 20, 1: 21})
    assert consumer.stats.posts_refused == refused
    world.assert_empty()


def test_a_read_that_cannot_be_posted_fails_the_reception_behind_the_fence() -> None:
    """P40: what was read before it stays good, and the producer is let go at once."""
    world = World(small(in_flight_per_peer=1))
    producer, consumer = pair(world)
    producer.do(*prefill(T1, range(4), 4 * BLOCK_TOKENS))
    world.fabric.hold(producer.peer, consumer.peer, Traffic.POSTS)
    consumer.do(pull(producer, range(20, 24), 4 * BLOCK_TOKENS))
    world.until(lambda: consumer.loop.consumer.reader.in_flight() == 1)
    world.fabric.inject(consumer.peer, producer.peer, PostFault.FAIL)
    world.fabric.release(producer.peer, consumer.peer, Traffic.POSTS)
    world.until(lambda: consumer.results and producer.of(Released))
    [failed] = consumer.of(ReceiveFailed)
    assert failed.reason.startswith("post_failed: ")
    assert (failed.valid_until, failed.fenced) == (2 * BLOCK_TOKENS, True)
    assert_copied(producer, consumer, {0: 20, 1: 21})
    world.assert_empty()


def test_a_broken_connection_keeps_what_was_read() -> None:
    """P11, P46: the rest is recomputed; the lease of a producer that lives ends by itself at the latest."""
    world = World(small(in_flight_per_peer=1))
    producer, consumer = pair(world)
    producer.do(*prefill(T1, range(4), 4 * BLOCK_TOKENS))
    world.fabric.set_link(producer.peer, consumer.peer, Link(latency_seconds=0.01))
    consumer.do(pull(producer, range(20, 24), 4 * BLOCK_TOKENS))
    world.until(lambda: consumer.stats.posted_slices == 2)
    world.fabric.break_connection(consumer.peer, producer.peer)
    world.until(lambda: consumer.results)
    [failed] = consumer.of(ReceiveFailed)
    assert failed.reason.startswith("peer_lost: ")
    assert (failed.valid_until, failed.fenced) == (2 * BLOCK_TOKENS, True)
    world.until(lambda: producer.of(Released), seconds=35)


def test_a_lost_fetched_is_said_again() -> None:
    """P16: the request does not wait for the answer."""
    world = World()
    producer, consumer = pair(world)
    producer.do(*prefill(T1, range(2), 2 * BLOCK_TOKENS))
    world.fabric.hold(producer.peer, consumer.peer, Traffic.POSTS)
    consumer.do(pull(producer, range(20, 22), 2 * BLOCK_TOKENS))
    world.until(lambda: consumer.loop.consumer.reader.in_flight() == 1)
    world.fabric.inject(consumer.peer, producer.peer, MessageFault.LOSE)
    world.fabric.release(producer.peer, consumer.peer, Traffic.POSTS)
    world.until(lambda: consumer.of(Received))
    assert not producer.of(Released)
    took = world.until(lambda: producer.of(Released))
    assert took < world.limits.renew_seconds + 0.1
    world.until(lambda: not consumer.loop.consumer.state.farewells)
    assert consumer.loop.consumer.next_due() is None


def test_a_reader_that_was_stopped_uses_nothing_that_it_read() -> None:
    """P14: its READ was under way when it was stopped; when it goes on, the blocks are another request's."""
    world = World(Limits(lease_seconds=4, silence_seconds=30, unknown_seconds=2))
    producer, consumer = pair(world)
    producer.do(*prefill(T1, range(2), 2 * BLOCK_TOKENS))
    world.fabric.hold(producer.peer, consumer.peer, Traffic.POSTS)
    consumer.do(pull(producer, range(20, 22), 2 * BLOCK_TOKENS))
    world.until(lambda: consumer.loop.consumer.reader.in_flight() == 1)
    consumer.dead = True
    world.until(lambda: producer.of(Released), seconds=6)
    producer.memory[:] = 0
    world.fabric.release(producer.peer, consumer.peer, Traffic.POSTS)
    world.run(1.0)
    consumer.dead = False
    world.until(lambda: consumer.results)
    [failed] = consumer.of(ReceiveFailed)
    assert (failed.reason, failed.valid_until, failed.fenced) == ("lease_expired", 0, True)
    assert consumer.loop.consumer.state.counts["read_late"] == 1
    world.run(3.0)
    world.assert_empty()


def test_preempted_blocks_wait_for_whoever_reads_them() -> None:
    """X25: `Drained` is not said while a reader may be reading."""
    world = World()
    producer, consumer = pair(world)
    producer.do(*prefill(T1, range(2), 2 * BLOCK_TOKENS))
    world.fabric.hold(producer.peer, consumer.peer, Traffic.POSTS)
    consumer.do(pull(producer, range(20, 22), 2 * BLOCK_TOKENS))
    world.until(lambda: consumer.loop.consumer.reader.in_flight() == 1)
    producer.do(Preempt((T1,), 7))
    world.run(1.0)
    assert producer.of(Drained) == []
    world.fabric.release(producer.peer, consumer.peer, Traffic.POSTS)
    world.until(lambda: producer.of(Drained) and consumer.results)
    [failed] = consumer.of(ReceiveFailed)
    assert failed.reason == "incomplete: its blocks were taken back"
    world.assert_empty()


def test_a_producer_that_closes_waits_for_its_readers() -> None:
    """P66: it says that they should stop, and leaves when they have."""
    world = World()
    producer, consumer = pair(world)
    producer.do(*prefill(T1, range(2), 2 * BLOCK_TOKENS))
    world.fabric.hold(producer.peer, consumer.peer, Traffic.POSTS)
    consumer.do(pull(producer, range(20, 22), 2 * BLOCK_TOKENS))
    world.until(lambda: consumer.loop.consumer.reader.in_flight() == 1)
    producer.do(Close())
    world.run(1.0)
    assert not producer.loop.quiet
    world.fabric.release(producer.peer, consumer.peer, Traffic.POSTS)
    world.until(lambda: producer.loop.quiet and consumer.results)
    [failed] = consumer.of(ReceiveFailed)
    assert failed.reason.startswith("closed")


def test_two_consumers_of_one_prefill_may_differ() -> None:
    """P42: one is written, the other one reads; the source ends with the second."""
    world = World()
    producer, consumer = pair(world)
    [other] = world.engine("E", 3)
    source = source_of(producer, 1)
    producer.do(*prefill(T1, [5, 6], 2 * BLOCK_TOKENS, consumers=2))
    consumer.do(receive(T1, "r1", source, [20, 21], 2 * BLOCK_TOKENS))
    world.until(lambda: consumer.of(Received))
    assert not producer.of(Released)
    other.do(AnnounceCommand(T1, ConsumerId("r2"), source))
    other.do(receive(T1, "r2", source, [1, 2], 2 * BLOCK_TOKENS, mode="pull"))
    world.until(lambda: other.of(Received) and producer.of(Released))
    assert_copied(producer, consumer, {5: 20, 6: 21})
    assert_copied(producer, other, {5: 1, 6: 2})
    world.assert_empty()


def test_unequal_engines_read_from_every_rank_that_they_need() -> None:
    """P42: two ranks on either side; each reads its own heads."""
    world = World()
    producers = world.engine("P", 1, tp_size=2)
    consumers = world.engine("D", 2, tp_size=2)
    for rank in producers:
        rank.do(*prefill(T1, [5, 6], 2 * BLOCK_TOKENS))
    for rank in consumers:
        rank.do(receive(T1, "r1", source_of(producers[0], 1), [20, 21], 2 * BLOCK_TOKENS, mode="pull"))
    world.until(lambda: all(rank.of(Received) for rank in consumers))
    world.until(lambda: all(rank.of(Released) for rank in producers))
    for one, another in zip(producers, consumers, strict=True):
        assert_copied(one, another, {5: 20, 6: 21})


def test_an_offer_that_names_blocks_outside_the_cache_is_not_read() -> None:
    """V01: out of range ids end in a failure, nothing is posted."""
    world = World()
    producer, consumer = pair(world)
    before = consumer.memory.copy()
    producer.do(*prefill(T1, range(2), 2 * BLOCK_TOKENS))
    consumer.do(pull(producer, range(20, 22), 2 * BLOCK_TOKENS))
    world.fabric.hold(producer.peer, consumer.peer, Traffic.MESSAGES)
    world.until(lambda: producer.loop.producer.lent() == 1)
    row = consumer.loop.consumer.state.rows[T1, R1]
    forged = Offer(
        transfer=T1,
        consumer=R1,
        attempt=row.attempt,
        start=0,
        stop=2 * BLOCK_TOKENS,
        groups=(((1 << 40, 2),),),
        asked=world.clock.now,
        keep_seconds=30.0,
    )
    consumer.loop.consumer.handle_message(producer.peer, forged, world.clock.now)
    world.until(lambda: consumer.results)
    [failed] = consumer.of(ReceiveFailed)
    assert failed.reason.startswith("post_failed: ")
    assert (failed.valid_until, failed.fenced) == (0, True)
    assert (consumer.memory == before).all()
    assert consumer.stats.posted_slices == 0
