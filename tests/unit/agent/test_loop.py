"""Two and more agents on a fake clock, real bytes over the memory transport."""

from __future__ import annotations

import msgspec
import pytest

from kvferry.agent.loop import POSTING_SECONDS, Close
from kvferry.ids import ConsumerId, TransferId
from kvferry.layout.spans import to_spans
from kvferry.protocol.codec import Encoder
from kvferry.protocol.commands import (
    Abandon,
    Advance,
    AnnounceCommand,
    BlocksSafe,
    Drained,
    Expect,
    Finish,
    Preempt,
    Received,
    ReceiveFailed,
    Released,
    Withdraw,
)
from kvferry.protocol.limits import Limits
from kvferry.protocol.messages import Register
from kvferry.transport.faults import MessageFault, PostFault
from kvferry.transport.memory import Traffic
from tests.support.ranks import BLOCK_TOKENS, TestRank, World, prefill, receive, source_of

T1 = TransferId("transfer-0001")


def pair(world: World, order_p: str = "LBHNC", order_d: str = "LBHNC") -> tuple[TestRank, TestRank]:
    [producer] = world.engine("P", 1, order=order_p)
    [consumer] = world.engine("D", 2, order=order_d)
    return producer, consumer


def assert_copied(producer: TestRank, consumer: TestRank, pairs: dict[int, int]) -> None:
    for source, target in pairs.items():
        assert consumer.block(target) == producer.block(source), f"block {source} -> {target}"


@pytest.mark.parametrize("first", ["kv", "registration"])
@pytest.mark.parametrize("orders", [("LBHNC", "LBHNC"), ("LBHNC", "BLHNC"), ("BHLNC", "LBNHC")])
def test_bytes_arrive_in_either_order_of_arrival(first: str, orders: tuple[str, str]) -> None:
    world = World()
    producer, consumer = pair(world, *orders)
    untouched = consumer.block(40)
    compute = prefill(T1, [3, 4, 9], 40)
    wait = receive(T1, "r1", source_of(producer, 1), [20, 30, 31], 40)
    steps = [(producer, compute), (consumer, (wait,))]
    for rank, commands in steps if first == "kv" else reversed(steps):
        rank.do(*commands)
        world.run(0.05)
    world.until(lambda: consumer.of(Received) and producer.of(Released))
    assert_copied(producer, consumer, {3: 20, 4: 30, 9: 31})
    assert consumer.block(40) == untouched
    assert consumer.results == [Received(T1, ConsumerId("r1"), 3 * producer.cache.groups[0].block_bytes)]
    assert producer.of(Released) == [Released(T1, "written")]
    assert producer.stats.bytes_posted == 3 * producer.cache.groups[0].block_bytes
    world.assert_empty()


def test_chunks_leave_while_later_ones_compute() -> None:
    world = World()
    producer, consumer = pair(world)
    consumer.do(receive(T1, "r1", source_of(producer, 1), range(20, 28), 8 * BLOCK_TOKENS))
    producer.do(Expect(T1, 8 * BLOCK_TOKENS))
    for chunk in range(4):
        blocks = (to_spans([2 * chunk, 2 * chunk + 1]),)
        producer.do(Advance(T1, (chunk + 1) * 2 * BLOCK_TOKENS, 2 * chunk, blocks))
        world.run(0.05)
    block = producer.cache.groups[0].block_bytes
    assert producer.stats.bytes_posted == 8 * block
    assert producer.stats.bytes_posted_early == 6 * block
    assert consumer.of(Received)
    assert not producer.of(Released), "the host has not finished yet"
    producer.do(Finish(T1))
    world.until(lambda: producer.of(Released))
    assert_copied(producer, consumer, {n: 20 + n for n in range(8)})
    world.assert_empty()


def test_prefix_on_the_consumer_is_aligned_by_token() -> None:
    """P01: P holds blocks [10..17], D has five cached and registers [3, 4, 5] for the rest."""
    world = World()
    producer, consumer = pair(world)
    producer.do(*prefill(T1, range(10, 18), 8 * BLOCK_TOKENS))
    source = source_of(producer, 1)
    consumer.do(receive(T1, "r1", source, [3, 4, 5], 8 * BLOCK_TOKENS, start=5 * BLOCK_TOKENS))
    world.until(lambda: consumer.of(Received) and producer.of(Released))
    assert_copied(producer, consumer, {15: 3, 16: 4, 17: 5})


