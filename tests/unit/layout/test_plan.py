"""The plan of one pair of ranks: how many pieces, how long, from where to where."""

from __future__ import annotations

import msgspec
import pytest

from kvferry.errors import GeometryError
from kvferry.ids import Rank
from kvferry.layout import plan as plan_module
from kvferry.layout.describe import STRIDE_ORDERS, describe
from kvferry.layout.plan import CopyPlan, join, plan
from kvferry.layout.spec import BLOCK_TOKENS_MAX, CacheSpec, GroupSpec, Plane
from tests.support.caches import cache_of, changed, triples
from tests.support.engines import Sizes, caches_of

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 5, 4, 2, 8
SOURCE, TARGET = 1 << 20, 1 << 40


def group_of(
    order: str, address: int, heads: int = HEADS, head_first: int = 0, heads_total: int = 8
) -> GroupSpec:
    group, _ = describe(
        order,
        layers=LAYERS,
        blocks=BLOCKS,
        heads=heads,
        block_tokens=TOKENS,
        content_bytes=CONTENT,
        address=address,
        head_first=head_first,
        heads_total=heads_total,
    )
    return group


def spec_of(order: str, address: int) -> CacheSpec:
    group = group_of(order, address, heads_total=HEADS)
    _, region = describe(
        order,
        layers=LAYERS,
        blocks=BLOCKS,
        heads=HEADS,
        block_tokens=TOKENS,
        content_bytes=CONTENT,
        address=address,
    )
    return cache_of(group, region)


@pytest.mark.parametrize(
    ("source", "target", "pieces"),
    [
        ("LBHNC", "LBHNC", LAYERS),
        ("LBNHC", "LBNHC", LAYERS),
        ("LHBNC", "LHBNC", LAYERS * HEADS),
        ("BLHNC", "BLHNC", 1),
        ("BLNHC", "BLNHC", 1),
        ("BHLNC", "BHLNC", 1),
        ("BLHNC", "LBHNC", LAYERS),
        ("BLNHC", "LBNHC", LAYERS),
        ("BHLNC", "LHBNC", LAYERS * HEADS),
        ("BHLNC", "BLHNC", LAYERS * HEADS),
        ("LBHNC", "LBNHC", LAYERS * HEADS * TOKENS),
    ],
)
def test_a_block_falls_into_as_few_pieces_as_both_layouts_allow(
    source: str, target: str, pieces: int
) -> None:
    """G02: block-outermost layouts on both sides need one descriptor per block for all layers."""
    found = plan(spec_of(source, SOURCE), spec_of(target, TARGET))
    assert found.pieces(0) == pieces
    assert found.bytes_per_block(0) == LAYERS * HEADS * TOKENS * CONTENT


def test_pieces_are_exact() -> None:
    found = plan(spec_of("BLHNC", SOURCE), spec_of("LBHNC", TARGET)).groups[0]
    (part,) = found.parts
    per_layer = HEADS * TOKENS * CONTENT
    assert triples(part.pieces) == [
        (SOURCE + layer * per_layer, TARGET + layer * BLOCKS * per_layer, per_layer)
        for layer in range(LAYERS)
    ]
    assert (part.source.block_bytes, part.target.block_bytes) == (LAYERS * per_layer, per_layer)
    assert (found.source_block_count, found.target_block_count) == (BLOCKS, BLOCKS)


@pytest.mark.parametrize("order", STRIDE_ORDERS)
def test_the_plan_back_is_the_plan_turned_around(order: str) -> None:
    """Either engine can be producer or consumer."""
    (there,) = plan(spec_of(order, SOURCE), spec_of("LBNHC", TARGET)).groups[0].parts
    (back,) = plan(spec_of("LBNHC", TARGET), spec_of(order, SOURCE)).groups[0].parts
    assert sorted((target, source, length) for source, target, length in triples(there.pieces)) == triples(
        back.pieces
    )


