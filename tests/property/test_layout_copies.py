"""Copies between caches of any strides, against an account that looks at every byte.

Goal: every byte that the target needs lands exactly once and from the right place, nothing leaves registered
memory, and no two runs are left that could be one. Method: draw two caches with padded strides in any order,
registered in one piece or many, and fragmented block lists; compare with plain loops over elements.
"""

from __future__ import annotations

from itertools import pairwise, product
from random import Random

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvferry.errors import UsageError
from kvferry.layout.describe import STRIDE_ORDERS, describe
from kvferry.layout.descriptors import expand
from kvferry.layout.plan import CopyPlan, join, plan
from kvferry.layout.runs import Region, Runs, merge
from kvferry.layout.spec import CacheSpec, GroupSpec, decode_spec, encode_spec
from tests.support.caches import (
    Memory,
    Shape,
    cache_of,
    element,
    expected_bytes,
    moved_bytes,
    region_of,
    runs_of,
    triples,
)

Pairs = list[tuple[int, int]]
UNTOUCHED = 0xEE


def content(layer: str, head: int, token: int, size: int) -> list[int]:
    """What the KV of one element is, whoever holds it."""
    return list(Random(f"{layer}/{head}/{token}").randbytes(size))


def check(source: CacheSpec, target: CacheSpec, runs: Runs, pairs: Pairs) -> None:
    """Everything that is promised of an expanded plan."""
    assert moved_bytes(runs) == expected_bytes(source.groups[0], target.groups[0], pairs)
    places = []
    for start, place, length in triples(runs):
        from_region = region_of(source.regions, start, length)
        to_region = region_of(target.regions, place, length)
        assert from_region is not None, "a run leaves the source's memory"
        assert to_region is not None, "a run leaves the target's memory"
        places.append((start, place, length, from_region, to_region))
    assert [place[0] for place in places] == sorted(place[0] for place in places)
    for one, other in pairwise(places):
        touching = one[0] + one[2] == other[0] and one[1] + one[2] == other[1]
        assert not (touching and one[3:] == other[3:]), "two runs could be one"


def blocks_of(pairs: Pairs) -> tuple[np.ndarray, np.ndarray]:
    table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


# --- every pair of stride orders -----------------------------------------------------------------


