"""Links coming up and going down between agents on a fake clock: who is told, what heals, what is bounded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from kvferry.agent import links as links_module
from kvferry.agent import loop as loop_module
from kvferry.agent.directory import Directory
from kvferry.agent.loop import Close, Inquired
from kvferry.agent.mailbox import Gated
from kvferry.errors import PeerError, PeerGoneError, TransportError
from kvferry.ids import ConsumerId, EngineId, Incarnation, PeerName, TransferId, peer_name
from kvferry.layout.spec import decode_spec, encode_spec
from kvferry.protocol.codec import Encoder
from kvferry.protocol.commands import (
    Advance,
    AnnounceCommand,
    BlocksSafe,
    Expect,
    Finish,
    Received,
    ReceiveFailed,
    Released,
    Source,
    Withdraw,
)
from kvferry.protocol.limits import Limits
from kvferry.protocol.messages import PROTOCOL_VERSION, Announce, AnyMessage, Hello, HelloRefused
from kvferry.protocol.outputs import Link
from kvferry.transport.faults import MessageFault
from kvferry.transport.memory import Link as MemoryLink
from kvferry.transport.memory import Traffic
from tests.support.ranks import BLOCK_TOKENS, TestRank, World, prefill, receive, source_of


def pair(world: World, target_order: str = "LBHNC") -> tuple[TestRank, TestRank]:
    [producer] = world.engine("P", 1)
    [consumer] = world.engine("D", 2, order=target_order)
    return producer, consumer


def transfer(number: int) -> TransferId:
    return TransferId(f"transfer-{number:04}")


def ask(producer: TestRank, consumer: TestRank, number: int, block: int = 20) -> None:
    """Both legs of one transfer of one block."""
    producer.do(*prefill(transfer(number), [3], BLOCK_TOKENS))
    consumer.do(receive(transfer(number), "r", source_of(producer, 1), [block], BLOCK_TOKENS))


def works(world: World, producer: TestRank, consumer: TestRank, number: int, block: int = 20) -> None:
    """The next transfer ends well, and soon."""
    before = len(consumer.of(Received))
    ask(producer, consumer, number, block)
    assert world.until(lambda: len(consumer.of(Received)) > before) < 0.5
    assert consumer.block(block) == producer.block(3)


def say(world: World, sender: TestRank, receiver: TestRank, message: AnyMessage) -> None:
    """A message that the sender's own loop knows nothing of."""
    del world
    for payload in Encoder(1 << 16).encode(message):
        sender.transport.send(receiver.peer, payload)


# --- a link breaks and heals -----------------------------------------------------------------------


def test_after_the_loss_of_a_connection_both_sides_meet_again() -> None:
    """A07, A25: the producer's side finds the connection broken; the next transfer says Hello again."""
    world = World()
    producer, consumer = pair(world)
    works(world, producer, consumer, 1)
    world.fabric.exchange.nodes[consumer.peer].connections[producer.peer].alive = False
    consumer.do(receive(transfer(2), "r", source_of(producer, 1), [21], BLOCK_TOKENS))
    world.until(lambda: consumer.of(ReceiveFailed))
    assert consumer.stats.peers_lost == 1
    [failed] = consumer.of(ReceiveFailed)
    assert failed.reason.startswith("peer_lost")
    works(world, producer, consumer, 3, 22)
    works(world, producer, consumer, 4, 23)
    assert world.resolver.asked == [1, 1]
    assert world.resolver.inquired == [1]


def test_a_producer_that_lost_its_consumer_writes_again_when_it_speaks() -> None:
    """A07: its own connection is gone; what it knows of the peer makes a new one, without a new Hello."""
    world = World()
    producer, consumer = pair(world)
    works(world, producer, consumer, 1)
    world.fabric.exchange.nodes[producer.peer].connections[consumer.peer].alive = False
    ask(producer, consumer, 2, 21)
    world.until(lambda: producer.stats.peers_lost == 1)
    world.until(lambda: any(result.transfer == transfer(2) for result in consumer.results), 20.0)
    works(world, producer, consumer, 3, 22)
    assert world.resolver.asked == [1], "the consumer never noticed that it should look again"


def broken_under_a_write(world: World) -> tuple[TestRank, TestRank]:
    """Two blocks: the first has landed and the second is being written when D's connection breaks."""
    producer, consumer = pair(world)
    works(world, producer, consumer, 1)
    consumer.do(receive(transfer(2), "r", source_of(producer, 1), [21, 22], 2 * BLOCK_TOKENS))
    advance = Advance(transfer(2), BLOCK_TOKENS, 0, (((5, 1),),))
    producer.do(Expect(transfer(2), 2 * BLOCK_TOKENS), advance)
    world.run(0.1)
    world.fabric.hold(producer.peer, consumer.peer, Traffic.POSTS)
    producer.do(Advance(transfer(2), 2 * BLOCK_TOKENS, 1, (((6, 1),),)), Finish(transfer(2)))
    world.until(producer.loop.producer.in_flight)
    assert world.fabric.break_connection(consumer.peer, producer.peer)
    return producer, consumer


def test_a_producer_that_lives_is_linked_again_and_its_fence_comes_after_its_write() -> None:
    """Promise 2, A07: the connection is no proof; its engine's directory still names the rank. No block of
    the request is given back while the producer writes into it."""
    world = World()
    producer, consumer = broken_under_a_write(world)
    world.until(lambda: consumer.stats.peers_lost, 5.0)
    world.run(0.5)
    assert world.resolver.inquired == [1]
    assert consumer.of(ReceiveFailed) == []
    world.fabric.release(producer.peer, consumer.peer, Traffic.POSTS)
    assert world.until(lambda: consumer.of(ReceiveFailed), 5.0) < 0.5
    [failed] = consumer.of(ReceiveFailed)
    assert failed.reason.startswith("peer_lost")
    assert failed.fenced
    assert consumer.block(22) == producer.block(6), "it had landed, in memory that was still the request's"
    assert consumer.of(BlocksSafe) == []
    works(world, producer, consumer, 3, 23)
    world.assert_empty()


