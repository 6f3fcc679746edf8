"""The copy between two engines, looked at byte by byte."""

from __future__ import annotations

from math import gcd
from random import Random

import numpy as np

from kvferry.ids import Rank
from kvferry.layout.compare import compare
from kvferry.layout.descriptors import expand
from kvferry.layout.plan import plan
from kvferry.layout.ranks import meetings, shape_of
from kvferry.layout.spec import CacheSpec
from tests.support.engines import CopyTable, Sizes, caches_of, covering, end_of, expected, moved, where


def request_blocks(random: Random, spec: CacheSpec, tokens: range) -> list[list[int]]:
    """Blocks of each table that cover the tokens, in any order, some of them neighbours."""
    found = []
    for groups in spec.tables:
        size, count = groups[0].block_tokens, groups[0].block_count
        needed = covering(tokens, size)
        first = random.randrange(count - needed + 1)
        found.append(
            random.sample(range(count), needed)
            if random.random() < 0.7
            else list(range(first, first + needed))
        )
    return found


def rounded(tokens: range, source: CacheSpec, target: CacheSpec, table: int) -> range:
    """The tokens whose cells are copied."""
    cell = gcd(source.block_tokens[table], target.block_tokens[table])
    return range(tokens.start, -(-tokens.stop // cell) * cell if tokens else tokens.stop)


def copied(
    source: CacheSpec,
    target: CacheSpec,
    tokens: range,
    blocks: tuple[list[list[int]], list[list[int]]],
    turn: int,
) -> list[CopyTable]:
    """What one rank copies for another, per block table, once it is what it should be."""
    found = plan(source, target, turn)
    tables = []
    for table, sides in enumerate(zip(*blocks, strict=True)):
        ids = [np.array(side, dtype=np.int64) for side in sides]
        runs = expand(found, table, ids[0], ids[1], tokens.start, tokens.stop)
        table_tokens = rounded(tokens, source, target, table)
        actual = moved(runs)
        assert np.array_equal(actual, expected(source, target, table, table_tokens, sides, turn))
        assert len(actual) == runs.bytes
        if len(table_tokens) == covering(tokens, target.block_tokens[table]) * target.block_tokens[table]:
            assert runs.bytes == found.bytes_per_block(table) * len(sides[1])
        tables.append(actual)
    return tables


def needed(
    source: CacheSpec, target: CacheSpec, tokens: range, blocks: list[list[int]], table: int
) -> list[int]:
    """Addresses of every byte that the target rank needs."""
    groups = target.tables[table]
    span = rounded(tokens, source, target, table)
    return sorted(
        address
        for name in set().union(*(group.layers for group in groups))
        for heads in {range(g.head_first, g.head_first + g.head_count) for g in groups if name in g.layers}
        for address in where(groups, name, heads, span, blocks[table]).ravel().tolist()
    )


def check_engines(ours: Sizes, theirs: Sizes, tokens: range, random: Random, turn: int = 0) -> None:
    """Everything that is promised of two engines: `ours` has the KV and `theirs` needs it."""
    producer = caches_of(ours)
    consumer = caches_of(theirs, 1 + max(map(end_of, producer.values())))
    source_blocks = request_blocks(random, producer[Rank(0, 0)], tokens)
    target_blocks = request_blocks(random, consumer[Rank(0, 0)], tokens)
    for rank, target in consumer.items():
        assert all(compare(source, target) == [] for source in producer.values())
        arrived: list[list[CopyTable]] = []
        met = meetings(rank, shape_of(target), shape_of(producer[Rank(0, 0)]), turn)
        for meeting in met:
            source = producer[meeting.rank]
            tables = copied(source, target, tokens, (source_blocks, target_blocks), turn)
            assert meeting.writes == (not plan(source, target, turn).moves_nothing)
            arrived.append(tables)
        for other in producer.keys() - {meeting.rank for meeting in met}:
            assert plan(producer[other], target, turn).moves_nothing
        for table in range(len(target.tables)):
            come = np.concatenate([tables[table][:, 0] for tables in arrived])
            any_source = producer[met[0].rank]
            assert sorted(come.tolist()) == needed(any_source, target, tokens, target_blocks, table)
