"""Whole engines' caches for tests of the layout, and a plain account of where each byte of KV lies.

`where` says it by the definition of a description and nothing else; `expected` and `moved` are the two
sides of every comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.ids import Rank
from kvferry.layout.describe import describe
from kvferry.layout.ranks import heads_of, sent_heads
from kvferry.layout.runs import Region, Runs
from kvferry.layout.spec import CacheSpec, GroupSpec, Plane

Addresses = npt.NDArray[np.int64]
CopyTable = npt.NDArray[np.int64]
"""Rows of (target address, source address), one per byte, by target."""

FORMS = ("packed", "apart", "uneven", "transposed")
"""K and V together; K and V of one size apart; K and V of unlike sizes apart, each in an order of its own; K
and V apart with K kept transposed, one value of all tokens of a block after the other."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """An engine. `split` has the layers of each stage; `window` puts every other layer into a window of so
    many tokens, with a block table of its own; `scales` adds a byte per head and token to each layer.
    """

    tp: int = 1
    split: tuple[int, ...] = (2,)
    heads: int = 2
    order: str = "LBHNC"
    block_tokens: int = 2
    blocks: int = 6
    content_bytes: int = 4
    form: str = "packed"
    window: int = 0
    scales: bool = False

    @property
    def ranks(self) -> list[Rank]:
        """All of its ranks."""
        return [Rank(pp, tp) for pp, tp in product(range(len(self.split)), range(self.tp))]


def caches_of(sizes: Sizes, address: int = 1 << 20) -> dict[Rank, CacheSpec]:
    """The description of every rank, each in memory of its own from `address` on."""
    found = {}
    for rank in sizes.ranks:
        found[rank] = cache_of_rank(sizes, rank, address)
        address = end_of(found[rank]) + 64
    return found


def end_of(spec: CacheSpec) -> int:
    """The first address behind a rank's memory."""
    return max(region.address + region.bytes for region in spec.regions)


