"""One process's KV memory, and stamps at the ends of every page by which a misplaced or missing one shows."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvferry.ids import BlockId, Rank
from kvferry.layout.describe import describe
from kvferry.layout.runs import Region
from kvferry.layout.spec import CacheSpec
from kvferry.microbench.cells import BLOCK_TOKENS, Shape

ALIGNMENT_BYTES = 4096
WORD_BYTES = 8

Words = npt.NDArray[np.uint64]


class Memory:
    """So many bytes, touched, that caches of any shape may lie in, one at a time."""

    def __init__(self, size_bytes: int) -> None:
        raw = np.empty(size_bytes + ALIGNMENT_BYTES, np.uint8)
        skip = -raw.ctypes.data % ALIGNMENT_BYTES
        usable = size_bytes - size_bytes % WORD_BYTES
        self.words: Words = raw[skip : skip + usable].view(np.uint64)
        # The first touch of memory costs more than any copy of it.
        self.words.fill(0)

    @property
    def region(self) -> Region:
        """All of it."""
        return Region(int(self.words.ctypes.data), self.words.nbytes)

    def copy_seconds(self) -> tuple[int, float]:
        """Copy one half over the other by one thread: bytes and seconds."""
        half = len(self.words) // 2
        begun = time.perf_counter()
        np.copyto(self.words[half : 2 * half], self.words[:half])
        return half * WORD_BYTES, time.perf_counter() - begun


class Cache:
    """A cache of one shape in a memory."""

    def __init__(self, memory: Memory, shape: Shape) -> None:
        self._words = memory.words
        self.blocks = memory.words.nbytes // shape.block_bytes
        base = memory.region.address
        group, region = describe(
            shape.order,
            layers=shape.layers,
            blocks=self.blocks,
            heads=1,
            block_tokens=BLOCK_TOKENS,
            content_bytes=shape.page_bytes // BLOCK_TOKENS,
            address=base,
        )
        self.spec = CacheSpec(
            model="microbench",
            dtype="uint8",
            kv_dtype="uint8",
            rank=Rank(0, 0),
            tp_size=1,
            pp_size=1,
            groups=(group,),
            regions=(region,),
        )
        self._planes = np.array([plane.address - base for plane in group.planes], np.uint64)
        self._block_stride = np.uint64(group.block_stride)
        self._page_words = np.uint64(shape.page_bytes // WORD_BYTES)

    def stamp(self, blocks: Sequence[BlockId], seed: int) -> None:
        """Write what the pages of these blocks shall hold at their ends."""
        for at, values in self._ends(blocks, seed):
            self._words[at] = values

    def wrong_pages(self, blocks: Sequence[BlockId], seed: int) -> int:
        """How many pages do not hold what `stamp` writes with this seed for as many blocks."""
        wrong = np.zeros((len(self._planes), len(blocks)), np.bool_)
        for at, values in self._ends(blocks, seed):
            wrong |= self._words[at] != values
        return int(wrong.sum())

    def damage(self, block: BlockId) -> None:
        """Spoil the first word of the block's first page."""
        address = int(self._planes[0]) + block * int(self._block_stride)
        self._words[address // WORD_BYTES] ^= np.uint64(1)

    def _ends(self, blocks: Sequence[BlockId], seed: int) -> list[tuple[Words, Words]]:
        """First and last words of the pages, `[layer, block]`: where they are, and what they shall be."""
        ids = np.array(blocks, np.uint64)
        first = np.add.outer(self._planes, ids * self._block_stride) // np.uint64(WORD_BYTES)
        layers = np.arange(len(self._planes), dtype=np.uint64) << np.uint64(32)
        indices = np.arange(len(blocks), dtype=np.uint64)
        values = _mixed(np.bitwise_or.outer(layers, indices) + _mixed(np.array([seed], np.uint64)))
        return [(first, values), (first + self._page_words - np.uint64(1), ~values)]


def _mixed(values: Words) -> Words:
    """Each value as one that has nothing in common with its neighbours' (the last steps of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