def test_asking_for_more_than_there_is_fails() -> None:
    """P01, P40: fewer tokens on P than D asks for is an error, nothing is written."""
    world = World()
    producer, consumer = pair(world)
    before = consumer.memory.copy()
    producer.do(*prefill(T1, range(8), 8 * BLOCK_TOKENS))
    consumer.do(receive(T1, "r1", source_of(producer, 1), range(9), 9 * BLOCK_TOKENS))
    world.until(lambda: consumer.results and producer.of(Released))
    [failed] = consumer.of(ReceiveFailed)
    assert failed.reason.startswith("too_short: asked for 144 tokens, the prompt has 128")
    assert failed.fenced
    assert failed.valid_until == 0
    assert (consumer.memory == before).all()
    world.assert_empty()


def test_abort_on_the_consumer_waits_for_the_fence_while_a_write_is_in_flight() -> None:
    """P02, A11: the blocks are not safe before the write in flight has ended."""
    world = World()
    producer, consumer = pair(world)
    source = source_of(producer, 1)
    consumer.do(receive(T1, "r1", source, [20, 21], 2 * BLOCK_TOKENS))
    world.run(0.05)
    world.fabric.hold(producer.peer, consumer.peer, Traffic.POSTS)
    producer.do(*prefill(T1, [1, 2], 2 * BLOCK_TOKENS))
    world.until(producer.loop.producer.in_flight)
    consumer.do(Withdraw(T1, ConsumerId("r1"), source, "aborted"))
    world.run(2.0)
    assert not consumer.results
    assert not producer.of(Released)
    world.fabric.release(producer.peer, consumer.peer, Traffic.POSTS)
    world.until(lambda: consumer.results and producer.of(Released))
    [failed] = consumer.of(ReceiveFailed)
    assert failed.cancelled
    assert failed.fenced
    world.assert_empty()


def test_aborts_with_nothing_in_flight_are_fenced_at_once() -> None:
    """P33: 50 aborts, all answered within 100 ms, none by a time-out."""
    world = World()
    producer, consumer = pair(world)
    source = source_of(producer, 1)
    ids = [TransferId(f"transfer-{n:04}") for n in range(50)]
    for transfer in ids:
        producer.do(Expect(transfer, BLOCK_TOKENS))
        consumer.do(receive(transfer, "r", source, [1], BLOCK_TOKENS))
    world.run(0.1)
    for transfer in ids:
        consumer.do(Withdraw(transfer, ConsumerId("r"), source, "aborted"))
    took = world.until(lambda: len(consumer.results) == 50)
    assert took < 0.1
    assert all(result.fenced and result.cancelled for result in consumer.of(ReceiveFailed))
    for transfer in ids:
        producer.do(Abandon(transfer, "abandoned"))
    world.until(lambda: len(producer.of(Released)) == 50)
    world.assert_empty()


def test_a_refused_post_is_tried_again_and_nothing_is_lost() -> None:
    """A22, A25: busy N times, then everything arrives, in order."""
    world = World()
    producer, consumer = pair(world)
    consumer.do(receive(T1, "r1", source_of(producer, 1), [20, 21], 2 * BLOCK_TOKENS))
    world.run(0.05)
    world.fabric.inject(producer.peer, consumer.peer, *[PostFault.REFUSE] * 3, PostFault.BREAK)
    producer.do(*prefill(T1, [1, 2], 2 * BLOCK_TOKENS))
    world.until(lambda: consumer.of(Received), 20.0)
    assert consumer.of(ReceiveFailed) == []
    assert_copied(producer, consumer, {1: 20, 2: 21})
    assert producer.stats.posts_refused == 3


def test_one_of_two_ranks_that_cannot_post_fails_the_transfer_at_once() -> None:
    """P03: each planned write has exactly one end; D hears of it within a poll, not by a time-out."""
    world = World(Limits(retries_max=1, retry_seconds=0.01))
    producers = world.engine("P", 1, tp_size=2)
    consumers = world.engine("D", 2, tp_size=2)
    source = source_of(producers[0], 1)
    for rank in consumers:
        rank.do(receive(T1, "r1", source, [20], BLOCK_TOKENS))
    world.run(0.05)
    world.fabric.inject(producers[1].peer, consumers[1].peer, *[PostFault.REFUSE] * 9)
    for rank in producers:
        rank.do(*prefill(T1, [5], BLOCK_TOKENS))
    took = world.until(lambda: all(rank.results for rank in consumers))
    assert took < 0.5
    assert consumers[0].of(Received)
    [failed] = consumers[1].of(ReceiveFailed)
    assert failed.reason.startswith("post_failed")
    assert failed.fenced
    world.until(lambda: all(rank.of(Released) for rank in producers))
    world.assert_empty()