def test_a_producer_that_is_proven_dead_is_not_waited_for() -> None:
    """P47: nobody listens any more where its engine was. What had landed is kept."""
    world = World()
    producer, consumer = broken_under_a_write(world)
    world.kill(producer)
    bound = world.limits.renew_seconds + world.limits.orphan_seconds + 0.1
    assert world.limits.orphan_seconds < world.until(lambda: consumer.of(ReceiveFailed), 5.0) <= bound
    [failed] = consumer.of(ReceiveFailed)
    assert failed.fenced
    assert failed.valid_until == BLOCK_TOKENS
    assert world.resolver.inquired == [1]
    assert not consumer.loop.consumer.expecting


def test_a_producer_whose_engine_has_started_anew_is_dead() -> None:
    """P47, A24: another incarnation answers at the address; the next transfer goes to it."""
    world = World()
    producer, consumer = broken_under_a_write(world)
    world.kill(producer)
    [restarted] = world.engine("P", 1)
    world.until(lambda: consumer.of(ReceiveFailed), 5.0)
    [failed] = consumer.of(ReceiveFailed)
    assert failed.fenced
    assert failed.reason.startswith("peer_lost")
    assert world.resolver.inquired == [1]
    works(world, restarted, consumer, 3, 23)


def test_a_producer_of_which_nothing_can_be_found_out_is_asked_for_again_and_waited_for() -> None:
    """P04, P07: told at the silence limit, safe when no permission is left; asked once per renewal."""
    world = World()
    producer, consumer = broken_under_a_write(world)
    world.resolver.mute = {1}
    producer.dead = True  # It stands still, and its engine does not answer.
    world.until(lambda: consumer.stats.peers_lost, 5.0)
    waited = world.until(lambda: consumer.of(ReceiveFailed), 20.0)
    [failed] = consumer.of(ReceiveFailed)
    assert not failed.fenced
    assert waited > world.limits.silence_seconds - world.limits.renew_seconds - 0.1
    waited += world.until(lambda: consumer.of(BlocksSafe), 20.0)
    assert waited > world.limits.write_seconds - 0.2
    assert 2 <= len(world.resolver.inquired) <= 2 + waited / world.limits.renew_seconds
    assert consumer.loop.quiet
    assert not consumer.loop.consumer.expecting


def test_a_connection_that_breaks_again_and_again_is_no_storm_of_questions() -> None:
    """P05: each time that it is linked again, it breaks."""
    world = World()
    producer, consumer = broken_under_a_write(world)
    asked_at = world.clock.now
    breaks = 0
    while world.clock.now < asked_at + 4.5 * world.limits.renew_seconds:
        breaks += world.fabric.break_connection(consumer.peer, producer.peer)
        world.step()
    assert breaks >= 3
    assert 3 <= len(world.resolver.inquired) <= 6
    world.fabric.release(producer.peer, consumer.peer, Traffic.POSTS)
    world.until(lambda: consumer.of(ReceiveFailed), 20.0)
    assert consumer.of(ReceiveFailed)[0].fenced
    works(world, producer, consumer, 3, 23)


def test_a_new_link_that_breaks_under_its_hello_is_asked_about_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A07: the answer that it lives is true, and of no use without a link."""
    world = World()
    producer, consumer = broken_under_a_write(world)
    opened, first = links_module.Links.open, [True]

    def breaking(links: links_module.Links, source: Source, *more: Any) -> tuple[Link, ...]:
        found = opened(links, source, *more)
        if first:
            first.clear()
            world.fabric.break_connection(consumer.peer, producer.peer)
        return found

    monkeypatch.setattr(links_module.Links, "open", breaking)
    world.until(lambda: consumer.stats.peers_lost == 2, 5.0)
    world.until(lambda: world.resolver.inquired == [1, 1], 2 * world.limits.renew_seconds)
    world.fabric.release(producer.peer, consumer.peer, Traffic.POSTS)
    world.until(lambda: consumer.of(ReceiveFailed), 5.0)
    assert consumer.of(ReceiveFailed)[0].fenced


@pytest.mark.parametrize(
    "answer", ["gone", "other incarnation", "late", "other engine", "unreadable", "same"]
)
def test_what_each_answer_proves(answer: str) -> None:
    """Promise 2: only that the process has ended is proof. Everything else leaves the blocks as they are."""
    world = World()
    producer, consumer = broken_under_a_write(world)
    world.resolver.held = {1}
    world.until(lambda: consumer.stats.peers_lost, 5.0)
    directory = world.resolver.engines[1]
    [entry] = directory.ranks
    answers: dict[str, Directory | Exception] = {
        "gone": PeerGoneError("nobody listens at 127.0.0.1:1"),
        "other incarnation": msgspec.structs.replace(
            directory, ranks=(msgspec.structs.replace(entry, peer="P.i9.0.0"),)
        ),
        "late": TransportError("no answer within 10 s", retryable=True),
        "other engine": PeerError("the engine there is another"),
        "unreadable": msgspec.structs.replace(
            directory, ranks=(msgspec.structs.replace(entry, cache=b"\xff"),)
        ),
        "same": directory,
    }
    is_proof = answer in ("gone", "other incarnation")
    sent = consumer.stats.messages_sent
    consumer.do(Inquired(producer.peer, source_of(producer, 1), answers[answer]))
    world.run(0.1)
    assert consumer.of(ReceiveFailed) == [], "a rank may outlive its engine for a moment"
    assert consumer.stats.messages_sent - sent == (2 if answer == "same" else 0), "Hello and Cancel"
    world.run(world.limits.orphan_seconds)
    assert bool(consumer.of(ReceiveFailed)) is is_proof
    if is_proof:
        assert consumer.of(ReceiveFailed)[0].fenced
        return
    world.resolver.held = set()
    world.fabric.release(producer.peer, consumer.peer, Traffic.POSTS)
    world.until(lambda: consumer.of(ReceiveFailed), 5.0)
    assert consumer.of(ReceiveFailed)[0].fenced, "it lives, and says so when it is asked once more"


@pytest.mark.parametrize("seconds", [1.0, 5.0])
def test_an_outage_is_lived_through(seconds: float) -> None:
    """A25: both directions stand still for a while under ten transfers; all end, and the link works after."""
    world = World()
    producer, consumer = pair(world)
    works(world, producer, consumer, 100)
    for number in range(10):
        ask(producer, consumer, number, 30 + number)
    world.fabric.cut(producer.peer, consumer.peer)
    world.fabric.cut(consumer.peer, producer.peer)
    world.run(seconds)
    world.fabric.heal(producer.peer, consumer.peer)
    world.fabric.heal(consumer.peer, producer.peer)
    world.until(lambda: len(consumer.of(Received)) + len(consumer.of(ReceiveFailed)) == 11, 60.0)
    world.until(lambda: len(producer.of(Released)) == 11, 60.0)
    works(world, producer, consumer, 200)
    world.assert_empty()


@pytest.mark.parametrize("lost", range(4))
def test_one_lost_message_ends_no_transfer(lost: int) -> None:
    """A13: Hello, announcement, registration or the last write's notification: none is the only chance."""
    world = World()
    producer, consumer = pair(world)
    ways = [(consumer.peer, producer.peer)] * 3 + [(producer.peer, consumer.peer)]
    if lost:
        works(world, producer, consumer, 1)
    source = source_of(producer, 1)
    if lost == 3:
        consumer.do(receive(transfer(2), "r", source, [21], BLOCK_TOKENS))
        world.run(0.05)
    elif lost == 2:
        consumer.do(AnnounceCommand(transfer(2), ConsumerId("r"), source))
        world.run(0.05)
    world.fabric.inject(*ways[lost], MessageFault.LOSE)
    if lost == 1:
        consumer.do(AnnounceCommand(transfer(2), ConsumerId("r"), source))
        world.run(0.05)
    if lost < 3:
        consumer.do(receive(transfer(2), "r", source, [21], BLOCK_TOKENS))
    producer.do(*prefill(transfer(2), [5], BLOCK_TOKENS))
    world.until(lambda: consumer.results and consumer.results[-1].transfer == transfer(2), 60.0)
    if lost:
        assert consumer.of(Received)[-1].transfer == transfer(2)
        assert consumer.block(21) == producer.block(5)
    else:
        # Hello is not repeated on a link that stands: silence fails the transfer, and tears the link down.
        assert consumer.of(ReceiveFailed)
        world.run(world.limits.write_seconds + 2 * consumer.transport.retry_bound_seconds + 1.0)
    works(world, producer, consumer, 3, 22)


