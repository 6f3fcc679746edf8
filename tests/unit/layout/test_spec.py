"""Descriptions of caches: what is valid, what travels, and what strangers may not say."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvferry.errors import PeerError, UsageError
from kvferry.ids import Rank
from kvferry.layout import spec as spec_module
from kvferry.layout.describe import STRIDE_ORDERS, describe
from kvferry.layout.runs import Region
from kvferry.layout.spec import (
    SPEC_BYTES_MAX,
    CacheSpec,
    GroupSpec,
    Plane,
    decode_spec,
    encode_spec,
    validate,
)
from tests.support.caches import cache_of, changed, with_group
from tests.support.engines import Sizes, cache_of_rank

ADDRESS = 1 << 40


def group_of(order: str = "LBHNC", **changes: Any) -> tuple[GroupSpec, Region]:
    sizes = {"layers": 2, "blocks": 5, "heads": 3, "block_tokens": 4, "content_bytes": 8}
    return describe(order, address=ADDRESS, **(sizes | changes))


def spec_of(order: str = "LBHNC", **changes: Any) -> CacheSpec:
    return cache_of(*group_of(order, **changes), facts={"attention_backend": "CPU"})


# --- entries, tables, stages -----------------------------------------------------------------------


def replaced(spec: CacheSpec, index: int, **changes: Any) -> CacheSpec:
    """The description with other fields in one of its groups."""
    groups = list(spec.groups)
    groups[index] = msgspec.structs.replace(groups[index], **changes)
    return changed(spec, groups=tuple(groups))


def rich() -> CacheSpec:
    """K and V of unlike size apart, scales, and windows; two block tables, two stages."""
    sizes = Sizes(split=(2, 1), form="uneven", window=8, scales=True)
    return cache_of_rank(sizes, Rank(0, 0), ADDRESS)


def test_entries_of_one_block_table_are_one_cache_group() -> None:
    spec = rich()
    assert [[group.kind for group in groups] for groups in spec.tables] == [
        ["full", "full", "scales"],
        ["sliding_window", "sliding_window", "scales"],
    ]
    assert (spec.block_tokens, spec.block_counts) == ((2, 2), (6, 6))
    assert spec.groups[0].stages == (("layer0",), ("layer2",))
    assert [group.whole_bytes for group in spec.groups[:3]] == [4, 4, 1]
    assert decode_spec(encode_spec(spec)) == spec


def test_groups_that_state_no_table_have_their_own() -> None:
    spec = spec_of()
    assert spec.tables == ((spec.groups[0],),)
    twice = changed(spec, groups=spec.groups * 2)
    assert len(twice.tables) == 2


def test_a_stage_without_layers_of_a_group_says_so() -> None:
    sizes = Sizes(split=(1, 1), window=8)
    first = cache_of_rank(sizes, Rank(0, 0), ADDRESS)
    assert [len(group.planes) for group in first.groups] == [1, 0]


@pytest.mark.parametrize(
    ("index", "changes", "problem"),
    [
        (1, {"table": 1}, r"groups\[2\]\.table: is 0; number tables in order"),
        (0, {"table": -1}, r"groups\[0\]\.table: is -1"),
        (3, {"table": 2}, r"groups\[3\]\.table: is 2"),
        (1, {"block_tokens": 1}, "table 0: block_tokens: is 1 in one of its groups and 2 in another"),
        (1, {"block_count": 5}, "table 0: block_count"),
        (4, {"window_tokens": 9}, "table 1: window_tokens: is 9 in one of its groups and 8 in another"),
        (0, {"element_bytes": 5}, "parts of 'layer0' differ in element_bytes"),
        (1, {"content_bytes": 2}, "'layer0' has 3 bytes of content, element_bytes says 4"),
        (0, {"stages": (("layer0",),)}, r"groups\[0\]\.stages: has 1 entries, pp_size is 2"),
        (0, {"stages": (("layer0",), ("layer0",))}, r"'layer0' is there twice"),
        (0, {"stages": (("layer2",), ("layer0",))}, r"stages\[0\]: is not what the planes"),
        (0, {"stages": (("layer0",), ("",))}, r"stages \(a name\)"),
        (0, {"element_bytes": -1}, "element_bytes"),
        (0, {"window_tokens": -1}, "window_tokens"),
        (
            0,
            {"engine_block_tokens": 3},
            r"groups\[0\]\.engine_block_tokens: must be a multiple of the 2 tokens",
        ),
        (0, {"engine_block_tokens": -2}, r"groups\[0\]\.engine_block_tokens: must be from 0"),
        (4, {"engine_block_tokens": 4}, "table 1: engine_block_tokens: is 4 in one of its groups and 0"),
        (0, {"tile_tokens": 0}, r"groups\[0\]\.tile_tokens: must be from 1 to 2"),
        (0, {"tile_tokens": 3}, r"groups\[0\]\.tile_tokens: must be from 1 to 2"),
        (0, {"rows": 0}, r"groups\[0\]\.rows"),
        (0, {"rows": 2, "row_stride": 0}, r"groups\[0\]\.\w+_stride"),
        (0, {"row_stride": -1}, r"groups\[0\]\.row_stride"),
    ],
)
def test_entries_that_contradict_each_other_are_refused(
    index: int, changes: dict[str, Any], problem: str
) -> None:
    """V04 V07: a description that exists is one that a plan can be made of."""
    with pytest.raises(UsageError, match=problem):
        replaced(rich(), index, **changes)


def test_a_plane_within_a_layer_twice_is_refused() -> None:
    spec = cache_of_rank(Sizes(form="apart"), Rank(0, 0), ADDRESS)
    planes = tuple(msgspec.structs.replace(plane, content_first=0) for plane in spec.groups[0].planes)
    with pytest.raises(UsageError, match=r"planes\[1\]\.name: 'layer0' is there twice"):
        replaced(spec, 0, planes=planes)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"tile_tokens": 3}, "must divide the 4 tokens of a block"),
        ({"tile_tokens": 4, "token_stride": 16}, "neither holes nor rows"),
        ({"tile_tokens": 4, "content_bytes": 4, "rows": 2, "row_stride": 4}, "neither holes nor rows"),
    ],
)
def test_tiles_are_dense(changes: dict[str, Any], problem: str) -> None:
    group, region = group_of("BLHNC")
    with pytest.raises(UsageError, match=problem):
        cache_of(msgspec.structs.replace(group, **changes), region)


@pytest.mark.parametrize(("first", "missing"), [(1, 1), (3, 2)])
def test_content_that_overlaps_or_has_a_gap_is_refused(first: int, missing: int) -> None:
    spec = cache_of_rank(Sizes(form="apart"), Rank(0, 0), ADDRESS)
    planes = tuple(
        msgspec.structs.replace(plane, content_first=first) if plane.content_first else plane
        for plane in spec.groups[0].planes
    )
    with pytest.raises(UsageError, match=f"content of 'layer0' from byte {missing} on is not there once"):
        replaced(spec, 0, planes=planes)


def test_names_of_stages_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """S01: they are a stranger's, like all else."""
    spec = rich()
    monkeypatch.setattr(spec_module, "PLANES_MAX", 8)
    with pytest.raises(UsageError, match="number of names in stages: must be from 0 to 8, not 9"):
        validate(spec)


