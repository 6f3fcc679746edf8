"""A plan and block ids become runs: exact values, limits, and what the work may cost."""

from __future__ import annotations

import sys
import tracemalloc
from random import Random
from types import FrameType

import numpy as np
import pytest

from kvferry.errors import GeometryError
from kvferry.layout.describe import describe
from kvferry.layout.descriptors import BlockArray, expand
from kvferry.layout.plan import CopyPlan, join, plan
from kvferry.layout.runs import Region
from kvferry.layout.spec import CacheSpec, GroupSpec, Plane
from tests.support.caches import cache_of, triples, with_group

SOURCE, TARGET = 1 << 30, 1 << 40
LAYERS, HEADS, TOKENS, CONTENT = 3, 2, 4, 8
PER_LAYER = HEADS * TOKENS * CONTENT
"""Bytes of one block in one layer."""


def spec_of(order: str, address: int, **changes: int) -> CacheSpec:
    sizes = {"layers": LAYERS, "blocks": 64, "heads": HEADS, "block_tokens": TOKENS, "content_bytes": CONTENT}
    return cache_of(*describe(order, address=address, **(sizes | changes)))  # type: ignore[arg-type]


def plan_of(source: str, target: str, **changes: int) -> CopyPlan:
    return plan(spec_of(source, SOURCE, **changes), spec_of(target, TARGET, **changes))


def ids(*blocks: int) -> BlockArray:
    return np.array(blocks, dtype=np.int64)


def test_blocks_land_where_their_tokens_belong() -> None:
    """P01: (15→3)(16→4)(17→5), as addresses."""
    runs = expand(plan_of("BLHNC", "BLHNC"), 0, ids(15, 16, 17), ids(3, 4, 5))
    block = LAYERS * PER_LAYER
    assert triples(runs) == [(SOURCE + 15 * block, TARGET + 3 * block, 3 * block)]


def test_layer_outermost_blocks_are_one_run_per_layer() -> None:
    """G01"""
    runs = expand(plan_of("LBHNC", "LBHNC"), 0, ids(15, 16, 17), ids(3, 4, 5))
    assert triples(runs) == [
        (
            SOURCE + (layer * 64 + 15) * PER_LAYER,
            TARGET + (layer * 64 + 3) * PER_LAYER,
            3 * PER_LAYER,
        )
        for layer in range(LAYERS)
    ]


def test_blocks_that_do_not_touch_stay_apart() -> None:
    block = LAYERS * PER_LAYER
    runs = expand(plan_of("BLHNC", "BLHNC"), 0, ids(9, 2, 3, 10), ids(1, 2, 4, 0))
    assert triples(runs) == [
        (SOURCE + source * block, TARGET + target * block, block)
        for source, target in ((2, 2), (3, 4), (9, 1), (10, 0))
    ]


def test_unlike_orders_pair_layer_by_layer() -> None:
    runs = expand(plan_of("LBHNC", "BLHNC"), 0, ids(7, 1), ids(0, 1))
    assert triples(runs) == [
        (
            SOURCE + (layer * 64 + source) * PER_LAYER,
            TARGET + (target * LAYERS + layer) * PER_LAYER,
            PER_LAYER,
        )
        for layer in range(LAYERS)
        for source, target in ((1, 1), (7, 0))
    ]


@pytest.mark.parametrize("order", ["LBHNC", "BLHNC"])
def test_no_blocks_are_no_runs(order: str) -> None:
    """P22: nothing to move is not an error."""
    runs = expand(plan_of(order, order), 0, ids(), ids())
    assert triples(runs) == []
    assert runs.bytes == 0


@pytest.mark.parametrize("run", [1, 4, 16])
def test_adjacent_pairs_share_a_descriptor(run: int) -> None:
    """G01: runs of k adjacent pairs are one descriptor, pairs at random are n."""
    firsts = list(range(0, 64, run + 1))
    source = np.concatenate([np.arange(first, min(first + run, 64)) for first in firsts])
    assert len(expand(plan_of("BLHNC", "BLHNC"), 0, source, source)) == len(firsts)


@pytest.mark.parametrize(
    ("order", "descriptors"),
    [("BLHNC", 32), ("BHLNC", 32), ("LBHNC", 32 * LAYERS), ("LHBNC", 32 * LAYERS * HEADS)],
)
def test_descriptors_of_scattered_blocks(order: str, descriptors: int) -> None:
    """G02: the count follows from the geometry; block-outermost layouts need one per block."""
    source = np.arange(0, 64, 2)
    assert len(expand(plan_of(order, order), 0, source, source)) == descriptors