def test_a_new_peer_that_does_not_answer_delays_nobody() -> None:
    """P05, G04: the directory of P2 hangs; transfers from P1 go on, P2's follow when it answers."""
    world = World()
    producer, consumer = pair(world)
    [other] = world.engine("P2", 3)
    world.resolver.held.add(3)
    slow = TransferId("transfer-slow")
    other.do(*prefill(slow, [1], BLOCK_TOKENS))
    consumer.do(receive(slow, "slow", source_of(other, 3), [50], BLOCK_TOKENS))
    for number in range(100):
        transfer = TransferId(f"transfer-{number:04}")
        producer.do(*prefill(transfer, [number % 40], BLOCK_TOKENS))
        consumer.do(receive(transfer, "r", source_of(producer, 1), [number % 40], BLOCK_TOKENS))
        before = len(consumer.of(Received))
        took = world.until(lambda before=before: len(consumer.of(Received)) > before)
        assert took < 0.05
    world.resolver.free(3)
    world.until(lambda: len(consumer.of(Received)) == 101)
    assert_copied(other, consumer, {1: 50})


def test_dead_producer_is_noticed_and_the_good_prefix_is_told() -> None:
    """P04, P47: half of the chunks are there when P dies; D keeps them and is fenced."""
    world = World()
    producer, consumer = pair(world)
    consumer.do(receive(T1, "r1", source_of(producer, 1), range(20, 24), 4 * BLOCK_TOKENS))
    producer.do(Expect(T1, 4 * BLOCK_TOKENS), Advance(T1, 2 * BLOCK_TOKENS, 0, (((0, 2),),)))
    world.run(0.2)
    world.kill(producer)
    took = world.until(lambda: consumer.results, 15.0)
    [failed] = consumer.of(ReceiveFailed)
    assert took <= world.limits.renew_seconds + world.limits.orphan_seconds + 0.1
    assert failed.reason.startswith("peer_lost")
    assert failed.fenced
    assert failed.valid_until == 2 * BLOCK_TOKENS
    assert_copied(producer, consumer, {0: 20, 1: 21})
    world.assert_empty()


def test_silence_fails_the_request_and_keeps_its_blocks_until_nothing_can_write() -> None:
    """P04, P07, P46: told at the silence limit, blocks safe only after permission and retry bounds."""
    world = World()
    producer, consumer = pair(world)
    consumer.do(receive(T1, "r1", source_of(producer, 1), [20], BLOCK_TOKENS))
    world.run(0.5)
    world.fabric.cut(producer.peer, consumer.peer)
    world.fabric.cut(consumer.peer, producer.peer)
    producer.do(Expect(T1, BLOCK_TOKENS))
    took = world.until(lambda: consumer.results, 30.0)
    assert took == pytest.approx(world.limits.silence_seconds, abs=world.limits.renew_seconds)
    [failed] = consumer.of(ReceiveFailed)
    assert failed.reason.startswith("peer_silent")
    assert not failed.fenced
    safe_after = world.until(lambda: consumer.of(BlocksSafe), 60.0)
    bound = world.limits.write_seconds + 2 * consumer.transport.retry_bound_seconds
    assert safe_after <= bound
    producer.do(Abandon(T1, "abandoned"))
    world.fabric.heal(producer.peer, consumer.peer)
    world.fabric.heal(consumer.peer, producer.peer)
    world.run(world.limits.unknown_seconds + 1)
    world.assert_empty()


def test_a_slow_producer_is_not_a_dead_one() -> None:
    """P04, P13: ten times the silence limit passes while P computes and answers renewals."""
    world = World()
    producer, consumer = pair(world)
    consumer.do(receive(T1, "r1", source_of(producer, 1), [20], BLOCK_TOKENS))
    producer.do(Expect(T1, BLOCK_TOKENS))
    world.clock.advance(0.01)
    for _ in range(1000):
        world.step()
        world.clock.advance(0.1)
    assert not consumer.results
    producer.do(Advance(T1, BLOCK_TOKENS, 0, (((5, 1),),)), Finish(T1))
    world.until(lambda: consumer.of(Received))


