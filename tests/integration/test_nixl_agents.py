"""Two agents with their threads over NIXL, in one process: the production pieces below the vLLM adapter."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from kvferry.agent.agent import Agent
from kvferry.agent.directory import Directory, RankEntry
from kvferry.errors import PeerLostError
from kvferry.ids import ConsumerId, PeerName, TransferId
from kvferry.layout.spans import to_spans
from kvferry.layout.spec import encode_spec
from kvferry.protocol.commands import Advance, Expect, Finish, Received, ReceiveFailed, Released, Result
from kvferry.protocol.limits import Limits
from kvferry.transport.nixl import NixlTransport
from tests.support.ranks import BLOCK_TOKENS, DirectResolver, TestRank, World, receive, source_of

WAIT_SECONDS = 30.0


def started(
    rank: TestRank,
    resolver: DirectResolver,
    port: int,
    transport: Callable[[PeerName], NixlTransport] = NixlTransport,
    limits: Limits | None = None,
) -> Agent:
    agent = Agent(rank.identity, rank.cache, transport, limits or Limits(), resolver)
    metadata = agent.start()
    identity = rank.identity
    entry = RankEntry(
        pp=0, tp=identity.rank.tp, peer=rank.peer, metadata=metadata, cache=encode_spec(rank.cache)
    )
    resolver.engines[port] = Directory(
        engine=identity.engine, incarnation=identity.incarnation, tp_size=1, pp_size=1, ranks=(entry,)
    )
    return agent


def wait(agent: Agent, kind: type[Result]) -> Result:
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        for result in agent.results():
            if isinstance(result, kind):
                return result
        threading.Event().wait(0.001)
    raise AssertionError(f"no {kind.__name__} within {WAIT_SECONDS} s")


def test_chunks_are_pushed_over_nixl_and_a_restarted_producer_is_found_again() -> None:
    """A02, A08: bytes arrive in both lives of the producer; the second has another name."""
    world, resolver = World(), DirectResolver()
    [p] = world.engine("P", 1)
    [d] = world.engine("D", 2, order="BLHNC")
    consumer = started(d, resolver, 2)
    try:
        for life in range(2):
            if life:
                [p] = world.engine("P", 1)
            producer = started(p, resolver, 1)
            try:
                transfer = TransferId(f"transfer-000{life}")
                targets = [20, 31, 22, 40]
                stop = 4 * BLOCK_TOKENS
                consumer.submit(receive(transfer, "r1", source_of(p, 1), targets, stop))
                producer.submit(Expect(transfer, stop))
                producer.submit(Advance(transfer, 2 * BLOCK_TOKENS, 0, (to_spans([5, 9]),)))
                producer.submit(Advance(transfer, stop, 2, (to_spans([6, 7]),)))
                producer.submit(Finish(transfer))
                block_bytes = p.cache.groups[0].block_bytes
                assert wait(consumer, Received) == Received(transfer, ConsumerId("r1"), 4 * block_bytes)
                assert wait(producer, Released) == Released(transfer, "written")
                for source, target in zip([5, 9, 6, 7], targets, strict=True):
                    assert d.block(target) == p.block(source)
            finally:
                assert producer.close(WAIT_SECONDS)
    finally:
        assert consumer.close(WAIT_SECONDS)


def test_blocks_are_read_over_nixl_and_flow_back() -> None:
    """Pull, both directions: what D has of the turn before is read by P, then all of it by D."""
    world, resolver = World(), DirectResolver()
    [p] = world.engine("P", 1)
    [d] = world.engine("D", 2, order="BLHNC")
    prefill, decode = started(p, resolver, 1), started(d, resolver, 2)
    size = p.cache.groups[0].block_bytes
    try:
        back, stop = TransferId("transfer-back"), 3 * BLOCK_TOKENS
        for command in (Expect(back, stop), Advance(back, stop, 0, (to_spans([20, 31, 22]),)), Finish(back)):
            decode.submit(command)
        prefill.submit(receive(back, "r1", source_of(d, 2), [5, 9], stop, BLOCK_TOKENS, mode="pull"))
        assert wait(prefill, Received) == Received(back, ConsumerId("r1"), 2 * size)
        assert wait(decode, Released) == Released(back, "fetched")
        assert (p.block(5), p.block(9)) == (d.block(31), d.block(22))
        forth = TransferId("transfer-forth")
        decode.submit(receive(forth, "r2", source_of(p, 1), [40, 41, 50], stop, mode="pull"))
        prefill.submit(Expect(forth, stop))
        prefill.submit(Advance(forth, stop, 0, (to_spans([7, 5, 9]),)))
        prefill.submit(Finish(forth))
        assert wait(decode, Received) == Received(forth, ConsumerId("r2"), 3 * size)
        assert wait(prefill, Released) == Released(forth, "fetched")
        for source, target in zip([7, 5, 9], [40, 41, 50], strict=True):
            assert d.block(target) == p.block(source)
    finally:
        assert decode.close(WAIT_SECONDS)
        assert prefill.close(WAIT_SECONDS)


class Breaking(NixlTransport):
    """NIXL whose connections can be made to look broken from our end, while both processes live."""

    broken = False

    def send(self, peer: PeerName, payload: bytes) -> None:
        if self.broken:
            self.broken = False
            raise PeerLostError(f"{peer} has torn the connection down")
        super().send(peer, payload)


def test_a_living_producer_behind_a_broken_connection_is_linked_again_and_asked_for_its_fence() -> None:
    """A07, P02: the link breaks on the consumer's side only; its blocks are safe when P says so."""
    world, resolver = World(), DirectResolver()
    [p] = world.engine("P", 1)
    [d] = world.engine("D", 2)
    made: list[Breaking] = []

    def make(name: PeerName) -> Breaking:
        made.append(Breaking(name))
        return made[0]

    producer = started(p, resolver, 1)
    consumer = started(d, resolver, 2, make)
    try:
        transfer, stop = TransferId("transfer-broken"), 2 * BLOCK_TOKENS
        producer.submit(Expect(transfer, stop))
        producer.submit(Advance(transfer, BLOCK_TOKENS, 0, (to_spans([5]),)))
        consumer.submit(receive(transfer, "r1", source_of(p, 1), [20, 31], stop))
        deadline = time.monotonic() + WAIT_SECONDS
        while d.block(20) != p.block(5) and time.monotonic() < deadline:
            threading.Event().wait(0.001)
        made[0].broken = True
        failed = wait(consumer, ReceiveFailed)
        assert isinstance(failed, ReceiveFailed)
        assert failed.reason.startswith("peer_lost")
        assert failed.fenced
        assert failed.valid_until == BLOCK_TOKENS
        # The new link serves the next request, over a producer that never noticed anything.
        following = TransferId("transfer-after")
        producer.submit(Expect(following, BLOCK_TOKENS))
        producer.submit(Advance(following, BLOCK_TOKENS, 0, (to_spans([9]),)))
        producer.submit(Finish(following))
        consumer.submit(receive(following, "r2", source_of(p, 1), [22], BLOCK_TOKENS))
        assert isinstance(wait(consumer, Received), Received)
        assert d.block(22) == p.block(9)
    finally:
        assert consumer.close(WAIT_SECONDS)
        assert producer.close(WAIT_SECONDS)