def test_ten_completions_of_which_each_in_turn_is_lost() -> None:
    """A13: the receiver counts on no single message: it renews, and is answered that all is there."""
    world = World()
    producer, consumer = pair(world)
    works(world, producer, consumer, 100)
    for number in range(10):
        consumer.do(receive(transfer(number), "r", source_of(producer, 1), [30 + number], BLOCK_TOKENS))
        world.run(0.01)
        world.fabric.inject(producer.peer, consumer.peer, MessageFault.LOSE)
        producer.do(*prefill(transfer(number), [number], BLOCK_TOKENS))
        world.until(
            lambda number=number: (
                consumer.results[-1] == consumer.of(Received)[-1]
                and consumer.results[-1].transfer == transfer(number)
            )
        )
        assert consumer.block(30 + number) == producer.block(number)
    world.until(lambda: len(producer.of(Released)) == 11)
    world.assert_empty()


def test_a_hundred_aborts_under_writes_release_nothing_before_its_end() -> None:
    """A11: the fabric refuses the release of a handle in flight; closing waits too."""
    world = World(Limits(in_flight_per_peer=100))
    producer, consumer = pair(world)
    source = source_of(producer, 1)
    for number in range(100):
        consumer.do(receive(transfer(number), "r", source, [number % 60], BLOCK_TOKENS))
    world.run(0.05)
    world.fabric.hold(producer.peer, consumer.peer, Traffic.POSTS)
    for number in range(100):
        producer.do(*prefill(transfer(number), [1], BLOCK_TOKENS))
    world.until(lambda: producer.loop.producer.in_flight() == 100)
    for number in range(100):
        consumer.do(Withdraw(transfer(number), ConsumerId("r"), source, "cancelled: left"))
    world.run(1.0)
    assert (consumer.results, producer.of(Released)) == ([], [])
    assert not producer.loop.quiet
    world.fabric.release(producer.peer, consumer.peer, Traffic.POSTS)
    world.until(lambda: len(consumer.results) == len(producer.of(Released)) == 100)
    assert all(result.fenced and result.cancelled for result in consumer.of(ReceiveFailed))
    world.assert_empty()


# --- a link cannot come up -------------------------------------------------------------------------


def test_a_peer_that_cannot_be_loaded_fails_its_transfers_alone(monkeypatch) -> None:
    """A01, A03: loading a producer's metadata raises: that request fails with the reason, others go on."""
    world = World()
    producer, consumer = pair(world)
    [bad] = world.engine("P2", 3)
    connect = consumer.transport.connect

    def refusing(peer: PeerName, metadata: bytes) -> None:
        if peer == bad.peer:
            raise TransportError("loading the metadata failed")
        connect(peer, metadata)

    monkeypatch.setattr(consumer.transport, "connect", refusing)
    consumer.do(receive(transfer(1), "r", source_of(bad, 3), [20], BLOCK_TOKENS))
    world.until(lambda: consumer.of(ReceiveFailed))
    [failed] = consumer.of(ReceiveFailed)
    assert failed.reason == "handshake: loading the metadata failed"
    assert failed.fenced
    works(world, producer, consumer, 2, 21)
    monkeypatch.undo()
    bad.do(*prefill(transfer(3), [3], BLOCK_TOKENS))
    consumer.do(receive(transfer(3), "r", source_of(bad, 3), [22], BLOCK_TOKENS))
    world.until(lambda: consumer.of(Received)[-1].transfer == transfer(3))


