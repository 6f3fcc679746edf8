"""A model of two engines' KV memory, token by token, that notices every write and read out of turn."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry.ids import TransferId


class Token(NamedTuple):
    """The KV of one token of one transfer's prompt; None in memory is anybody's garbage."""

    transfer: TransferId
    position: int


@dataclass(slots=True)
class Pool:
    """Block ids of one engine. `owner` says who holds a block; free blocks have none."""

    count: int
    owner: dict[int, object] = field(default_factory=dict)
    _next: int = 0

    @property
    def free_count(self) -> int:
        """Blocks that nobody holds."""
        return self.count - len(self.owner)

    def take(self, count: int, owner: object) -> list[int]:
        """Allocate; blocks come round robin, scattered when others are held."""
        assert count <= self.free_count, "the model has too few blocks"
        taken: list[int] = []
        while len(taken) < count:
            block, self._next = self._next, (self._next + 1) % self.count
            if block not in self.owner:
                self.owner[block] = owner
                taken.append(block)
        return taken

    def give_back(self, blocks: Iterable[int], owner: object) -> None:
        """Free blocks; they must be the owner's."""
        for block in blocks:
            assert self.owner.pop(block) == owner, "freed by who does not hold it"


@dataclass(slots=True)
class Memory:
    """KV of one rank (or of one part of a rank): what each token slot of each block holds."""

    block_tokens: int
    slots: dict[tuple[int, int], Token] = field(default_factory=dict)

    def compute(self, transfer: TransferId, blocks: list[int], start: int, stop: int) -> None:
        """Put the KV of tokens `[start, stop)` in a request's blocks, of which the first holds token 0."""
        for position in range(start, stop):
            block = blocks[position // self.block_tokens]
            self.slots[block, position % self.block_tokens] = Token(transfer, position)

    def spoil(self, blocks: Iterable[int]) -> None:
        """The blocks belong to another request now."""
        for block in blocks:
            for at in range(self.block_tokens):
                self.slots.pop((block, at), None)

    def read(self, block: int, at: int) -> Token | None:
        """What a slot holds."""
        return self.slots.get((block, at))

    def write(self, block: int, at: int, token: Token | None) -> None:
        """What lands in a slot; garbage too."""
        if token is None:
            self.slots.pop((block, at), None)
        else:
            self.slots[block, at] = token


def spans(blocks: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Runs `(first, count)` of consecutive ids, in order."""
    found: list[tuple[int, int]] = []
    for block in blocks:
        if found and found[-1][0] + found[-1][1] == block:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((block, 1))
    return tuple(found)