def cache_of_rank(sizes: Sizes, rank: Rank, address: int) -> CacheSpec:
    """One rank's description, in memory from `address` on."""
    groups: list[GroupSpec] = []
    regions: list[Region] = []
    for table, parity in enumerate((0, 1) if sizes.window else (None,)):
        window = sizes.window if parity else 0
        for part in _parts(sizes):
            group, region = _entry(sizes, rank, part, parity, address)
            groups.append(msgspec.structs.replace(group, table=table, window_tokens=window))
            regions.append(region)
            # A gap, so that a run that leaves a region is seen.
            address += region.bytes + 16
    return CacheSpec(
        model="tiny",
        dtype="float32",
        kv_dtype="float32",
        rank=rank,
        tp_size=sizes.tp,
        pp_size=len(sizes.split),
        groups=tuple(groups),
        regions=tuple(regions),
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """One entry of a description: content bytes of each of its planes, the first byte of each plane."""

    content_bytes: int
    firsts: tuple[int, ...]
    whole: int
    suffix: str = ""
    order: str = ""
    rows: int = 1


def _parts(sizes: Sizes) -> list[_Part]:
    whole = sizes.content_bytes
    half, less = whole // 2, whole // 4
    parts = {
        "packed": [_Part(whole, (0,), whole)],
        "apart": [_Part(half, (0, half), whole)],
        "uneven": [_Part(less, (0,), whole), _Part(whole - less, (less,), whole, order="BNLHC")],
        "transposed": [_Part(half, (0,), whole, rows=half), _Part(half, (half,), whole)],
    }[sizes.form]
    return parts + [_Part(1, (0,), 1, ":scale")] * sizes.scales


def _entry(
    sizes: Sizes, rank: Rank, part: _Part, parity: int | None, address: int
) -> tuple[GroupSpec, Region]:
    stages = stage_layers(sizes, parity)
    names = [name + part.suffix for name in stages[rank.pp]]
    held = heads_of(rank.tp, sizes.tp, sizes.heads)
    planes = [(name, first) for name in names for first in part.firsts]
    order = part.order or sizes.order
    if part.rows > 1 and not order.endswith("NC"):
        # Tokens of a head lie together, to be turned.
        order = order.replace("N", "").replace("C", "NC")
    group, region = describe(
        order,
        layers=max(len(planes), 1),
        blocks=sizes.blocks,
        heads=len(held),
        block_tokens=sizes.block_tokens,
        content_bytes=part.content_bytes,
        address=address,
        kind="scales" if part.suffix else "sliding_window" if parity else "full",
        head_first=held.start,
        heads_total=sizes.heads,
    )
    named = [
        Plane(name, plane.address, content_first=first)
        for (name, first), plane in zip(planes, group.planes, strict=False)
    ]
    stated = tuple(tuple(name + part.suffix for name in stage) for stage in stages)
    changes: dict[str, Any] = {"planes": tuple(named), "element_bytes": part.whole, "stages": stated}
    if part.rows > 1:
        value = part.content_bytes // part.rows
        changes |= {"content_bytes": value, "token_stride": value, "rows": part.rows}
        changes["row_stride"] = value * sizes.block_tokens
    return msgspec.structs.replace(group, **changes), region


def stage_layers(sizes: Sizes, parity: int | None = None) -> list[list[str]]:
    """Names of the layers of each stage; of those with an even or odd number only, if asked for."""
    ends = list(accumulate(sizes.split))
    return [
        [f"layer{n}" for n in range(end - count, end) if parity is None or n % 2 == parity]
        for end, count in zip(ends, sizes.split, strict=True)
    ]


# --- where each byte lies --------------------------------------------------------------------------


def where(
    groups: Sequence[GroupSpec], name: str, heads: range, tokens: range, blocks: Sequence[int]
) -> Addresses:
    """Addresses of a layer's content, by head, token and byte.

    `blocks` cover the tokens from the block of `tokens.start` on.
    """
    (whole,) = {group.whole_bytes for group in groups if name in group.layers}
    found = np.full((len(heads), len(tokens), whole), -1, dtype=np.int64)
    for group in groups:
        first_block = tokens.start // group.block_tokens
        for plane in group.planes:
            if plane.name != name:
                continue
            for i, head in enumerate(heads):
                for j, token in enumerate(tokens):
                    block = blocks[token // group.block_tokens - first_block]
                    at = (
                        plane.address
                        + block * group.block_stride
                        + (head - group.head_first) * group.head_stride
                        + token % group.block_tokens * group.token_stride
                    )
                    for row in range(group.rows):
                        first, begin = (
                            plane.content_first + row * group.content_bytes,
                            at + row * group.row_stride,
                        )
                        stop = first + group.content_bytes
                        found[i, j, first:stop] = range(begin, begin + group.content_bytes)
    assert (found >= 0).all(), "a part of a layer lies nowhere"
    return found


def expected(
    source: CacheSpec, target: CacheSpec, table: int, tokens: range, blocks: tuple[list[int], list[int]],
    turn: int = 0,
) -> CopyTable:  # fmt: skip
    """What one rank writes for another: all that both hold, and that nobody else is chosen to send."""
    parts = [np.empty((0, 2), np.int64)]
    ours, theirs = source.tables[table], target.tables[table]
    layers = set().union(*(group.layers for group in ours)) & set().union(*(group.layers for group in theirs))
    for name in layers:
        (total,) = {group.heads_total for group in ours if name in group.layers}
        sent = sent_heads(source.rank.tp, source.tp_size, target.rank.tp, target.tp_size, total, turn)
        sides = [
            where(groups, name, sent, tokens, ids).ravel()
            for groups, ids in ((theirs, blocks[1]), (ours, blocks[0]))
        ]
        parts.append(np.stack(sides, axis=1))
    return by_target(np.concatenate(parts))


def moved(runs: Runs) -> CopyTable:
    """What the runs move; a target byte that is written twice is an error."""
    length = runs.length.astype(np.int64)
    within = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
    table = by_target(
        np.stack(
            [
                np.repeat(runs.target.astype(np.int64), length) + within,
                np.repeat(runs.source.astype(np.int64), length) + within,
            ],
            axis=1,
        )
    )
    assert (table[1:, 0] > table[:-1, 0]).all(), "a byte is written twice"
    return table


def by_target(table: CopyTable) -> CopyTable:
    """The rows in the order of their targets."""
    return table[np.argsort(table[:, 0], kind="stable")]


def covering(tokens: range, block_tokens: int) -> int:
    """Blocks that hold the tokens."""
    return -(-tokens.stop // block_tokens) - tokens.start // block_tokens if tokens else 0