def test_a_consumer_that_cannot_be_loaded_is_told(monkeypatch) -> None:
    """A01, V03: the producer cannot write back; the consumer's request fails at once, with the reason."""
    world = World()
    producer, consumer = pair(world)

    def refusing(peer: PeerName, metadata: bytes) -> None:
        if b"kvferry/D" in peer.encode() and not consumer.of(ReceiveFailed):
            connect(peer, metadata)
            raise TransportError("no route back")
        connect(peer, metadata)

    connect = producer.transport.connect
    monkeypatch.setattr(producer.transport, "connect", refusing)
    ask(producer, consumer, 1)
    assert world.until(lambda: consumer.of(ReceiveFailed)) < 0.1
    [failed] = consumer.of(ReceiveFailed)
    assert "no route back" in failed.reason
    assert failed.fenced
    assert producer.stats.hellos_refused == 1
    assert consumer.stats.hellos_refused == 1
    works(world, producer, consumer, 2, 21)


def hello_of(rank: TestRank, **changes: object) -> Hello:
    return msgspec.structs.replace(rank.loop._peers.links.hello(), **changes)


def test_a_hello_of_another_version_is_refused_with_both_ranges() -> None:
    """V04: a fleet that is upgraded engine by engine sees what does not fit."""
    world = World()
    producer, consumer = pair(world)
    consumer.transport.connect(producer.peer, producer.transport.local_metadata())
    newer = PROTOCOL_VERSION + 5
    say(world, consumer, producer, hello_of(consumer, version=newer, version_min=newer))
    world.run(0.02)
    assert producer.stats.hellos_refused == 1
    assert not producer.loop._peers.is_linked(consumer.peer)
    # A refused consumer tears its side down.
    consumer.transport.connect(producer.peer, producer.transport.local_metadata())
    say(world, consumer, producer, hello_of(consumer, version=0, version_min=0))
    world.run(0.02)
    assert producer.stats.hellos_refused == 2
    consumer.transport.connect(producer.peer, producer.transport.local_metadata())
    say(world, consumer, producer, hello_of(consumer, version=newer))
    world.run(0.02)
    assert producer.loop._peers.is_linked(consumer.peer), "who also speaks ours is welcome"


def test_a_hello_in_another_name_is_refused() -> None:
    """S03: nobody can have KV written to a peer that it is not."""
    world = World()
    producer, consumer = pair(world)
    consumer.transport.connect(producer.peer, producer.transport.local_metadata())
    say(world, consumer, producer, hello_of(consumer, engine=EngineId("another")))
    world.run(0.02)
    assert producer.stats.hellos_refused == 1
    assert not producer.loop._peers.is_linked(consumer.peer)


@pytest.mark.parametrize("changes", [{"kv_dtype": "float16"}, {"model": "another"}])
def test_a_hello_whose_cache_does_not_fit_is_refused_by_the_producer_too(changes: dict[str, str]) -> None:
    """V04, V13: the producer does not rely on the consumer's own comparison."""
    world = World()
    producer, consumer = pair(world)
    spec = decode_spec(encode_spec(consumer.cache))
    other = encode_spec(msgspec.structs.replace(spec, **changes))
    consumer.transport.connect(producer.peer, producer.transport.local_metadata())
    say(world, consumer, producer, hello_of(consumer, cache=other))
    world.run(0.02)
    assert producer.stats.hellos_refused == 1
    assert not producer.loop._peers.is_linked(consumer.peer)


def test_a_producer_whose_cache_does_not_fit_is_not_even_greeted() -> None:
    """V04, V07: the consumer compares before anything is sent."""
    world = World()
    [producer] = world.engine("P", 1, tp_size=1)
    consumer, _ = world.engine("D", 2, tp_size=2)
    consumer.do(receive(transfer(1), "r", source_of(producer, 1), [20], BLOCK_TOKENS))
    world.until(lambda: consumer.of(ReceiveFailed))
    assert consumer.of(ReceiveFailed)[0].reason.startswith("geometry: ")
    assert consumer.stats.messages_sent == 0
    assert producer.stats.hellos_refused == 0


def crowded() -> tuple[World, TestRank, TestRank, TestRank]:
    """A producer that has room for one consumer, and two consumers."""
    world = World(Limits(links_max=1))
    [producer] = world.engine("P", 1)
    [first] = world.engine("D0", 10)
    [second] = world.engine("D1", 11)
    return world, producer, first, second


def test_a_refusal_that_crosses_a_registration_frees_nothing_that_is_written() -> None:
    """Promise 2: the producer had no room, said so truthfully, and had room again before that was read."""
    world, producer, first, second = crowded()
    producer.do(*prefill(transfer(1), [3], BLOCK_TOKENS))
    second.do(receive(transfer(1), "r1", source_of(producer, 1), [30], BLOCK_TOKENS))
    world.until(lambda: second.of(Received))
    producer.do(Expect(transfer(0), BLOCK_TOKENS))
    first.do(receive(transfer(0), "r", source_of(producer, 1), [20], BLOCK_TOKENS))
    world.run(0.1)
    world.fabric.set_link(producer.peer, second.peer, MemoryLink(latency_seconds=0.2))
    producer.do(Expect(transfer(2), BLOCK_TOKENS), Expect(transfer(3), BLOCK_TOKENS))
    world.run(0.01)
    second.do(receive(transfer(2), "r2", source_of(producer, 1), [31], BLOCK_TOKENS))
    world.run(0.02)
    assert producer.stats.hellos_refused == 1
    producer.do(*prefill(transfer(0), [3], BLOCK_TOKENS)[1:])
    world.run(0.05)
    second.do(receive(transfer(3), "r3", source_of(producer, 1), [32], BLOCK_TOKENS))
    world.run(0.02)
    world.fabric.hold(producer.peer, second.peer, Traffic.POSTS)
    producer.do(*prefill(transfer(3), [3], BLOCK_TOKENS)[1:])
    world.run(1.0)
    assert second.stats.hellos_refused == 1
    assert producer.loop.producer.in_flight() == 1
    fenced = {result.consumer for result in second.of(ReceiveFailed) if result.fenced}
    assert fenced <= {"r2"}, "the block of r3 is being written"
    assert second.of(BlocksSafe) == []
    world.fabric.release(producer.peer, second.peer, Traffic.POSTS)
    world.until(lambda: "r3" in {result.consumer for result in second.of(BlocksSafe)})
    assert producer.loop.producer.in_flight() == 0


