"""Prompts that nobody has sent before, so that no cache can answer for a prefill.

A prompt is kept as its JSON: it is encoded once, before the load starts, and serves both legs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec

from kvferry.errors import UsageError

VOCABULARY_DEFAULT = (1000, 30000)
"""Token ids that any common tokenizer has, and that are no special tokens there."""
# Common short words: most tokenizers make one token of each, together with the space before it.
# fmt: off
_WORDS = (
    "ferry", "river", "stone", "cloud", "green", "night", "paper", "water", "light",
    "house", "train", "field", "music", "story", "glass", "north", "south", "table",
    "horse", "bread", "winter", "summer", "engine", "bridge", "harbor", "island", "window",
    "garden", "market", "letter", "number", "circle", "silver", "copper", "forest", "valley",
    "morning", "evening", "traffic", "captain", "weather", "journey", "promise", "picture", "village",
)
# fmt: on


class Prompt(msgspec.Struct, frozen=True):
    """One prompt: its JSON, and how many tokens it is meant to have."""

    encoded: msgspec.Raw
    tokens: int


def token_prompts(count: int, tokens: int, vocabulary: tuple[int, int], seed: int) -> Iterator[Prompt]:
    """Random prompts of token ids from `vocabulary`, a half-open range.

    Raises:
        UsageError: the range is empty, or a prompt would have no token.
    """
    first, end = vocabulary
    if not 0 <= first < end:
        raise UsageError(f"--vocabulary must be FIRST:END with 0 <= FIRST < END, not {first}:{end}")
    _check_length(tokens)
    chance = random.Random(f"prompts {seed}")
    for _ in range(count):
        ids = chance.choices(range(first, end), k=tokens)
        yield Prompt(msgspec.Raw(msgspec.json.encode(ids)), tokens)


def text_prompts(count: int, tokens: int, seed: int) -> Iterator[Prompt]:
    """Random prompts of words, about one token each; the server's usage says how many it counted.

    Raises:
        UsageError: a prompt would have no word.
    """
    _check_length(tokens)
    chance = random.Random(f"texts {seed}")
    for _ in range(count):
        text = " ".join(chance.choices(_WORDS, k=tokens))
        yield Prompt(msgspec.Raw(msgspec.json.encode(text)), tokens)


def _check_length(tokens: int) -> None:
    if tokens < 1:
        raise UsageError(f"--random-input-len must be at least 1, not {tokens}")