def test_restarted_producer_at_the_same_address_is_another_peer() -> None:
    """A02, A05, A21: same engine id and port, new incarnation: the next request is pushed by the new one."""
    world = World()
    producer, consumer = pair(world)
    producer.do(*prefill(T1, [1], BLOCK_TOKENS))
    consumer.do(receive(T1, "r1", source_of(producer, 1), [20], BLOCK_TOKENS))
    world.until(lambda: consumer.of(Received))
    world.kill(producer)
    [again] = world.engine("P", 1)
    second = TransferId("transfer-0002")
    again.do(*prefill(second, [7], BLOCK_TOKENS))
    consumer.do(receive(second, "r2", source_of(again, 1), [21], BLOCK_TOKENS))
    world.until(lambda: len(consumer.of(Received)) == 2)
    assert_copied(again, consumer, {7: 21})


def test_a_restarted_consumer_is_served_and_what_it_was_before_ends() -> None:
    """A02, A21: P writes to the new one at once; a write to the old one finds that it is gone."""
    world = World()
    producer, consumer = pair(world)
    producer.do(Expect(T1, BLOCK_TOKENS))
    consumer.do(receive(T1, "r1", source_of(producer, 1), [20], BLOCK_TOKENS))
    world.run(0.1)
    world.kill(consumer)
    [again] = world.engine("D", 2)
    second = TransferId("transfer-0002")
    again.do(receive(second, "r1", source_of(producer, 1), [30], BLOCK_TOKENS))
    producer.do(*prefill(second, [4], BLOCK_TOKENS))
    producer.do(Advance(T1, BLOCK_TOKENS, 0, (((3, 1),),)), Finish(T1))
    world.until(lambda: again.of(Received) and len(producer.of(Released)) == 2)
    assert_copied(producer, again, {4: 30})
    assert {result.outcome.partition(":")[0] for result in producer.of(Released)} == {"peer_lost", "written"}


def test_geometry_that_does_not_fit_is_refused_with_the_field() -> None:
    """V04, V07, V13: refused at the handshake, within one request's time, never at the first write."""
    world = World()
    [producer] = world.engine("P", 1, tp_size=1)
    consumers = world.engine("D", 2, tp_size=2)
    consumers[0].do(receive(T1, "r1", source_of(producer, 1), [20], BLOCK_TOKENS))
    took = world.until(lambda: consumers[0].results)
    [failed] = consumers[0].of(ReceiveFailed)
    assert took < 1.0
    assert failed.reason.startswith("geometry: ")
    assert "groups[0].heads_total differs: ours is 4, theirs is 2" in failed.reason
    assert failed.fenced
    world.assert_empty()


def test_unreachable_producer_fails_the_request_with_the_reason() -> None:
    """V03: the directory cannot be read: failed once, fenced, and the next request tries again."""
    world = World()
    producer, consumer = pair(world)
    gone = source_of(producer, 9)
    for name in ("r1", "r2"):
        consumer.do(receive(T1, name, gone, [20], BLOCK_TOKENS))
        world.until(lambda name=name: any(r.consumer == name for r in consumer.of(ReceiveFailed)))
    assert all(r.fenced and r.reason.startswith("handshake: ") for r in consumer.of(ReceiveFailed))
    assert world.resolver.asked == [9, 9]


def test_preemption_drains_what_reads_the_blocks_and_resumes_without_sending_again() -> None:
    """P28, P64, G08: the drained answer comes after the write, the rest follows from other blocks."""
    world = World()
    producer, consumer = pair(world)
    consumer.do(receive(T1, "r1", source_of(producer, 1), range(20, 24), 4 * BLOCK_TOKENS))
    world.run(0.05)
    world.fabric.hold(producer.peer, consumer.peer, Traffic.POSTS)
    producer.do(Expect(T1, 4 * BLOCK_TOKENS), Advance(T1, 2 * BLOCK_TOKENS, 0, (((0, 2),),)))
    world.until(producer.loop.producer.in_flight)
    producer.do(Preempt((T1,), 7))
    world.run(0.5)
    assert not producer.of(Drained)
    world.fabric.release(producer.peer, consumer.peer, Traffic.POSTS)
    world.until(lambda: producer.of(Drained))
    posted = producer.stats.bytes_posted
    producer.do(Advance(T1, 2 * BLOCK_TOKENS, 0, (((8, 2),),)))
    world.run(0.1)
    assert producer.stats.bytes_posted == posted, "what is there is not sent again"
    producer.do(Advance(T1, 4 * BLOCK_TOKENS, 2, (((10, 2),),)), Finish(T1))
    world.until(lambda: consumer.of(Received) and producer.of(Released))
    assert_copied(producer, consumer, {0: 20, 1: 21, 10: 22, 11: 23})
    world.assert_empty()