# --- describing ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "layer", "block", "head", "token"),
    [
        ("LBHNC", 480, 96, 32, 8),
        ("LBNHC", 480, 96, 8, 24),
        ("LHBNC", 480, 32, 160, 8),
        ("BLHNC", 96, 192, 32, 8),
        ("BLNHC", 96, 192, 8, 24),
        ("BHLNC", 32, 192, 64, 8),
    ],
)
def test_each_stride_order_has_its_strides(order: str, layer: int, block: int, head: int, token: int) -> None:
    group, region = group_of(order)
    assert group.planes[1].address - group.planes[0].address == layer
    assert (group.block_stride, group.head_stride, group.token_stride) == (block, head, token)
    assert region == Region(ADDRESS, 2 * 5 * 3 * 4 * 8, 0, "DRAM")
    assert group.block_bytes == 2 * 3 * 4 * 8


def test_all_orders_of_the_engine_are_covered() -> None:
    assert STRIDE_ORDERS == ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


def test_the_builder_passes_on_what_it_is_told() -> None:
    group, region = group_of(
        head_first=3, heads_total=12, kind="mla", layer_name="l{}", device=2, memory="VRAM"
    )
    assert (group.kind, group.head_first, group.head_count, group.heads_total) == ("mla", 3, 3, 12)
    assert group.planes == (Plane("l0", ADDRESS, 2), Plane("l1", ADDRESS + 480, 2))
    assert (region.device, region.kind) == (2, "VRAM")


@pytest.mark.parametrize("order", ["", "LBHN", "CLBHN", "LBHNX", "LLHNC", "LBHNCC"])
def test_an_impossible_order_is_refused(order: str) -> None:
    with pytest.raises(UsageError, match=r"order: .*ends in C"):
        group_of(order)


@pytest.mark.parametrize("order", STRIDE_ORDERS)
def test_the_last_element_ends_where_the_extent_ends(order: str) -> None:
    group, region = group_of(order)
    last = group.planes[-1].address + group.extent_bytes
    assert last == region.address + region.bytes
    validate(cache_of(group, region))


# --- what can travel -----------------------------------------------------------------------------


