"""Tensors as vLLM registers them, described and read back byte by byte."""

from __future__ import annotations

import ctypes

import pytest
import torch
from vllm import _custom_ops as ops

from kvferry.connector import compat
from kvferry.connector.caches import Model, Table, describe_caches, layers_of
from kvferry.errors import UsageError
from kvferry.ids import Rank
from kvferry.layout.compare import compare
from kvferry.layout.describe import STRIDE_ORDERS
from kvferry.layout.plan import plan
from kvferry.layout.ranks import shape_of
from kvferry.layout.spans import scaled_spans
from tests.support.engines import where

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 5, 2, 4, 6


def model(**changes):
    fields = {
        "name": "tiny#0",
        "dtype": "float32",
        "kv_dtype": "float32",
        "kv_heads": HEADS,
        "is_mla": False,
        "facts": {},
    }
    return Model(**(fields | changes))


def tensors(order="LBHNC", *, heads=HEADS, blocks=BLOCKS, tokens=TOKENS):
    """One backing allocation viewed as vLLM does: `[block, head, token, content]` per layer."""
    sizes = {"L": LAYERS, "B": blocks, "H": heads, "N": tokens, "C": CONTENT}
    backing = torch.arange(LAYERS * blocks * heads * tokens * CONTENT, dtype=torch.float32)
    physical = backing.view([sizes[axis] for axis in order])
    logical = physical.permute([order.index(axis) for axis in "LBHNC"])
    return {f"layers.{layer}": logical[layer] for layer in range(LAYERS)}


def describe(views, *, given=None, rank=None, tp=1, stages=(), block_count=BLOCKS, order="tokens", **table):
    """As one cache group."""
    (layers,) = layers_of(views, [tuple(views)])
    return describe_caches(
        views,
        model=given or model(),
        rank=rank or Rank(0, 0),
        tp=tp,
        pp=max(len(stages), 1),
        tables=[Table(layers, **({"block_tokens": TOKENS} | table), order=order, stages=stages)],
        block_count=block_count,
    )


@pytest.mark.parametrize("order", STRIDE_ORDERS)
def test_every_stride_order_is_addressed_right(order):
    views = tensors(order)
    group = describe(views).spec.groups[0]
    for plane, view in zip(group.planes, views.values(), strict=True):
        for block in range(BLOCKS):
            for head in range(HEADS):
                for token in range(TOKENS):
                    address = (
                        plane.address
                        + block * group.block_stride
                        + head * group.head_stride
                        + token * group.token_stride
                    )
                    found = (ctypes.c_float * CONTENT).from_address(address)
                    assert list(found) == view[block, head, token].tolist()
    assert group.content_bytes == CONTENT * 4


def test_layers_of_one_allocation_are_one_region():
    spec = describe(tensors()).spec
    assert len(spec.regions) == 1
    assert spec.regions[0].bytes == LAYERS * BLOCKS * HEADS * TOKENS * CONTENT * 4
    assert spec.regions[0].kind == "DRAM"


def test_layers_that_share_a_tensor_count_once():
    views = tensors()
    views["layers.shared"] = views["layers.0"]
    assert [plane.name for plane in describe(views).spec.groups[0].planes] == [
        "layers.0",
        "layers.1",
        "layers.2",
    ]


def test_smaller_kernel_blocks_are_described_as_they_are():
    """The engine counts 5 blocks of 8 tokens, the kernel 10 of 4."""
    caches = describe(tensors(blocks=10), block_tokens=8, block_count=5)
    assert caches.ratios == (2,)
    assert caches.spec.groups[0].block_count == 10
    assert (caches.spec.block_tokens, caches.spec.whole_tokens) == ((4,), (8,))
    assert scaled_spans(((1, 2), (4, 1)), caches.ratios[0]) == ((2, 4), (8, 2))


@pytest.mark.parametrize(
    ("kv_heads", "tp", "heads", "firsts"),
    [(8, 2, 4, [0, 4]), (4, 4, 1, [0, 1, 2, 3]), (2, 4, 1, [0, 0, 1, 1])],
)
def test_heads_of_each_rank(kv_heads, tp, heads, firsts):
    """V06: with more ranks than KV heads they share heads, and each says which."""
    for rank, first in enumerate(firsts):
        group = describe(
            tensors(heads=heads), given=model(kv_heads=kv_heads), rank=Rank(0, rank), tp=tp
        ).spec.groups[0]
        assert (group.head_first, group.head_count, group.heads_total) == (first, heads, kv_heads)


