"""An engine's block pool: reference counts, a queue of free blocks, and the prefix cache in both.

The same block ids serve every rank of the engine. A free block keeps its cached content until it is given
out anew; one without is garbage from the moment it is free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

Key = tuple[int, ...]
"""Names the content of a whole block and of all before it."""


class BlockPool:
    """Blocks `first` to `count - 1`, all free at first.

    `taken` hears of blocks that were free and are not any more, `returned` of the reverse, and `spoilt` of
    blocks whose content is lost.
    """

    def __init__(
        self,
        count: int,
        *,
        first: int = 0,
        taken: Callable[[tuple[int, ...], str], None],
        returned: Callable[[tuple[int, ...]], None],
        spoilt: Callable[[Sequence[int]], None],
    ) -> None:
        self.count = count - first
        self.blocks = range(count)
        """What the host's pins hand to `touch` and `free_blocks`."""
        self._taken, self._returned, self._spoilt = taken, returned, spoilt
        self._references = [0] * count
        # A dict keeps its order: the first is the next to be given out.
        self._free: dict[int, None] = dict.fromkeys(range(first, count))
        self._block_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}

    @property
    def free_count(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def get_num_free_blocks(self) -> int:
        """`free_count`, as the host's pins ask for it."""
        return len(self._free)

    def is_free(self, block: int) -> bool:
        """Whether nobody holds a block."""
        return self._references[block] == 0

    def take(self, count: int, owner: str) -> list[int] | None:
        """Give out blocks, each with one reference; None, and nothing changes, when too few are free."""
        if count > len(self._free):
            return None
        blocks: list[int] = []
        spoilt = []
        for block in self._free:
            if len(blocks) == count:
                break
            blocks.append(block)
        for block in blocks:
            del self._free[block]
            self._references[block] = 1
            if self._forget(block):
                spoilt.append(block)
        if blocks:
            self._taken(tuple(blocks), owner)
        if spoilt:
            self._spoilt(spoilt)
        return blocks

    def touch(self, blocks: Iterable[int], owner: str = "pin") -> None:
        """Add a reference to each block; cached blocks may be free before."""
        fresh = []
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
                fresh.append(block)
            self._references[block] += 1
        if fresh:
            self._taken(tuple(fresh), owner)

    def free_blocks(self, blocks: Iterable[int]) -> None:
        """Drop a reference of each block; the first that is free by it is the first to be given out."""
        freed = []
        for block in blocks:
            assert self._references[block] > 0, f"block {block} is freed twice"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                freed.append(block)
        if freed:
            self._returned(tuple(freed))
            garbage = [block for block in freed if block not in self._key_of]
            if garbage:
                self._spoilt(garbage)

    def cache(self, block: int, key: Key) -> None:
        """Remember what a held block contains; a second block with the same content stays anonymous."""
        if block not in self._key_of and key not in self._block_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def cached(self, key: Key) -> int | None:
        """The block with this content."""
        return self._block_of.get(key)

    def held(self) -> list[int]:
        """Blocks that somebody holds."""
        return [block for block, references in enumerate(self._references) if references]

    def _forget(self, block: int) -> bool:
        key = self._key_of.pop(block, None)
        if key is None:
            return False
        del self._block_of[key]
        return True
