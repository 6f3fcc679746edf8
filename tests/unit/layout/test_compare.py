"""Why two caches cannot be joined: one field at a time, each named with both values and a fix."""

from __future__ import annotations

from math import gcd
from typing import Any

import msgspec
import pytest

from kvferry.errors import GeometryError
from kvferry.ids import Rank
from kvferry.layout.compare import INFORMATIONAL_FACTS, MOVABLE_KINDS, STRICT_FACTS, compare, warnings
from kvferry.layout.describe import STRIDE_ORDERS, describe
from kvferry.layout.plan import plan
from kvferry.layout.spec import CacheSpec
from tests.support.caches import cache_of, changed, with_group
from tests.support.engines import Sizes, cache_of_rank, caches_of

FACTS = {
    "attention_backend": "CPU_ATTN",
    "engine_version": "0.32.0",
    "max_model_len": "4096",
    "model_revision": "main",
    "quantization": "none",
    "speculative_config": "none",
}


def spec_of(order: str = "LBHNC", address: int = 1 << 30, **changes: Any) -> CacheSpec:
    sizes: dict[str, Any] = {"layers": 2, "blocks": 6, "heads": 2, "block_tokens": 16, "content_bytes": 8}
    group, region = describe(order, address=address, layer_name="layer{}", **(sizes | changes))
    return cache_of(group, region, facts=FACTS)


def only_error(ours: CacheSpec, theirs: CacheSpec) -> GeometryError:
    (error,) = compare(ours, theirs)
    return error


@pytest.mark.parametrize("ours", STRIDE_ORDERS)
@pytest.mark.parametrize("theirs", STRIDE_ORDERS)
def test_stride_orders_addresses_and_cache_sizes_may_differ(ours: str, theirs: str) -> None:
    assert compare(spec_of(ours), spec_of(theirs, address=4096, blocks=9)) == []
    assert warnings(spec_of(ours), spec_of(theirs, address=4096, blocks=9)) == []


@pytest.mark.parametrize(
    ("field", "changes", "ours", "theirs", "fix"),
    [
        ("model", {"model": "other"}, "tiny", "other", "same model"),
        ("dtype", {"dtype": "bfloat16"}, "float32", "bfloat16", "--dtype"),
        ("kv_dtype", {"kv_dtype": "fp8_e4m3"}, "float32", "fp8_e4m3", "--kv-cache-dtype"),
        (
            "stages",
            {"pp_size": 2},
            "1 stages, known",
            "2 stages, their layers are not stated",
            "every pipeline stage",
        ),
    ],
)
def test_one_differing_field_of_the_cache_is_named(
    field: str, changes: dict[str, Any], ours: object, theirs: object, fix: str
) -> None:
    """V04: refused with the field name, before anything else happens."""
    error = only_error(spec_of(), changed(spec_of(), **changes))
    assert (error.field, error.ours, error.theirs) == (field, ours, theirs)
    assert fix in str(error)


@pytest.mark.parametrize(
    ("field", "theirs", "values", "fix"),
    [
        ("kind", {"kind": "mla"}, ("full", "mla"), "hybrid cache"),
        ("element_bytes", {"content_bytes": 16}, (8, 16), "attention backend"),
        ("heads_total", {"heads": 4}, (2, 4), "same model"),
    ],
)
def test_one_differing_field_of_a_group_is_named(
    field: str, theirs: dict[str, Any], values: tuple[object, object], fix: str
) -> None:
    """V04"""
    error = only_error(spec_of(), spec_of(**theirs))
    assert (error.field, error.ours, error.theirs) == (f"groups[0].{field}", *values)
    assert fix in str(error)


def test_windows_of_unlike_length_are_named() -> None:
    ours, theirs = (with_group(spec_of(kind="sliding_window"), window_tokens=size) for size in (64, 128))
    error = only_error(ours, theirs)
    assert (error.field, error.ours, error.theirs) == ("groups[0].window_tokens", 64, 128)


def windowed(**changes: Any) -> CacheSpec:
    return with_group(spec_of(kind="sliding_window"), window_tokens=40, **changes)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ({}, {"engine_block_tokens": 32}),
        ({"engine_block_tokens": 48}, {"engine_block_tokens": 32}),
        ({"engine_block_tokens": 32}, {"engine_block_tokens": 64}),
    ],
)
def test_windows_whose_first_block_cannot_come_whole_are_named(
    source: dict[str, Any], target: dict[str, Any]
) -> None:
    """V13 V14: the producer has the window in its own blocks; each side says so of itself first."""
    ours, theirs = windowed(**source), windowed(**target)
    sizes = [16, 16]
    for index, one in enumerate((source, target)):
        sizes[index] = one.get("engine_block_tokens", 16)
    (sent,) = compare(ours, theirs, we_send=True)
    assert (sent.field, sent.ours, sent.theirs) == ("groups[0].block_tokens", *sizes)
    (received,) = compare(theirs, ours, we_send=False)
    assert (received.field, received.ours, received.theirs) == ("groups[0].block_tokens", *sizes[::-1])
    assert "--block-size" in str(sent)
    with pytest.raises(GeometryError, match=r"groups\[0\]\.block_tokens"):
        plan(ours, theirs)