@pytest.mark.parametrize("order", STRIDE_ORDERS)
def test_a_description_survives_the_journey(order: str) -> None:
    spec = changed(spec_of(order), rank=Rank(1, 2), tp_size=4, pp_size=2)
    assert decode_spec(encode_spec(spec)) == spec


def test_a_newer_peer_may_say_more() -> None:
    body = msgspec.to_builtins(spec_of()) | {"version": 7, "planets": 9}
    assert decode_spec(msgspec.msgpack.encode(body)).version == 7


def test_too_long_an_encoding_is_neither_made_nor_read(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode_spec(spec_of())
    with pytest.raises(PeerError, match=f"at most {SPEC_BYTES_MAX}"):
        decode_spec(bytes(SPEC_BYTES_MAX + 1))
    monkeypatch.setattr(spec_module, "SPEC_BYTES_MAX", len(data))
    assert encode_spec(spec_of()) == data
    assert decode_spec(data) == spec_of()
    monkeypatch.setattr(spec_module, "SPEC_BYTES_MAX", len(data) - 1)
    with pytest.raises(UsageError, match=f"has {len(data)} bytes"):
        encode_spec(spec_of())
    with pytest.raises(PeerError, match=f"has {len(data)} bytes"):
        decode_spec(data)


def test_the_largest_real_cache_fits() -> None:
    group, region = group_of("LBHNC", layers=spec_module.PLANES_MAX, blocks=2)
    size = region.bytes // len(group.planes)
    regions = tuple(Region(plane.address, size) for plane in group.planes)
    spec = cache_of(group, regions)
    assert decode_spec(encode_spec(spec)) == spec


# --- what strangers may not say ------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xc1",
        b"\x91" * 50_000,
        b"\x81\xa1x" + b"\x91" * 50_000,
        b"\x81\xa5model\xa2\xff\xff",
        b"\xdf\xff\xff\xff\xff",
    ],
)
def test_stray_bytes_are_a_peer_error(data: bytes) -> None:
    """S03 S04: bytes of a stranger never raise anything else."""
    with pytest.raises(PeerError, match="cache description"):
        decode_spec(data)


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.9, 0.999])
def test_a_truncated_description_is_a_peer_error(keep: float) -> None:
    data = encode_spec(spec_of())
    with pytest.raises(PeerError):
        decode_spec(data[: int(len(data) * keep)])


GROUP_FIELDS = [
    "block_tokens",
    "block_count",
    "block_stride",
    "head_stride",
    "token_stride",
    "content_bytes",
    "head_count",
    "head_first",
    "heads_total",
]


@pytest.mark.parametrize("value", [-1, 1 << 63, "x", None, [], 1.5])
@pytest.mark.parametrize("field", GROUP_FIELDS)
def test_a_hostile_number_names_its_field(field: str, value: object) -> None:
    """S01: numbers of a peer are bounded before anything is sized by them."""
    body = msgspec.to_builtins(spec_of())
    body["groups"][0][field] = value
    with pytest.raises(PeerError, match=field):
        decode_spec(msgspec.msgpack.encode(body))


@pytest.mark.parametrize("field", [*CacheSpec.__struct_fields__])
def test_a_field_of_the_wrong_type_is_named(field: str) -> None:
    body = msgspec.to_builtins(spec_of())
    body[field] = 1.5
    with pytest.raises(PeerError, match=field):
        decode_spec(msgspec.msgpack.encode(body))


@pytest.mark.parametrize(
    "field", [name for name in CacheSpec.__struct_fields__ if name not in {"facts", "version"}]
)
def test_a_missing_field_is_named(field: str) -> None:
    body = msgspec.to_builtins(spec_of())
    del body[field]
    with pytest.raises(PeerError, match=field):
        decode_spec(msgspec.msgpack.encode(body))


def test_the_reason_is_the_one_that_our_own_mistakes_get() -> None:
    body = msgspec.to_builtins(spec_of())
    body["groups"][0]["planes"][1][1] = 5
    with pytest.raises(PeerError, match=r"groups\[0\]\.planes\[1\].* lies in no single region"):
        decode_spec(msgspec.msgpack.encode(body))


