"""What an emulated device writes into its KV pages, and how a page that came from elsewhere is checked.

A page is what one layer keeps of one block. Its content stands for all that real KV depends on: the tokens of
the whole prompt up to the block's last one, their order, and the layer. The first word of a page is that
value, the last word its complement; `full` fills every word, each with one of its own. So a page that is
stale, of another request, another layer, another place in the prompt, or only partly written, is found.

All of it is numpy over whole transfers: 65,536 pages take milliseconds, and no step is per block or layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.errors import UsageError

Words = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int64]

WORD_BYTES = 8
# Odd constants, so that multiplying by them loses nothing modulo 2**64.
_TOKEN_BASE = np.uint64(0x9E3779B97F4A7C15)
_BLOCK_BASE = np.uint64(0xD1B54A32D192ED03)
_MIX_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_MIX_SECOND = np.uint64(0x94D049BB133111EB)


def mixed(words: Words) -> Words:
    """Spread every bit of each word over the whole word."""
    words = (words ^ (words >> np.uint64(30))) * _MIX_FIRST
    words = (words ^ (words >> np.uint64(27))) * _MIX_SECOND
    return words ^ (words >> np.uint64(31))


def powers(base: np.uint64, count: int) -> Words:
    """`base` to the power of 1, 2, ..., `count`, modulo 2**64."""
    return np.cumprod(np.full(count, base), dtype=np.uint64)


class TokenChain:
    """One sequence's tokens and, per block of them, a value that stands for all tokens up to its end.

    A block that ends in the middle, at the sequence's own end, has a value too; it changes when the sequence
    grows. Not thread-safe.
    """

    def __init__(self, tokens: Sequence[int], block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._token_powers = powers(_TOKEN_BASE, block_tokens)
        self._tokens = np.asarray(tokens, dtype=np.uint64)
        self._sums = self._cumulated(0, np.uint64(0))

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def values(self) -> Words:
        """Per block, as many as the tokens need."""
        return mixed(self._sums)

    @property
    def seed(self) -> int:
        """One value for the whole sequence, its length included."""
        return int(mixed(self._sums[-1:] + np.uint64(len(self._tokens)))[0]) if len(self._tokens) else 0

    def extend(self, tokens: Sequence[int] | Words) -> None:
        """Append tokens."""
        whole = len(self._tokens) // self._block_tokens
        self._tokens = np.concatenate([self._tokens, np.asarray(tokens, dtype=np.uint64)])
        before = self._sums[whole - 1] if whole else np.uint64(0)
        self._sums = np.concatenate([self._sums[:whole], self._cumulated(whole, before)])

    def _cumulated(self, first: int, before: np.uint64) -> Words:
        """Sums from block `first` on; a position's weight makes the order of blocks count."""
        size = self._block_tokens
        tail = self._tokens[first * size :]
        blocks = -(-len(tail) // size)
        padded = np.zeros(blocks * size, dtype=np.uint64)
        # A token of 0 must differ from no token.
        padded[: len(tail)] = tail + np.uint64(1)
        hashes = mixed((padded.reshape(blocks, size) * self._token_powers).sum(axis=1, dtype=np.uint64))
        weights = powers(_BLOCK_BASE, first + blocks)[first:]
        return before + np.cumsum(hashes * weights, dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class Grid:
    """Where the pages of a rank's cache are, in words from the start of its memory.

    One page is `head_count` x `token_count` runs of `run_words` words; block `b` of layer `l` begins at
    `layer_words[l] + b * block_words`.
    """

    layer_words: Indices
    block_words: int
    head_words: int
    token_words: int
    head_count: int
    token_count: int
    run_words: int

    @property
    def last_word(self) -> int:
        """Offset of a page's last word from its first."""
        heads = (self.head_count - 1) * self.head_words
        return heads + (self.token_count - 1) * self.token_words + self.run_words - 1

    def first_words(self, blocks: Indices) -> Indices:
        """`[layers, len(blocks)]`: each page's first word."""
        return self.layer_words[:, None] + blocks[None, :] * self.block_words

    def block_at(self, word: int) -> int:
        """The block that a word belongs to, in whichever order layers, heads and blocks stand."""
        first = int(self.layer_words.min())
        if int(self.layer_words.max()) - first >= self.block_words:
            # Each layer has a place of its own.
            first = int(self.layer_words[self.layer_words <= word].max(initial=first))
        offset = word - first
        if self.head_words > self.block_words:
            offset %= self.head_words
        return offset // self.block_words

    def page_words(self) -> Indices:
        """Offsets of all words of a page, from its first."""
        heads = np.arange(self.head_count, dtype=np.int64) * self.head_words
        tokens = np.arange(self.token_count, dtype=np.int64) * self.token_words
        run = np.arange(self.run_words, dtype=np.int64)
        return (heads[:, None, None] + tokens[None, :, None] + run[None, None, :]).ravel()


@dataclass(frozen=True, slots=True)
class Wrong:
    """Pages that do not hold what they should."""

    pages: int
    layers: tuple[int, ...]
    """Some of the layers concerned, ascending."""
    positions: tuple[int, ...]
    """Some of the blocks concerned, by their place in the sequence, ascending."""


class Pages:
    """The pages of one rank's cache."""

    def __init__(self, memory: Words, grid: Grid, *, whole: bool = False) -> None:
        """`whole`: every word of a page is written and compared, else only its first and last.

        Raises:
            UsageError: a page has not two words, so its ends cannot be told apart.
        """
        if grid.last_word < 1:
            raise UsageError("a KV page has less than 16 bytes; use a larger block or head size")
        self._memory = memory
        self._grid = grid
        self._salts = mixed(np.arange(1, len(grid.layer_words) + 1, dtype=np.uint64) * _TOKEN_BASE)
        if whole:
            self._offsets = grid.page_words()
        else:
            self._offsets = np.array([0, grid.last_word], dtype=np.int64)
        marks = mixed(np.arange(len(self._offsets), dtype=np.uint64) * _BLOCK_BASE)
        # The first word is the value itself, the last its complement, in both ways of marking.
        marks[0], marks[-1] = np.uint64(0), ~np.uint64(0)
        self._marks = marks

    @property
    def layers(self) -> int:
        """Pages per block."""
        return len(self._grid.layer_words)

    def write(self, blocks: Indices, values: Words) -> None:
        """Write the pages of `blocks`, all layers; `values` are their blocks' of the chain."""
        first, wanted = self._grid.first_words(blocks), self._wanted(values)
        for offset, mark in zip(self._offsets, self._marks, strict=True):
            self._memory[first + offset] = wanted ^ mark

    def wrong(self, blocks: Indices, values: Words, named_max: int = 8) -> Wrong | None:
        """Compare the pages of `blocks`, all layers; None when all are right."""
        first, wanted = self._grid.first_words(blocks), self._wanted(values)
        right = np.ones(first.shape, dtype=np.bool_)
        for offset, mark in zip(self._offsets, self._marks, strict=True):
            right &= self._memory[first + offset] == wanted ^ mark
        if right.all():
            return None
        layers, positions = np.nonzero(~right)
        return Wrong(
            pages=len(layers),
            layers=tuple(np.unique(layers)[:named_max].tolist()),
            positions=tuple(np.unique(positions)[:named_max].tolist()),
        )

    def _wanted(self, values: Words) -> Words:
        """`[layers, len(values)]`: each page's value."""
        return values[None, :] * (self._salts[:, None] | np.uint64(1)) + self._salts[:, None]
