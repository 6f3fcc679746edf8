"""Engines of any two shapes, against an account that looks at every byte.

Goal: each byte that a rank of the consumer needs arrives exactly once and from the right place, and nothing
else is touched, whatever the parallel sizes, stages, block sizes, stride orders and buffers on either side.
Method: draw two engines of one model; for each consumer rank ask whom it meets, expand the plan of each such
pair for a request's blocks and compare with where the descriptions say that every byte lies. The exhaustive
part does so for every combination of small sizes; pairs of ranks that differ only in where they are among
their likes have one plan, which is looked at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.ids import Rank
from kvferry.layout.describe import STRIDE_ORDERS
from kvferry.layout.ranks import heads_of, meetings, sent_heads, shape_of
from kvferry.layout.spec import decode_spec, encode_spec
from tests.support.copies import check_engines, copied, request_blocks
from tests.support.engines import FORMS, Sizes, cache_of_rank, caches_of, stage_layers
from tests.support.layout_table import PAGE, table, written

PARALLEL = (1, 2, 4, 8)
HEADS = (1, 2, 8)
BLOCK_SIZES = ((1, 4), (1, 2), (2, 2), (2, 1), (4, 1))
LAYERS = 8


# --- drawn ---------------------------------------------------------------------------------------


@st.composite
def splits(draw: st.DrawFn, layers: int) -> tuple[int, ...]:
    """A division of the layers into stages, each with a layer at least."""
    stages = draw(st.integers(1, min(3, layers)))
    cuts = draw(st.permutations(range(1, layers)))[: stages - 1]
    return tuple(stop - start for start, stop in pairwise([0, *sorted(cuts), layers]))


@st.composite
def engines(draw: st.DrawFn) -> tuple[Sizes, Sizes]:
    """Two engines of one model."""
    layers = draw(st.integers(1, 5))
    model = Sizes(
        heads=draw(st.sampled_from([1, 2, 3, 4, 6])),
        content_bytes=draw(st.sampled_from([4, 8])),
        window=draw(st.sampled_from([0, 0, 4])),
        scales=draw(st.booleans()),
    )
    sides = []
    for _ in range(2):
        sizes = [tp for tp in (1, 2, 3, 4, 6, 8) if model.heads % tp == 0 or tp % model.heads == 0]
        sides.append(
            replace(
                model,
                tp=draw(st.sampled_from(sizes)),
                split=draw(splits(layers)),
                order=draw(st.sampled_from(STRIDE_ORDERS)),
                block_tokens=draw(st.sampled_from([1, 2, 3, 4, 6])),
                blocks=16,
                form=draw(st.sampled_from(FORMS)),
            )
        )
    ours, theirs = sides
    if model.window and ours.block_tokens % theirs.block_tokens:
        # Of a window whole blocks travel.
        theirs = replace(theirs, block_tokens=ours.block_tokens)
    return ours, theirs


@given(engines(), st.data(), st.integers(0, 1 << 32), st.randoms(use_true_random=False))
def test_every_byte_of_any_two_engines_arrives_once(
    pair: tuple[Sizes, Sizes], data: st.DataObject, turn: int, random: Random
) -> None:
    """V06 V07 V08 V09 V11 V13 V14: exact, or refused; here nothing is to be refused."""
    ours, theirs = pair
    start = data.draw(st.integers(0, 2)) * theirs.block_tokens
    tokens = range(start, start + data.draw(st.integers(0, 9)))
    check_engines(ours, theirs, tokens, random, turn)


@given(engines())
def test_descriptions_of_engines_travel(pair: tuple[Sizes, Sizes]) -> None:
    for cache in caches_of(pair[0]).values():
        assert decode_spec(encode_spec(cache)) == cache


def test_the_table_of_supported_pairs_is_current() -> None:
    """V06 V07 V11 V13 V14 V15: each row was tried; `python -m tests.support.layout_table` writes it anew."""
    page = PAGE.read_text(encoding="utf-8")
    assert page == written(page, table())


# --- all of them ---------------------------------------------------------------------------------


def split_evenly(stages: int) -> tuple[int, ...]:
    return (LAYERS // stages,) * stages


@dataclass
class Seen:
    """Pairs of ranks that were looked at, by all that their plan depends on."""

    plans: set[object] = field(default_factory=set)

    def look(self, ours: Sizes, theirs: Sizes, source: Rank, target: Rank) -> None:
        """Compare one pair of ranks byte by byte, unless one of its kind was."""
        held = [
            heads_of(rank.tp, sizes.tp, sizes.heads) for sizes, rank in ((ours, source), (theirs, target))
        ]
        sent = sent_heads(source.tp, ours.tp, target.tp, theirs.tp, ours.heads)
        layers = [stage_layers(sizes)[rank.pp] for sizes, rank in ((ours, source), (theirs, target))]
        kind = (
            (ours.order, theirs.order, ours.block_tokens, theirs.block_tokens),
            [(len(heads), sent.start - heads.start, len(sent)) for heads in held],
            [[name in other for name in names] for names, other in (layers, layers[::-1])],
        )
        if repr(kind) in self.plans:
            return
        self.plans.add(repr(kind))
        caches = cache_of_rank(ours, source, 1 << 12), cache_of_rank(theirs, target, 1 << 24)
        tokens = range(theirs.block_tokens, theirs.block_tokens + 7)
        random = Random(repr(kind))
        blocks = tuple(request_blocks(random, cache, tokens) for cache in caches)
        copied(*caches, tokens, blocks, turn=0)  # type: ignore[arg-type]


def check_all_ranks(ours: Sizes, theirs: Sizes, seen: Seen) -> None:
    """Layers and heads of every consumer rank come once; every kind of pair of ranks copies exactly."""
    shapes = [shape_of(cache_of_rank(sizes, Rank(0, 0), 0)) for sizes in (theirs, ours)]
    for target in theirs.ranks:
        come: list[tuple[str, int]] = []
        for meeting in meetings(target, *shapes):
            source = meeting.rank
            heads = sent_heads(source.tp, ours.tp, target.tp, theirs.tp, ours.heads)
            common = set(stage_layers(ours)[source.pp]) & set(stage_layers(theirs)[target.pp])
            come += product(common, heads)
            assert meeting.writes == bool(heads)
            seen.look(ours, theirs, source, target)
        mine = heads_of(target.tp, theirs.tp, theirs.heads)
        assert sorted(come) == sorted(product(stage_layers(theirs)[target.pp], mine))


def all_sizes(heads: int) -> Iterator[tuple[Sizes, Sizes]]:
    """Every pair of parallel sizes."""
    for tp, their_tp, pp, their_pp in product(PARALLEL, repeat=4):
        yield (
            Sizes(tp=tp, split=split_evenly(pp), heads=heads, content_bytes=2),
            Sizes(tp=their_tp, split=split_evenly(their_pp), heads=heads, content_bytes=2),
        )


def with_memory(sizes: Sizes, order: str, block_tokens: int) -> Sizes:
    return replace(sizes, order=order, block_tokens=block_tokens, blocks=24 // block_tokens)


@pytest.mark.parametrize("heads", HEADS)
def test_every_pair_of_parallel_sizes(heads: int) -> None:
    """V06 V07 V11: TP and PP in {1,2,4,8} on either side; stride orders and block sizes take turns."""
    memory = list(product(STRIDE_ORDERS, STRIDE_ORDERS, BLOCK_SIZES))
    Random(heads).shuffle(memory)
    seen = Seen()
    sizes = list(all_sizes(heads))
    for number, (ours, theirs) in enumerate(sizes):
        order, their_order, blocks = memory[number % len(memory)]
        check_all_ranks(
            with_memory(ours, order, blocks[0]), with_memory(theirs, their_order, blocks[1]), seen
        )
    assert len(sizes) == 256
    assert len(seen.plans) > 256


@pytest.mark.parametrize(("order", "their_order"), list(product(STRIDE_ORDERS, STRIDE_ORDERS)))
def test_every_pair_of_stride_orders_and_block_sizes(order: str, their_order: str) -> None:
    """V09 V13: each with engines of unequal parallel sizes, both ways; numbers of heads take turns."""
    turn = STRIDE_ORDERS.index(order) + STRIDE_ORDERS.index(their_order)
    for number, blocks in enumerate(BLOCK_SIZES, turn):
        heads = HEADS[number % len(HEADS)]
        large = Sizes(tp=2, split=(1, 2), heads=heads, order=order, block_tokens=blocks[0], blocks=24)
        small = Sizes(tp=1, split=(3,), heads=heads, order=their_order, block_tokens=blocks[1], blocks=24)
        tokens = range(blocks[1], blocks[1] + 7)
        check_engines(large, small, tokens, Random(heads))
        tokens = range(blocks[0], blocks[0] + 7)
        check_engines(small, large, tokens, Random(heads))


@pytest.mark.long
@pytest.mark.parametrize(("order", "their_order"), list(product(STRIDE_ORDERS, STRIDE_ORDERS)))
def test_all_sizes_with_all_stride_orders_and_block_sizes(order: str, their_order: str) -> None:
    """V06 V07 V08 V09 V11 V13: every combination."""
    seen = Seen()
    for heads, blocks in product(HEADS, BLOCK_SIZES):
        for ours, theirs in all_sizes(heads):
            check_all_ranks(
                with_memory(ours, order, blocks[0]), with_memory(theirs, their_order, blocks[1]), seen
            )
