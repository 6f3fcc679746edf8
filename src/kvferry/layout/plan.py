"""How the blocks of one rank's cache become those of another's.

A plan is made once per pair of ranks, by one operation: intersect the parts (planes by name, heads by range,
tokens by position), then walk the dimensions from the inside out while both sides are contiguous. What is
left are a few pieces, each the same distance from its block on either side: block pair (s, t) is copied by

    piece.length bytes from piece.source + s * source_stride to piece.target + t * target_stride

for every piece. `descriptors.expand` does that for a transfer's blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from kvferry.errors import GeometryError
from kvferry.layout.compare import compare
from kvferry.layout.runs import NO_BARRIERS, AddressArray, Barriers, Region, Runs, merge
from kvferry.layout.spec import CacheSpec, GroupSpec

PIECES_MAX = 1 << 20
"""Elements that a block may fall into before merging: 24 MiB while the plan is made."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupPlan:
    """The plan of one cache group: pieces in terms of block 0 on both sides, strides in bytes per block."""

    pieces: Runs
    source_stride: int
    target_stride: int
    source_block_count: int
    target_block_count: int
    barriers: Barriers

    @property
    def blocks_touch(self) -> bool:
        """Whether the next block continues each piece on both sides: runs of blocks are runs of bytes."""
        return self.source_stride == self.target_stride and bool(
            np.all(self.pieces.length == self.source_stride)
        )

    @property
    def blocks_outermost(self) -> bool:
        """Whether a source block ends before the next one starts."""
        first, last = self.pieces.source[0], self.pieces.source[-1]
        return self.source_stride >= int(last - first + self.pieces.length[-1])


@dataclass(frozen=True, slots=True, eq=False)
class CopyPlan:
    """What `plan` found for one pair of ranks, per cache group."""

    groups: tuple[GroupPlan, ...]

    def bytes_per_block(self, group: int) -> int:
        """Bytes of KV that a pair of blocks moves."""
        return self.groups[group].pieces.bytes

    def pieces(self, group: int) -> int:
        """Descriptors that a single pair of blocks takes."""
        return len(self.groups[group].pieces)


@dataclass(frozen=True, slots=True)
class _Axis:
    """A dimension that both sides share: `count` elements, strides in bytes."""

    count: int
    source_stride: int
    target_stride: int


def plan(source: CacheSpec, target: CacheSpec) -> CopyPlan:
    """The plan that copies blocks of the `source` cache into blocks of the `target` cache.

    Raises:
        GeometryError: the first field that keeps them from being joined; `compare` lists all.
    """
    for error in compare(source, target):
        raise error
    barriers = Barriers(_barriers(source.regions), _barriers(target.regions))
    return CopyPlan(
        tuple(
            join(source_group, target_group, barriers)
            for source_group, target_group in zip(source.groups, target.groups, strict=True)
        )
    )


def join(source: GroupSpec, target: GroupSpec, barriers: Barriers = NO_BARRIERS) -> GroupPlan:
    """The plan for the planes and heads that two groups have in common.

    Raises:
        GeometryError: content or block sizes differ, nothing is in common, or a block falls into more than
            `PIECES_MAX` elements.
    """
    _check_joinable(source, target)
    heads = _common_heads(source, target)
    source_base, target_base = _common_planes(source, target)
    source_base += np.uint64((heads.start - source.head_first) * source.head_stride)
    target_base += np.uint64((heads.start - target.head_first) * target.head_stride)
    length, axes = _walk(
        source.content_bytes,
        [
            _Axis(source.block_tokens, source.token_stride, target.token_stride),
            _Axis(len(heads), source.head_stride, target.head_stride),
        ],
    )
    count = len(source_base) * prod(axis.count for axis in axes)
    if count > PIECES_MAX:
        raise GeometryError(
            "pieces", f"at most {PIECES_MAX} per block", count, "use cache layouts that are more alike"
        )
    source_starts = _starts(source_base, [(axis.count, axis.source_stride) for axis in axes])
    target_starts = _starts(target_base, [(axis.count, axis.target_stride) for axis in axes])
    pieces = merge(Runs(source_starts, target_starts, np.full(count, length, np.uint64)), barriers)
    return GroupPlan(
        pieces=pieces,
        source_stride=source.block_stride,
        target_stride=target.block_stride,
        source_block_count=source.block_count,
        target_block_count=target.block_count,
        barriers=barriers,
    )


def _check_joinable(source: GroupSpec, target: GroupSpec) -> None:
    for field in ("block_tokens", "content_bytes", "heads_total"):
        ours, theirs = getattr(source, field), getattr(target, field)
        if ours != theirs:
            raise GeometryError(field, ours, theirs, f"configure the same {field} on both engines")


def _common_heads(source: GroupSpec, target: GroupSpec) -> range:
    heads = range(
        max(source.head_first, target.head_first),
        min(source.head_first + source.head_count, target.head_first + target.head_count),
    )
    if not heads:
        raise GeometryError("heads", source.head_first, target.head_first, "join ranks that share a head")
    return heads


def _common_planes(source: GroupSpec, target: GroupSpec) -> tuple[AddressArray, AddressArray]:
    """Block 0's addresses of the planes that both have, in the source's order."""
    targets = {plane.name: plane.address for plane in target.planes}
    pairs = [(plane.address, targets[plane.name]) for plane in source.planes if plane.name in targets]
    if not pairs:
        raise GeometryError(
            "layers", source.planes[0].name, target.planes[0].name, "join ranks that share a layer"
        )
    table = np.array(pairs, dtype=np.uint64)
    return table[:, 0].copy(), table[:, 1].copy()


def _walk(length: int, axes: list[_Axis]) -> tuple[int, list[_Axis]]:
    """The bytes that are contiguous on both sides, and the axes that are left to enumerate."""
    for axis in axes:
        if axis.source_stride == axis.target_stride == length:
            return _walk(length * axis.count, [other for other in axes if other is not axis])
    return length, axes


def _starts(base: AddressArray, axes: Sequence[tuple[int, int]]) -> AddressArray:
    """The addresses of all elements, in an order that only `base` and the axes' `(count, stride)` decide."""
    for count, stride in axes:
        steps = np.arange(count, dtype=np.uint64) * np.uint64(stride)
        base = np.add.outer(base, steps).ravel()
    return base


def _barriers(regions: Sequence[Region]) -> AddressArray:
    """Where one region ends and another one starts."""
    ends = {region.address + region.bytes for region in regions}
    return np.array([region.address for region in regions if region.address in ends], dtype=np.uint64)
