"""How the blocks of one rank's cache become those of another's.

A plan is made once per pair of ranks, by one operation: intersect the parts (planes by name, heads and
content by range, tokens by position), then walk the dimensions from the inside out while both sides are
contiguous. Blocks of unequal size meet in cells, the most tokens that make whole blocks on both sides: a cell
is copied into a cell. What is left of a cell are a few pieces, each the same distance from its cell on either
side:

    piece.length bytes from piece.source + s * block_bytes + u * cell_bytes   (cell u of source block s)
                       to   piece.target + t * block_bytes + v * cell_bytes   (cell v of target block t)

for every piece. `descriptors.expand` does that for a transfer's blocks. The case of equal blocks is the one
where each block is one cell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd, prod

import msgspec
import numpy as np

from kvferry.errors import GeometryError
from kvferry.layout.compare import compare
from kvferry.layout.ranks import sent_heads
from kvferry.layout.runs import NO_BARRIERS, AddressArray, Barriers, Region, Runs, flipped, merge
from kvferry.layout.spec import BLOCK_TOKENS_MAX, CacheSpec, GroupSpec, Plane

PIECES_MAX = 1 << 20
"""Elements that a cell may fall into before merging: 24 MiB while the plan is made."""


@dataclass(frozen=True, slots=True)
class Side:
    """The blocks of one side. `block_bytes` and `cell_bytes` from one to the next, in one plane."""

    block_tokens: int
    block_count: int
    block_bytes: int
    cell_bytes: int

    def is_dense(self, piece_bytes: int, cell_tokens: int) -> bool:
        """Whether pieces of so many bytes, one for each cell, fill the blocks of a plane."""
        return self.block_bytes == piece_bytes * (self.block_tokens // cell_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class PartPlan:
    """The plan of two entries of a cache group: pieces in terms of cell 0 of block 0 on both sides."""

    pieces: Runs
    source: Side
    target: Side
    nested: int
    """So many pieces in a row lie within one block of the leading side; 0 where that is not alike."""
    joint: int
    """Bytes of every piece, where the next cell may continue it on both sides; else 0."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupPlan:
    """The plan of one cache group. Without parts one side has nothing that the other needs."""

    cell_tokens: int
    source_tokens: int
    target_tokens: int
    source_block_count: int
    target_block_count: int
    parts: tuple[PartPlan, ...]
    barriers: Barriers

    @property
    def target_leads(self) -> bool:
        """Whether runs are made in the order of target addresses: the side leads whose blocks are cells."""
        return self.source_tokens > self.cell_tokens == self.target_tokens

    @property
    def blocks_touch(self) -> bool:
        """Whether the next block continues each piece on both sides: runs of blocks are runs of bytes."""
        return all(
            part.joint
            and all(side.is_dense(part.joint, self.cell_tokens) for side in (part.source, part.target))
            for part in self.parts
        )

    @property
    def cell_bytes(self) -> int:
        """Bytes that a cell moves."""
        return sum(part.pieces.bytes for part in self.parts)

    @property
    def cell_pieces(self) -> int:
        """Descriptors that a single cell takes."""
        return sum(len(part.pieces) for part in self.parts)