def test_a_refusal_that_is_read_twice_frees_nothing_that_is_written() -> None:
    """Promise 2: messages may be doubled and late; a second copy says nothing of what came since."""
    world, producer, first, second = crowded()
    producer.do(Expect(transfer(0), BLOCK_TOKENS))
    first.do(receive(transfer(0), "r", source_of(producer, 1), [20], BLOCK_TOKENS))
    world.run(0.1)
    second.do(receive(transfer(1), "r1", source_of(producer, 1), [30], BLOCK_TOKENS))
    world.until(lambda: second.of(ReceiveFailed))
    producer.do(*prefill(transfer(0), [3], BLOCK_TOKENS)[1:])
    world.run(0.1)
    producer.do(Expect(transfer(2), BLOCK_TOKENS))
    second.do(receive(transfer(2), "r2", source_of(producer, 1), [31], BLOCK_TOKENS))
    world.run(0.1)
    world.fabric.hold(producer.peer, second.peer, Traffic.POSTS)
    producer.do(*prefill(transfer(2), [3], BLOCK_TOKENS)[1:])
    world.run(0.1)
    assert producer.loop.producer.in_flight() == 1
    say(world, producer, second, HelloRefused(reason="no room"))
    world.run(1.0)
    assert second.stats.hellos_refused == 2
    assert "r2" not in {result.consumer for result in second.of(ReceiveFailed) if result.fenced}
    assert second.of(BlocksSafe) == []
    world.fabric.release(producer.peer, second.peer, Traffic.POSTS)
    world.until(lambda: "r2" in {result.consumer for result in second.of(BlocksSafe)})


# --- messages before Hello -------------------------------------------------------------------------


def test_messages_that_overtake_their_hello_are_kept_for_it() -> None:
    world = World()
    producer, consumer = pair(world)
    producer.do(Expect(transfer(1), BLOCK_TOKENS), Advance(transfer(1), BLOCK_TOKENS, 0, (((3, 1),),)))
    producer.do(Finish(transfer(1)))
    consumer.transport.connect(producer.peer, producer.transport.local_metadata())
    say(world, consumer, producer, Announce(transfer=transfer(1), consumer=ConsumerId("r")))
    world.run(25.0)
    assert producer.stats.peer_errors == 0
    say(world, consumer, producer, hello_of(consumer))
    world.run(10.0)
    assert producer.of(Released) == [], "the announcement counts from when it could be heard"


def test_a_bad_message_before_hello_costs_no_other() -> None:
    """X21: what a rank said before its Hello is judged one by one, as what it says after it."""
    world = World()
    producer, consumer = pair(world)
    consumer.transport.connect(producer.peer, producer.transport.local_metadata())
    say(world, consumer, producer, Announce(transfer=transfer(1), consumer=ConsumerId("c" * 5000)))
    say(world, consumer, producer, Announce(transfer=transfer(2), consumer=ConsumerId("r")))
    world.run(0.01)
    say(world, consumer, producer, hello_of(consumer))
    world.run(0.1)
    assert producer.stats.peer_errors == 1
    assert list(producer.loop.producer.state.rows) == [transfer(2)]


def test_messages_without_a_hello_are_bounded_per_peer_and_over_all() -> None:
    """S03: a stranger that never introduces itself costs a bounded amount of memory."""
    world = World(Limits(parked_messages_max=3, parked_peers_max=2))
    producer, *strangers = (world.engine(f"E{n}", n)[0] for n in range(1, 6))
    message = Announce(transfer=transfer(1), consumer=ConsumerId("r"))
    for stranger in strangers:
        stranger.transport.connect(producer.peer, producer.transport.local_metadata())
        for _ in range(4):
            say(world, stranger, producer, message)
        world.run(0.01)
    assert producer.stats.peer_errors == 4
    parked = producer.loop._peers.parked
    assert len(parked) == 6
    kept = [parked.take(stranger.peer) for stranger in strangers]
    assert kept == [[], [], [message] * 3, [message] * 3]


def test_messages_without_a_hello_are_bounded_in_bytes() -> None:
    """S03: 256 messages of a rank may be 4 GiB; what is too long is refused, and short ones are kept on."""
    world = World(Limits(parked_bytes_max=1000))
    producer, stranger = pair(world)
    stranger.transport.connect(producer.peer, producer.transport.local_metadata())
    for length in (300, 300, 500, 50):
        name = ConsumerId("c" * length)
        say(world, stranger, producer, Announce(transfer=transfer(1), consumer=name))
    world.run(0.01)
    assert producer.stats.peer_errors == 1
    kept = producer.loop._peers.parked.take(stranger.peer)
    assert [len(message.consumer) for message in kept if isinstance(message, Announce)] == [300, 300, 50]


def test_messages_without_a_hello_are_kept_for_so_long_only() -> None:
    """S03: nobody waits for ever for a rank that never introduces itself."""
    world = World(Limits(parked_seconds=5.0))
    producer, *strangers = (world.engine(f"E{n}", n)[0] for n in range(1, 4))
    for stranger in strangers:
        stranger.transport.connect(producer.peer, producer.transport.local_metadata())
        say(world, stranger, producer, Announce(transfer=transfer(1), consumer=ConsumerId("r")))
        world.run(3.0)
    assert len(producer.loop._peers.parked) == 1
    world.run(2.1)
    assert len(producer.loop._peers.parked) == 0
    assert producer.loop.producer.states() == {}


# --- incarnations of one rank ----------------------------------------------------------------------


def speaks_on(world: World, producer: TestRank, consumer: TestRank, first: int) -> None:
    """A consumer asks for something once per second, for a little longer than the silence limit."""
    for second in range(int(world.limits.silence_seconds) + 2):
        works(world, producer, consumer, first + second, 40)
        world.run(1.0)


def write_in_flight(world: World, producer: TestRank, consumer: TestRank) -> None:
    """A write to a consumer is in flight until its posts are released or its connection is gone."""
    consumer.do(receive(transfer(1), "r", source_of(producer, 1), [20], BLOCK_TOKENS))
    world.run(0.05)
    world.fabric.hold(producer.peer, consumer.peer, Traffic.POSTS)
    producer.do(*prefill(transfer(1), [3], BLOCK_TOKENS))
    world.until(producer.loop.producer.in_flight)


