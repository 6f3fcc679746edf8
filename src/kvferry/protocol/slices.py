"""Slices of a token range, and the blocks that they take."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from kvferry.protocol.outputs import BlockArray


@dataclass(slots=True)
class Posted:
    """A slice that the agent was asked to write or to read, and that has not ended."""

    start: int
    stop: int
    attempt: int


def blocks_covering(start: int, stop: int, block_tokens: int) -> tuple[int, int]:
    """`(first, past the last)` block index of tokens `[start, stop)`."""
    return start // block_tokens, -(-stop // block_tokens)


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


def cut_blocks(
    groups: tuple[BlockArray, ...], block_tokens: tuple[int, ...], base: int, start: int, stop: int
) -> tuple[BlockArray, ...]:
    """The blocks of tokens `[start, stop)`, of each group; `groups[g][0]` holds token `base`."""
    cuts = []
    for blocks, tokens in zip(groups, block_tokens, strict=True):
        first, past = blocks_covering(start, stop, tokens)
        before = base // tokens
        cuts.append(blocks[first - before : past - before])
    return tuple(cuts)


def is_one_run(blocks: BlockArray) -> bool:
    """Whether blocks follow each other without a gap."""
    if not blocks:
        return True
    first, last = blocks[0], blocks[-1]
    # The ends tell nearly all; only where they fit each block is looked at.
    return last - first == len(blocks) - 1 and blocks == array("q", range(first, last + 1))
