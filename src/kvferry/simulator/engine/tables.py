"""Which request holds which blocks: growing, prefix hits, and giving back behind steps in flight."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvferry.simulator.engine.pool import BlockPool, Key
from kvferry.simulator.engine.requests import Request
from kvferry.simulator.engine.steps import Step
from kvferry.simulator.ground.arena import GroupShape

NULL = 0
"""What stands in tables where windows have moved on, or began later. It is no block's id then."""


@dataclass(slots=True, eq=False)
class Tables:
    """Block tables of one engine's requests, one for each cache group; all groups draw from one pool.

    An engine that loads KV while steps are in flight defers frees: a step may still write what a load would
    fill. `planned` steps with work have been planned, and `processed` is the newest that has come back.
    """

    pool: BlockPool
    groups: tuple[GroupShape, ...]
    defers: bool
    planned: int = 0
    processed: int = -1
    has_windows: bool = field(init=False)
    _grain: int = field(init=False)
    """Prefix hits are whole blocks of every group."""
    _deferred: deque[tuple[int, list[int]]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        """Nobody holds anything at first."""
        self.has_windows = any(group.window_tokens for group in self.groups)
        self._grain = math.lcm(*(group.block_tokens for group in self.groups))

    def add(self, request: Request) -> None:
        """A request has come, and has no blocks."""
        request.blocks = [[] for _ in self.groups]

    def blocks(self, tokens: int) -> int:
        """Blocks that cover so many tokens, of all groups."""
        return sum(group.blocks(tokens) for group in self.groups)

    def grow(self, request: Request, tokens: int) -> list[list[int]] | None:
        """Blocks for so many tokens in all; the new ones by group, or None when too few are free."""
        if self.has_windows:
            self._slide(request)
        wanted = [
            max(group.blocks(tokens) - len(blocks), 0)
            for group, blocks in zip(self.groups, request.blocks, strict=True)
        ]
        if sum(wanted) > self.pool.free_count:
            return None
        return [
            self._extend(request, blocks, count) for blocks, count in zip(request.blocks, wanted, strict=True)
        ]

    def _extend(self, request: Request, blocks: list[int], count: int) -> list[int]:
        fresh = self.pool.take(count, request.name)
        assert fresh is not None, "there were enough"
        blocks += fresh
        return fresh

    def _slide(self, request: Request) -> None:
        """Give back what no step looks at any more, neither one in flight nor one to come."""
        processed = max(request.computed - request.in_flight, 0)
        for group, blocks in zip(self.groups, request.blocks, strict=True):
            gone = min(group.skipped(processed), len(blocks))
            self.pool.free_blocks(block for block in reversed(blocks[:gone]) if block != NULL)
            blocks[:gone] = [NULL] * gone

    def allocate(self, request: Request, hits: list[list[int]], computed: int, tokens: int) -> bool:
        """Give a request blocks for so many tokens, of which it has `computed` without computing them.

        `hits` are those of the prefix cache, by group. False, and nothing changes, when too few are free.
        """
        if any(request.blocks):
            return self.grow(request, computed + tokens) is not None
        skipped = [group.skipped(computed) for group in self.groups]
        kept = [found[past:] for found, past in zip(hits, skipped, strict=True)]
        wanted = [
            max(group.blocks(computed + tokens) - past - len(found), 0)
            for group, found, past in zip(self.groups, kept, skipped, strict=True)
        ]
        fresh_hits = sum(self.pool.is_free(block) for found in kept for block in found)
        if sum(wanted) > self.pool.free_count - fresh_hits:
            return False
        # Hits first: no group may take what another one has found.
        for index, (found, past) in enumerate(zip(kept, skipped, strict=True)):
            self.pool.touch(found, request.name)
            request.blocks[index] = [NULL] * past + found
        for blocks, count in zip(request.blocks, wanted, strict=True):
            self._extend(request, blocks, count)
        return True

    def hits(self, request: Request) -> tuple[int, list[list[int]]]:
        """The tokens of the prompt's beginning that are cached, and their blocks by group.

        The last token is always computed. Of a window only what the next token looks at must be there.
        """
        if len(self.groups) == 1 and not self.has_windows:
            return self._plain_hits(request)
        most = (request.prompt.tokens - 1) // self._grain
        for tokens in range(most * self._grain, 0, -self._grain):
            found = [self._cached(request, index, tokens) for index in range(len(self.groups))]
            if all(blocks is not None for blocks in found):
                return tokens, [blocks for blocks in found if blocks is not None]
        return 0, [[] for _ in self.groups]

    def _plain_hits(self, request: Request) -> tuple[int, list[list[int]]]:
        hits: list[int] = []
        for index in range((request.prompt.tokens - 1) // self._grain):
            block = self.pool.cached(self._key(request, 0, index))
            if block is None:
                break
            hits.append(block)
        return len(hits) * self._grain, [hits]

    def _cached(self, request: Request, group: int, tokens: int) -> list[int] | None:
        """A group's blocks of the first so many tokens; None when one is missed."""
        shape = self.groups[group]
        skipped = shape.skipped(tokens)
        found = [
            self.pool.cached(self._key(request, group, index))
            for index in range(skipped, shape.blocks(tokens))
        ]
        if any(block is None for block in found):
            return None
        return [NULL] * skipped + [block for block in found if block is not None]

    def _key(self, request: Request, group: int, index: int) -> Key:
        key = request.prompt.block_key(index, self.groups[group].block_tokens)
        return (*key, group) if group else key

    def cache(self, request: Request, tokens: int) -> None:
        """The request's first tokens have KV, or will have when the step that is planned has run."""
        for group, (shape, blocks) in enumerate(zip(self.groups, request.blocks, strict=True)):
            for index in range(min(tokens // shape.block_tokens, len(blocks))):
                if blocks[index] != NULL or not self.has_windows:
                    self.pool.cache(blocks[index], self._key(request, group, index))

    def can_free(self, request: Request) -> bool:
        """Whether no step in flight may write its blocks, where that matters."""
        return not self.defers or request.last_step <= self.processed

    def free(self, request: Request) -> None:
        """The request needs its blocks no more; the tail goes first: a prefix is worth keeping longer."""
        blocks = self._held(request.blocks)
        self.add(request)
        if self.can_free(request):
            self.pool.free_blocks(blocks)
        elif blocks:
            self._deferred.append((self.planned - 1, blocks))

    def _held(self, tables: Iterable[list[int]]) -> list[int]:
        """The tail of each table first."""
        blocks = [block for table in tables for block in reversed(table)]
        return [block for block in blocks if block != NULL] if self.has_windows else blocks

    def step_back(self, step: Step) -> None:
        """A step has come back from every rank."""
        if not step.work:
            return
        self.processed = step.number
        while self._deferred and self._deferred[0][0] <= self.processed:
            self.pool.free_blocks(self._deferred.popleft()[1])

    @property
    def deferred_count(self) -> int:
        """Blocks that wait for a step in flight."""
        return sum(len(blocks) for _, blocks in self._deferred)
