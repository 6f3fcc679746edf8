"""Which request the KV in each block of a cache is for, so that a transfer can be told by where it lands.

Whoever fetches KV need not name the request to anybody: kvferry's READs carry no notification.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.emulator.pattern import WORD_BYTES, Grid


class Landing:
    """The scheduler's thread says what is expected where; any thread may ask."""

    def __init__(self) -> None:
        self._requests: dict[int, str] = {}
        """By block. A block that is given away again belongs to its next request from then on."""
        self._base = 0
        self._grid: Grid | None = None

    def place(self, base: int, grid: Grid) -> None:
        """The cache's memory begins at this address; before that no address is in it."""
        self._base, self._grid = base, grid

    def expect(self, request: str, blocks: Iterable[int]) -> None:
        """What comes into these blocks is for this request."""
        self._requests.update(dict.fromkeys(blocks, request))

    def request_at(self, address: int) -> str:
        """The request whose KV is expected at an address; empty where none is."""
        grid = self._grid
        if grid is None or address < self._base:
            return ""
        return self._requests.get(grid.block_at((address - self._base) // WORD_BYTES), "")
