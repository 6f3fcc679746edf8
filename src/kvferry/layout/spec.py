"""What one rank's KV cache looks like in memory.

KV is a five-dimensional array `[layer, block, head, token, content]`. A rank holds a part of it, split into
cache groups that have block tables of their own. A `GroupSpec` describes layers that lie alike in memory;
several of them may share one block table (K and V of unlike size, scales beside what they scale). The bytes
of (plane, block b, head h, token n) are

    [address, address + content_bytes)   with
    address = plane.address + b * block_stride + h * head_stride + n * token_stride

Because each plane has an address of its own, every stride order of the five dimensions is such a description,
padding included. A `CacheSpec` that exists is valid: its constructor checks that every element lies inside a
registered region, that no two elements of a `GroupSpec` overlap (groups may share memory: their blocks are
never in use at the same time), and that every layer is there as a whole. It travels as bytes, and those of a
peer are hostile until `decode_spec` has returned.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec

from kvferry.errors import PeerError, UsageError
from kvferry.ids import Rank
from kvferry.layout.runs import Region

SPEC_VERSION = 1
SPEC_BYTES_MAX = 1 << 20
"""The longest encoding that is made or read; a cache of 4,096 planes in as many regions takes half of it."""

GROUPS_MAX = 64
PLANES_MAX = 4096
"""Planes of all groups together; it bounds the time that a stranger's description takes to check."""
REGIONS_MAX = 4096
FACTS_MAX = 64
TEXT_CHARACTERS_MAX = 1024
RANKS_MAX = 1024
BLOCKS_MAX = 1 << 31
BLOCK_TOKENS_MAX = 1 << 20
HEADS_MAX = 1 << 16
CONTENT_BYTES_MAX = 1 << 24
ADDRESS_MAX = 1 << 62
"""Addresses and strides stay below it, so that no sum of an address and a stride leaves 64 bits."""


class Plane(msgspec.Struct, frozen=True, array_like=True):
    """The part of a layer that one base address and the group's strides reach.

    `name` is the layer's. `address` is that of block 0, head 0 (of this rank), token 0. `device` is that of
    the region it lies in. `content_first` is the first byte of the layer's content that it holds: where K and
    V lie apart a layer has two planes, K's from 0 on and V's from where K ends.
    """

    name: str
    address: int
    device: int = 0
    content_first: int = 0


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The cache of layers that share a block table and lie alike in memory. Strides in bytes.

    The rank holds heads `[head_first, head_first + head_count)` of the model's `heads_total` KV heads; ranks
    that hold replicas state the same heads. Caches without heads (MLA) have one. `kind` says what a block
    means ("full", "sliding_window", "mla", ...). `content_bytes` is what lies together per head and token.
    """

    kind: str
    block_tokens: int
    block_count: int
    planes: tuple[Plane, ...]
    block_stride: int
    head_stride: int
    token_stride: int
    content_bytes: int
    head_first: int
    head_count: int
    heads_total: int
    table: int = -1
    """Number of its block table; -1 in all of a rank's groups: each has its own, in their order."""
    element_bytes: int = 0
    """A layer's content per head and token, all planes together; 0 where one plane has all of it."""
    window_tokens: int = 0
    """Of sliding windows: the newest so many tokens are all that is needed. 0: every token is."""
    engine_block_tokens: int = 0
    """Tokens per block of the engine, where several blocks of this description make one; 0: each is one."""
    tile_tokens: int = 1
    """So many tokens of a head lie together in an order that only the attention kernel knows; 1: each token's
    content is in one piece. A tile is copied whole."""
    rows: int = 1
    row_stride: int = 0
    """A token's content in a plane is so many pieces of `content_bytes`, so far apart: keys that are kept
    transposed, one value of all tokens after the other."""
    stages: tuple[tuple[str, ...], ...] = ()
    """Names of the layers of this group on each pipeline stage of the engine; empty with one stage."""

    @property
    def plane_bytes(self) -> int:
        """A plane's content per head and token."""
        return self.rows * self.content_bytes

    @property
    def whole_bytes(self) -> int:
        """A layer's content per head and token, all planes together."""
        return self.element_bytes or self.plane_bytes

    @property
    def whole_tokens(self) -> int:
        """Tokens per block of the engine: what its prefix cache takes for one thing."""
        return self.engine_block_tokens or self.block_tokens

    @property
    def layers(self) -> frozenset[str]:
        """Names of the layers that this rank holds."""
        return frozenset(plane.name for plane in self.planes)

    @property
    def extent_bytes(self) -> int:
        """Bytes from a plane's address to the end of its last element."""
        return _extent(_axes(self), self.content_bytes)

    @property
    def block_bytes(self) -> int:
        """Bytes of KV in one block of all planes, padding not counted."""
        return len(self.planes) * self.head_count * self.block_tokens * self.plane_bytes


class CacheSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All of one rank's cache, and what must agree before its bytes mean the same elsewhere.

    `model` is a name or a digest, `dtype` the model's and `kv_dtype` the cache's. `facts` are further
    statements (attention backend, speculative configuration, ...); `compare` knows which must be equal.

    Raises:
        UsageError: the description is not possible; names the field.
    """

    model: str
    dtype: str
    kv_dtype: str
    rank: Rank
    tp_size: int
    pp_size: int
    groups: tuple[GroupSpec, ...]
    regions: tuple[Region, ...]
    facts: dict[str, str] = {}
    version: int = SPEC_VERSION

    def __post_init__(self) -> None:
        """Refuse what `validate` refuses."""
        validate(self)

    @property
    def tables(self) -> tuple[tuple[GroupSpec, ...], ...]:
        """The groups of each block table; what a table's number counts elsewhere as a cache group."""
        by_table: dict[int, list[GroupSpec]] = {}
        for index, group in enumerate(self.groups):
            by_table.setdefault(index if group.table < 0 else group.table, []).append(group)
        return tuple(tuple(groups) for groups in by_table.values())

    @property
    def block_tokens(self) -> tuple[int, ...]:
        """Tokens per block of each block table."""
        return tuple(groups[0].block_tokens for groups in self.tables)

    @property
    def whole_tokens(self) -> tuple[int, ...]:
        """Tokens per block of the engine, of each block table."""
        return tuple(groups[0].whole_tokens for groups in self.tables)

    @property
    def block_counts(self) -> tuple[int, ...]:
        """Blocks of each block table."""
        return tuple(groups[0].block_count for groups in self.tables)

    @property
    def windows(self) -> tuple[int, ...]:
        """The window of each block table in tokens; 0: every token is needed."""
        return tuple(groups[0].window_tokens for groups in self.tables)


def encode_spec(spec: CacheSpec) -> bytes:
    """The bytes that travel as `Hello.cache`.

    Raises:
        UsageError: longer than `SPEC_BYTES_MAX`, which a peer would refuse.
    """
    data = msgspec.msgpack.encode(spec)
    if len(data) > SPEC_BYTES_MAX:
        raise UsageError(f"cache description: has {len(data)} bytes, at most {SPEC_BYTES_MAX} can travel")
    return data


def decode_spec(data: bytes) -> CacheSpec:
    """The valid description that a peer sent.

    Raises:
        PeerError: not a possible description; names the field at fault.
    """
    if len(data) > SPEC_BYTES_MAX:
        raise PeerError(f"cache description: has {len(data)} bytes, at most {SPEC_BYTES_MAX} are read")
    try:
        return msgspec.msgpack.decode(data, type=CacheSpec)
    except UsageError as error:
        raise PeerError(str(error)) from error
    except (msgspec.DecodeError, RecursionError) as error:
        # msgspec stops at deep nesting as Python does.
        raise PeerError(f"cache description: {error}") from error


def validate(spec: CacheSpec) -> None:
    """Check every field and every address. The constructor calls it.

    Raises:
        UsageError: names the field and what is possible.
    """
    _whole("version", spec.version, 1, 1 << 31)
    for field, text in (("model", spec.model), ("dtype", spec.dtype), ("kv_dtype", spec.kv_dtype)):
        _text(field, text)
    _whole("tp_size", spec.tp_size, 1, RANKS_MAX)
    _whole("pp_size", spec.pp_size, 1, RANKS_MAX)
    _whole("rank.tp", spec.rank.tp, 0, spec.tp_size - 1)
    _whole("rank.pp", spec.rank.pp, 0, spec.pp_size - 1)
    _check_facts(spec.facts)
    _whole("number of regions", len(spec.regions), 1, REGIONS_MAX)
    _whole("number of groups", len(spec.groups), 1, GROUPS_MAX)
    _whole("number of planes", sum(len(group.planes) for group in spec.groups), 1, PLANES_MAX)
    _whole("number of names in stages", sum(map(_stage_names, spec.groups)), 0, PLANES_MAX)
    regions = _checked_regions(spec.regions)
    _check_tables(spec.groups)
    for index, group in enumerate(spec.groups):
        _check_group(f"groups[{index}]", group)
        _check_stages(f"groups[{index}].stages", group, spec)
        _check_inside(f"groups[{index}]", group, regions)
    for number, groups in enumerate(spec.tables):
        _check_table(f"table {number}", groups)


def _refuse(field: str, problem: str) -> UsageError:
    return UsageError(f"cache description: {field}: {problem}")


