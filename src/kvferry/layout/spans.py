"""Lists of block ids as runs of consecutive ids, and the block indices that tokens fall into.

A block *index* counts a request's blocks from its first token on; a block *id* names a place in the cache.
Spans of a request list the ids of its blocks in the order of their indices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvferry.errors import GeometryError, PeerError
from kvferry.ids import BlockId, Span


def to_spans(block_ids: Iterable[BlockId]) -> tuple[Span, ...]:
    """Spans of the ids in the order given; plain Python because it is faster here than a numpy conversion."""
    spans: list[Span] = []
    first = following = -1
    for block in block_ids:
        if block == following:
            following += 1
            continue
        if following != first:
            spans.append((first, following - first))
        first = block
        following = block + 1
    if following != first:
        spans.append((first, following - first))
    return tuple(spans)


def from_spans(spans: Sequence[Span]) -> npt.NDArray[np.int64]:
    """The ids in order, one int64 each. A peer's spans pass `checked` first: this allocates what they say."""
    if not spans:
        return np.empty(0, dtype=np.int64)
    table = np.asarray(spans, dtype=np.int64)
    firsts, counts = table[:, 0], table[:, 1]
    # Each id is its place in the result plus the difference between its span's first id and first place.
    return np.arange(counts.sum()) + np.repeat(firsts - np.cumsum(counts) + counts, counts)


def count(spans: Iterable[Span]) -> int:
    """Blocks in the spans."""
    return sum(blocks for _, blocks in spans)


def cut(spans: Sequence[Span], first: int, blocks: int) -> tuple[Span, ...]:
    """The spans of block indices `[first, first + blocks)`.

    Raises:
        GeometryError: there are not that many blocks.
    """
    available = count(spans)
    if first < 0 or blocks < 0 or first + blocks > available:
        raise GeometryError(
            "blocks",
            f"{available} blocks",
            f"block indices [{first}, {first + blocks})",
            "ask only for what is there",
        )
    parts: list[Span] = []
    skip, wanted = first, blocks
    for start, length in spans:
        if not wanted:
            break
        if skip >= length:
            skip -= length
            continue
        taken = min(length - skip, wanted)
        parts.append((start + skip, taken))
        skip = 0
        wanted -= taken
    return tuple(parts)


def checked(spans: Sequence[Span], blocks_max: int) -> tuple[Span, ...]:
    """A peer's spans, once they are known to name distinct blocks of a cache of `blocks_max` blocks.

    Raises:
        PeerError: a span is empty, leaves the cache or overlaps another one.
    """
    if len(spans) > blocks_max:
        raise PeerError(f"spans: {len(spans)} of them, for a cache of {blocks_max} blocks")
    for first, blocks in spans:
        # The count is compared before it is added, so that the message never prints a number of any length.
        if blocks < 1 or blocks > blocks_max or first < 0 or first > blocks_max - blocks:
            raise PeerError(f"spans: one is empty or leaves the cache of {blocks_max} blocks")
    following = 0
    for first, blocks in sorted(spans):
        if first < following:
            raise PeerError(f"spans: block {first} is named twice")
        following = first + blocks
    return tuple(spans)


def align(start: int, stop: int, block_tokens: int) -> range:
    """The block indices that cover tokens `[start, stop)`; the last block may be covered in part.

    Raises:
        GeometryError: `start` is not the first token of a block, or the range runs backwards.
    """
    if start < 0 or start % block_tokens:
        raise GeometryError(
            "start", f"a multiple of {block_tokens} tokens", start, "register whole blocks from the first on"
        )
    if stop < start:
        raise GeometryError(
            "stop", f"at least {start}", stop, "register a range of tokens that does not end early"
        )
    return range(start // block_tokens, -(-stop // block_tokens))


def scaled_spans(spans: tuple[Span, ...], ratio: int) -> tuple[Span, ...]:
    """Spans of blocks as spans of smaller ones, `ratio` to each."""
    return spans if ratio == 1 else tuple((first * ratio, count * ratio) for first, count in spans)
