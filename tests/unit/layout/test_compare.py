"""Why two caches cannot be joined: one field at a time, each named with both values and a fix."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvferry.errors import GeometryError
from kvferry.ids import Rank
from kvferry.layout.compare import INFORMATIONAL_FACTS, STRICT_FACTS, compare, warnings
from kvferry.layout.describe import STRIDE_ORDERS, describe
from kvferry.layout.plan import plan
from kvferry.layout.spec import CacheSpec
from tests.support.caches import cache_of, changed, with_group

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
        ("tp_size", {"tp_size": 2}, 1, 2, "--tensor-parallel-size"),
        ("pp_size", {"pp_size": 2}, 1, 2, "--pipeline-parallel-size 1"),
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
        ("block_tokens", {"block_tokens": 32}, (16, 32), "--block-size"),
        ("content_bytes", {"content_bytes": 16}, (8, 16), "attention backend"),
        ("heads_total", {"heads_total": 8}, (2, 8), "same model"),
    ],
)
def test_one_differing_field_of_a_group_is_named(
    field: str, theirs: dict[str, Any], values: tuple[object, object], fix: str
) -> None:
    """V04"""
    error = only_error(spec_of(), spec_of(**theirs))
    assert (error.field, error.ours, error.theirs) == (f"groups[0].{field}", *values)
    assert fix in str(error)


@pytest.mark.parametrize(("head_first", "heads", "shown"), [(2, 2, "2 to 3"), (0, 1, "0 to 0")])
def test_other_heads_are_named(head_first: int, heads: int, shown: str) -> None:
    ours = spec_of(heads_total=4)
    error = only_error(ours, spec_of(head_first=head_first, heads=heads, heads_total=4))
    assert (error.field, error.ours, error.theirs) == ("groups[0].heads", "0 to 1", shown)


@pytest.mark.parametrize("sizes", [(16, 32), (32, 16), (16, 48)])
def test_unequal_blocks_are_refused_before_any_request(sizes: tuple[int, int]) -> None:
    """V13: block geometry is compared at the handshake, not at the first transfer."""
    ours, theirs = (spec_of(block_tokens=size) for size in sizes)
    error = only_error(ours, theirs)
    assert (error.field, error.ours, error.theirs) == ("groups[0].block_tokens", *sizes)
    with pytest.raises(GeometryError, match=r"groups\[0\]\.block_tokens"):
        plan(ours, theirs)


def test_missing_layers_are_named() -> None:
    """V11: planes meet by name; a producer that lacks one is refused."""
    error = only_error(spec_of(), spec_of(layers=7))
    assert error.field == "groups[0].layers"
    assert error.ours == "2 planes"
    assert error.theirs == "7 planes, layer2, layer3, layer4, layer5 and 1 more only there"


def test_renamed_layers_are_named_on_both_sides() -> None:
    ours = spec_of()
    planes = [msgspec.structs.replace(plane, name=f"{plane.name}:k") for plane in ours.groups[0].planes]
    error = only_error(ours, with_group(ours, planes=tuple(planes)))
    assert error.ours == "2 planes, layer0, layer1 only here"
    assert error.theirs == "2 planes, layer0:k, layer1:k only there"


def test_the_order_of_layers_is_no_difference() -> None:
    ours = spec_of()
    assert compare(ours, with_group(ours, planes=ours.groups[0].planes[::-1])) == []


def test_another_number_of_groups_is_named_and_the_common_ones_compared() -> None:
    ours = spec_of()
    theirs = changed(spec_of(content_bytes=4), groups=spec_of(content_bytes=4).groups * 2)
    assert [error.field for error in compare(ours, theirs)] == ["groups", "groups[0].content_bytes"]


def test_every_difference_is_told_at_once() -> None:
    theirs = changed(spec_of(block_tokens=32, heads=1), model="other", tp_size=2, facts={})
    assert [error.field for error in compare(spec_of(), theirs)] == [
        "tp_size",
        "model",
        "groups[0].block_tokens",
        "groups[0].heads_total",
        "groups[0].heads",
        *(f"facts.{key}" for key in sorted(STRICT_FACTS)),
    ]


def test_equal_ranks_of_larger_engines_are_joined() -> None:
    spec = changed(spec_of(head_first=2, heads_total=4), tp_size=2, rank=Rank(0, 1))
    assert compare(spec, spec) == []


def test_pipeline_stages_are_refused_even_when_equal() -> None:
    spec = changed(spec_of(), pp_size=2)
    assert [error.field for error in compare(spec, spec)] == ["pp_size"]


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