def test_planes_meet_by_name() -> None:
    """V11: never by their place in a list."""
    source = group_of("LBHNC", SOURCE)
    target = group_of("LBHNC", TARGET)
    names = [plane.name for plane in target.planes]
    turned = [Plane(name, plane.address) for name, plane in zip(names[::-1], target.planes, strict=True)]
    (found,) = join(source, msgspec.structs.replace(target, planes=tuple(turned))).parts
    assert [place for _, place, _ in triples(found.pieces)] == [
        plane.address for plane in target.planes[::-1]
    ]


def test_only_common_planes_are_planned() -> None:
    source, target = group_of("LBHNC", SOURCE), group_of("LBHNC", TARGET)
    (found,) = join(source, msgspec.structs.replace(target, planes=target.planes[1:2])).parts
    assert triples(found.pieces) == [(source.planes[1].address, target.planes[1].address, 64)]


@pytest.mark.parametrize(
    ("source_heads", "target_heads", "pieces"),
    [
        ((0, 4), (0, 8), [(0, 0, 64)]),
        ((4, 4), (0, 8), [(0, 64, 64)]),
        ((0, 8), (4, 4), [(64, 0, 64)]),
        ((2, 4), (4, 4), [(32, 0, 32)]),
        ((3, 1), (3, 1), [(0, 0, 16)]),
    ],
)
def test_heads_are_intersected_by_range(
    source_heads: tuple[int, int], target_heads: tuple[int, int], pieces: list[tuple[int, int, int]]
) -> None:
    """V06 V08: a rank sends the heads that the other side has, from where they are to where they go."""
    source = group_of("LBHNC", SOURCE, heads=source_heads[1], head_first=source_heads[0])
    target = group_of("LBHNC", TARGET, heads=target_heads[1], head_first=target_heads[0])
    first = triples(join(source, target).parts[0].pieces)[:1]
    assert [(start - SOURCE, place - TARGET, length) for start, place, length in first] == pieces


@pytest.mark.parametrize(("changed_field", "field"), [("content_bytes", "whole_bytes"), ("heads_total",) * 2])
def test_groups_of_unlike_content_are_refused(changed_field: str, field: str) -> None:
    source = group_of("LBHNC", SOURCE)
    target = msgspec.structs.replace(group_of("LBHNC", TARGET), **{changed_field: 16})
    with pytest.raises(GeometryError) as caught:
        join(source, target)
    assert (caught.value.field, caught.value.ours, caught.value.theirs) == (field, getattr(source, field), 16)


def test_groups_with_nothing_in_common_have_nothing_to_copy() -> None:
    source = group_of("LBHNC", SOURCE, heads=4)
    stranger = msgspec.structs.replace(source, planes=(Plane("draft", TARGET),))
    for other in (group_of("LBHNC", TARGET, heads=4, head_first=4), stranger):
        found = CopyPlan((join(source, other),))
        assert found.moves_nothing
        assert (found.pieces(0), found.bytes_per_block(0), found.bytes) == (0, 0, 0)
        assert found.slice_tokens(1, 1) == BLOCK_TOKENS_MAX, "it limits nobody"


def test_a_block_in_too_many_elements_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    elements = LAYERS * HEADS * TOKENS
    source, target = group_of("LBHNC", SOURCE), group_of("LBNHC", TARGET)
    monkeypatch.setattr(plan_module, "PIECES_MAX", elements)
    assert join(source, target).cell_pieces == elements
    monkeypatch.setattr(plan_module, "PIECES_MAX", elements - 1)
    with pytest.raises(GeometryError, match="pieces"):
        join(source, target)