def test_a_whole_cache_is_one_run() -> None:
    every = np.arange(64)
    for order in ("BLHNC", "LBHNC"):
        (run,) = triples(expand(plan_of(order, order), 0, every, every))
        assert run == (SOURCE, TARGET, 64 * LAYERS * PER_LAYER)


@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize("order", ["LBHNC", "BLHNC"])
def test_a_run_never_leaves_its_region(order: str, side: str) -> None:
    """V08: neighbouring registrations are two, however well their bytes fit together."""
    whole = spec_of(order, SOURCE)
    if order == "LBHNC":
        cuts = [plane.address for plane in whole.groups[0].planes]
        size = cuts[1] - cuts[0]
        regions = [Region(address, size) for address in cuts]
        expected = LAYERS
    else:
        # Two tensors, each block-outermost, side by side; one group reaches into both.
        regions = [
            Region(SOURCE, 64 * 2 * PER_LAYER),
            Region(SOURCE + 64 * 2 * PER_LAYER, 64 * 2 * PER_LAYER),
        ]
        planes = tuple(
            Plane(f"l{index}", regions[index // 2].address + index % 2 * PER_LAYER) for index in range(4)
        )
        group = GroupSpec(
            kind="full",
            block_tokens=TOKENS,
            block_count=64,
            planes=planes,
            block_stride=2 * PER_LAYER,
            head_stride=TOKENS * CONTENT,
            token_stride=CONTENT,
            content_bytes=CONTENT,
            head_first=0,
            head_count=HEADS,
            heads_total=HEADS,
        )
        whole = cache_of(group, Region(SOURCE, 64 * 4 * PER_LAYER))
        expected = 2
    split = cache_of(whole.groups[0], regions)
    pair = (split, whole) if side == "source" else (whole, split)
    every = np.arange(64)
    assert len(expand(plan(whole, whole), 0, every, every)) == 1
    runs = expand(plan(*pair), 0, every, every)
    assert len(runs) == expected
    assert [start for start, _, _ in triples(runs)] == [region.address for region in regions]


@pytest.mark.parametrize("side", ["source", "target"])
def test_pieces_of_one_block_stay_in_their_regions_too(side: str) -> None:
    """V08: a cache of one block, whose layers are registered one by one, side by side."""
    whole = spec_of("LBHNC", SOURCE, blocks=1)
    regions = [Region(plane.address, PER_LAYER) for plane in whole.groups[0].planes]
    split = cache_of(whole.groups[0], regions)
    assert plan(whole, whole).pieces(0) == 1
    found = plan(*((split, whole) if side == "source" else (whole, split)))
    assert found.pieces(0) == len(expand(found, 0, ids(0), ids(0))) == LAYERS


# --- blocks of unequal size, and ranges of tokens --------------------------------------------------


def offsets(runs: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Runs of the first layer, in terms of tokens; each token of both heads has `PER_TOKEN` bytes."""
    return [
        ((source - SOURCE) // PER_TOKEN, (target - TARGET) // PER_TOKEN, length // PER_TOKEN)
        for source, target, length in runs
        if source < SOURCE + 64 * 8 * PER_TOKEN
    ]


PER_TOKEN = HEADS * CONTENT


def plan_of_sizes(source: int, target: int, blocks: int = 64) -> CopyPlan:
    """Heads within tokens, so that tokens of a block lie side by side."""
    return plan(
        spec_of("LBNHC", SOURCE, block_tokens=source, blocks=blocks * 8 // source),
        spec_of("LBNHC", TARGET, block_tokens=target, blocks=blocks * 8 // target),
    )


def test_small_blocks_gather_in_a_large_one() -> None:
    """V13: four blocks of 4 tokens are two of 8."""
    runs = expand(plan_of_sizes(4, 8), 0, ids(9, 3, 4, 7), ids(5, 1))
    assert offsets(triples(runs)) == [(12, 44, 4), (16, 8, 4), (28, 12, 4), (36, 40, 4)]


def test_a_large_block_scatters_into_small_ones_in_the_order_of_their_places() -> None:
    runs = expand(plan_of_sizes(8, 4), 0, ids(5, 1), ids(9, 3, 4, 7))
    assert offsets(triples(runs)) == [(44, 12, 4), (8, 16, 4), (12, 28, 4), (40, 36, 4)]


def test_neighbours_are_one_run_whatever_the_block_size() -> None:
    """G01"""
    for sizes, source, target in (((8, 4), ids(2, 3), ids(6, 7, 8, 9)), ((4, 8), ids(6, 7, 8, 9), ids(2, 3))):
        (run,) = offsets(triples(expand(plan_of_sizes(*sizes), 0, source, target)))
        assert run[2] == 16


def test_a_range_may_begin_within_a_source_block_and_end_within_any() -> None:
    """Tokens 4 to 14: from the second half of a source block on; the last cell is copied whole."""
    runs = expand(plan_of_sizes(8, 4), 0, ids(5, 1), ids(9, 3, 4), start=4, stop=14)
    assert offsets(triples(runs)) == [(8, 12, 8), (44, 36, 4)]


def test_a_range_may_begin_within_a_target_block() -> None:
    """Of a window only its own tokens are written."""
    runs = expand(plan_of_sizes(4, 8), 0, ids(9), ids(5), start=4, stop=8)
    assert offsets(triples(runs)) == [(36, 44, 4)]


def test_sizes_without_a_whole_ratio_meet_in_what_divides_both() -> None:
    runs = expand(plan_of_sizes(6, 4, blocks=6), 0, ids(3, 0), ids(2, 7, 5))
    assert runs.bytes == LAYERS * 12 * PER_TOKEN


@pytest.mark.parametrize(
    ("source", "target", "start", "stop", "field"),
    [
        (ids(1), ids(1), 2, 4, "tokens"),
        (ids(1), ids(1), -4, 4, "tokens"),
        (ids(1), ids(1), 8, 4, "tokens"),
        (ids(1), ids(1), 0, 5, "blocks"),
        (ids(1, 2, 3), ids(1), 0, 8, "blocks"),
        (ids(1), ids(1), 0, 0, "blocks"),
        (ids(1, 2, 3), ids(1), 0, None, "blocks"),
    ],
)
def test_blocks_that_do_not_cover_the_tokens_are_refused(
    source: BlockArray, target: BlockArray, start: int, stop: int | None, field: str
) -> None:
    """P01: whoever counts wrong is told, and copies nothing."""
    with pytest.raises(GeometryError) as caught:
        expand(plan_of_sizes(4, 8), 0, source, target, start, stop)
    assert caught.value.field == field


def test_a_plan_of_nothing_copies_nothing() -> None:
    other = spec_of("LBHNC", TARGET)
    planes = tuple(Plane(f"draft{n}", plane.address) for n, plane in enumerate(other.groups[0].planes))
    nothing = CopyPlan(
        (join(spec_of("LBHNC", SOURCE).groups[0], with_group(other, planes=planes).groups[0]),)
    )
    assert len(expand(nothing, 0, ids(1, 2), ids(3, 4))) == 0


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target", "field"),
    [
        (ids(0, 64), ids(0, 1), "source_blocks"),
        (ids(0, -1), ids(0, 1), "source_blocks"),
        (ids(0, 1), ids(64, 1), "target_blocks"),
        (ids(0, 1), ids(1, -5), "target_blocks"),
        (ids(0, 1), ids(1, 1 << 40), "target_blocks"),
        (ids(3, 3), ids(0, 1), "source_blocks"),
        (ids(0, 1), ids(3, 3), "target_blocks"),
        (ids(0, 1), ids(0), "blocks"),
        (ids(0), ids(0, 1), "blocks"),
        (ids(), ids(0), "blocks"),
        (np.array([[0, 1]]), ids(0, 1), "source_blocks"),
        (np.array(0), np.array(0), "source_blocks"),
        (ids(0), np.array([0.0]), "target_blocks"),
        (np.array([True]), ids(0), "source_blocks"),
    ],
)
def test_impossible_blocks_are_refused(source: BlockArray, target: BlockArray, field: str) -> None:
    """P01 V01 V08: too few, out of range or doubled ids end here, before an address exists."""
    with pytest.raises(GeometryError) as caught:
        expand(plan_of("LBHNC", "BLHNC"), 0, source, target)
    assert caught.value.field == field


def test_the_message_names_the_block_and_the_cache() -> None:
    with pytest.raises(GeometryError, match=r"source_blocks differs: ours is 'blocks 0 to 63', theirs is -7"):
        expand(plan_of("LBHNC", "LBHNC"), 0, ids(1, -7), ids(0, 1))
    with pytest.raises(GeometryError, match=r"target_blocks differs: ours is 'blocks 0 to 63', theirs is 99"):
        expand(plan_of("LBHNC", "LBHNC"), 0, ids(1, 2), ids(0, 99))


def test_each_side_has_its_own_number_of_blocks() -> None:
    small, large = spec_of("LBHNC", SOURCE, blocks=4), spec_of("LBHNC", TARGET, blocks=64)
    assert len(expand(plan(small, large), 0, ids(3), ids(63))) == LAYERS
    with pytest.raises(GeometryError, match="target_blocks"):
        expand(plan(large, small), 0, ids(3), ids(63))


# --- what it costs -------------------------------------------------------------------------------


def scattered(count: int, seed: int = 1) -> tuple[BlockArray, BlockArray]:
    random = Random(seed)
    first, second = (random.sample(range(4096), count) for _ in range(2))
    return np.array(first), np.array(second)


def test_no_python_runs_per_block() -> None:
    """G01: ten blocks and a thousand make the same calls."""
    found = plan_of("LBHNC", "LBNHC", blocks=4096)
    calls = 0

    def counting(_frame: FrameType, _event: str, _argument: object) -> None:
        nonlocal calls
        calls += 1

    counts = []
    for blocks in (10, 1000):
        source, target = scattered(blocks)
        calls = 0
        sys.setprofile(counting)
        try:
            runs = expand(found, 0, source, target)
        finally:
            sys.setprofile(None)
        assert len(runs) == blocks * found.pieces(0)
        counts.append(calls)
    assert counts[0] == counts[1]


def peak_bytes(found: CopyPlan, source: BlockArray, target: BlockArray) -> int:
    """The most memory that an expansion holds at once, its result included."""
    expand(found, 0, source, target)
    tracemalloc.start()
    try:
        expand(found, 0, source, target)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


SLACK_BYTES = 16_384
"""Frames, array headers and the like."""


@pytest.mark.parametrize(
    ("source_order", "target_order"),
    [("BLHNC", "BLHNC"), ("LBHNC", "BLHNC"), ("LBHNC", "LBNHC"), ("LHBNC", "BHLNC"), ("BHLNC", "BHLNC")],
)
@pytest.mark.parametrize("adjacent", [False, True])
def test_the_work_takes_at_most_three_times_the_result(
    source_order: str, target_order: str, adjacent: bool
) -> None:
    found = plan_of(source_order, target_order, blocks=4096, heads=8, block_tokens=16)
    source, target = (np.arange(300), np.arange(300)) if adjacent else scattered(300)
    result_bytes = 24 * len(source) * found.pieces(0)
    assert peak_bytes(found, source, target) <= 4 * result_bytes + SLACK_BYTES


@pytest.mark.parametrize("source_order", ["LBHNC", "BLHNC"])
@pytest.mark.parametrize("target_order", ["LBHNC", "BLHNC"])
def test_common_layouts_need_no_sorting(source_order: str, target_order: str) -> None:
    """Built in the order of source addresses, the runs are never held twice."""
    found = plan_of(source_order, target_order, blocks=4096, layers=16)
    source, target = scattered(1000)
    blocks_bytes = 8 * 24 * len(source)
    assert peak_bytes(found, source, target) <= 24 * len(source) * found.pieces(0) * 1.5 + blocks_bytes


def test_neighbouring_blocks_are_joined_before_layers_multiply_them() -> None:
    """G01: a long prompt in a tidy cache costs as much as its runs, not as its blocks times layers."""
    found = plan_of("LBHNC", "LBHNC", blocks=4096, layers=64)
    every = np.arange(2000)
    assert len(expand(found, 0, every, every)) == 64
    assert peak_bytes(found, every, every) <= 8 * 24 * len(every)


def test_two_producers_fill_one_consumer_exactly() -> None:
    """V09: TP 2 to TP 1 by the same operation; each producer rank writes its heads, together all of them."""

    def part(address: int, head_first: int, heads: int) -> GroupSpec:
        group, _ = describe(
            "LBHNC",
            layers=2,
            blocks=4,
            heads=heads,
            block_tokens=2,
            content_bytes=4,
            address=address,
            head_first=head_first,
            heads_total=4,
        )
        return group

    target = part(TARGET, 0, 4)
    plans = [CopyPlan((join(part(SOURCE << rank, 2 * rank, 2), target),)) for rank in (0, 1)]
    written = [
        place + byte
        for found in plans
        for _, place, length in triples(expand(found, 0, ids(0, 1, 2, 3), ids(3, 2, 1, 0)))
        for byte in range(length)
    ]
    assert sorted(written) == list(range(TARGET, TARGET + 2 * 4 * 4 * 2 * 4))
