"""Which request holds which blocks: growing, prefix hits, and giving back behind steps in flight."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvferry.simulator.engine.pool import BlockPool
from kvferry.simulator.engine.requests import Request
from kvferry.simulator.engine.steps import Step


@dataclass(slots=True, eq=False)
class Tables:
    """Block tables of one engine's requests.

    An engine that loads KV while steps are in flight defers frees: a step may still write what a load would
    fill. `planned` steps with work have been planned, and `processed` is the newest that has come back.
    """

    pool: BlockPool
    block_tokens: int
    defers: bool
    planned: int = 0
    processed: int = -1
    _deferred: deque[tuple[int, list[int]]] = field(default_factory=deque)

    def blocks(self, tokens: int) -> int:
        """Blocks that cover so many tokens."""
        return -(-tokens // self.block_tokens)

    def grow(self, request: Request, tokens: int) -> list[int] | None:
        """Blocks for so many tokens in all; the new ones, or None when too few are free."""
        wanted = max(self.blocks(tokens) - len(request.blocks), 0)
        fresh = self.pool.take(wanted, request.name)
        if fresh is not None:
            request.blocks += fresh
        return fresh

    def allocate(self, request: Request, hits: list[int], tokens: int) -> bool:
        """Give a request its blocks, prefix hits first; False, and nothing changes, when too few are free."""
        wanted = self.blocks(tokens) - len(request.blocks) - len(hits)
        fresh_hits = sum(1 for block in hits if self.pool.is_free(block))
        if max(wanted, 0) > self.pool.free_count - fresh_hits:
            return False
        self.pool.touch(hits, request.name)
        fresh = self.pool.take(max(wanted, 0), request.name)
        assert fresh is not None, "there were enough"
        request.blocks += hits + fresh
        return True

    def hits(self, request: Request) -> list[int]:
        """Cached blocks of the prompt's beginning; the last token is always computed."""
        hits: list[int] = []
        for index in range((request.prompt.tokens - 1) // self.block_tokens):
            block = self.pool.cached(request.prompt.block_key(index, self.block_tokens))
            if block is None:
                break
            hits.append(block)
        return hits

    def cache(self, request: Request, tokens: int) -> None:
        """The request's first tokens have KV, or will have when the step that is planned has run."""
        for index in range(min(tokens // self.block_tokens, len(request.blocks))):
            key = request.prompt.block_key(index, self.block_tokens)
            self.pool.cache(request.blocks[index], key)

    def can_free(self, request: Request) -> bool:
        """Whether no step in flight may write its blocks, where that matters."""
        return not self.defers or request.last_step <= self.processed

    def free(self, request: Request) -> None:
        """The request needs its blocks no more; the tail goes first: a prefix is worth keeping longer."""
        blocks, request.blocks = request.blocks, []
        if self.can_free(request):
            self.pool.free_blocks(reversed(blocks))
        elif blocks:
            self._deferred.append((self.planned - 1, blocks))

    def step_back(self, step: Step) -> None:
        """A step has come back from every rank."""
        if not step.work:
            return
        self.processed = step.number
        while self._deferred and self._deferred[0][0] <= self.processed:
            self.pool.free_blocks(reversed(self._deferred.popleft()[1]))

    @property
    def deferred_count(self) -> int:
        """Blocks that wait for a step in flight."""
        return sum(len(blocks) for _, blocks in self._deferred)
