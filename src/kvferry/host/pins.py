"""Blocks that must not be given to another request although no request of the engine holds them.

The engine's block pool counts references; a pin is one more. Scheduler side, its thread only.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Protocol

from kvferry.ids import BlockId


class BlockPool(Protocol):
    """What we use of vLLM's block pool."""

    @property
    def blocks(self) -> Sequence[Any]:
        """The pool's blocks by their ids."""
        ...

    def get_num_free_blocks(self) -> int:
        """How many blocks nobody holds."""
        ...

    def touch(self, blocks: Sequence[Any]) -> None:
        """Add a reference to each block."""
        ...

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Drop a reference of each block; the first is the first to be reused."""
        ...


class Pins:
    """References to blocks, by owner. Until a pool is bound it counts and holds nothing."""

    def __init__(self) -> None:
        self._pool: BlockPool | None = None
        self._held: dict[Hashable, list[Any]] = {}
        """The pool's own blocks, so that nobody looks them up again to give them back."""

    def bind(self, pool: BlockPool) -> None:
        """Use the engine's pool from now on. Called once, before the first request."""
        self._pool = pool

    def add(self, owner: Hashable, blocks: Sequence[BlockId]) -> None:
        """Hold these blocks for `owner` too."""
        if not blocks:
            return
        held: Sequence[Any] = blocks
        if self._pool is not None:
            held = list(map(self._pool.blocks.__getitem__, blocks))
            self._pool.touch(held)
        self._held.setdefault(owner, []).extend(held)

    def drop(self, owner: Hashable) -> None:
        """Give the owner's blocks back; unknown owners are ignored."""
        held = self._held.pop(owner, None)
        if held and self._pool is not None:
            # The tail first: a prefix is worth keeping longer.
            self._pool.free_blocks(held[::-1])

    def move(self, owner: Hashable, new_owner: Hashable) -> None:
        """Name another owner of `owner`'s blocks."""
        held = self._held.pop(owner, None)
        if held:
            self._held.setdefault(new_owner, []).extend(held)

    @property
    def free_blocks(self) -> int:
        """Blocks of the pool that nobody holds; 0 while no pool is bound."""
        return 0 if self._pool is None else self._pool.get_num_free_blocks()

    def count(self, owner: Hashable) -> int:
        """Blocks held for `owner`."""
        return len(self._held.get(owner, ()))

    def __len__(self) -> int:
        return sum(len(held) for held in self._held.values())