def test_who_falls_silent_while_another_incarnation_speaks_is_forgotten() -> None:
    """A05, A21: its state goes when nothing moves to it any more, not while a write to it is in flight."""
    world = World(Limits(slice_seconds=60.0))
    producer, consumer = pair(world)
    write_in_flight(world, producer, consumer)
    consumer.dead = True
    [again] = world.engine("D", 2)
    peers = producer.loop._peers
    works(world, producer, again, 2, 21)
    world.run(world.limits.silence_seconds - 2.0)
    works(world, producer, again, 3, 21)
    assert peers.is_linked(consumer.peer), "it may be the living one"
    world.run(2.0)
    works(world, producer, again, 4, 21)
    assert not peers.is_linked(consumer.peer)
    assert consumer.peer in peers.links._writable
    assert consumer.peer in world.fabric.exchange.nodes[producer.peer].connections
    assert not any(released.transfer == transfer(1) for released in producer.of(Released))
    world.fabric.kill(consumer.peer)
    world.until(lambda: consumer.peer not in peers.links._writable)
    assert consumer.peer not in world.fabric.exchange.nodes[producer.peer].connections
    [ended] = [released for released in producer.of(Released) if released.transfer == transfer(1)]
    assert ended.outcome == "peer_lost: silent while another incarnation of it speaks"
    works(world, producer, again, 5, 22)
    assert peers._rivals == {}


def test_nobody_is_forgotten_while_no_incarnation_speaks() -> None:
    """A21: idle is not silent. Whoever speaks first after an hour is heard."""
    world = World()
    producer, consumer = pair(world)
    works(world, producer, consumer, 1)
    [again] = world.engine("D", 2)
    works(world, producer, again, 2)
    world.run(3 * world.limits.silence_seconds)
    peers = producer.loop._peers
    assert peers.is_linked(consumer.peer)
    assert peers.is_linked(again.peer)
    works(world, producer, consumer, 3)
    assert not peers.is_linked(again.peer), "the other one has said nothing for so long"


@pytest.mark.parametrize("writing", [False, True])
def test_a_forgotten_incarnation_that_says_hello_again_is_welcome(writing: bool) -> None:
    """A21: it was paused, or its messages were lost. Nothing of it is held against it, and a write to it that
    ends late does not cut it off again."""
    world = World(Limits(slice_seconds=60.0))
    producer, consumer = pair(world)
    if writing:
        write_in_flight(world, producer, consumer)
    else:
        works(world, producer, consumer, 1)
    consumer.dead = True
    [again] = world.engine("D", 2)
    speaks_on(world, producer, again, 10)
    peers = producer.loop._peers
    assert not peers.is_linked(consumer.peer)
    assert peers._rivals == {}
    say(world, consumer, producer, hello_of(consumer))
    world.run(0.01)
    assert peers.is_linked(consumer.peer)
    assert producer.stats.hellos_refused == 0
    if writing:
        assert producer.loop.producer.in_flight() == 1
        world.fabric.release(producer.peer, consumer.peer, Traffic.POSTS)
        world.until(lambda: not producer.loop.producer.in_flight())
        world.run(0.01)
    assert peers.is_linked(consumer.peer)
    consumer.dead = False
    world.run(0.01)
    consumer.do(receive(transfer(50), "r", source_of(producer, 1), [25], BLOCK_TOKENS))
    producer.do(*prefill(transfer(50), [3], BLOCK_TOKENS))
    world.until(lambda: any(result.transfer == transfer(50) for result in consumer.of(Received)))
    assert consumer.block(25) == producer.block(3)
    works(world, producer, again, 60)


def test_incarnations_that_both_speak_are_both_kept() -> None:
    """A21: two engines under one id are an operator's mistake, and still no reason to fail requests."""
    world = World()
    producer, consumer = pair(world)
    [again] = world.engine("D", 2)
    for second in range(2 * int(world.limits.silence_seconds)):
        works(world, producer, (consumer, again)[second % 2], second)
        world.run(1.0)
    peers = producer.loop._peers
    assert peers.is_linked(consumer.peer)
    assert peers.is_linked(again.peer)


def test_incarnations_that_are_gone_leave_nothing_behind() -> None:
    """Consumers are killed and started anew for months: who watches them forgets the dead ones."""
    world = World()
    producer, consumer = pair(world)
    works(world, producer, consumer, 1)
    for number in range(2, 6):
        [again] = world.engine("D", 2)
        works(world, producer, again, 10 * number)
        assert set(producer.loop._peers._rivals) == {consumer.peer, again.peer}
        world.kill(consumer)
        producer.loop._peers.lose([(consumer.peer, "gone")])
        consumer = again
        works(world, producer, consumer, 10 * number + 1)
        assert producer.loop._peers._rivals == {}


def test_remembered_peers_are_bounded() -> None:
    """Consumers come and go for months: what is remembered of those without a link has an end."""
    world = World(Limits(hellos_max=3))
    [producer] = world.engine("P", 1)
    for number in range(8):
        [consumer] = world.engine(f"D{number}", 10 + number)
        works(world, producer, consumer, number)
        world.kill(consumer)
        producer.loop._peers.lose([(consumer.peer, "gone")])
    assert len(producer.loop._peers.links._writable) == 3


def test_incarnations_are_those_of_the_same_rank_of_the_same_engine_and_nobody_else() -> None:
    """A02: ranks of one engine, and other engines, are no rivals however long one of them is silent."""
    world = World()
    [producer] = world.engine("P", 1)
    consumers = [world.engine("D", 2)[0], world.engine("E", 3)[0]]
    for number, consumer in enumerate(consumers):
        works(world, producer, consumer, number)
    links = producer.loop._peers.links
    assert all(links.other_incarnations(consumer.peer) == [] for consumer in consumers)
    assert links.other_incarnations(PeerName("stranger")) == []
    [again] = world.engine("D", 2)
    works(world, producer, again, 7)
    assert again.peer == peer_name(EngineId("D"), Incarnation("i4"), again.identity.rank)
    assert links.other_incarnations(again.peer) == [consumers[0].peer]
    assert links.other_incarnations(consumers[0].peer) == [again.peer]
    speaks_on(world, producer, again, 10)
    assert producer.loop._peers.is_linked(consumers[1].peer)
    assert not producer.loop._peers.is_linked(consumers[0].peer)
    assert links.other_incarnations(again.peer) == []


