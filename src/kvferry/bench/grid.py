"""The cells of a comparison: how many requests per second, and how long their prompts are."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvferry.errors import UsageError

CELLS_MAX = 64
_CELL = re.compile(r"(\d+(?:\.\d+)?)x(\d+)(k?)")


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One load: requests per second, and tokens per prompt."""

    rate: float
    input_tokens: int

    @property
    def name(self) -> str:
        """Such as `8 x 16k`."""
        return f"{self.rate:g} x {tokens_text(self.input_tokens)}"


@dataclass(frozen=True, slots=True)
class Grid:
    """Cells, how often each is run, and how long all of it may take."""

    name: str
    cells: tuple[Cell, ...]
    repeats: int
    minutes_max: float


GRIDS = {
    "published": Grid(
        "published",
        tuple(Cell(rate, tokens) for rate in (1, 2, 4, 8) for tokens in (1024, 4096, 8192, 16384)),
        repeats=3,
        minutes_max=60,
    ),
    "quick": Grid(
        "quick", (Cell(1, 1024), Cell(1, 16384), Cell(4, 16384), Cell(8, 16384)), repeats=2, minutes_max=10
    ),
}
"""`published` has the cells of the published comparison of vLLM's connectors."""


def parse_cells(text: str) -> tuple[Cell, ...]:
    """Read `1x1024,8x16k`: requests per second x tokens per prompt.

    Raises:
        UsageError: a cell cannot be read, or there are none or too many.
    """
    cells = []
    for part in filter(None, text.split(",")):
        found = _CELL.fullmatch(part.strip())
        if found is None or not float(found[1]) or not int(found[2]):
            raise UsageError(f"--cells must be RATExTOKENS,..., such as 1x1024,8x16k, not {part!r}")
        cells.append(Cell(float(found[1]), int(found[2]) * (1024 if found[3] else 1)))
    if not 1 <= len(set(cells)) <= CELLS_MAX:
        raise UsageError(f"--cells must name from 1 to {CELLS_MAX} cells, not {len(set(cells))}")
    return tuple(sorted(set(cells)))


def tokens_text(tokens: int) -> str:
    """A number of tokens for people: `16k`, or `300`."""
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)
