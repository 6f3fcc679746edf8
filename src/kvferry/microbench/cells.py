"""What is measured: shapes of a cache, and transfers of a size, scattered so or so, some at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, get_args

from kvferry.errors import UsageError

Fragmentation = Literal["contiguous", "scattered", "churned"]
FRAGMENTATIONS: tuple[Fragmentation, ...] = get_args(Fragmentation)
LAYOUTS = ("LBHNC", "BLHNC")
"""A page per layer and block, each layer's apart; and all pages of a block together."""
BLOCK_TOKENS = 16
POOL_SHARE = 2
"""A cache has at least this many times the blocks that move, so that no two of them need be neighbours."""
BLOCKS_MAX = 1 << 16
CONCURRENCY_MAX = 1024


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """One rank's cache: the stride order, and pages of one block and layer."""

    order: str
    page_bytes: int
    layers: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of all layers."""
        return self.layers * self.page_bytes


@dataclass(frozen=True, slots=True)
class Cell:
    """`concurrency` transfers at once, of so many blocks each."""

    shape: Shape
    blocks: int
    fragmentation: Fragmentation
    concurrency: int

    @property
    def bytes(self) -> int:
        """Bytes that all of them move."""
        return self.concurrency * self.blocks * self.shape.block_bytes

    @property
    def pages(self) -> int:
        """Pages that all of them move."""
        return self.concurrency * self.blocks * self.shape.layers

    @property
    def tokens(self) -> int:
        """Tokens of one transfer."""
        return self.blocks * BLOCK_TOKENS

    @property
    def name(self) -> str:
        """What it is called in tables."""
        return (
            f"{self.shape.order} {self.shape.page_bytes} B {self.fragmentation} {self.blocks} blocks"
            f" x {self.concurrency}"
        )


@dataclass(frozen=True, slots=True)
class Grid:
    """The cells that fit, and how many do not fit into the cache."""

    cells: tuple[Cell, ...]
    left_out: int

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Every shape that occurs."""
        return tuple(dict.fromkeys(cell.shape for cell in self.cells))


def make_grid(
    *,
    blocks: Sequence[int],
    pages: Sequence[int],
    layers: int,
    layouts: Sequence[str],
    fragmentations: Sequence[Fragmentation],
    concurrencies: Sequence[int],
    cache_bytes: int,
) -> Grid:
    """All combinations whose transfers fit into a cache of `cache_bytes`.

    Raises:
        UsageError: a value is out of range, or nothing fits; names the option.
    """
    _check("blocks", blocks, 1, BLOCKS_MAX)
    _check("concurrency", concurrencies, 1, CONCURRENCY_MAX)
    _check("layers", [layers], 1, 1024)
    _check("pages", pages, 128, 1 << 24)
    if any(page % 128 for page in pages):
        raise UsageError(f"--pages must be multiples of 128 bytes ({BLOCK_TOKENS} tokens), not {list(pages)}")
    combined = product(layouts, pages, fragmentations, blocks, concurrencies)
    cells = [
        Cell(Shape(order, page, layers), count, fragmentation, concurrency)
        for order, page, fragmentation, count, concurrency in combined
    ]
    fitting = tuple(cell for cell in cells if POOL_SHARE * cell.bytes <= cache_bytes)
    if not fitting:
        least = min(POOL_SHARE * cell.bytes for cell in cells)
        raise UsageError(f"--cache-mib must be at least {-(-least >> 20) or 1} for the smallest transfer")
    return Grid(fitting, len(cells) - len(fitting))


def _check(option: str, values: Sequence[int], least: int, most: int) -> None:
    for value in values:
        if not least <= value <= most:
            raise UsageError(f"--{option} must be from {least} to {most}, not {value}")
