"""The blocks of one prefill request, by cache group: which are allocated, and which the ranks know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.host.facts import NULL_BLOCK, CacheGroup
from kvferry.ids import BlockId, Span
from kvferry.layout.spans import to_spans
from kvferry.protocol.commands import Groups, absent

_ABSENT = -1


@dataclass(slots=True)
class Publication:
    """What is new to the ranks. `held` are the blocks that a write may read from now on."""

    first_block: int
    spans: Groups
    first_blocks: tuple[int, ...]
    """Of each cache group, where there are several."""
    held: list[BlockId]


@dataclass(slots=True)
class _Group:
    """One group's part. `kept_from` is the first block that a consumer can need."""

    sizes: CacheGroup
    kept_from: int
    published: int = 0
    fresh: list[BlockId] = field(default_factory=list)

    def take(self, frontier: int) -> list[BlockId]:
        """Allocated blocks up to the frontier that were not published."""
        wanted = self.sizes.blocks(frontier) - self.published
        blocks, self.fresh = self.fresh, []
        if len(blocks) > wanted:
            blocks, self.fresh = blocks[:wanted], blocks[wanted:]
        self.published += len(blocks)
        return blocks


class PublishedBlocks:
    """`tokens`: the length of what is to be handed over, at most; windows are those of its last token."""

    def __init__(self, tables: tuple[CacheGroup, ...], tokens: int) -> None:
        self._groups = [_Group(table, table.first_needed(tokens - 1)) for table in tables]

    def add(self, blocks: Sequence[list[BlockId]], *, replaced: bool) -> None:
        """The engine has allocated more of each group, or others from the first one on; no groups: none."""
        if replaced:
            self.clear()
        for group, more in zip(self._groups, blocks, strict=False):
            group.fresh += more

    def clear(self) -> None:
        """The engine has taken all of them."""
        for group in self._groups:
            group.published, group.fresh = 0, []

    def advance(self, frontier: int) -> Publication:
        """Publish what covers the tokens before the frontier."""
        firsts = tuple(group.published for group in self._groups)
        spans: list[tuple[Span, ...]] = []
        held: list[BlockId] = []
        for group, first in zip(self._groups, firsts, strict=True):
            blocks = group.take(frontier)
            if group.sizes.window_tokens:
                before = min(max(group.kept_from - first, 0), len(blocks))
                blocks = [_ABSENT if block == NULL_BLOCK else block for block in blocks[before:]]
                spans.append(absent(before) + to_spans(blocks))
                held += [block for block in blocks if block != _ABSENT]
            else:
                spans.append(to_spans(blocks))
                held += blocks
        return Publication(firsts[0], tuple(spans), firsts if len(firsts) > 1 else (), held)