def test_finish_of_a_preempted_request_fails_it() -> None:
    """P28: preempted in its last step: D is told, it never gets an empty success."""
    world = World()
    producer, consumer = pair(world)
    consumer.do(receive(T1, "r1", source_of(producer, 1), [20], BLOCK_TOKENS))
    producer.do(Expect(T1, BLOCK_TOKENS))
    world.run(0.05)
    producer.do(Preempt((T1,), 1), Finish(T1))
    world.until(lambda: consumer.results and producer.of(Released))
    assert consumer.of(ReceiveFailed)[0].reason.startswith("incomplete")
    world.assert_empty()


def test_two_consumers_are_served_before_the_lease_ends() -> None:
    """P19: n=2: both get the KV, one release."""
    world = World()
    producer, consumer = pair(world)
    producer.do(*prefill(T1, [3], BLOCK_TOKENS, consumers=2))
    consumer.do(receive(T1, "0_r", source_of(producer, 1), [20], BLOCK_TOKENS))
    world.until(lambda: consumer.of(Received))
    world.run(0.2)
    assert not producer.of(Released)
    consumer.do(receive(T1, "1_r", source_of(producer, 1), [21], BLOCK_TOKENS))
    world.until(lambda: producer.of(Released))
    assert_copied(producer, consumer, {3: 20})
    assert_copied(producer, consumer, {3: 21})


def test_full_prefix_hit_releases_the_producer_at_once() -> None:
    """P22, P17, P49: no transfer needed, still P is told and does not wait out its lease."""
    world = World()
    producer, consumer = pair(world)
    source = source_of(producer, 1)
    producer.do(*prefill(T1, [3], BLOCK_TOKENS))
    consumer.do(AnnounceCommand(T1, ConsumerId("r1"), source))
    world.run(0.1)
    consumer.do(Withdraw(T1, ConsumerId("r1"), source, "cancelled: everything was cached"))
    assert world.until(lambda: producer.of(Released)) < 0.1
    assert not consumer.results
    world.assert_empty()


def test_nobody_comes_and_the_lease_ends() -> None:
    """P09, P13: without a consumer the lease ends at its time."""
    world = World()
    producer, _ = pair(world)
    producer.do(*prefill(T1, [3], BLOCK_TOKENS))
    took = world.until(lambda: producer.of(Released), 60.0)
    assert took == pytest.approx(world.limits.lease_seconds, abs=0.01)
    assert producer.of(Released) == [Released(T1, "lease_expired")]


def test_announced_consumer_keeps_the_lease_through_its_queue() -> None:
    """P09, P13: ten leases long it waits for memory, then still gets its KV."""
    world = World()
    producer, consumer = pair(world)
    source = source_of(producer, 1)
    producer.do(*prefill(T1, [3], BLOCK_TOKENS))
    consumer.do(AnnounceCommand(T1, ConsumerId("r1"), source))
    for _ in range(3000):
        world.step()
        world.clock.advance(0.1)
    assert not producer.results
    consumer.do(receive(T1, "r1", source, [20], BLOCK_TOKENS))
    world.until(lambda: consumer.of(Received))


def test_small_transfers_take_turns_with_a_large_one() -> None:
    """A 1-block transfer is not behind all slices of a 40-block one."""
    block = 3 * 2 * 16 * 8
    world = World(Limits(slice_bytes=block, in_flight_per_peer=1))
    producer, consumer = pair(world)
    large, small = TransferId("transfer-large"), TransferId("transfer-small")
    consumer.do(receive(large, "l", source_of(producer, 1), range(20, 60), 40 * BLOCK_TOKENS))
    consumer.do(receive(small, "s", source_of(producer, 1), [1], BLOCK_TOKENS))
    world.run(0.05)
    producer.do(*prefill(large, range(40), 40 * BLOCK_TOKENS), *prefill(small, [50], BLOCK_TOKENS))
    world.until(lambda: consumer.of(Received))
    assert consumer.of(Received)[0].transfer == small
    world.until(lambda: len(consumer.of(Received)) == 2)
    assert_copied(producer, consumer, {n: 20 + n for n in range(40)})