@dataclass(frozen=True, slots=True, eq=False)
class CopyPlan:
    """What `plan` found for one pair of ranks, per cache group (block table)."""

    groups: tuple[GroupPlan, ...]

    @property
    def bytes(self) -> int:
        """Memory that the plan takes."""
        return sum(24 * group.cell_pieces for group in self.groups)

    @property
    def moves_nothing(self) -> bool:
        """Whether the source holds nothing that the target needs of it."""
        return not any(group.parts for group in self.groups)

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """Bytes of KV that are written into a block of the target, by group."""
        return tuple(self.bytes_per_block(group) for group in range(len(self.groups)))

    @property
    def source_tokens(self) -> tuple[int, ...]:
        """Tokens per block of the source, by group."""
        return tuple(group.source_tokens for group in self.groups)

    def bytes_per_block(self, group: int) -> int:
        """Bytes of KV that are written into a block of the target."""
        found = self.groups[group]
        return found.cell_bytes * (found.target_tokens // found.cell_tokens)

    def pieces(self, group: int) -> int:
        """Descriptors that a single pair of cells takes; cells are blocks where both sides' are equal."""
        return self.groups[group].cell_pieces

    def slice_tokens(self, bytes_max: int, runs_max: int) -> int:
        """The most tokens whose copy has at most so many bytes and runs before merging, at least a cell."""
        return min(
            (_slice_tokens(group, bytes_max, runs_max) for group in self.groups if group.parts),
            default=BLOCK_TOKENS_MAX,
        )

    def joined_tokens(self, bytes_max: int, runs_max: int) -> int:
        """The same where blocks follow each other on both sides, and take no runs of their own then."""
        return min(
            (
                _slice_tokens(
                    group, bytes_max, BLOCK_TOKENS_MAX * PIECES_MAX if group.blocks_touch else runs_max
                )
                for group in self.groups
                if group.parts
            ),
            default=BLOCK_TOKENS_MAX,
        )


@dataclass(frozen=True, slots=True)
class _Axis:
    """A dimension that both sides share: `count` elements, strides in bytes."""

    count: int
    source_stride: int
    target_stride: int


def plan(source: CacheSpec, target: CacheSpec, turn: int = 0) -> CopyPlan:
    """The plan that copies blocks of the `source` cache into blocks of the `target` cache.

    `turn` chooses among the source engine's replicas as in `ranks.duties`; where another one serves the
    target, the plan is empty.

    Raises:
        GeometryError: the first field that keeps them from being joined; `compare` lists all.
    """
    for error in compare(source, target, we_send=True):
        raise error
    barriers = Barriers(_barriers(source.regions), _barriers(target.regions))
    pair = source, target, turn
    return CopyPlan(
        tuple(
            _join_tables(
                ours, theirs, barriers, [(one, other, _sent(one, pair)) for one in ours for other in theirs]
            )
            for ours, theirs in zip(source.tables, target.tables, strict=True)
        )
    )


def join(source: GroupSpec, target: GroupSpec, barriers: Barriers = NO_BARRIERS) -> GroupPlan:
    """The plan for all planes and heads that two groups have in common, whoever else may hold them.

    Raises:
        GeometryError: the contents are not of one kind, or a cell falls into more than `PIECES_MAX` elements.
    """
    for field in ("whole_bytes", "heads_total"):
        ours, theirs = getattr(source, field), getattr(target, field)
        if ours != theirs:
            raise GeometryError(field, ours, theirs, "serve the same model on both engines")
    return _join_tables((source,), (target,), barriers, [(source, target, range(source.heads_total))])


def _sent(group: GroupSpec, pair: tuple[CacheSpec, CacheSpec, int]) -> range:
    source, target, turn = pair
    return sent_heads(source.rank.tp, source.tp_size, target.rank.tp, target.tp_size, group.heads_total, turn)


def _join_tables(
    source: Sequence[GroupSpec],
    target: Sequence[GroupSpec],
    barriers: Barriers,
    pairs: Sequence[tuple[GroupSpec, GroupSpec, range]],
) -> GroupPlan:
    ours, theirs = source[0], target[0]
    cell_tokens = gcd(ours.block_tokens, theirs.block_tokens)
    leads = ours.block_tokens > cell_tokens == theirs.block_tokens
    parts = [_join_parts(one, other, heads, cell_tokens, barriers, leads) for one, other, heads in pairs]
    return GroupPlan(
        cell_tokens=cell_tokens,
        source_tokens=ours.block_tokens,
        target_tokens=theirs.block_tokens,
        source_block_count=ours.block_count,
        target_block_count=theirs.block_count,
        parts=tuple(part for part in parts if part is not None),
        barriers=barriers,
    )


def _join_parts(
    source: GroupSpec,
    target: GroupSpec,
    sent: range,
    cell_tokens: int,
    barriers: Barriers,
    target_leads: bool,
) -> PartPlan | None:
    heads = _common_heads(source, target, sent)
    elements = list(_elements(source, target, heads, cell_tokens)) if heads else []
    if not elements:
        return None
    count = sum(len(runs) for runs in elements)
    if count > PIECES_MAX:
        raise GeometryError(
            "pieces", f"at most {PIECES_MAX} per cell", count, "use cache layouts that are more alike"
        )
    runs = Runs(*(np.concatenate(arrays) for arrays in zip(*map(_arrays, elements), strict=True)))
    pieces = flipped(merge(flipped(runs), barriers.flipped)) if target_leads else merge(runs, barriers)
    source_side, target_side = _side(source, cell_tokens), _side(target, cell_tokens)
    return PartPlan(
        pieces=pieces,
        source=source_side,
        target=target_side,
        nested=_nested(
            flipped(pieces) if target_leads else pieces, target_side if target_leads else source_side
        ),
        joint=_joint(pieces, source_side, target_side, cell_tokens),
    )


def _arrays(runs: Runs) -> tuple[AddressArray, AddressArray, AddressArray]:
    return runs.source, runs.target, runs.length


def _side(group: GroupSpec, cell_tokens: int) -> Side:
    return Side(group.block_tokens, group.block_count, group.block_stride, cell_tokens * group.token_stride)


def _common_heads(source: GroupSpec, target: GroupSpec, sent: range) -> range:
    ranges = [sent, *(range(g.head_first, g.head_first + g.head_count) for g in (source, target))]
    return range(max(heads.start for heads in ranges), min(heads.stop for heads in ranges))


def _elements(source: GroupSpec, target: GroupSpec, heads: range, cell_tokens: int) -> Iterator[Runs]:
    """The runs of a cell as long as all planes allow, per length of the content that planes share."""
    source_first = np.uint64((heads.start - source.head_first) * source.head_stride)
    target_first = np.uint64((heads.start - target.head_first) * target.head_stride)
    alike = (source.rows, source.content_bytes) == (target.rows, target.content_bytes)
    if not alike:
        source, target = _row_by_row(source), _row_by_row(target)
    for content_bytes, (source_base, target_base) in _common_planes(source, target).items():
        length, axes = _walk(
            content_bytes,
            [
                _Axis(cell_tokens, source.token_stride, target.token_stride),
                _Axis(source.rows, source.row_stride, target.row_stride),
                _Axis(len(heads), source.head_stride, target.head_stride),
            ],
        )
        count = len(source_base) * prod(axis.count for axis in axes)
        if count > PIECES_MAX:
            raise GeometryError(
                "pieces", f"at most {PIECES_MAX} per cell", count, "use cache layouts that are more alike"
            )
        yield Runs(
            _starts(source_base + source_first, [(axis.count, axis.source_stride) for axis in axes]),
            _starts(target_base + target_first, [(axis.count, axis.target_stride) for axis in axes]),
            np.full(count, length, np.uint64),
        )


def _row_by_row(group: GroupSpec) -> GroupSpec:
    """The same with a plane for each row."""
    planes = [
        Plane(
            plane.name,
            plane.address + row * group.row_stride,
            plane.device,
            plane.content_first + row * group.content_bytes,
        )
        for plane in group.planes
        for row in range(group.rows)
    ]
    return msgspec.structs.replace(
        group, planes=tuple(planes), rows=1, row_stride=0, element_bytes=group.whole_bytes
    )


def _common_planes(source: GroupSpec, target: GroupSpec) -> dict[int, tuple[AddressArray, AddressArray]]:
    """Addresses, for block 0, of the content that planes of both sides hold, by its length in bytes.

    Of planes with rows it is the first row's, and both sides' rows are the same.
    """
    theirs: dict[str, list[tuple[int, int]]] = {}
    for plane in target.planes:
        theirs.setdefault(plane.name, []).append((plane.content_first, plane.address))
    found: dict[int, list[tuple[int, int]]] = {}
    for plane in source.planes:
        for first, address in theirs.get(plane.name, ()):
            start = max(plane.content_first, first)
            stop = min(plane.content_first + source.content_bytes, first + target.content_bytes)
            if start < stop and (source.rows == 1 or plane.content_first == first):
                pair = plane.address + start - plane.content_first, address + start - first
                found.setdefault(stop - start, []).append(pair)
    tables = {length: np.array(pairs, dtype=np.uint64) for length, pairs in found.items()}
    return {length: (table[:, 0].copy(), table[:, 1].copy()) for length, table in tables.items()}


def _walk(length: int, axes: list[_Axis]) -> tuple[int, list[_Axis]]:
    """The bytes that are contiguous on both sides, and the axes that are left to enumerate."""
    for axis in axes:
        if axis.count == 1 or axis.source_stride == axis.target_stride == length:
            return _walk(length * axis.count, [other for other in axes if other is not axis])
    return length, axes


def _starts(base: AddressArray, axes: Sequence[tuple[int, int]]) -> AddressArray:
    """The addresses of all elements, in an order that only `base` and the axes' `(count, stride)` decide."""
    for count, stride in axes:
        steps = np.arange(count, dtype=np.uint64) * np.uint64(stride)
        base = np.add.outer(base, steps).ravel()
    return base


def _nested(pieces: Runs, lead: Side) -> int:
    """How many pieces in a row fit between one block and the next, if it is the same number everywhere.

    `pieces` are in the order of their sources, which `lead` is the side of.
    """
    start, step = pieces.source, np.uint64(lead.block_bytes)
    if lead.block_count == 1:
        return len(pieces)
    breaks = np.flatnonzero(start[1:] - start[:-1] >= step) + 1
    edges = np.concatenate(([0], breaks, [len(pieces)]))
    sizes = np.diff(edges)
    return int(sizes[0]) if bool(np.all(sizes == sizes[0])) else 0


def _joint(pieces: Runs, source: Side, target: Side, cell_tokens: int) -> int:
    length = int(pieces.length[0])
    steps = [_steps(side, side.block_tokens // cell_tokens) for side in (source, target)]
    possible = all(length in side for side in steps)
    return length if possible and bool(np.all(pieces.length == length)) else 0


def _steps(side: Side, cells: int) -> set[int]:
    """The distances between a cell and the next one, in the same block or in the next."""
    last = side.block_bytes - (cells - 1) * side.cell_bytes
    return {last} if cells == 1 else {side.cell_bytes, last}


def _slice_tokens(group: GroupPlan, bytes_max: int, runs_max: int) -> int:
    cells = min(bytes_max // group.cell_bytes, runs_max // group.cell_pieces)
    return max(cells, 1) * group.cell_tokens


def _barriers(regions: Sequence[Region]) -> AddressArray:
    """Where one region ends and another one starts."""
    ends = {region.address + region.bytes for region in regions}
    return np.array([region.address for region in regions if region.address in ends], dtype=np.uint64)