def test_the_cpu_s_kernels_keep_keys_transposed_as_described():
    """V13: what the kernel writes is read back by the description, byte by byte, whatever the block size."""
    heads, size = 2, 32
    for tokens in (32, 64):
        cache = torch.zeros(3, heads, tokens, 2 * size)
        keys, values = (torch.rand(tokens, heads, size) for _ in range(2))
        wide = cache.view(3, heads, 2 * tokens, size)
        slots = torch.arange(tokens, 2 * tokens)
        ops.cpu_attn_reshape_and_cache(keys, values, *wide.chunk(2, dim=2), slots, "vec")
        assert compat.keeps_keys_transposed(torch.float32, tokens, size, "auto")
        spec = describe(
            {"layers.0": cache},
            order="transposed_keys",
            block_tokens=tokens,
            block_count=3,
        ).spec
        (group,) = spec.tables
        places = where(group, "layers.0", range(heads), range(tokens, 2 * tokens), [1])
        for head in range(heads):
            for token in range(tokens):
                found = bytes(ctypes.c_ubyte.from_address(int(at)).value for at in places[head, token])
                expected = torch.cat([keys[token, head], values[token, head]]).numpy().tobytes()
                assert found == expected


def test_kernels_that_nobody_knows_have_blocks_that_stay_whole():
    (group,) = describe(tensors(), order="opaque").spec.groups
    assert group.tile_tokens == group.block_tokens == TOKENS
    with pytest.raises(UsageError, match="orders a block's tokens in its own way"):
        describe(tensors("LBNHC"), order="opaque")
    assert not compat.keeps_keys_transposed(torch.bfloat16, 48, 48, "auto")


@pytest.mark.parametrize("order", ["LBHNC", "BLHNC", "LBNHC"])
def test_heads_that_are_not_the_model_s_are_copied_by_the_block(order):
    """V07, V09: K's and V's heads apart: a range of them is no range of the model's."""
    caches = describe(tensors(order, heads=4), given=model(kv_heads=4), rank=Rank(0, 1), tp=2)
    (group,) = caches.spec.groups
    assert (group.head_first, group.head_count, group.heads_total) == (1, 1, 2)
    assert group.tile_tokens == TOKENS
    assert group.block_bytes == LAYERS * 4 * TOKENS * CONTENT * 4
    other = describe(tensors(order, heads=8), given=model(kv_heads=4), rank=Rank(0, 0), tp=1).spec
    assert "groups[0].heads_total" in {error.field for error in compare(caches.spec, other)}


@pytest.mark.parametrize("order", ["LHBNC", "BHLNC"])
def test_heads_that_are_not_the_model_s_and_lie_apart_are_refused(order):
    with pytest.raises(UsageError, match="cache_layout"):
        describe(tensors(order, heads=4), given=model(kv_heads=4), rank=Rank(0, 1), tp=2)


def test_mla_has_one_head_on_every_rank():
    for rank in range(2):
        group = describe(
            tensors(heads=1), given=model(is_mla=True, kv_heads=16), rank=Rank(0, rank), tp=2
        ).spec.groups[0]
        assert (group.kind, group.head_first, group.heads_total) == ("mla", 0, 1)


def test_a_stage_says_what_all_stages_hold():
    """V11: both sides find out who has what, whatever the split."""
    views = {name.replace("layers.", "layers.1"): view for name, view in tensors().items()}
    stages = (("layers.0", "layers.1"), tuple(views))
    caches = describe(views, rank=Rank(1, 0), stages=stages)
    assert caches.spec.groups[0].stages == stages
    assert (caches.spec.pp_size, caches.spec.rank.pp) == (2, 1)
    assert len(shape_of(caches.spec).stages[0][HEADS]) == 2


def test_an_engine_of_one_stage_sends_no_names_twice():
    assert describe(tensors(), stages=(tuple(tensors()),)).spec.groups[0].stages == ()