# --- what is possible ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 0}, "version: must be from 1"),
        ({"model": ""}, "model: must be printable"),
        ({"model": "m" * 1025}, "model: must be printable"),
        ({"dtype": "a\nb"}, "dtype: must be printable"),
        ({"kv_dtype": ""}, "kv_dtype: must be printable"),
        ({"tp_size": 0}, "tp_size: must be from 1 to 1024"),
        ({"pp_size": 1025}, "pp_size: must be from 1 to 1024"),
        ({"rank": Rank(0, 1)}, r"rank\.tp: must be from 0 to 0, not 1"),
        ({"rank": Rank(-1, 0)}, r"rank\.pp: must be from 0 to 0, not -1"),
        ({"facts": {str(i): "" for i in range(65)}}, "number of facts"),
        ({"facts": {"": "x"}}, "facts .a key."),
        ({"facts": {"backend": "x" * 1025}}, r"facts\.backend"),
        ({"groups": ()}, "number of groups: must be from 1 to 64, not 0"),
        ({"regions": ()}, "number of regions"),
        ({"regions": (Region(-1, 5),)}, r"regions\[0\]\.address"),
        ({"regions": (Region(0, 0),)}, r"regions\[0\]\.bytes"),
        ({"regions": (Region(0, 1, 0, ""),)}, r"regions\[0\]\.kind"),
        ({"regions": (Region(9, 9), Region(0, 10))}, "regions: those at 0x0 and 0x9 overlap"),
        ({"regions": (Region(0, 10),)}, "lies in no single region"),
        ({"regions": (Region(ADDRESS + 1, 960),)}, "lies in no single region"),
        ({"regions": (Region(ADDRESS, 959),)}, "lies in no single region"),
        ({"regions": (Region(ADDRESS, 960, 1),)}, r"planes\[0\]\.device: is 0, its region's is 1"),
    ],
)
def test_an_impossible_cache_names_its_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"cache description: .*{message}"):
        changed(spec_of(), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": ""}, "kind: must be printable"),
        ({"planes": ()}, "planes: is empty|number of planes"),
        ({"planes": (Plane("", ADDRESS),)}, r"planes\[0\]\.name"),
        ({"planes": (Plane("a", 1 << 63),)}, r"planes\[0\]\.address"),
        (
            {"planes": (Plane("a", ADDRESS), Plane("a", ADDRESS + 480))},
            r"planes\[1\]\.name: 'a' is there twice",
        ),
        ({"planes": (Plane("a", ADDRESS), Plane("b", ADDRESS))}, "elements of two planes overlap"),
        ({"planes": (Plane("a", ADDRESS), Plane("b", ADDRESS + 479))}, "elements of two planes overlap"),
        ({"heads_total": 2}, "head_count: must be from 1 to 2, not 3"),
        ({"head_first": 1}, "head_first: must be from 0 to 0, not 1"),
        ({"token_stride": 7}, "token_stride: is 7, less than the 8 bytes"),
        ({"token_stride": 0}, "token_stride: is 0, less than the 8 bytes"),
        ({"head_stride": 31}, "head_stride: is 31, less than the 32 bytes"),
        ({"block_stride": 95}, "block_stride: is 95, less than the 96 bytes"),
    ],
)
def test_an_impossible_group_names_its_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        with_group(spec_of(), **changes)


def test_a_group_without_planes_is_refused_beside_one_with_planes() -> None:
    spec = spec_of()
    empty = msgspec.structs.replace(spec.groups[0], planes=())
    with pytest.raises(UsageError, match=r"groups\[1\]\.planes: is empty"):
        changed(spec, groups=(spec.groups[0], empty))


def test_planes_of_all_groups_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of()
    monkeypatch.setattr(spec_module, "PLANES_MAX", 4)
    changed(spec, groups=spec.groups * 2)
    with pytest.raises(UsageError, match="number of planes: must be from 1 to 4, not 6"):
        changed(spec, groups=spec.groups * 3)


def test_groups_may_share_memory() -> None:
    """Hybrid caches: blocks of two groups are never in use at the same place at the same time."""
    spec = spec_of()
    assert changed(spec, groups=spec.groups * 2).groups == spec.groups * 2


def test_a_stride_without_a_second_element_means_nothing() -> None:
    group, region = group_of(blocks=1, heads=1, block_tokens=1, heads_total=1)
    free = msgspec.structs.replace(group, block_stride=0, head_stride=5, token_stride=1)
    assert cache_of(free, region).groups[0].extent_bytes == 8


def test_k_and_v_may_lie_apart_in_each_block() -> None:
    """`[block, 2, head, token, content]` per layer: two planes that reach into each other."""
    group, region = group_of("BLHNC", layers=2)
    planes = (Plane("a:k", ADDRESS), Plane("a:v", ADDRESS + 96))
    assert len(cache_of(msgspec.structs.replace(group, planes=planes), region).groups[0].planes) == 2


@pytest.mark.parametrize("shift", [1, 31, 33, 95, 97])
@pytest.mark.parametrize("order", ["BLHNC", "BLNHC", "BHLNC"])
def test_interleaved_planes_that_touch_are_refused(order: str, shift: int) -> None:
    """Every shift off the layer's own place makes elements overlap, within a block or across it."""
    group, region = group_of(order)
    planes = (Plane("a", ADDRESS), Plane("b", ADDRESS + shift))
    with pytest.raises(UsageError, match="elements of two planes overlap"):
        cache_of(msgspec.structs.replace(group, planes=planes), Region(ADDRESS, region.bytes + 200))
