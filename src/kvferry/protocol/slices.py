"""Slices of a token range, and the blocks that they take."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvferry.protocol.outputs import BlockArray, Link, PeerFacts


@dataclass(slots=True)
class Posted:
    """A slice that the agent was asked to write or to read, and that has not ended."""

    start: int
    stop: int
    attempt: int


def slice_size(
    peer: PeerFacts | Link,
    block_tokens: tuple[int, ...],
    start: int,
    stop: int,
    blocks: Callable[[Posted], Iterable[BlockArray]],
) -> tuple[int, int]:
    """The most tokens of the next slice of `[start, stop)`, and the block size in which both sides are cut.

    More where all blocks follow each other on both sides: `blocks` gives those of a slice, of every group and
    side. `block_tokens` are our own block sizes.
    """
    grain = math.lcm(*block_tokens, *peer.block_tokens)
    most, longer = peer.slice_tokens, min(start + peer.joined_tokens, stop)
    if longer > start + most and all(map(is_one_run, blocks(Posted(start, longer, 0)))):
        most = peer.joined_tokens
    return max(most // grain, 1) * grain, grain


def blocks_covering(start: int, stop: int, block_tokens: int) -> tuple[int, int]:
    """`(first, past the last)` block index of tokens `[start, stop)`."""
    return start // block_tokens, -(-stop // block_tokens)


def blocks_due(count: int, start: int, stop: int, block_tokens: int, window_tokens: int) -> int:
    """How many blocks of `[start, stop)` whoever lists `count` of them should have listed.

    Of a window at least those that whoever computes token `stop` next looks at, and at most all.
    """
    first, past = blocks_covering(start, stop, block_tokens)
    if not window_tokens:
        return past - first
    needed = max(first, min((stop + 1 - window_tokens) // block_tokens, past))
    return min(max(count, past - needed), past - first)


def first_token(start: int, stop: int, window_tokens: int, whole_tokens: int) -> int:
    """The first token of `[start, stop)` that a group needs, in blocks of `whole_tokens` of an engine."""
    if not window_tokens:
        return start
    return max(start, (stop + 1 - window_tokens) // whole_tokens * whole_tokens)


def listed_from(stop: int, count: int, block_tokens: int) -> int:
    """The first token of the last `count` blocks before `stop`."""
    return (-(-stop // block_tokens) - count) * block_tokens


def expanded(spans: tuple[tuple[int, int], ...]) -> BlockArray:
    """Block ids of spans, in order."""
    blocks = array("q")
    for first, count in spans:
        blocks.extend(range(first, first + count))
    return blocks


def spanned(blocks: BlockArray) -> tuple[tuple[int, int], ...]:
    """Block ids as spans, in order."""
    spans: list[tuple[int, int]] = []
    for block in blocks:
        if spans and sum(spans[-1]) == block:
            spans[-1] = (spans[-1][0], spans[-1][1] + 1)
        else:
            spans.append((block, 1))
    return tuple(spans)


def cut_last(
    groups: tuple[BlockArray, ...],
    block_tokens: tuple[int, ...],
    end: int,
    starts: tuple[int, ...],
    part: Posted,
) -> tuple[BlockArray, ...]:
    """The blocks of a slice, of each group from token `starts[g]` on; `groups[g]` end with token `end`."""
    cuts = []
    for blocks, tokens, least in zip(groups, block_tokens, starts, strict=True):
        first, past = covering(part, least, tokens)
        before = -(-end // tokens) - len(blocks)
        cuts.append(blocks[first - before : past - before])
    return tuple(cuts)


def covering(part: Posted, least: int, block_tokens: int) -> tuple[int, int]:
    """The block indices of a slice from token `least` on; none where it ends before."""
    if least >= part.stop:
        return least // block_tokens, least // block_tokens
    return blocks_covering(max(part.start, least), part.stop, block_tokens)


def is_one_run(blocks: BlockArray) -> bool:
    """Whether blocks follow each other without a gap."""
    if not blocks:
        return True
    first, last = blocks[0], blocks[-1]
    # The ends tell nearly all; only where they fit each block is looked at.
    return last - first == len(blocks) - 1 and blocks == array("q", range(first, last + 1))
