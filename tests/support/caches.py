"""Small KV caches and a slow, plain account of what a copy between two of them does to every byte."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.ids import Rank
from kvferry.layout.runs import Region, Runs
from kvferry.layout.spec import CacheSpec, GroupSpec, Plane

ByteMap = dict[int, int]
"""Target address of a byte -> the source address that it comes from."""


def cache_of(
    groups: Sequence[GroupSpec] | GroupSpec, regions: Sequence[Region] | Region, **changes: Any
) -> CacheSpec:
    """A valid description of the only rank of an engine, around the groups given."""
    fields: dict[str, Any] = {
        "model": "tiny",
        "dtype": "float32",
        "kv_dtype": "float32",
        "rank": Rank(0, 0),
        "tp_size": 1,
        "pp_size": 1,
        "groups": (groups,) if isinstance(groups, GroupSpec) else tuple(groups),
        "regions": (regions,) if isinstance(regions, Region) else tuple(regions),
    }
    return CacheSpec(**(fields | changes))


def changed(spec: CacheSpec, **changes: Any) -> CacheSpec:
    """The description with other cache fields."""
    return msgspec.structs.replace(spec, **changes)


def with_group(spec: CacheSpec, **changes: Any) -> CacheSpec:
    """The description with other fields in its first group."""
    first, *others = spec.groups
    return changed(spec, groups=(msgspec.structs.replace(first, **changes), *others))


@dataclass(frozen=True)
class Shape:
    """A cache with room between its elements: `padding_bytes[axis]` follows each element of an axis.

    `order` names the axes from the outermost in. `split` registers each plane on its own where the layer axis
    is outermost; without padding between layers these regions then touch.
    """

    order: str
    counts: dict[str, int]
    padding_bytes: dict[str, int]
    address: int = 4096
    split: bool = False
    head_first: int = 0
    heads_total: int = 0
    """0: no more than it holds."""

    def build(self, names: Sequence[str]) -> tuple[GroupSpec, tuple[Region, ...]]:
        """The group with planes of these names in the order of memory, and its regions."""
        strides: dict[str, int] = {}
        size = 1
        for axis in reversed(self.order):
            strides[axis] = size
            size = size * self.counts[axis] + self.padding_bytes[axis]
        addresses = [self.address + index * strides["L"] for index in range(self.counts["L"])]
        group = GroupSpec(
            kind="full",
            block_tokens=self.counts["N"],
            block_count=self.counts["B"],
            planes=tuple(Plane(name, address) for name, address in zip(names, addresses, strict=True)),
            block_stride=strides["B"],
            head_stride=strides["H"],
            token_stride=strides["N"],
            content_bytes=self.counts["C"],
            head_first=self.head_first,
            head_count=self.counts["H"],
            heads_total=self.heads_total or self.counts["H"],
        )
        if self.split and self.order[0] == "L":
            length = strides["L"] - self.padding_bytes["B"]
            return group, tuple(Region(address, length) for address in addresses)
        return group, (Region(self.address, size),)


def element(group: GroupSpec, name: str, block: int, head: int, token: int) -> int:
    """The address of one element; `head` counts the model's heads."""
    (plane,) = (plane for plane in group.planes if plane.name == name)
    return (
        plane.address
        + block * group.block_stride
        + (head - group.head_first) * group.head_stride
        + token * group.token_stride
    )


def expected_bytes(source: GroupSpec, target: GroupSpec, pairs: Iterable[tuple[int, int]]) -> ByteMap:
    """What must land where, element by element and byte by byte."""
    names = {plane.name for plane in source.planes} & {plane.name for plane in target.planes}
    heads = set(range(source.head_first, source.head_first + source.head_count)) & set(
        range(target.head_first, target.head_first + target.head_count)
    )
    return {
        element(target, name, target_block, head, token) + byte: element(
            source, name, source_block, head, token
        )
        + byte
        for source_block, target_block in pairs
        for name in names
        for head in heads
        for token in range(source.block_tokens)
        for byte in range(source.content_bytes)
    }


def moved_bytes(runs: Runs) -> ByteMap:
    """What the runs move, byte by byte; a target byte that is written twice is an error."""
    moved: ByteMap = {}
    for source, target, length in triples(runs):
        for byte in range(length):
            assert target + byte not in moved, "a byte is written twice"
            moved[target + byte] = source + byte
    return moved


def triples(runs: Runs) -> list[tuple[int, int, int]]:
    """The runs as plain `(source, target, length)`."""
    assert len(runs.source) == len(runs.target) == len(runs.length)
    assert runs.source.dtype == runs.target.dtype == runs.length.dtype == np.uint64
    return list(zip(runs.source.tolist(), runs.target.tolist(), runs.length.tolist(), strict=True))


def runs_of(entries: Iterable[tuple[int, int, int]]) -> Runs:
    """Runs from plain `(source, target, length)`."""
    table = np.array(list(entries), dtype=np.uint64).reshape(-1, 3)
    return Runs(table[:, 0].copy(), table[:, 1].copy(), table[:, 2].copy())


def region_of(regions: Iterable[Region], address: int, length: int) -> Region | None:
    """The one region that holds all these bytes."""
    for region in regions:
        if region.address <= address and address + length <= region.address + region.bytes:
            return region
    return None


class Memory:
    """Real bytes behind pretended addresses: one buffer per region."""

    def __init__(self, regions: Iterable[Region], fill: int = 0) -> None:
        self.regions = tuple(regions)
        self._buffers = {
            region.address: np.full(region.bytes, fill, dtype=np.uint8) for region in self.regions
        }

    def view(self, address: int, length: int) -> npt.NDArray[np.uint8]:
        """The bytes themselves; they must lie in one region."""
        region = region_of(self.regions, address, length)
        assert region is not None, f"[{address}, {address + length}) is not in one region"
        offset = address - region.address
        return self._buffers[region.address][offset : offset + length]

    def receive(self, runs: Runs, source: Memory) -> None:
        """Copy the runs out of `source`."""
        for source_address, target_address, length in triples(runs):
            self.view(target_address, length)[:] = source.view(source_address, length)