def test_long_posts_do_not_keep_the_loop_from_messages_and_commands() -> None:
    """Where a post takes as long as its bytes, a step ends between two of them, and the next one is due."""
    world = World(Limits(slice_bytes=1))
    producer, consumer = pair(world)
    consumer.do(receive(T1, "r1", source_of(producer, 1), range(20, 28), 8 * BLOCK_TOKENS))
    world.run(0.05)
    posted: list[object] = []

    def take_long(post: object) -> None:
        posted.append(post)
        world.clock.advance(0.6 * POSTING_SECONDS)

    world.fabric.on_post(take_long)
    producer.do(*prefill(T1, range(8), 8 * BLOCK_TOKENS))
    for step in range(1, 4):
        assert producer.loop.step() == 0.0
        assert len(posted) == 2 * step
    world.until(lambda: consumer.of(Received))
    assert len(posted) == 8
    assert producer.loop.step() > 0.0, "nothing is left to post"
    assert_copied(producer, consumer, {n: 20 + n for n in range(8)})


def test_close_with_transfers_in_flight_tells_the_peer_and_drains() -> None:
    """X18, A11: shutdown: nothing new is posted, the consumer hears, the transport closes cleanly."""
    world = World()
    producer, consumer = pair(world)
    consumer.do(receive(T1, "r1", source_of(producer, 1), [20, 21], 2 * BLOCK_TOKENS))
    producer.do(Expect(T1, 2 * BLOCK_TOKENS), Advance(T1, BLOCK_TOKENS, 0, (((0, 1),),)))
    world.run(0.1)
    producer.do(Close())
    world.until(lambda: consumer.results)
    [failed] = consumer.of(ReceiveFailed)
    assert failed.reason == "closed"
    assert failed.fenced
    assert failed.valid_until == BLOCK_TOKENS
    assert producer.loop.closing
    world.until(lambda: producer.loop.quiet)
    producer.transport.close()


def test_strangers_bytes_are_counted_and_ignored() -> None:
    """S03, X21: unreadable, unknown and impossible messages never stop the loop."""
    world = World()
    producer, consumer = pair(world)
    consumer.do(receive(T1, "r1", source_of(producer, 1), [20], BLOCK_TOKENS))
    world.run(0.05)
    for payload in (
        b"x",
        b"GET / HTTP/1.1",
        b"KF\x01\x00\0\0\0\0\xc1",
        b"KF\x09\x00\0\0\0\0\x80",
        b"\xff" * 2000,
    ):
        consumer.transport.send(producer.peer, payload)
    world.run(0.05)
    assert producer.stats.peer_errors == 5
    producer.do(*prefill(T1, [3], BLOCK_TOKENS))
    world.until(lambda: consumer.of(Received))


def test_a_lost_hello_is_noticed_although_the_peer_talks_of_other_things() -> None:
    """P04, promise 6: P renews what it wants of D; that says nothing of what D wants of P."""
    world = World()
    producer, consumer = pair(world)
    back = TransferId("transfer-back")
    consumer.do(Expect(back, BLOCK_TOKENS))
    producer.do(receive(back, "b", source_of(consumer, 2), [8], BLOCK_TOKENS))
    world.run(0.1)
    world.fabric.inject(consumer.peer, producer.peer, MessageFault.LOSE)
    producer.do(*prefill(T1, [3], BLOCK_TOKENS))
    consumer.do(receive(T1, "r1", source_of(producer, 1), [20], BLOCK_TOKENS))
    took = world.until(lambda: consumer.of(ReceiveFailed), 30.0)
    assert took <= world.limits.silence_seconds + world.limits.renew_seconds
    again = TransferId("transfer-0002")
    producer.do(*prefill(again, [4], BLOCK_TOKENS))
    consumer.do(receive(again, "r2", source_of(producer, 1), [21], BLOCK_TOKENS))
    world.until(lambda: consumer.of(Received))
    assert_copied(producer, consumer, {4: 21})


