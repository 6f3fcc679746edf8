"""Links that nothing is said on are given up, come back on demand, and are bounded in number."""

from __future__ import annotations

import pytest

from kvferry.agent.idle import Connections
from kvferry.ids import ConsumerId, PeerName, TransferId
from kvferry.layout.spans import to_spans
from kvferry.protocol.codec import Encoder
from kvferry.protocol.commands import AnnounceCommand, Expect, Received, ReceiveFailed, Withdraw
from kvferry.protocol.limits import Limits
from kvferry.transport.memory import Traffic
from tests.support.ranks import BLOCK_TOKENS, TestRank, World, prefill, receive, source_of

A, B, C = PeerName("a"), PeerName("b"), PeerName("c")
IDLE = Limits(idle_seconds=20.0)


class Clock:
    """Stands still until it is moved."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def transfer(number: int) -> TransferId:
    return TransferId(f"transfer-{number:04}")


def works(world: World, producer: TestRank, consumer: TestRank, number: int) -> None:
    """One transfer ends well, and soon."""
    producer.do(*prefill(transfer(number), [3], BLOCK_TOKENS))
    consumer.do(receive(transfer(number), "r", source_of(producer, 1), [20], BLOCK_TOKENS))
    before = len(consumer.of(Received))
    assert world.until(lambda: len(consumer.of(Received)) > before) < 0.5
    assert consumer.block(20) == producer.block(3)


def linked(rank: TestRank) -> int:
    """Peers that a rank's transport is connected to, as the rank counts them."""
    connections = rank.loop._peers.links.connections
    assert connections._used.keys() == rank.transport._node.connections.keys(), (
        "every connection is counted, and only those"
    )
    return len(connections)


def pass_time(world: World, seconds: float) -> None:
    """Let time pass in large steps: nothing is under way."""
    for _ in range(int(seconds)):
        world.clock.advance(1.0)
        world.step()


# --- the table by itself ---------------------------------------------------------------------------


def test_a_peer_is_idle_once_per_idle_time_and_twice_as_late_for_the_patient() -> None:
    clock = Clock()
    connections = Connections(10.0, clock)
    for peer in (A, B, C):
        connections.opened(peer)
    found = []
    for second in range(1, 36):
        clock.now = float(second)
        if second == 5:
            connections.used(C, clock.now)
        found += [(second, peer) for peer in connections.idle(clock.now, lambda peer: peer == B)]
    assert found == [(10, A), (15, C), (20, A), (20, B), (25, C), (30, A), (30, B), (35, C)]


def test_what_is_closed_is_not_idle_and_strangers_are_not_counted() -> None:
    clock = Clock()
    connections = Connections(10.0, clock)
    connections.opened(A)
    connections.used(B, 1.0)
    connections.closed(A)
    connections.closed(C)
    assert list(connections.idle(100.0, lambda _: False)) == []
    assert len(connections) == 0
    assert A not in connections


def test_the_longest_idle_peer_is_one_that_nothing_needs() -> None:
    clock = Clock()
    connections = Connections(10.0, clock)
    for peer in (A, B, C):
        clock.now += 1.0
        connections.opened(peer)
    connections.used(B, 10.0)
    assert connections.longest_idle(set()) == A
    assert connections.longest_idle({A}) == C
    assert connections.longest_idle({A, C}) == B
    assert connections.longest_idle({A, B, C}) is None


# --- between ranks ---------------------------------------------------------------------------------


def test_consumers_that_come_and_go_leave_no_link_behind() -> None:
    """Every start of an engine makes new names: none of them is linked for ever."""
    world = World(IDLE)
    [producer] = world.engine("P", 1)
    for number in range(5):
        [consumer] = world.engine(f"D{number}", 10 + number)
        works(world, producer, consumer, number)
        world.kill(consumer)
        world.ranks.remove(consumer)
    assert linked(producer) == 5
    pass_time(world, 2 * IDLE.idle_seconds + 1)
    assert linked(producer) == 0
    assert producer.loop.producer.state.lanes == {}


def test_producers_that_come_and_go_leave_no_link_behind() -> None:
    world = World(IDLE)
    [consumer] = world.engine("D", 2)
    for number in range(5):
        [producer] = world.engine(f"P{number}", 1)
        works(world, producer, consumer, number)
        world.kill(producer)
        world.ranks.remove(producer)
    assert linked(consumer) == 5
    pass_time(world, IDLE.idle_seconds + 1)
    assert linked(consumer) == 0
    assert len(consumer.loop.consumer.state.sources) == 0


def test_a_link_that_was_given_up_is_opened_by_the_next_transfer() -> None:
    """The consumer forgets first, so that it says Hello anew before the producer has forgotten it."""
    world = World(IDLE)
    [producer] = world.engine("P", 1)
    [consumer] = world.engine("D", 2)
    for number, (seconds, producer_links) in enumerate([(0.0, 0), (25.0, 1), (50.0, 0), (15.0, 1)]):
        pass_time(world, seconds)
        assert (linked(producer), linked(consumer)) == (producer_links, int(seconds == 15.0))
        works(world, producer, consumer, number)
    assert world.resolver.asked == [1, 1, 1]
    assert producer.stats.peers_lost == consumer.stats.peers_lost == 0


def test_a_consumer_whose_link_the_producer_alone_gave_up_needs_no_new_hello() -> None:
    """What a later message needs is remembered: the Hello."""
    world = World(IDLE)
    [producer] = world.engine("P", 1)
    [consumer] = world.engine("D", 2)
    works(world, producer, consumer, 1)
    producer.loop._peers._give_up(consumer.peer, "for the test")
    assert linked(producer) == 0
    works(world, producer, consumer, 2)
    assert world.resolver.asked == [1]
    assert linked(producer) == 1