def test_layers_that_differ_are_refused_by_name():
    """V04: nothing is carried that cannot be described."""
    views = tensors()
    views["layers.odd"] = torch.zeros(BLOCKS, HEADS, TOKENS, CONTENT + 2)
    with pytest.raises(UsageError, match=r"layers\.odd"):
        describe(views)


@pytest.mark.parametrize(
    ("view", "words"),
    [
        (torch.zeros(2, BLOCKS, HEADS, TOKENS, CONTENT), "shape"),
        (torch.zeros(BLOCKS, HEADS, TOKENS, CONTENT * 2)[..., ::2], "contiguous"),
        (torch.zeros(BLOCKS + 1, HEADS, TOKENS, CONTENT), "expected 5"),
    ],
)
def test_unexpected_tensors_are_refused(view, words):
    with pytest.raises(UsageError, match=words):
        describe({"layers.0": view})


def test_no_cache_at_all_is_refused():
    with pytest.raises(UsageError, match="no KV cache"):
        describe({})


def test_each_cache_group_is_a_table_of_its_own():
    """V14: groups lie over each other in memory, and are two all the same."""
    views = tensors()
    views["layers.1"] = views["layers.0"]
    whole, window = layers_of(views, [("layers.0", "layers.2"), ("layers.1", "layers.elsewhere")])
    caches = describe_caches(
        views,
        model=model(),
        rank=Rank(0, 0),
        tp=1,
        pp=1,
        tables=[Table(whole, TOKENS), Table(window, TOKENS, window_tokens=9)],
        block_count=BLOCKS,
    )
    assert [[group.kind for group in groups] for groups in caches.spec.tables] == [
        ["full"],
        ["sliding_window"],
    ]
    assert [sorted(groups[0].layers) for groups in caches.spec.tables] == [
        ["layers.0", "layers.2"],
        ["layers.1"],
    ]
    assert caches.spec.windows == (0, 9)
    assert caches.spec.groups[0].planes[0].address == caches.spec.groups[1].planes[0].address
    assert len(caches.spec.regions) == 1
    assert caches.ratios == (1, 1)


def test_a_group_may_have_kernel_blocks_of_its_own_size():
    views = tensors()
    window = torch.zeros(2 * BLOCKS, HEADS, TOKENS, CONTENT)
    caches = describe_caches(
        views | {"layers.w": window},
        model=model(),
        rank=Rank(0, 0),
        tp=1,
        pp=1,
        tables=[Table(tuple(views), TOKENS), Table(("layers.w",), 2 * TOKENS, window_tokens=9)],
        block_count=BLOCKS,
    )
    assert caches.ratios == (1, 2)
    assert caches.spec.block_counts == (BLOCKS, 2 * BLOCKS)
    assert caches.spec.whole_tokens == (TOKENS, 2 * TOKENS)


def test_a_stage_without_a_layer_of_a_group_says_so():
    """V11: the other stages' ranks have them, and the plan finds nothing to move here."""
    views = tensors()
    stages = (("layers.0", "layers.1", "layers.2"), ()), ((), ("layers.9",))
    caches = describe_caches(
        views,
        model=model(),
        rank=Rank(0, 0),
        tp=1,
        pp=2,
        tables=[
            Table(tuple(views), TOKENS, stages=stages[0]),
            Table((), 8, window_tokens=9, stages=stages[1]),
        ],
        block_count=BLOCKS,
    )
    (_, (empty,)) = caches.spec.tables
    assert (empty.planes, empty.block_tokens, empty.block_bytes) == ((), 8, 0)
    assert compare(caches.spec, caches.spec) == []
    assert len(shape_of(caches.spec).stages[1][HEADS]) == 1
    found = plan(caches.spec, caches.spec)
    assert [found.bytes_per_block(table) > 0 for table in range(2)] == [True, False]


def test_a_layer_of_no_group_is_refused_by_name():
    with pytest.raises(UsageError, match=r"layers\.2 is in none of the engine's 2 groups"):
        layers_of(tensors(), [("layers.0",), ("layers.1",)])


def test_a_layer_that_shares_its_tensor_needs_no_group():
    views = tensors()
    views["layers.shared"] = views["layers.1"]
    assert layers_of(views, [("layers.0", "layers.2"), ("layers.1",)]) == [
        ("layers.0", "layers.2"),
        ("layers.1",),
    ]
