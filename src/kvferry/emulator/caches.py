"""KV caches in the host's memory, laid out as vLLM has decided, and where their pages are."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_cache_interface import create_kv_cache_views

from kvferry.emulator.pattern import WORD_BYTES, Grid, Words
from kvferry.errors import UsageError

_TOUCH_BYTES = 4096


def allocate(kv_cache_config: Any, layout: Any) -> tuple[dict[str, Any], Words, Grid]:
    """vLLM's view of each layer, all their memory as words, and the grid of pages in it.

    Raises:
        UsageError: the cache has several groups, or a page is no whole number of words.
    """
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise UsageError(f"an emulated engine has one group of layers, not {len(groups)}")
    memory = _memory(max(tensor.size for tensor in kv_cache_config.kv_cache_tensors))
    raw = torch.from_numpy(memory)
    tensors: dict[str, Any] = {}
    for placed in kv_cache_config.kv_cache_tensors:
        views = create_kv_cache_views(
            raw, groups[0].kv_cache_spec, kv_cache_config.num_blocks, layout, placed
        )
        tensors.update(zip(placed.layers, views, strict=True))
    return tensors, memory.view(np.uint64), _grid(tensors, raw.data_ptr())


def _memory(size: int) -> Any:
    """So many bytes, rounded up to words, all of them touched.

    Touching now keeps its cost out of a measurement. Large pages make scattered access cheaper, as it is on a
    device that has no small ones.
    """
    whole = mmap.mmap(-1, -(-size // WORD_BYTES) * WORD_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        whole.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(whole, dtype=np.int8)
    memory[::_TOUCH_BYTES] = 0
    return memory


def _grid(tensors: Mapping[str, Any], base: int) -> Grid:
    first = next(iter(tensors.values()))
    _, heads, tokens, content = first.shape
    size = first.element_size()
    strides = [step * size for step in first.stride()[:3]]
    begins = [tensor.data_ptr() - base for tensor in tensors.values()]
    run = content * size
    if any(value % WORD_BYTES for value in (*strides, run, *begins)):
        raise UsageError(
            f"a KV cache with strides of {strides} bytes does not divide into words of {WORD_BYTES} bytes; "
            "use a larger head size"
        )
    return Grid(
        layer_words=np.array(begins, dtype=np.int64) // WORD_BYTES,
        block_words=strides[0] // WORD_BYTES,
        head_words=strides[1] // WORD_BYTES,
        token_words=strides[2] // WORD_BYTES,
        head_count=heads,
        token_count=tokens,
        run_words=run // WORD_BYTES,
    )