def _whole(field: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise _refuse(field, f"must be from {least} to {most}, not {value}")


def _text(field: str, value: str) -> None:
    if not value or len(value) > TEXT_CHARACTERS_MAX or not value.isprintable():
        raise _refuse(field, f"must be printable and have 1 to {TEXT_CHARACTERS_MAX} characters")


def _check_facts(facts: dict[str, str]) -> None:
    _whole("number of facts", len(facts), 0, FACTS_MAX)
    for key, value in facts.items():
        _text("facts (a key)", key)
        if len(value) > TEXT_CHARACTERS_MAX:
            raise _refuse(f"facts.{key}", f"must have at most {TEXT_CHARACTERS_MAX} characters")


def _checked_regions(regions: Sequence[Region]) -> list[Region]:
    """The regions in order of their addresses."""
    for index, region in enumerate(regions):
        _whole(f"regions[{index}].address", region.address, 0, ADDRESS_MAX)
        _whole(f"regions[{index}].bytes", region.bytes, 1, ADDRESS_MAX)
        _text(f"regions[{index}].kind", region.kind)
    ordered = sorted(regions, key=lambda region: region.address)
    for before, after in pairwise(ordered):
        if before.address + before.bytes > after.address:
            raise _refuse("regions", f"those at {before.address:#x} and {after.address:#x} overlap")
    return ordered


def _check_group(field: str, group: GroupSpec) -> None:
    _text(f"{field}.kind", group.kind)
    _whole(f"{field}.block_tokens", group.block_tokens, 1, BLOCK_TOKENS_MAX)
    _whole(f"{field}.block_count", group.block_count, 1, BLOCKS_MAX)
    _whole(f"{field}.content_bytes", group.content_bytes, 1, CONTENT_BYTES_MAX)
    _whole(f"{field}.heads_total", group.heads_total, 1, HEADS_MAX)
    _whole(f"{field}.head_count", group.head_count, 1, group.heads_total)
    _whole(f"{field}.head_first", group.head_first, 0, group.heads_total - group.head_count)
    for axis in ("block", "head", "token"):
        _whole(f"{field}.{axis}_stride", getattr(group, f"{axis}_stride"), 0, ADDRESS_MAX)
    _whole(f"{field}.element_bytes", group.element_bytes, 0, CONTENT_BYTES_MAX)
    _whole(f"{field}.window_tokens", group.window_tokens, 0, ADDRESS_MAX)
    _whole(f"{field}.engine_block_tokens", group.engine_block_tokens, 0, BLOCK_TOKENS_MAX)
    if group.engine_block_tokens % group.block_tokens:
        raise _refuse(
            f"{field}.engine_block_tokens",
            f"must be a multiple of the {group.block_tokens} tokens of a block",
        )
    _whole(f"{field}.tile_tokens", group.tile_tokens, 1, group.block_tokens)
    if group.block_tokens % group.tile_tokens:
        raise _refuse(f"{field}.tile_tokens", f"must divide the {group.block_tokens} tokens of a block")
    if group.tile_tokens > 1 and (group.token_stride != group.content_bytes or group.rows > 1):
        raise _refuse(f"{field}.tile_tokens", "tiles have neither holes nor rows; state 1")
    _whole(f"{field}.rows", group.rows, 1, CONTENT_BYTES_MAX // group.content_bytes)
    _whole(f"{field}.row_stride", group.row_stride, 0, ADDRESS_MAX)
    if not group.planes and not group.stages:
        raise _refuse(f"{field}.planes", "is empty; leave out groups that hold no layer")
    names: set[tuple[str, int]] = set()
    for index, plane in enumerate(group.planes):
        _text(f"{field}.planes[{index}].name", plane.name)
        _whole(f"{field}.planes[{index}].address", plane.address, 0, ADDRESS_MAX)
        _whole(f"{field}.planes[{index}].content_first", plane.content_first, 0, CONTENT_BYTES_MAX)
        if (plane.name, plane.content_first) in names:
            raise _refuse(f"{field}.planes[{index}].name", f"{plane.name!r} is there twice")
        names.add((plane.name, plane.content_first))


def _stage_names(group: GroupSpec) -> int:
    return sum(map(len, group.stages))


def _check_stages(field: str, group: GroupSpec, spec: CacheSpec) -> None:
    """Each layer on one stage, and on ours what we hold."""
    if not group.stages:
        return
    if len(group.stages) != spec.pp_size:
        raise _refuse(field, f"has {len(group.stages)} entries, pp_size is {spec.pp_size}")
    seen: set[str] = set()
    for name in (name for stage in group.stages for name in stage):
        _text(f"{field} (a name)", name)
        if name in seen:
            raise _refuse(field, f"{name!r} is there twice")
        seen.add(name)
    if set(group.stages[spec.rank.pp]) != group.layers:
        raise _refuse(f"{field}[{spec.rank.pp}]", "is not what the planes of this rank are")


def _check_tables(groups: Sequence[GroupSpec]) -> None:
    """Block tables are numbered in order, or not at all."""
    numbers = [group.table for group in groups]
    if all(number == -1 for number in numbers):
        return
    before = -1
    for index, number in enumerate(numbers):
        if number not in (max(before, 0), before + 1):
            raise _refuse(f"groups[{index}].table", f"is {number}; number tables in order from 0 on")
        before = number


def _check_table(field: str, groups: Sequence[GroupSpec]) -> None:
    """Groups of one block table have the same blocks, and together every layer as a whole."""
    parts: dict[str, list[tuple[int, int, int, int]]] = {}
    for group in groups:
        for name in ("block_tokens", "block_count", "window_tokens", "engine_block_tokens"):
            ours, first = getattr(group, name), getattr(groups[0], name)
            if ours != first:
                raise _refuse(f"{field}: {name}", f"is {ours} in one of its groups and {first} in another")
        for plane in group.planes:
            part = (plane.content_first, group.plane_bytes, group.whole_bytes, group.heads_total)
            parts.setdefault(plane.name, []).append(part)
    for name, pieces in parts.items():
        _, _, whole, heads = pieces[0]
        reached = 0
        for first, length, total, heads_total in sorted(pieces):
            if (total, heads_total) != (whole, heads):
                raise _refuse(field, f"parts of {name!r} differ in element_bytes or heads_total")
            if first != reached:
                raise _refuse(
                    field, f"content of {name!r} from byte {min(first, reached)} on is not there once"
                )
            reached += length
        if reached != whole:
            raise _refuse(field, f"{name!r} has {reached} bytes of content, element_bytes says {whole}")


def _check_inside(field: str, group: GroupSpec, regions: Sequence[Region]) -> None:
    """Every element in one region, no two elements on one byte."""
    axes = _axes(group)
    inner = group.content_bytes
    for name, stride, count in reversed(axes):
        if stride < inner:
            raise _refuse(
                f"{field}.{name}_stride", f"is {stride}, less than the {inner} bytes that lie inside it"
            )
        inner += (count - 1) * stride
    starts = [region.address for region in regions]
    for index, plane in enumerate(group.planes):
        place = bisect_right(starts, plane.address) - 1
        region = regions[place] if place >= 0 else None
        if region is None or plane.address + inner > region.address + region.bytes:
            raise _refuse(
                f"{field}.planes[{index}]",
                f"{plane.name!r}, {inner} bytes from {plane.address:#x} on, lies in no single region",
            )
        if region.device != plane.device:
            raise _refuse(
                f"{field}.planes[{index}].device", f"is {plane.device}, its region's is {region.device}"
            )
    if group.planes and not _apart(
        sorted(plane.address for plane in group.planes), axes, group.content_bytes
    ):
        raise _refuse(f"{field}.planes", "elements of two planes overlap")


def _axes(group: GroupSpec) -> list[tuple[str, int, int]]:
    """`(name, stride, count)` of the dimensions that have a length, the widest stride first."""
    axes = [
        ("block", group.block_stride, group.block_count),
        ("head", group.head_stride, group.head_count),
        ("token", group.token_stride, group.block_tokens),
        ("row", group.row_stride, group.rows),
    ]
    return sorted((axis for axis in axes if axis[2] > 1), key=lambda axis: axis[1], reverse=True)


def _extent(axes: Sequence[tuple[str, int, int]], content_bytes: int) -> int:
    return content_bytes + sum((count - 1) * stride for _, stride, count in axes)


def _apart(starts: Sequence[int], axes: Sequence[tuple[str, int, int]], content_bytes: int) -> bool:
    """Whether combs of equal shape that start at `starts` (ascending) have no byte in common.

    Combs that reach into each other must have their teeth apart within one stride of the outermost axis,
    which is the same question with one axis less. Interleaving that wraps around a stride counts as overlap:
    no stride order makes it.
    """
    if not axes:
        return all(after - before >= content_bytes for before, after in pairwise(starts))
    _, stride, _ = axes[0]
    inner = _extent(axes[1:], content_bytes)
    for cluster in _clusters(starts, _extent(axes, content_bytes)):
        teeth = sorted((start - cluster[0]) % stride for start in cluster)
        if teeth[-1] + inner > stride or not _apart(teeth, axes[1:], content_bytes):
            return False
    return True


def _clusters(starts: Sequence[int], extent: int) -> Iterator[list[int]]:
    """Groups of starts whose `extent` bytes reach into each other; `starts` ascends and has a member."""
    cluster = [starts[0]]
    for start in starts[1:]:
        if start >= cluster[-1] + extent:
            yield cluster
            cluster = []
        cluster.append(start)
    yield cluster