def test_windows_may_go_into_blocks_that_divide_the_producers() -> None:
    """And what holds in one direction need not in the other."""
    larger, smaller = windowed(engine_block_tokens=64), windowed(engine_block_tokens=32)
    assert compare(larger, smaller, we_send=True) == compare(smaller, larger, we_send=False) == []
    assert compare(larger, smaller) == compare(smaller, larger) == []
    assert len(compare(larger, smaller, we_send=False)) == 1
    without = [with_group(one, window_tokens=0) for one in (smaller, larger)]
    assert compare(*without, we_send=True) == compare(*without, we_send=False) == []


@pytest.mark.parametrize("kind", ["mamba", "linear_attention", "something_new"])
def test_what_a_copy_does_not_keep_is_refused_even_when_equal(kind: str) -> None:
    """V15: the state of a state-space layer sums up its tokens; nothing says which of them are in it."""
    assert kind not in MOVABLE_KINDS
    error = only_error(spec_of(kind=kind), spec_of(kind=kind))
    assert error.field == "groups[0].kind"
    assert str(error).startswith(f"groups[0].kind is '{kind}' on both sides; ")
    assert "cannot be moved exactly" in str(error)
    fields = {error.field for error in compare(spec_of(), spec_of(kind=kind))}
    assert fields == {"groups[0].kind"}


@pytest.mark.parametrize("kind", sorted(MOVABLE_KINDS))
def test_what_can_be_moved_is_joined(kind: str) -> None:
    assert compare(spec_of(kind=kind), spec_of(kind=kind)) == []


@pytest.mark.parametrize(
    ("head_first", "heads", "shown"),
    [(2, 2, "2 to 3 of 4 on rank 0 of 2"), (0, 1, "0 to 0 of 4 on rank 0 of 2")],
)
def test_heads_that_do_not_follow_from_the_rank_are_named(head_first: int, heads: int, shown: str) -> None:
    """Both sides must find out alone who sends what."""
    ours = changed(spec_of(heads_total=4), tp_size=2)
    assert compare(ours, ours) == []
    error = only_error(ours, changed(spec_of(head_first=head_first, heads=heads, heads_total=4), tp_size=2))
    assert (error.field, error.ours, error.theirs) == ("groups[0].heads", "0 to 1 of 4 on rank 0 of 2", shown)


def test_a_size_that_cannot_split_the_heads_is_named() -> None:
    """V07: refused at the handshake, whichever side it is."""
    ours, theirs = spec_of(heads=4), changed(spec_of(heads=1, heads_total=4), tp_size=3)
    for error in (only_error(ours, theirs), only_error(theirs, ours)):
        assert error.field == "groups[0].heads"
        assert "--tensor-parallel-size" in str(error)


@pytest.mark.parametrize("sizes", [(16, 32), (32, 16), (16, 48), (48, 16), (16, 24)])
def test_unequal_blocks_are_joined(sizes: tuple[int, int]) -> None:
    """V13: they meet by token; the copies are compared byte by byte elsewhere."""
    ours, theirs = (spec_of(block_tokens=size) for size in sizes)
    assert compare(ours, theirs) == []
    assert plan(ours, theirs).groups[0].cell_tokens == gcd(*sizes)


@pytest.mark.parametrize(
    ("ours", "theirs", "shown"),
    [
        ((64, 64), (128, 128), ("64 in tiles of 64", "128 in tiles of 128")),
        ((64, 32), (64, 64), ("64 in tiles of 32", "64 in tiles of 64")),
        ((64, 1), (64, 64), ("64 in tiles of 1", "64 in tiles of 64")),
        ((64, 32), (80, 16), ("64 in tiles of 32", "80 in tiles of 16")),
    ],
)
def test_tiles_that_would_be_cut_are_refused(
    ours: tuple[int, int], theirs: tuple[int, int], shown: tuple[str, str]
) -> None:
    """V13: a block whose tokens only its kernel finds is never copied token by token."""
    one, other = (with_group(spec_of(block_tokens=size), tile_tokens=tile) for size, tile in (ours, theirs))
    for error, values in ((only_error(one, other), shown), (only_error(other, one), shown[::-1])):
        assert (error.field, error.ours, error.theirs) == ("groups[0].block_tokens", *values)
        assert "--block-size" in str(error)


def test_tiles_meet_in_blocks_of_unequal_size_that_they_divide() -> None:
    one, other = (with_group(spec_of(block_tokens=size), tile_tokens=32) for size in (64, 96))
    assert compare(one, other) == []
    assert plan(one, other).groups[0].cell_tokens == 32


def test_tiles_of_parts_of_the_content_are_refused() -> None:
    one = with_group(cache_of_rank(Sizes(), Rank(0, 0), 1 << 20), tile_tokens=2)
    other = with_group(cache_of_rank(Sizes(form="apart"), Rank(0, 0), 1 << 30), tile_tokens=2)
    error = only_error(one, other)
    assert (error.field, error.ours, error.theirs) == ("groups[0].content_bytes", 4, 2)