SCATTERED = [4, 0, 7, 2, 6, 1, 5, 3]


def posted_blocks(limits: Limits, sources: Iterable[int], target_order: str = "LBHNC") -> list[int]:
    """How many blocks each slice of a transfer of eight has, whose targets follow each other."""
    world = World(limits)
    producer, consumer = pair(world, target_order)
    posted: list[int] = []
    world.fabric.on_post(lambda post: posted.append(post.runs.bytes))
    consumer.do(receive(transfer(1), "r", source_of(producer, 1), range(20, 28), 8 * BLOCK_TOKENS))
    producer.do(*prefill(transfer(1), sources, 8 * BLOCK_TOKENS))
    world.until(lambda: consumer.of(Received))
    return [count // BLOCK_BYTES for count in posted]


BLOCK_BYTES = 3 * 2 * 16 * 8
BLOCK_RUNS = 3


@pytest.mark.parametrize(("blocks", "most"), [(1, 1), (2, 2), (0.5, 1)])
def test_a_slice_is_within_bytes_and_descriptors(blocks: float, most: int) -> None:
    """A long transfer is cut by whichever limit is met first, and never below one block."""
    for limits in (
        Limits(slice_bytes=max(int(BLOCK_BYTES * blocks), 1)),
        Limits(slice_runs=max(int(BLOCK_RUNS * blocks), 1)),
    ):
        posted = posted_blocks(limits, SCATTERED)
        assert max(posted) == most
        assert sum(posted) == 8


def test_blocks_that_follow_each_other_on_both_sides_are_bound_by_bytes_alone() -> None:
    """Their descriptors merge. One out of its place, at an end or within, makes the slice short again."""
    limits = Limits(slice_runs=BLOCK_RUNS, slice_bytes=4 * BLOCK_BYTES)
    assert max(posted_blocks(limits, range(8))) == 4
    assert max(posted_blocks(limits, [9, 1, 2, 3, 4, 5, 6, 7])) == 4, "the second slice is in one run"
    assert max(posted_blocks(limits, [0, 2, 1, 3, 4, 6, 5, 7])) == 1
    assert max(posted_blocks(limits, SCATTERED)) == 1


def test_where_blocks_do_not_merge_being_neighbours_changes_nothing() -> None:
    """Each layer apart on one side, a block's layers together on the other."""
    limits = Limits(slice_runs=BLOCK_RUNS, slice_bytes=4 * BLOCK_BYTES)
    assert max(posted_blocks(limits, range(8), target_order="BLHNC")) == 1


def test_what_a_lost_peer_left_unfinished_is_forgotten() -> None:
    """Parts of a message whose rest will never come are no memory for ever."""
    world = World()
    producer, consumer = pair(world)
    works(world, producer, consumer, 1)
    first, *_ = Encoder(64).encode(Announce(transfer=transfer(2), consumer=ConsumerId("x" * 200)))
    consumer.transport.send(producer.peer, first)
    world.run(0.02)
    assert len(producer.loop._decoder._partial) == 1
    producer.loop._peers.lose([(consumer.peer, "gone")])
    assert not producer.loop._decoder._partial


def test_a_connection_that_we_tear_down_frees_no_block_of_ours() -> None:
    """Promise 2: the peer may live and write; only the end of its permission and its retries is proof."""
    world = World()
    producer, consumer = pair(world)
    consumer.do(receive(transfer(1), "r", source_of(producer, 1), [20], BLOCK_TOKENS))
    producer.do(Expect(transfer(1), BLOCK_TOKENS))
    world.run(0.05)
    producer.dead = True
    consumer.loop._peers.disconnect(producer.peer, "a slice has not ended")
    world.until(lambda: consumer.results, 1.0)
    [failed] = consumer.of(ReceiveFailed)
    assert failed.reason.startswith("peer_silent")
    assert not failed.fenced
    took = world.until(lambda: consumer.of(BlocksSafe), 60.0)
    assert took > world.limits.write_seconds
    world.assert_empty()


def test_the_loss_of_a_consumer_ends_its_deliveries_and_no_lease_is_waited_for() -> None:
    """P13: a dead decode engine strands no cache of the prefill engine."""
    world = World()
    producer, consumer = pair(world)
    consumer.do(receive(transfer(1), "r", source_of(producer, 1), [20], BLOCK_TOKENS))
    producer.do(Expect(transfer(1), BLOCK_TOKENS))
    world.run(0.05)
    world.kill(consumer)
    producer.loop._peers.lose([(consumer.peer, "gone")])
    producer.do(*prefill(transfer(1), [3], BLOCK_TOKENS)[1:])
    assert world.until(lambda: producer.of(Released), 1.0) < 0.1
    assert producer.of(Released) == [Released(transfer(1), "peer_lost: gone")]


# --- the order of a step, and how long it may be left alone ----------------------------------------


def test_what_has_arrived_is_read_before_deadlines_are_judged() -> None:
    """P37: the answer is in the inbox, the clock is past the silence limit: one step, and nothing fails."""
    world = World()
    producer, consumer = pair(world)
    consumer.do(receive(transfer(1), "r", source_of(producer, 1), [20], BLOCK_TOKENS))
    producer.do(Expect(transfer(1), BLOCK_TOKENS))
    world.run(0.05)
    world.clock.advance(1.5 * world.limits.renew_seconds)
    consumer.loop.step()
    producer.loop.step()
    world.clock.advance(world.limits.silence_seconds)
    consumer.loop.step()
    assert consumer.results == []


def test_nothing_is_posted_once_closing_has_begun() -> None:
    """X18: a registration that comes during the shutdown is not begun."""
    world = World()
    producer, consumer = pair(world)
    works(world, producer, consumer, 1)
    posted = producer.stats.bytes_posted
    producer.do(*prefill(transfer(2), [3], BLOCK_TOKENS)[:2], Close())
    world.run(0.01)
    consumer.do(receive(transfer(2), "r", source_of(producer, 1), [21], BLOCK_TOKENS))
    world.run(1.0)
    assert producer.stats.bytes_posted == posted


def test_a_message_that_was_refused_is_sent_in_a_later_step(monkeypatch) -> None:
    """A22: the loop comes back to what waits, without anything else to do."""
    world = World()
    producer, consumer = pair(world)
    send, refusals = consumer.transport.send, [3]

    def busy(peer: PeerName, payload: bytes) -> None:
        if refusals[0]:
            refusals[0] -= 1
            raise TransportError("busy", retryable=True)
        send(peer, payload)

    monkeypatch.setattr(consumer.transport, "send", busy)
    works(world, producer, consumer, 1)
    assert refusals == [0]


def test_closing_is_not_over_while_a_message_waits_to_be_sent(monkeypatch) -> None:
    """X18: the peers of a rank that shuts down are told, though the transport is busy just then."""
    world = World()
    producer, consumer = pair(world)
    producer.do(Expect(transfer(1), BLOCK_TOKENS))
    consumer.do(receive(transfer(1), "r", source_of(producer, 1), [20], BLOCK_TOKENS))
    world.run(0.05)

    def busy(peer: PeerName, payload: bytes) -> None:
        raise TransportError("busy", retryable=True)

    monkeypatch.setattr(producer.transport, "send", busy)
    producer.do(Close())
    world.run(0.05)
    assert producer.loop.closing
    assert not producer.loop.quiet
    monkeypatch.undo()
    world.until(lambda: producer.loop.quiet)
    world.until(lambda: consumer.of(ReceiveFailed))
    assert consumer.of(ReceiveFailed)[0].reason == "closed"


def test_a_step_says_how_long_it_may_be_left_alone() -> None:
    """G09, P59: nothing spins while idle; what is in flight is looked at often; deadlines are kept."""
    world = World()
    producer, consumer = pair(world)
    world.clock.advance(5.0)
    assert producer.loop.step() == loop_module.IDLE_SECONDS
    consumer.do(receive(transfer(1), "r", source_of(producer, 1), [20], BLOCK_TOKENS))
    world.run(0.01)
    shortest, longest = loop_module.EXPECT_SECONDS
    assert shortest <= consumer.loop.step() < 0.05 * 0.01 < longest
    world.clock.advance(0.1)
    assert consumer.loop.step() == longest
    world.fabric.hold(producer.peer, consumer.peer, Traffic.POSTS)
    producer.do(*prefill(transfer(1), [3], BLOCK_TOKENS))
    world.until(producer.loop.producer.in_flight)
    shortest, longest = loop_module.FLIGHT_SECONDS
    assert shortest <= producer.loop.step() < 2 * shortest
    world.clock.advance(0.01)
    assert producer.loop.step() == pytest.approx(0.05 * 0.01, rel=0.2)
    world.clock.advance(0.1)
    assert producer.loop.step() == longest
    world.fabric.release(producer.peer, consumer.peer, Traffic.POSTS)
    world.until(lambda: producer.of(Released))
    assert producer.loop.step() == loop_module.RECENT_SECONDS
    producer.do(*prefill(transfer(2), [3], BLOCK_TOKENS))
    producer.loop.step()
    world.clock.advance(world.limits.lease_seconds - 1e-5)
    assert 0.0 < producer.loop.step() < 2e-5, "the lease ends before the usual pause is over"


def test_a_device_that_computes_is_looked_at_often_and_not_all_the_time() -> None:
    world = World()
    producer, consumer = pair(world)
    consumer.do(receive(transfer(1), "r", source_of(producer, 1), [20], BLOCK_TOKENS))
    expect, *rest = prefill(transfer(1), [3], BLOCK_TOKENS)
    producer.do(expect, *(Gated(command, lambda: False) for command in rest))
    world.run(0.5)
    world.clock.advance(0.3)
    assert producer.loop.step() == loop_module.EVENT_SECONDS


def test_statistics_say_what_was_received_and_what_is_under_way() -> None:
    world = World()
    producer, consumer = pair(world)
    consumer.do(receive(transfer(1), "r", source_of(producer, 1), [20], BLOCK_TOKENS))
    producer.do(Expect(transfer(1), BLOCK_TOKENS))
    world.run(2 * loop_module.GAUGE_SECONDS)
    assert producer.stats.gauges == {"producer_queued": 1}
    assert consumer.stats.gauges == {"consumer_waiting": 1}
    producer.do(*prefill(transfer(1), [3], BLOCK_TOKENS)[1:])
    world.run(2 * loop_module.GAUGE_SECONDS)
    assert (producer.stats.gauges, consumer.stats.gauges) == ({}, {})
    assert consumer.stats.bytes_received == producer.stats.bytes_posted > 0


def test_strangers_are_not_answered() -> None:
    """S03: whoever has said no Hello gets no complaint: nothing is queued for it and nothing dropped."""
    world = World()
    producer, consumer = pair(world)
    consumer.transport.connect(producer.peer, producer.transport.local_metadata())
    consumer.transport.send(producer.peer, b"GET / HTTP/1.1")
    world.run(0.02)
    assert producer.stats.peer_errors == 1
    assert (producer.stats.messages_sent, producer.stats.messages_dropped) == (0, 0)


@pytest.mark.parametrize("ends_with_engine", [True, False])
def test_a_directory_says_whether_its_engines_end_is_that_of_its_ranks(ends_with_engine: bool) -> None:
    """P46: where a rank cannot see its engine's end, nobody takes the one for the other."""
    world = World()
    producer, consumer = pair(world)
    directory = world.resolver.engines[1]
    [entry] = directory.ranks
    entry = msgspec.structs.replace(entry, ends_with_engine=ends_with_engine)
    world.resolver.engines[1] = msgspec.structs.replace(directory, ranks=(entry,))
    producer.do(Expect(transfer(1), BLOCK_TOKENS))
    consumer.do(receive(transfer(1), "r", source_of(producer, 1), [20], BLOCK_TOKENS))
    world.run(0.1)
    world.kill(producer)
    world.run(2 * world.limits.renew_seconds + world.limits.orphan_seconds)
    assert len(consumer.of(ReceiveFailed)) == int(ends_with_engine)
    world.until(lambda: consumer.of(ReceiveFailed), world.limits.silence_seconds)
    assert consumer.of(ReceiveFailed)[0].fenced is ends_with_engine
