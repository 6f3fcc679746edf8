"""Where the pages are: the grid names exactly the words of vLLM's own views, in every memory order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvferry.emulator.caches import allocate
from kvferry.emulator.options import LAYOUTS
from kvferry.errors import UsageError

BLOCKS = 5
LAYERS = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn", "model.layers.2.self_attn.attn")


def config(layout: KVCacheLayout, *, head_size: int = 16, groups: int = 1) -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=head_size, dtype=torch.bfloat16)
    page = spec.page_size_bytes
    placed = KVCacheTensor(
        size=page * BLOCKS * len(LAYERS),
        layers=list(LAYERS),
        layer_stride=_layer_stride(layout, page),
        block_stride=_block_stride(layout, page),
    )
    return KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[placed],
        kv_cache_groups=[KVCacheGroupSpec(list(LAYERS), spec)] * groups,
    )


def _layer_stride(layout: KVCacheLayout, page: int) -> int:
    if not layout.is_block_outermost:
        return page * BLOCKS
    # With heads before layers each layer's share of a head follows the other's.
    return page // 2 if layout is KVCacheLayout.BHLNC else page


def _block_stride(layout: KVCacheLayout, page: int) -> int:
    if layout.is_block_outermost:
        return page * len(LAYERS)
    # With heads before blocks a block is one head's.
    return page // 2 if layout is KVCacheLayout.LHBNC else page


def words_of(tensor: Any, block: int, base: int) -> set[int]:
    """The words of a block as torch sees it."""
    page = tensor[block]
    size = page.element_size()
    begin = tensor.data_ptr() - base + block * tensor.stride(0) * size
    heads, tokens, content = page.shape
    return {
        (begin + (head * tensor.stride(1) + token * tensor.stride(2) + at) * size) // 8
        for head in range(heads)
        for token in range(tokens)
        for at in range(0, content, 8 // size)
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_grid_is_where_vllms_views_are(name: str) -> None:
    layout = KVCacheLayout[name]
    tensors, memory, grid = allocate(config(layout), layout)
    base = memory.__array_interface__["data"][0]
    seen: set[int] = set()
    for layer, tensor in enumerate(tensors.values()):
        for block in range(BLOCKS):
            first = grid.first_words(np.array([block]))[layer, 0]
            page = {int(first + offset) for offset in grid.page_words()}
            assert page == words_of(tensor, block, base)
            assert {grid.block_at(word) for word in page} == {block}
            assert {int(first), int(first) + grid.last_word} <= page
            assert not page & seen, "no two pages share a word"
            seen |= page
    assert len(seen) == len(memory)


def test_the_views_and_the_words_are_the_same_memory() -> None:
    layout = KVCacheLayout.BLHNC
    tensors, memory, grid = allocate(config(layout), layout)
    memory[grid.first_words(np.array([3]))[1, 0]] = np.uint64(0xFFFF)
    assert tensors[LAYERS[1]].view(torch.int16)[3, 0, 0, 0] == -1
    assert int(torch.count_nonzero(tensors[LAYERS[0]].view(torch.int16))) == 0


def test_several_groups_are_refused() -> None:
    layout = KVCacheLayout.LBHNC
    with pytest.raises(UsageError, match="one group of layers, not 2"):
        allocate(config(layout, groups=2), layout)


def test_pages_that_do_not_divide_into_words_are_refused() -> None:
    layout = KVCacheLayout.LBHNC
    with pytest.raises(UsageError, match="larger head size"):
        allocate(config(layout, head_size=1), layout)