def test_a_registration_that_arrives_after_the_producer_gave_up_is_void() -> None:
    """Promise 2: D was told that nothing will be written and has its blocks back."""
    world = World()
    producer, consumer = pair(world)
    landed: list[object] = []
    world.fabric.on_land(landed.append)
    other = TransferId("transfer-0000")
    producer.do(Expect(other, BLOCK_TOKENS))
    consumer.do(receive(other, "o", source_of(producer, 1), [8], BLOCK_TOKENS))
    world.run(0.004)
    consumer.do(receive(T1, "c", source_of(producer, 1), [20], BLOCK_TOKENS))
    world.run(0.004)
    due = producer.loop.producer.state.timers._due[("unknown", T1)][0]
    world.run(due - world.clock.now - 0.002)
    world.fabric.hold(consumer.peer, producer.peer)
    world.until(lambda: consumer.of(ReceiveFailed), 1.0)
    assert consumer.of(ReceiveFailed)[0].fenced
    producer.do(*prefill(T1, [3], BLOCK_TOKENS))
    world.step()
    world.fabric.release(consumer.peer, producer.peer)
    world.run(0.5)
    assert not landed
    # The id's second life ends as well, and what was said in the first is remembered beyond it.
    world.until(lambda: producer.of(Released), 40.0)
    consumer.do(receive(T1, "c", source_of(producer, 1), [20], BLOCK_TOKENS))
    world.until(lambda: len(consumer.of(ReceiveFailed)) == 2)
    assert not landed


def test_an_id_that_is_too_long_fails_that_request_alone() -> None:
    """S01: the notification of a write could not carry it; the agents live on."""
    world = World()
    producer, consumer = pair(world)
    consumer.do(receive(T1, "c" * 70_000, source_of(producer, 1), [20], BLOCK_TOKENS))
    world.until(lambda: consumer.of(ReceiveFailed))
    assert consumer.of(ReceiveFailed)[0].reason.startswith("malformed")
    consumer.do(receive(T1, "r1", source_of(producer, 1), [20], BLOCK_TOKENS))
    world.run(0.1)
    long = Register(
        transfer=T1,
        consumer=ConsumerId("c" * 70_000),
        start=0,
        stop=16,
        groups=(((1, 1),),),
        write_seconds=1.0,
    )
    for payload in Encoder(consumer.transport.notification_bytes_max).encode(long):
        consumer.transport.send(producer.peer, payload)
    world.run(0.1)
    assert producer.stats.peer_errors == 1
    producer.do(*prefill(T1, [3], BLOCK_TOKENS))
    world.until(lambda: consumer.of(Received))


def test_a_hello_of_one_incarnation_shuts_out_no_other() -> None:
    """A02, A21: which one lives is not told by who speaks first. Both are linked until one falls silent."""
    world = World()
    producer, consumer = pair(world)
    consumer.do(receive(T1, "r1", source_of(producer, 1), [20], BLOCK_TOKENS))
    world.run(0.1)
    [again] = world.engine("D", 2)
    second = TransferId("transfer-0002")
    again.do(receive(second, "r1", source_of(producer, 1), [30], BLOCK_TOKENS))
    world.run(0.1)
    third = TransferId("transfer-0003")
    consumer.do(receive(third, "r3", source_of(producer, 1), [40], BLOCK_TOKENS))
    world.run(0.1)
    assert producer.stats.hellos_refused == 0
    producer.do(*prefill(second, [4], BLOCK_TOKENS), *prefill(third, [5], BLOCK_TOKENS))
    world.until(lambda: again.of(Received) and consumer.of(Received))
    assert_copied(producer, again, {4: 30})
    assert_copied(producer, consumer, {5: 40})


def test_a_refusal_is_no_fence_while_a_write_is_in_flight() -> None:
    """Promise 2: the producer refuses a later Hello, but has not been silent: the blocks are not safe."""
    world = World()
    producer, consumer = pair(world)
    consumer.do(receive(T1, "r1", source_of(producer, 1), [20, 21], 2 * BLOCK_TOKENS))
    world.run(0.05)
    world.fabric.hold(producer.peer, consumer.peer, Traffic.POSTS)
    producer.do(*prefill(T1, [1, 2], 2 * BLOCK_TOKENS))
    world.until(producer.loop.producer.in_flight)
    hello = msgspec.structs.replace(consumer.loop._peers.links.hello(), version=0)
    for payload in Encoder(consumer.transport.notification_bytes_max).encode(hello):
        consumer.transport.send(producer.peer, payload)
    world.until(lambda: consumer.results)
    [failed] = consumer.of(ReceiveFailed)
    assert "protocol version" in failed.reason
    assert not failed.fenced
