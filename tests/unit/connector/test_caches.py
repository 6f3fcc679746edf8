"""Tensors as vLLM registers them, described and read back byte by byte."""

from __future__ import annotations

import ctypes

import pytest
import torch

from kvferry.connector.caches import Model, describe_caches
from kvferry.errors import UsageError
from kvferry.ids import Rank
from kvferry.layout.describe import STRIDE_ORDERS
from kvferry.layout.spans import scaled_spans

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


def describe(views, *, given=None, rank=None, tp=1, block_tokens=TOKENS, block_count=BLOCKS):
    return describe_caches(
        views,
        model=given or model(),
        rank=rank or Rank(0, 0),
        tp=tp,
        pp=1,
        block_tokens=block_tokens,
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
    assert caches.ratio == 2
    assert caches.spec.groups[0].block_count == 10
    assert scaled_spans(((1, 2), (4, 1)), caches.ratio) == ((2, 4), (8, 2))


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


def test_mla_has_one_head_on_every_rank():
    for rank in range(2):
        group = describe(
            tensors(heads=1), given=model(is_mla=True, kv_heads=16), rank=Rank(0, rank), tp=2
        ).spec.groups[0]
        assert (group.kind, group.head_first, group.heads_total) == ("mla", 0, 1)


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
