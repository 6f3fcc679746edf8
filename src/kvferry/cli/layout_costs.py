"""Copies of a request's KV between two layouts: descriptors, planning, expanding, memory.

Addresses are made up and no byte moves, so that caches may be as large as real ones.
"""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np

from kvferry.ids import Rank
from kvferry.layout.describe import describe
from kvferry.layout.descriptors import BlockArray, expand
from kvferry.layout.plan import CopyPlan, plan
from kvferry.layout.ranks import heads_of
from kvferry.layout.runs import Runs
from kvferry.layout.spec import CacheSpec

CONTENT_BYTES = 512
"""K and V of one head and token: 128 values each of two bytes."""


@dataclass(frozen=True, slots=True)
class Options:
    """What is measured. `blocks` of `block_tokens` tokens on the producer."""

    blocks: int
    layers: int
    heads: int
    block_tokens: int
    repeats: int


@dataclass(frozen=True, slots=True)
class Engine:
    """One side of a pair; its first rank is looked at."""

    order: str
    tp: int = 1
    tokens_factor: int = 1
    """Its blocks have so many times the producer's tokens."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One pair of layouts and one order of blocks. Times are medians in milliseconds.

    `temporaries` is what expanding takes at its peak besides its result, in times of that.
    """

    title: str
    blocks: str
    descriptors: int
    plan_ms: float
    expand_ms: float
    temporaries: float


PAIRS = (
    ("blocks outermost, equal", Engine("BLHNC"), Engine("BLHNC")),
    ("layers outermost, equal", Engine("LBHNC"), Engine("LBHNC")),
    ("layers outermost to blocks outermost", Engine("LBHNC"), Engine("BLHNC")),
    ("blocks outermost, TP 2 to TP 1", Engine("BLHNC", tp=2), Engine("BLHNC")),
    ("layers outermost, TP 1 to TP 2", Engine("LBHNC"), Engine("LBHNC", tp=2)),
    ("layers outermost, blocks twice as large", Engine("LBHNC"), Engine("LBHNC", tokens_factor=2)),
    ("heads and tokens exchanged", Engine("BLHNC"), Engine("BLNHC")),
)


def measure(options: Options) -> Iterator[Figure]:
    """A figure for each pair of layouts, with blocks in order and scattered."""
    for title, ours, theirs in PAIRS:
        source, target = _cache(options, ours, 1 << 40), _cache(options, theirs, 1 << 50)
        joint = plan(source, target)
        plan_ms = _median_ms(partial(plan, source, target), options.repeats)
        for name in ("in order", "scattered"):
            blocks = _blocks(options, theirs, scattered=name == "scattered")
            yield _figure(title, name, joint, blocks, plan_ms, options)


def _figure(
    title: str,
    name: str,
    joint: CopyPlan,
    blocks: tuple[BlockArray, BlockArray],
    plan_ms: float,
    options: Options,
) -> Figure:
    stop = options.blocks * options.block_tokens

    def work() -> Runs:
        return expand(joint, 0, *blocks, stop=stop)

    result_bytes = 24 * len(work())
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return Figure(
        title=title,
        blocks=name,
        descriptors=result_bytes // 24,
        plan_ms=plan_ms,
        expand_ms=_median_ms(work, options.repeats),
        temporaries=max(peak - result_bytes, 0) / result_bytes,
    )


def _cache(options: Options, engine: Engine, address: int) -> CacheSpec:
    """The first rank of an engine whose cache has room for four such requests."""
    held = heads_of(0, engine.tp, options.heads)
    group, region = describe(
        engine.order,
        layers=options.layers,
        blocks=4 * options.blocks,
        heads=len(held),
        block_tokens=options.block_tokens * engine.tokens_factor,
        content_bytes=CONTENT_BYTES,
        address=address,
        heads_total=options.heads,
    )
    names = tuple(plane.name for plane in group.planes)
    return CacheSpec(
        model="bench",
        dtype="bfloat16",
        kv_dtype="bfloat16",
        rank=Rank(0, 0),
        tp_size=engine.tp,
        pp_size=1,
        groups=(msgspec.structs.replace(group, stages=(names,)),),
        regions=(region,),
    )


def _blocks(options: Options, theirs: Engine, *, scattered: bool) -> tuple[BlockArray, BlockArray]:
    counts = options.blocks, -(-options.blocks // theirs.tokens_factor)
    random = np.random.default_rng(1)
    sides = [
        # Every fourth block, so that no two of them are neighbours.
        random.permutation(4 * np.arange(count)) if scattered else np.arange(count)
        for count in counts
    ]
    return sides[0], sides[1]


def _median_ms(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)
