"""What KV looks like here: 32 bits per token, layer and head, a function of the prompt and its place.

A KV value depends on everything before it, so prompts of one family agree exactly as far as they share
tokens. Ranks differ by the heads that they hold.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.uint32]
"""Indexed `[token, layer, head]`."""

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt. `number` names it; its first `shared_tokens` tokens are those of its family."""

    number: int
    tokens: int
    family: int = 0
    shared_tokens: int = 0

    def block_key(self, index: int, block_tokens: int) -> tuple[int, int]:
        """Equal for two whole blocks, the blocks before them included, when their content is."""
        shared = (index + 1) * block_tokens <= self.shared_tokens
        return (-self.family - 1 if shared else self.number, index)


@dataclass(slots=True)
class Contents:
    """The KV of every prompt of one world. `tokens_max` bounds prompts and what decode puts behind them."""

    layers: int
    tokens_max: int
    prompts: list[Prompt] = field(default_factory=list)
    _values: dict[tuple[int, int], Values] = field(default_factory=dict)
    _parts: dict[tuple[int, range, range], Values] = field(default_factory=dict)

    def add(self, tokens: int, family: int = 0, shared_tokens: int = 0) -> Prompt:
        """A new prompt."""
        prompt = Prompt(len(self.prompts), tokens, family, min(shared_tokens, tokens))
        self.prompts.append(prompt)
        return prompt

    def longer(self, prompt: Prompt, tokens: int) -> Prompt:
        """A prompt that goes on where another one and its answer have ended."""
        return replace(prompt, tokens=tokens)

    def of(self, number: int, head: int) -> Values:
        """The KV of a prompt in a rank that holds just this head of the model."""
        values = self._values.get((number, head))
        if values is None:
            values = self._values[(number, head)] = self._compute(self.prompts[number], head)
        return values

    def part(self, number: int, layers: range, heads: range) -> Values:
        """The KV of a prompt in a rank that holds these layers and heads of the model."""
        if len(heads) == 1 and len(layers) == self.layers:
            return self.of(number, heads.start)
        key = (number, layers, heads)
        values = self._parts.get(key)
        if values is None:
            whole = np.concatenate([self.of(number, head) for head in heads], axis=2)
            values = self._parts[key] = whole[:, layers.start : layers.stop]
        return values

    def _compute(self, prompt: Prompt, head: int) -> Values:
        text = np.full(self.tokens_max, 2 * prompt.number + 1, dtype=np.uint64)
        text[: prompt.shared_tokens] = 2 * prompt.family + 2
        tokens = np.arange(self.tokens_max, dtype=np.uint64)
        layers = np.arange(self.layers, dtype=np.uint64)
        places = (text * np.uint64(1 << 20) + tokens)[:, None] * np.uint64(64) + layers[None, :]
        mixed = (places * np.uint64(256) + np.uint64(head + 1)) * _MULTIPLIER
        mixed ^= mixed >> _SHIFT
        mixed *= _MULTIPLIER
        return (mixed >> np.uint64(32)).astype(np.uint32)[:, :, None]