def test_a_link_is_not_idle_while_a_hello_comes_in_parts() -> None:
    """Its parts came just before the link had been idle for long enough: the rest was no message any more."""
    world = World(IDLE)
    [second] = world.engine("P", 1)
    [first] = world.engine("D", 2)
    works(world, second, first, 1)
    pass_time(world, 19.0)
    second.transport.connect(first.peer, first.transport.local_metadata())
    *parts, last = Encoder(64).encode(second.loop._peers.links.hello())
    assert len(parts) > 1
    for part in parts:
        second.transport.send(first.peer, part)
    pass_time(world, 5.0)
    assert linked(first) == 1
    second.transport.send(first.peer, last)
    world.run(0.01)
    assert first.loop._peers.is_linked(second.peer)


def test_what_has_come_of_a_hello_is_kept_when_the_link_is_given_up() -> None:
    world = World(IDLE)
    [second] = world.engine("P", 1)
    [first] = world.engine("D", 2)
    works(world, second, first, 1)
    second.transport.connect(first.peer, first.transport.local_metadata())
    *parts, last = Encoder(64).encode(second.loop._peers.links.hello())
    for part in parts:
        second.transport.send(first.peer, part)
    pass_time(world, 50.0)
    assert linked(first) == 0
    second.transport.connect(first.peer, first.transport.local_metadata())
    second.transport.send(first.peer, last)
    world.run(0.01)
    assert first.loop._peers.is_linked(second.peer)


@pytest.mark.parametrize("waits_for", ["the consumer's memory", "the prefill", "a write"])
def test_a_link_that_a_transfer_waits_for_is_kept_though_nothing_is_said(waits_for: str) -> None:
    """Neither side gives up what is under way, however long it takes and however quiet it is."""
    world = World(Limits(idle_seconds=0.5, renew_seconds=2.0))
    [producer] = world.engine("P", 1)
    [consumer] = world.engine("D", 2)
    source, blocks = source_of(producer, 1), to_spans([3])
    assert blocks
    if waits_for == "the consumer's memory":
        producer.do(*prefill(transfer(1), [3], BLOCK_TOKENS))
        consumer.do(AnnounceCommand(transfer(1), ConsumerId("r"), source))
    elif waits_for == "the prefill":
        producer.do(Expect(transfer(1), BLOCK_TOKENS))
        consumer.do(receive(transfer(1), "r", source, [20], BLOCK_TOKENS))
    else:
        consumer.do(receive(transfer(1), "r", source, [20], BLOCK_TOKENS))
        world.run(0.1)
        world.fabric.hold(producer.peer, consumer.peer, Traffic.POSTS)
        producer.do(*prefill(transfer(1), [3], BLOCK_TOKENS))
    world.run(1.9)
    assert (linked(producer), linked(consumer)) == (1, 1)
    world.fabric.release(producer.peer, consumer.peer, Traffic.POSTS)
    consumer.do(Withdraw(transfer(1), ConsumerId("r"), source, "left"))
    world.run(4.0)
    assert (linked(producer), linked(consumer)) == (0, 0)


def test_a_new_consumer_takes_the_place_of_the_one_that_was_idle_longest() -> None:
    world = World(Limits(links_max=2))
    [producer] = world.engine("P", 1)
    consumers = [world.engine(f"D{n}", 10 + n)[0] for n in range(3)]
    for number, consumer in enumerate(consumers):
        works(world, producer, consumer, number)
        world.run(0.1)
    linked_now = [producer.loop._peers.is_linked(consumer.peer) for consumer in consumers]
    assert linked_now == [False, True, True]
    works(world, producer, consumers[0], 9)
    assert linked(producer) == 2


def test_without_a_place_a_hello_is_refused_with_the_limit_that_it_met() -> None:
    """Nothing is taken from those that wait; whoever comes too many is told why, at once."""
    world = World(Limits(links_max=2))
    [producer] = world.engine("P", 1)
    consumers = [world.engine(f"D{n}", 10 + n)[0] for n in range(4)]
    for number, consumer in enumerate(consumers):
        producer.do(Expect(transfer(number), BLOCK_TOKENS))
        consumer.do(receive(transfer(number), "r", source_of(producer, 1), [20], BLOCK_TOKENS))
        world.run(0.1)
    for consumer in consumers[2:]:
        [failed] = consumer.of(ReceiveFailed)
        assert isinstance(failed, ReceiveFailed)
        assert failed.fenced
        assert "limit is links_max" in failed.reason
        assert failed.reason.startswith("handshake: ")
    assert linked(producer) == 3, "one more place, to tell why"
    assert [producer.loop._peers.is_linked(consumer.peer) for consumer in consumers] == [
        True,
        True,
        False,
        False,
    ]


def test_without_a_place_a_transfer_from_one_more_producer_fails() -> None:
    world = World(Limits(links_max=1))
    producers = [world.engine(f"P{n}", 1 + n)[0] for n in range(2)]
    [consumer] = world.engine("D", 10)
    for number, producer in enumerate(producers):
        producer.do(Expect(transfer(number), BLOCK_TOKENS))
        consumer.do(receive(transfer(number), "r", source_of(producer, 1 + number), [20], BLOCK_TOKENS))
        world.run(0.1)
    [failed] = consumer.of(ReceiveFailed)
    assert isinstance(failed, ReceiveFailed)
    assert failed.transfer == transfer(1)
    assert "limit is links_max" in failed.reason
    assert linked(consumer) == 1