def test_contents_of_unlike_length_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """K and V of unlike size against both together: two lengths, each in as many elements."""
    sizes = Sizes(form="uneven"), Sizes()
    monkeypatch.setattr(plan_module, "PIECES_MAX", 1000)
    pieces = plan_between(*sizes, Rank(0, 0), Rank(0, 0)).pieces(0)
    monkeypatch.setattr(plan_module, "PIECES_MAX", pieces // 2 - 1)
    with pytest.raises(GeometryError, match="pieces"):
        plan_between(*sizes, Rank(0, 0), Rank(0, 0))


def test_caches_that_cannot_be_joined_have_no_plan() -> None:
    """V03: refused with the first field that differs."""
    with pytest.raises(GeometryError) as caught:
        plan(spec_of("LBHNC", SOURCE), changed(spec_of("LBHNC", TARGET), dtype="bfloat16", model="other"))
    assert caught.value.field == "model"


def test_each_group_has_its_plan() -> None:
    full, full_region = describe(
        "LBHNC", layers=2, blocks=4, heads=1, block_tokens=4, content_bytes=8, address=SOURCE
    )
    window, window_region = describe(
        "BLHNC",
        layers=3,
        blocks=4,
        heads=1,
        block_tokens=4,
        content_bytes=4,
        address=TARGET,
        kind="sliding_window",
    )
    spec = cache_of([full, window], [full_region, window_region])
    found = plan(spec, spec)
    assert [found.bytes_per_block(group) for group in (0, 1)] == [64, 48]
    assert [found.pieces(group) for group in (0, 1)] == [2, 1]


# --- what a plan is for -------------------------------------------------------------------------


def plan_between(ours: Sizes, theirs: Sizes, source: Rank, target: Rank, turn: int = 0) -> CopyPlan:
    return plan(caches_of(ours)[source], caches_of(theirs, 1 << 40)[target], turn)


def test_a_replica_that_serves_nobody_has_an_empty_plan() -> None:
    """MLA: the latent is on every rank; one sends it."""
    plans = [
        plan_between(Sizes(tp=4, heads=1), Sizes(heads=1), Rank(0, tp), Rank(0, 0), 2) for tp in range(4)
    ]
    assert [found.moves_nothing for found in plans] == [True, True, False, True]


def test_two_ranks_of_a_head_get_it_from_the_two_that_have_it() -> None:
    """V08: P TP1, D TP4, 2 heads: the sum of what is sent is what is registered."""
    sizes = Sizes(tp=4, heads=2)
    plans = [plan_between(Sizes(heads=2), sizes, Rank(0, 0), Rank(0, tp)) for tp in range(4)]
    (needed,) = {sum(g.block_bytes for g in spec.groups) for spec in caches_of(sizes).values()}
    assert [found.bytes_per_block(0) for found in plans] == [needed] * 4


@pytest.mark.parametrize(
    ("ours", "theirs", "cell", "bytes_per_block"),
    [(2, 8, 2, 128), (8, 2, 2, 32), (4, 6, 2, 96), (2, 2, 2, 32)],
)
def test_blocks_of_unequal_size_meet_in_cells(
    ours: int, theirs: int, cell: int, bytes_per_block: int
) -> None:
    """V13: (16,32)(32,16)(16,48) in small; a block of the target is what bytes are counted by."""
    found = plan_between(Sizes(block_tokens=ours), Sizes(block_tokens=theirs), Rank(0, 0), Rank(0, 0))
    assert found.groups[0].cell_tokens == cell
    assert found.bytes_per_block(0) == bytes_per_block
    assert found.block_bytes == (bytes_per_block,)


def test_k_and_v_apart_meet_k_and_v_together() -> None:
    found = plan_between(Sizes(form="apart"), Sizes(), Rank(0, 0), Rank(0, 0))
    whole = plan_between(Sizes(), Sizes(), Rank(0, 0), Rank(0, 0))
    assert found.bytes_per_block(0) == whole.bytes_per_block(0)
    assert {length for part in found.groups[0].parts for _, _, length in triples(part.pieces)} == {2}


def test_a_slice_keeps_within_bytes_and_runs() -> None:
    found = plan_between(Sizes(block_tokens=4), Sizes(), Rank(0, 0), Rank(0, 0))
    cell_bytes, pieces = found.bytes_per_block(0), found.pieces(0)
    assert found.groups[0].cell_tokens == 2
    assert found.slice_tokens(10 * cell_bytes, 1 << 20) == 20
    assert found.slice_tokens(1 << 20, 3 * pieces) == 6
    assert found.slice_tokens(1, 1) == 2, "at least a cell"


def test_the_most_demanding_group_limits_a_slice() -> None:
    found = plan_between(Sizes(split=(5,), window=8), Sizes(split=(5,), window=8), Rank(0, 0), Rank(0, 0))
    assert found.slice_tokens(1 << 20, 6 * found.pieces(0)) == 6 * 2
    assert found.pieces(1) < found.pieces(0)
