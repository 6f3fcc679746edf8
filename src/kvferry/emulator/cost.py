"""What a step of the engine would take on the emulated device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from kvferry.errors import UsageError


class Chunk(NamedTuple):
    """A part of a prompt that one step computes: `tokens` of them, with `context` before."""

    tokens: int
    context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """A device and a model, as seconds. Raises `UsageError` naming the field that makes no sense."""

    prefill_tokens_per_second: float
    """Rate of all that a prompt's tokens cost wherever they stand: everything but attention."""
    attention_seconds_per_pair: float = 0.0
    """Attention of one token to one token before it (or itself), all layers of the rank."""
    decode_seconds: float
    """What a step that decodes takes at least: the weights are read once."""
    decode_seconds_per_sequence: float = 0.0
    decode_seconds_per_context_token: float = 0.0
    """Reading the KV of one token of one decoding sequence, all layers of the rank."""
    step_seconds: float = 0.0
    """On top of every step: launches, sampling, all that does not shrink with the batch."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = "greater than 0" if field.name == "prefill_tokens_per_second" else "0 or more"
            if value < 0 or (value == 0 and least != "0 or more"):
                raise UsageError(f"costs.{field.name} must be {least}, not {value!r}")


def step_seconds(costs: Costs, chunks: Sequence[Chunk], decodes: Sequence[int]) -> float:
    """Seconds of a step with these prompt chunks and one token for each of `decodes`, given as contexts.

    Computing the tokens and reading the weights overlap, so the longer of the two counts; attention comes
    on top.
    """
    if not chunks and not decodes:
        return 0.0
    tokens = sum(chunk.tokens for chunk in chunks) + len(decodes)
    pairs = sum(chunk.tokens * chunk.context + chunk.tokens * (chunk.tokens + 1) / 2 for chunk in chunks)
    computing = tokens / costs.prefill_tokens_per_second
    reading = costs.decode_seconds if decodes else 0.0
    return (
        costs.step_seconds
        + max(computing, reading)
        + pairs * costs.attention_seconds_per_pair
        + len(decodes) * costs.decode_seconds_per_sequence
        + sum(decodes) * costs.decode_seconds_per_context_token
    )