@pytest.mark.parametrize("fragmented", [False, True])
@pytest.mark.parametrize(("ours", "theirs"), list(product(STRIDE_ORDERS, STRIDE_ORDERS)))
def test_all_stride_orders_carry_real_bytes(ours: str, theirs: str, fragmented: bool) -> None:
    """V09: the KV is filled with f(layer, head, token); the target's is f too, and nothing else changes."""
    sizes = {"layers": 3, "heads": 2, "block_tokens": 2, "content_bytes": 4, "layer_name": "l{}"}
    source = cache_of(*describe(ours, blocks=9, address=1 << 12, **sizes))  # type: ignore[arg-type]
    target = cache_of(*describe(theirs, blocks=7, address=1 << 20, **sizes))  # type: ignore[arg-type]
    pairs = [(4, 6), (8, 0), (1, 3), (2, 4)] if fragmented else [(3, 1), (4, 2), (5, 3), (6, 4)]
    group = source.groups[0]
    every = list(product([plane.name for plane in group.planes], range(2), range(len(pairs) * 2)))
    source_memory = Memory(source.regions)
    for name, head, token in every:
        address = element(group, name, pairs[token // 2][0], head, token % 2)
        source_memory.view(address, 4)[:] = content(name, head, token, 4)

    target_memory = Memory(target.regions, UNTOUCHED)
    expected = Memory(target.regions, UNTOUCHED)
    runs = expand(plan(source, target), 0, *blocks_of(pairs))
    target_memory.receive(runs, source_memory)

    for name, head, token in every:
        address = element(target.groups[0], name, pairs[token // 2][1], head, token % 2)
        expected.view(address, 4)[:] = content(name, head, token, 4)
    (region,) = target.regions
    assert np.array_equal(
        target_memory.view(region.address, region.bytes), expected.view(region.address, region.bytes)
    )
    check(source, target, runs, pairs)


# --- any strides ---------------------------------------------------------------------------------


@st.composite
def shapes(draw: st.DrawFn, sizes: dict[str, int], address: int) -> Shape:
    """A cache of these sizes in any order, with room between its elements now and then."""
    padding = st.sampled_from([0, 0, 0, 1, 3])
    return Shape(
        order="".join(draw(st.permutations("LBHN"))) + "C",
        counts=sizes | {"B": draw(st.integers(1, 6))},
        padding_bytes={axis: draw(padding) for axis in "LBHNC"},
        address=address + draw(st.integers(0, 5)),
        split=draw(st.booleans()),
    )


@st.composite
def pairs_of_caches(draw: st.DrawFn) -> tuple[CacheSpec, CacheSpec]:
    """Two caches of equal content and unlike memory; the target's layers in any order."""
    sizes = {axis: draw(st.integers(1, 3)) for axis in "LHNC"}
    names = [f"l{index}" for index in range(sizes["L"])]
    source = draw(shapes(sizes, 1 << 12)).build(names)
    target = draw(shapes(sizes, 1 << 20)).build(draw(st.permutations(names)))
    return cache_of(*source), cache_of(*target)


@st.composite
def block_pairs(draw: st.DrawFn, source: GroupSpec, target: GroupSpec) -> Pairs:
    """Distinct blocks on each side; drawn in order or not, so that some of them are neighbours."""
    count = draw(st.integers(0, min(source.block_count, target.block_count)))
    sides = []
    for group in (source, target):
        blocks = list(range(group.block_count))
        kind = draw(st.sampled_from(["first", "sorted", "any"]))
        chosen = draw(st.permutations(blocks)) if kind != "first" else blocks
        sides.append(sorted(chosen[:count]) if kind == "sorted" else chosen[:count])
    return list(zip(*sides, strict=True))


@settings(max_examples=3 * settings().max_examples)
@given(st.data())
def test_every_byte_lands_once_from_the_right_place(data: st.DataObject) -> None:
    """V08 V09 G01: any strides, any regions, any fragmentation."""
    source, target = data.draw(pairs_of_caches())
    pairs = data.draw(block_pairs(source.groups[0], target.groups[0]))
    found = plan(source, target)
    runs = expand(found, 0, *blocks_of(pairs))
    assert runs.bytes == found.bytes_per_block(0) * len(pairs) == source.groups[0].block_bytes * len(pairs)
    check(source, target, runs, pairs)


@given(st.data())
def test_parts_of_heads_and_layers_meet(data: st.DataObject) -> None:
    """V06 V09: ranks that hold other heads or other layers exchange exactly what both have."""
    total = 4
    names = ["a", "b", "c"]
    sides: list[CacheSpec] = []
    for address in (1 << 12, 1 << 20):
        first = data.draw(st.integers(0, total - 1))
        held = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
        shape = Shape(
            order="".join(data.draw(st.permutations("LBHN"))) + "C",
            counts={"L": len(held), "B": 3, "H": data.draw(st.integers(1, total - first)), "N": 2, "C": 2},
            padding_bytes=dict.fromkeys("LBHNC", data.draw(st.sampled_from([0, 1]))),
            address=address,
            head_first=first,
            heads_total=total,
        )
        sides.append(cache_of(*shape.build(held)))
    source, target = sides
    pairs = data.draw(block_pairs(source.groups[0], target.groups[0]))
    expected = expected_bytes(source.groups[0], target.groups[0], [(0, 0)])
    if expected:
        found = CopyPlan((join(source.groups[0], target.groups[0]),))
        check(source, target, expand(found, 0, *blocks_of(pairs)), pairs)


@given(pairs_of_caches())
def test_any_description_survives_the_journey(caches: tuple[CacheSpec, CacheSpec]) -> None:
    for cache in caches:
        assert decode_spec(encode_spec(cache)) == cache


@given(st.data())
def test_elements_share_no_byte_in_what_is_accepted(data: st.DataObject) -> None:
    """A description whose elements overlap is refused."""
    strides = {axis: data.draw(st.integers(0, 24)) for axis in ("block", "head", "token")}
    group, _ = describe("LBHNC", layers=2, blocks=2, heads=2, block_tokens=2, content_bytes=2, address=64)
    fields = {name: getattr(group, name) for name in group.__struct_fields__}
    planes = tuple(type(plane)(plane.name, 64 + data.draw(st.integers(0, 40))) for plane in group.planes)
    fields |= {f"{axis}_stride": stride for axis, stride in strides.items()} | {"planes": planes}
    loose = GroupSpec(**fields)
    taken = [
        element(loose, plane.name, block, head, token) + byte
        for plane in planes
        for block, head, token, byte in product(range(2), repeat=4)
    ]
    # Apart, they may still be refused: only nested strides are accepted, and the shapes above draw those.
    assume(len(set(taken)) < len(taken))
    with pytest.raises(UsageError, match=r"stride|overlap"):
        cache_of(loose, Region(0, 4096))


# --- merging -------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2), st.integers(0, 2)), max_size=12), st.randoms()
)
def test_merging_changes_no_byte(steps: list[tuple[int, int, int]], random: Random) -> None:
    entries = []
    source, target = 0, 1000
    for length, source_gap, target_gap in steps:
        source, target = source + source_gap, target + target_gap
        entries.append((source, target, length))
        source, target = source + length, target + length
    random.shuffle(entries)
    before = runs_of(entries)
    after = merge(before)
    assert moved_bytes(after) == moved_bytes(before)
    gaps = sum(1 for _, source_gap, target_gap in steps[1:] if source_gap or target_gap)
    assert len(after) == (gaps + 1 if steps else 0)