@pytest.mark.parametrize("theirs", [Sizes(tp=2), Sizes(split=(1, 1)), Sizes(tp=4, split=(2,), form="apart")])
def test_other_sizes_of_an_engine_are_no_difference(theirs: Sizes) -> None:
    """V06 V07 V11: tensor and pipeline parallel sizes, K and V together or apart."""
    ours = cache_of_rank(Sizes(), Rank(0, 0), 1 << 20)
    for spec in caches_of(theirs).values():
        assert compare(ours, spec) == compare(spec, ours) == []


def test_stages_are_compared_as_a_whole() -> None:
    """V11: a layer that an engine lacks on all of its stages."""
    ours = cache_of_rank(Sizes(), Rank(0, 0), 1 << 20)
    for spec in caches_of(Sizes(split=(1, 2))).values():
        error = only_error(ours, spec)
        assert (error.field, error.ours) == ("groups[0].layers", "2 layers")
        assert error.theirs == "3 layers, layer2 only there"


def test_missing_layers_are_named() -> None:
    """V11: layers meet by name; a producer that lacks one is refused."""
    error = only_error(spec_of(), spec_of(layers=7))
    assert error.field == "groups[0].layers"
    assert error.ours == "2 layers"
    assert error.theirs == "7 layers, layer2, layer3, layer4, layer5 and 1 more only there"


def test_renamed_layers_are_named_on_both_sides() -> None:
    ours = spec_of()
    planes = [msgspec.structs.replace(plane, name=f"{plane.name}:k") for plane in ours.groups[0].planes]
    error = only_error(ours, with_group(ours, planes=tuple(planes)))
    assert error.ours == "2 layers, layer0, layer1 only here"
    assert error.theirs == "2 layers, layer0:k, layer1:k only there"


def test_the_order_of_layers_is_no_difference() -> None:
    ours = spec_of()
    assert compare(ours, with_group(ours, planes=ours.groups[0].planes[::-1])) == []


def test_another_number_of_groups_is_named_and_the_common_ones_compared() -> None:
    ours = spec_of()
    theirs = changed(spec_of(content_bytes=4), groups=spec_of(content_bytes=4).groups * 2)
    assert [error.field for error in compare(ours, theirs)] == ["groups", "groups[0].element_bytes"]


def test_every_difference_is_told_at_once() -> None:
    theirs = changed(spec_of(content_bytes=4, heads=3, layers=3), model="other", tp_size=2, facts={})
    assert [error.field for error in compare(spec_of(), theirs)] == [
        "model",
        "groups[0].heads_total",
        "groups[0].element_bytes",
        "groups[0].heads",
        "groups[0].layers",
        *(f"facts.{key}" for key in sorted(STRICT_FACTS)),
    ]


def test_equal_ranks_of_larger_engines_are_joined() -> None:
    spec = changed(spec_of(head_first=2, heads_total=4), tp_size=2, rank=Rank(0, 1))
    assert compare(spec, spec) == []


def test_pipeline_stages_that_nobody_describes_are_refused_even_when_equal() -> None:
    spec = changed(spec_of(), pp_size=2)
    assert [error.field for error in compare(spec, spec)] == ["stages"]


@pytest.mark.parametrize("key", sorted(STRICT_FACTS))
@pytest.mark.parametrize("value", ["other", None])
def test_a_strict_fact_must_be_equal_and_there(key: str, value: str | None) -> None:
    """V04 V17: backend, revision and speculative configuration; silence is not agreement."""
    facts = {name: text for name, text in FACTS.items() if name != key} | ({key: value} if value else {})
    theirs = changed(spec_of(), facts=facts)
    for error in (only_error(spec_of(), theirs), only_error(theirs, spec_of())):
        assert error.field == f"facts.{key}"
        assert f"same {key}" in str(error)
    assert only_error(spec_of(), theirs).theirs == value
    assert warnings(spec_of(), theirs) == []


@pytest.mark.parametrize("key", sorted(INFORMATIONAL_FACTS))
@pytest.mark.parametrize("value", ["other", None])
def test_an_informational_fact_only_warns(key: str, value: str | None) -> None:
    """X05: engines whose max_model_len or version differ are joined, and it is said."""
    ours = changed(spec_of(), facts=FACTS | {key: "mine"})
    facts = {name: text for name, text in FACTS.items() if name != key} | ({key: value} if value else {})
    theirs = changed(spec_of(), facts=facts)
    assert compare(ours, theirs) == []
    assert warnings(ours, theirs) == [f"facts.{key}: ours is 'mine', theirs is {value!r}"]


def test_an_unknown_fact_counts_when_both_state_it() -> None:
    ours = changed(spec_of(), facts=FACTS | {"rope": "a"})
    assert only_error(ours, changed(ours, facts=FACTS | {"rope": "b"})).field == "facts.rope"


def test_an_unknown_fact_of_a_newer_release_only_warns() -> None:
    """A fleet is upgraded engine by engine."""
    newer = changed(spec_of(), facts=FACTS | {"rope": "a"})
    assert compare(spec_of(), newer) == compare(newer, spec_of()) == []
    assert warnings(spec_of(), newer) == ["facts.rope: ours is None, theirs is 'a'"]