@pytest.mark.parametrize(("consumer_seconds", "lookups"), [(0.2, 2), (600.0, 1)])
def test_a_link_that_was_given_up_works_again_over_nixl(consumer_seconds: float, lookups: int) -> None:
    """NIXL forgets idle peers and takes them again: both sides', or the producer's alone."""
    world, resolver = World(), DirectResolver()
    [p], [d] = world.engine("P", 1), world.engine("D", 2)
    made: dict[PeerName, NixlTransport] = {}

    def make(name: PeerName) -> NixlTransport:
        made[name] = NixlTransport(name)
        return made[name]

    def linked() -> list[int]:
        return [len(made[rank.peer]._peers._peers) for rank in (p, d)]

    consumer = started(d, resolver, 2, make, Limits(idle_seconds=consumer_seconds))
    producer = started(p, resolver, 1, make, Limits(idle_seconds=0.2))
    rested = [0, int(consumer_seconds > 1.0)]
    try:
        for number in range(2):
            transfer = TransferId(f"transfer-000{number}")
            consumer.submit(receive(transfer, "r1", source_of(p, 1), [20 + number], BLOCK_TOKENS))
            producer.submit(Expect(transfer, BLOCK_TOKENS))
            producer.submit(Advance(transfer, BLOCK_TOKENS, 0, (to_spans([5]),)))
            producer.submit(Finish(transfer))
            wait(consumer, Received)
            wait(producer, Released)
            assert d.block(20 + number) == p.block(5)
            deadline = time.monotonic() + WAIT_SECONDS
            while linked() != rested and time.monotonic() < deadline:
                threading.Event().wait(0.01)
            assert linked() == rested
        assert len(resolver.asked) == lookups
    finally:
        assert producer.close(WAIT_SECONDS)
        assert consumer.close(WAIT_SECONDS)
