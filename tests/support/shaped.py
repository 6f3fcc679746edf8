"""Engines of any shape, with production loops and cores over the memory transport, that hand KV over.

A byte of KV is a function of its layer, head, token and place, so that whoever has it can say what it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd
from random import Random

import numpy as np
import numpy.typing as npt

from kvferry.agent.directory import Directory, RankEntry
from kvferry.agent.links import Identity
from kvferry.agent.loop import Incoming, Loop
from kvferry.agent.mailbox import Mailbox
from kvferry.agent.stats import Stats
from kvferry.handoff import TransferMode
from kvferry.ids import BlockId, ConsumerId, EngineId, Incarnation, TransferId
from kvferry.layout.spans import to_spans
from kvferry.layout.spec import GroupSpec, encode_spec
from kvferry.protocol.commands import Advance, Expect, Finish, Groups, Receive, Result, Source
from kvferry.transport.memory import MemoryTransport
from tests.support.engines import Sizes, cache_of_rank, covering, end_of, where
from tests.support.ranks import TestRank, World

UNTOUCHED = 0xEE
Bytes = npt.NDArray[np.uint8]


class ShapedRank(TestRank):
    """A rank whose cache is any."""

    def __init__(self, world: World, identity: Identity, sizes: Sizes) -> None:
        length = end_of(cache_of_rank(sizes, identity.rank, 0))
        self.memory = np.full(length, UNTOUCHED, dtype=np.uint8)
        self.cache = cache_of_rank(sizes, identity.rank, int(self.memory.ctypes.data))
        self.identity = identity
        self.transport = MemoryTransport(world.fabric, identity.peer)
        self.transport.register(self.cache.regions)
        self.inbox: Mailbox[Incoming] = Mailbox()
        self.results: list[Result] = []
        self.stats = Stats()
        self.dead = False
        self.loop = Loop(
            identity,
            self.cache,
            self.transport,
            world.limits,
            world.resolver,
            self.inbox,
            self.results.append,
            self.stats,
            world.clock,
        )

    def write(self, table: int, tokens: range, blocks: list[BlockId], into: Bytes | None = None) -> None:
        """Put the KV of these tokens into the blocks that cover them, of our memory or a copy of it."""
        memory = self.memory if into is None else into
        groups = self.cache.tables[table]
        for group in groups:
            heads = range(group.head_first, group.head_first + group.head_count)
            for name in sorted(group.layers):
                places = where(groups, name, heads, tokens, blocks) - int(self.memory.ctypes.data)
                memory[places] = kv(name, heads, tokens, places.shape[2])


def kv(layer: str, heads: range, tokens: range, size: int) -> Bytes:
    """The KV of a layer, by head, token and byte."""
    mixed = np.full((len(heads), len(tokens), size), Random(layer).getrandbits(31), dtype=np.uint64)
    mixed += np.array(heads, dtype=np.uint64)[:, None, None] * np.uint64(7_368_787)
    mixed += np.array(tokens, dtype=np.uint64)[:, None] * np.uint64(15_485_863)
    mixed += np.arange(size, dtype=np.uint64) * np.uint64(32_452_843)
    return (mixed * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(56)).astype(np.uint8)


class ShapedEngine:
    """All ranks of one engine, at a port of the world's resolver."""

    def __init__(self, world: World, name: str, port: int, sizes: Sizes) -> None:
        self.sizes = sizes
        self.name, self.port = EngineId(name), port
        incarnation = Incarnation("first")
        self.ranks = [
            ShapedRank(world, Identity(self.name, incarnation, rank), sizes) for rank in sizes.ranks
        ]
        world.ranks += self.ranks
        world.resolver.engines[port] = Directory(
            engine=self.name,
            incarnation=incarnation,
            tp_size=sizes.tp,
            pp_size=len(sizes.split),
            ranks=tuple(
                RankEntry(
                    pp=rank.identity.rank.pp,
                    tp=rank.identity.rank.tp,
                    peer=rank.peer,
                    metadata=rank.transport.local_metadata(),
                    cache=encode_spec(rank.cache),
                )
                for rank in self.ranks
            ),
        )

    @property
    def source(self) -> Source:
        """How consumers are told of it."""
        return Source(self.name, "127.0.0.1", self.port)

    @property
    def tables(self) -> tuple[tuple[GroupSpec, ...], ...]:
        """Its block tables, as its first rank describes them."""
        return self.ranks[0].cache.tables

    def blocks(self, tokens: range, random: Random) -> list[list[BlockId]]:
        """Blocks for these tokens, per table, anywhere in the cache."""
        return [
            random.sample(range(groups[0].block_count), covering(tokens, groups[0].block_tokens))
            for groups in self.tables
        ]

    def window_start(self, table: int, tokens: range) -> int:
        """The first token of a block that is needed to go on from the prompt's end."""
        window, size = self.tables[table][0].window_tokens, self.sizes.block_tokens
        return max(tokens.start, (tokens.stop - window) // size * size) if window else tokens.start

    def compute(self, tokens: range, blocks: list[list[BlockId]]) -> None:
        """Have the KV of these tokens in place on every rank."""
        for rank in self.ranks:
            for table, ids in enumerate(blocks):
                rank.write(table, tokens, ids)

    def results(self, kind: type[Result]) -> list[Result]:
        """Results of one type, of all ranks."""
        return [result for rank in self.ranks for result in rank.of(kind)]


def hand_over(
    world: World,
    producer: ShapedEngine,
    consumer: ShapedEngine,
    tokens: range,
    random: Random,
    name: str = "a",
    mode: TransferMode = "push",
) -> list[Bytes]:
    """Have `tokens.stop` tokens computed in two chunks and handed over from `tokens.start` on.

    Returns what the memory of each rank of the consumer has to be in the end.
    """
    transfer = TransferId(f"transfer-{name}")
    source_blocks = producer.blocks(range(tokens.stop), random)
    # What lies behind the prompt in its last block travels along, so it has to be known.
    producer.compute(range(whole(tokens.stop, producer.sizes.block_tokens)), source_blocks)
    windows = [
        range(consumer.window_start(table, tokens), tokens.stop) for table in range(len(consumer.tables))
    ]
    target_blocks = [
        ids[-covering(window, consumer.sizes.block_tokens) :] if window else []
        for ids, window in zip(consumer.blocks(tokens, random), windows, strict=True)
    ]
    expected = [rank.memory.copy() for rank in consumer.ranks]
    cell = gcd(producer.sizes.block_tokens, consumer.sizes.block_tokens)
    for rank, memory in zip(consumer.ranks, expected, strict=True):
        for table, (ids, window) in enumerate(zip(target_blocks, windows, strict=True)):
            size = consumer.tables[table][0].window_tokens
            start = max(window.start, (tokens.stop + 1 - size) // cell * cell) if size else window.start
            # A consumer may have listed a block more than is needed.
            spare = start // consumer.sizes.block_tokens - window.start // consumer.sizes.block_tokens
            rank.write(table, range(start, whole(tokens.stop, cell)), ids[spare:], memory)
    groups = spans(target_blocks)
    for rank in consumer.ranks:
        rank.do(Receive(transfer, ConsumerId(name), producer.source, tokens.start, tokens.stop, groups, mode))
    _prefill(world, producer, transfer, tokens.stop, source_blocks)
    return expected


def _prefill(
    world: World, producer: ShapedEngine, transfer: TransferId, tokens: int, blocks: list[list[BlockId]]
) -> None:
    """Two chunks, with time between them. Of a window the engine has only the newest blocks."""
    kept = [
        [
            -1 if (index + 1) * producer.sizes.block_tokens <= tokens - window else block
            for index, block in enumerate(ids)
        ]
        if (window := groups[0].window_tokens)
        else ids
        for ids, groups in zip(blocks, producer.tables, strict=True)
    ]
    chunk = tokens // 2
    cut = covering(range(chunk), producer.sizes.block_tokens)
    for rank in producer.ranks:
        rank.do(Expect(transfer, tokens))
        if chunk:
            rank.do(Advance(transfer, chunk, 0, spans(ids[:cut] for ids in kept)))
    world.run(0.02)
    for rank in producer.ranks:
        rank.do(Advance(transfer, tokens, cut, spans(ids[cut:] for ids in kept)), Finish(transfer))


def whole(tokens: int, unit: int) -> int:
    """So many tokens as whole units hold."""
    return -(-tokens // unit) * unit


def spans(blocks: Iterable[Iterable[BlockId]]) -> Groups:
    """Blocks of each table as spans."""
    return tuple(to_spans(ids) for ids in blocks)
