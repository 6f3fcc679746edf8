"""Two agents with their threads over NIXL, in one process: the production pieces below the vLLM adapter."""

from __future__ import annotations

import threading
import time

from kvferry.agent.agent import Agent
from kvferry.agent.directory import Directory, RankEntry
from kvferry.ids import ConsumerId, TransferId
from kvferry.layout.spans import to_spans
from kvferry.layout.spec import encode_spec
from kvferry.protocol.commands import Advance, Expect, Finish, Received, Released, Result
from kvferry.protocol.limits import Limits
from kvferry.transport.nixl import NixlTransport
from tests.support.ranks import BLOCK_TOKENS, DirectResolver, TestRank, World, receive, source_of

WAIT_SECONDS = 30.0


def started(rank: TestRank, resolver: DirectResolver, port: int) -> Agent:
    agent = Agent(rank.identity, rank.cache, NixlTransport, Limits(), resolver)
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
