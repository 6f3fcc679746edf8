"""The requests that are running on a rank: their tokens, their blocks, and the tokens that they will say.

What an emulated model says follows from the prompt and the position alone, so two engines that are given the
same prompt say the same, and an answer from damaged KV is another one.

The engine's thread plans (`Sequence.plan`), the device's thread carries out what was planned: it alone
touches the chains of values, whose making takes time in proportion to a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence as Listed
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvferry.emulator.pattern import Indices, TokenChain, Words, mixed

AHEAD_TOKENS = 64
_STRIDE = np.uint64(0x9E3779B97F4A7C15)


class Part(NamedTuple):
    """What one step computes of a request: tokens `[start, stop)`."""

    start: int
    stop: int
    samples: bool
    """Whether a token is said at the end: the step reaches all that is known of the request."""
    decodes: bool
    """Whether it is the next token of a running answer, and not a part of a prompt."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens that are ever said: the upper half, where no special token stands."""

    size: int

    def said(self, seed: int, start: int, stop: int) -> list[int]:
        """The tokens at positions `[start, stop)` of the sequence with this seed."""
        least = self.size // 2
        positions = np.arange(start, stop, dtype=np.uint64) * _STRIDE + np.uint64(seed)
        spread = mixed(positions) % np.uint64(self.size - least)
        return [least + int(token) for token in spread]


@dataclass(slots=True)
class Sequence:
    """One running request."""

    name: str
    prompt: Listed[int]
    known: int
    """Tokens that were there when it was planned: the prompt, and after a preemption its answer."""
    blocks: list[int]
    damaged: bool = False
    """Its KV was found to be wrong; then so is its answer."""
    _chain: TokenChain | None = field(default=None, init=False)
    _seed: int = field(default=0, init=False)
    _ahead: dict[int, int] = field(default_factory=dict, init=False)
    """The next tokens of the answer by position: made in one go, because a step asks for one at a time."""

    def plan(self, start: int, tokens: int) -> Part:
        """The next `tokens` from `start` on."""
        stop = start + tokens
        return Part(start, stop, samples=stop >= self.known, decodes=tokens == 1 and stop >= self.known)

    def written(self, part: Part, block_tokens: int) -> range:
        """The blocks, by place, whose pages get their content in that part.

        A block that ends in the middle counts where the prompt ends in it. A running answer fills its last
        block token by token; that counts when it is full.
        """
        last = part.stop // block_tokens
        if part.samples and not part.decodes:
            last = -(-part.stop // block_tokens)
        return range(part.start // block_tokens, last)

    def next(self, position: int, block_tokens: int, vocabulary: Vocabulary) -> int:
        """The answer's token at this position."""
        if position not in self._ahead:
            said = self.said(position, position + AHEAD_TOKENS, block_tokens, vocabulary)
            self._ahead = dict(enumerate(said, start=position))
        return self._ahead[position]

    # --- the device's thread -------------------------------------------------------------------------

    def values(self, places: range, stop: int, block_tokens: int, vocabulary: Vocabulary) -> Words:
        """What stands for the tokens up to the end of each block; `stop` tokens are computed by then."""
        chain = self._chained(block_tokens)
        if len(chain) < stop:
            chain.extend(self.said(len(chain), stop, block_tokens, vocabulary))
        return chain.values[places.start : places.stop]

    def said(self, start: int, stop: int, block_tokens: int, vocabulary: Vocabulary) -> list[int]:
        """The answer's tokens at positions `[start, stop)`."""
        self._chained(block_tokens)
        return vocabulary.said(self._seed ^ self.damaged, start, stop)

    def block_ids(self, places: range) -> Indices:
        """The ids of blocks given by place."""
        return np.asarray(self.blocks[places.start : places.stop], dtype=np.int64)

    def _chained(self, block_tokens: int) -> TokenChain:
        if self._chain is None:
            self._chain = TokenChain(self.prompt, block_tokens)
            self._seed = self._chain.seed
        return self._chain
