"""Whose KV it is: digests of a request's beginnings, by which an engine knows what of it is its own prompt's.

What one engine holds after a turn is of use to the next turn's prompt as far as both have the same tokens. A
chat template may write an answer otherwise than it was sampled, or leave its reasoning out, so the common
beginning may end anywhere. Whoever holds tells the digests of some beginnings; whoever receives compares them
with its own prompt's and uses the longest that is equal.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, Protocol

import msgspec

from kvferry.handoff import PREFIXES_MAX, Prefix
from kvferry.host.requests import EngineRequest

_DIGEST_BYTES = 16


class TokenRequest(EngineRequest, Protocol):
    """vLLM's request, as far as its KV depends on it."""

    @property
    def all_token_ids(self) -> Sequence[int]:
        """The prompt's tokens and those that were sampled."""
        ...

    @property
    def num_tokens(self) -> int:
        """How many these are."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """How many of them have been given to the model."""
        ...

    @property
    def mm_features(self) -> Sequence[Any]:
        """Images and the like, of which the tokens are only placeholders."""
        ...

    @property
    def prompt_embeds(self) -> Any:
        """Embeddings in place of tokens, or None."""
        ...

    @property
    def lora_request(self) -> Any:
        """The adapter, or None."""
        ...

    @property
    def cache_salt(self) -> str | None:
        """Whoever has another one must not profit from this one's KV."""
        ...


def salt_of(request: TokenRequest) -> bytes | None:
    """What a request's KV depends on besides its tokens; None when that cannot be said in a few bytes."""
    if request.mm_features or request.prompt_embeds is not None:
        return None
    adapter = None if request.lora_request is None else request.lora_request.lora_name
    return msgspec.json.encode([adapter, request.cache_salt])


def told_prefixes(
    tokens: Sequence[int], prompt_tokens: int, block_tokens: int, salt: bytes
) -> tuple[Prefix, ...]:
    """Digests of at most `PREFIXES_MAX` beginnings of `tokens`: evenly spread, the prompt, and the whole."""
    pieces = PREFIXES_MAX - 2
    step = -(-len(tokens) // pieces)
    step = -(-step // block_tokens) * block_tokens
    ends = {*range(step, len(tokens), step), min(prompt_tokens, len(tokens)), len(tokens)}
    return tuple(Prefix(end, digest) for end, digest in _digests(tokens, sorted(ends), salt))


def common_tokens(tokens: Sequence[int], told: Sequence[Prefix], salt: bytes) -> int:
    """How many tokens from the first one on are the same, as far as the digests show it."""
    inside = sorted((prefix for prefix in told if prefix.tokens <= len(tokens)), key=lambda one: one.tokens)
    common = 0
    ours = _digests(tokens, [prefix.tokens for prefix in inside], salt)
    for prefix, (end, digest) in zip(inside, ours, strict=True):
        if digest != prefix.digest:
            break
        common = end
    return common


def _digests(tokens: Sequence[int], ends: Iterable[int], salt: bytes) -> Iterator[tuple[int, str]]:
    """The digest of each beginning; `ends` ascend."""
    running = blake2b(salt, digest_size=_DIGEST_BYTES)
    start = 0
    for end in ends:
        piece = array("q", tokens[start:end])
        if sys.byteorder == "big":
            piece.byteswap()
        running.update(piece)
        start = end
        yield end, running.hexdigest()
