"""Memory for the ranks of a world, at addresses that are the same in every process.

Addresses travel in handshakes, and every byte that travels is part of a history's hash. One reservation
serves all histories of a process, one after the other; descriptions of caches are made once.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.errors import UsageError
from kvferry.ids import Rank
from kvferry.layout.describe import describe
from kvferry.layout.ranks import heads_of
from kvferry.layout.runs import Region
from kvferry.layout.spec import CacheSpec, GroupSpec, Plane, encode_spec

_BASE = 0x1000_0000_0000
_FIXED_NOREPLACE = 0x10_0000
SLOT_BYTES = 1 << 16
SLOTS_MAX = 1 << 11
CONTENT_BYTES = 4
"""Of one token in one layer and head."""
LAYER_NAME = "model.layers.{}.self_attn.attn"


@dataclass(frozen=True, slots=True)
class GroupShape:
    """A cache group: its block size, and of sliding windows how many of the newest tokens a layer looks at.

    The arithmetic is the simulator's own: what the code under test makes of a window is compared with it.
    """

    block_tokens: int
    window_tokens: int = 0

    def blocks(self, tokens: int) -> int:
        """Blocks that cover so many tokens."""
        return -(-tokens // self.block_tokens)

    def first_token(self, computed: int) -> int:
        """The first token that a layer looks at when it computes the one behind so many."""
        return max(computed + 1 - self.window_tokens, 0) if self.window_tokens else 0

    def skipped(self, computed: int) -> int:
        """Blocks at the beginning that no layer looks at any more when so many tokens are computed."""
        return self.first_token(computed) // self.block_tokens


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Sizes of an engine's caches. Stages hold equally many of the model's layers.

    `block_tokens` are those of the first cache group; `groups` may be left out where it is the only one and
    has no window. Each group has `layers` layers, and all have the same blocks, one over the other.
    """

    order: str
    layers: int
    block_count: int
    block_tokens: int
    tp_size: int
    pp_size: int = 1
    heads: int = 0
    """KV heads of the model; 0: one for each rank of a stage."""
    groups: tuple[GroupShape, ...] = ()
    model: int = 0
    """Number of the model; caches of others hold other values, and do not fit."""

    @property
    def heads_total(self) -> int:
        """KV heads of the model."""
        return self.heads or self.tp_size

    @property
    def tables(self) -> tuple[GroupShape, ...]:
        """Every cache group."""
        return self.groups or (GroupShape(self.block_tokens),)

    @property
    def has_windows(self) -> bool:
        """Whether some layers look at their newest tokens only."""
        return any(group.window_tokens for group in self.groups)

    @property
    def first_block(self) -> int:
        """The first block that may be given out: with several groups or windows block 0 is nobody's."""
        return 1 if self.groups else 0

    @property
    def token_count(self) -> int:
        """Tokens that fit into the cache when every group keeps all of them."""
        if not self.groups:
            return self.block_count * self.block_tokens
        each = sum(Fraction(1, group.block_tokens) for group in self.groups)
        return int((self.block_count - self.first_block) / each)

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """All ranks of the engine, stage by stage."""
        return tuple(Rank(pp, tp) for pp in range(self.pp_size) for tp in range(self.tp_size))

    def fits(self, target: CacheShape) -> bool:
        """Whether a cache of the shape `target` can be filled from one of this shape.

        Of a window the target takes whole blocks, and the source has nothing before its own.
        """
        if (self.model, self.heads_total) != (target.model, target.heads_total):
            return False
        ours, theirs = self.tables, target.tables
        return [one.window_tokens for one in ours] == [one.window_tokens for one in theirs] and not any(
            one.window_tokens and one.block_tokens % other.block_tokens
            for one, other in zip(ours, theirs, strict=True)
        )

    def layers_of(self, stage: int, group: int = 0) -> range:
        """The layers of a cache group on a pipeline stage."""
        each = self.layers // self.pp_size
        first = group * self.layers + stage * each
        return range(first, first + each)


@dataclass(frozen=True, slots=True)
class Part:
    """One cache group in the memory of one rank."""

    shape: GroupShape
    layers: range
    """The model's layers that it holds."""
    values: npt.NDArray[np.uint32]
    """The memory, indexed `[block, token, layer, head]`."""


@dataclass(frozen=True, slots=True)
class Slot:
    """The memory of one rank in one life."""

    number: int
    cache: CacheSpec
    parts: tuple[Part, ...]
    """By cache group. They lie over each other, block by block."""
    heads: range
    """The model's KV heads that it holds."""
    encoded: bytes
    """The description as it travels."""
    block_of: tuple[int, ...]
    """The block that each 32 bit word belongs to."""


@lru_cache(maxsize=1)
def _reservation() -> npt.NDArray[np.uint8]:
    size = SLOT_BYTES * SLOTS_MAX
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED_NOREPLACE
    address = libc.mmap(_BASE, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if address != _BASE:
        raise UsageError(f"the simulator needs the addresses from {_BASE:#x} on; run it in a new process")
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def address_of(slot: int) -> int:
    """Where a slot's memory starts."""
    return _BASE + slot * SLOT_BYTES


def slot_at(address: int) -> tuple[int, int]:
    """The slot that an address lies in, and the 32 bit word within it."""
    offset = address - _BASE
    return offset // SLOT_BYTES, offset % SLOT_BYTES // CONTENT_BYTES


@lru_cache(maxsize=4096)
def slot(number: int, shape: CacheShape, rank: Rank) -> Slot:
    """The memory of the history's `number`th rank. Its content is whatever it was."""
    if number >= SLOTS_MAX:
        raise UsageError(f"a history has at most {SLOTS_MAX} lives of ranks; make it shorter or smaller")
    heads = heads_of(rank.tp, shape.tp_size, shape.heads_total)
    groups, region = _described(shape, rank, heads, address_of(number))
    if region.bytes > SLOT_BYTES:
        raise UsageError(f"a rank's cache has {region.bytes} bytes, at most {SLOT_BYTES} are possible")
    cache = CacheSpec(
        model=f"simulated {shape.model}" if shape.model else "simulated",
        dtype="float32",
        kv_dtype="float32",
        rank=rank,
        tp_size=shape.tp_size,
        pp_size=shape.pp_size,
        groups=groups,
        regions=(region,),
    )
    first = number * SLOT_BYTES
    words = _reservation()[first : first + region.bytes].view(np.uint32)
    combs = tuple(_comb(group, region.address) for group in groups)
    parts = tuple(
        Part(table, _held(shape, rank, index), _by_token(words, comb))
        for index, (table, comb) in enumerate(zip(shape.tables, combs, strict=True))
    )
    return Slot(number, cache, parts, heads, encode_spec(cache), _blocks(len(words), combs))


def _held(shape: CacheShape, rank: Rank, group: int) -> range:
    """The layers whose KV a rank's part has. Each model has layers of its own."""
    layers = shape.layers_of(rank.pp, group)
    before = shape.model * shape.layers * len(shape.tables)
    return range(before + layers.start, before + layers.stop)


def _described(
    shape: CacheShape, rank: Rank, heads: range, address: int
) -> tuple[tuple[GroupSpec, ...], Region]:
    """A rank's cache groups, and the one region of memory that all of them use."""
    layers = len(shape.layers_of(rank.pp))

    def alone(blocks: int, block_tokens: int) -> tuple[GroupSpec, Region]:
        return describe(
            shape.order,
            layers=layers,
            blocks=blocks,
            heads=len(heads),
            block_tokens=block_tokens,
            content_bytes=CONTENT_BYTES,
            address=address,
            head_first=heads.start,
            heads_total=shape.heads_total,
            layer_name=LAYER_NAME,
        )

    if not shape.groups:
        group, region = alone(shape.block_count, shape.block_tokens)
        return (_on_stage(group, shape, rank.pp),), region
    single = [alone(1, group.block_tokens) for group in shape.groups]
    # As vLLM does it: a page has room for a block of any group, and where layers are outermost, of any layer.
    whole = max(region.bytes for _, region in single)
    pages = whole // layers if shape.order.startswith("L") else whole
    return tuple(
        _on_stage(_paged(group, shape, index, pages), shape, rank.pp, index)
        for index, (group, _) in enumerate(single)
    ), Region(address, whole * shape.block_count)


def _paged(group: GroupSpec, shape: CacheShape, index: int, page_bytes: int) -> GroupSpec:
    """The group of a single block with all its blocks, one per page."""
    window = shape.groups[index].window_tokens
    planes = group.planes
    if shape.order.startswith("L"):
        step = page_bytes * shape.block_count
        planes = tuple(
            Plane(plane.name, planes[0].address + number * step) for number, plane in enumerate(planes)
        )
    return msgspec.structs.replace(
        group,
        kind="sliding_window" if window else "full",
        window_tokens=window,
        planes=planes,
        block_count=shape.block_count,
        block_stride=page_bytes,
    )


def _on_stage(group: GroupSpec, shape: CacheShape, stage: int, index: int = 0) -> GroupSpec:
    """The group with its layers' own names, and those of all stages."""
    if shape.pp_size == 1 and index == 0:
        return group
    stages = [
        [LAYER_NAME.format(layer) for layer in shape.layers_of(pp, index)] for pp in range(shape.pp_size)
    ]
    planes = [Plane(name, plane.address) for name, plane in zip(stages[stage], group.planes, strict=True)]
    names = tuple(tuple(names) for names in stages) if shape.pp_size > 1 else ()
    return msgspec.structs.replace(group, planes=tuple(planes), stages=names)


@dataclass(frozen=True, slots=True)
class _Comb:
    """Where a group's elements are in its region: the first word, elements per axis, words between them."""

    first: int
    counts: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]


def _comb(group: GroupSpec, address: int) -> _Comb:
    """Of `[block, token, layer, head]`."""
    planes = group.planes
    step = planes[1].address - planes[0].address if len(planes) > 1 else CONTENT_BYTES
    strides = (group.block_stride, group.token_stride, step, group.head_stride)
    counts = (group.block_count, group.block_tokens, len(planes), group.head_count)
    first = (planes[0].address - address) // CONTENT_BYTES
    return _Comb(first, counts, tuple(stride // CONTENT_BYTES for stride in strides))  # type: ignore[arg-type]


def _by_token(words: npt.NDArray[np.uint32], comb: _Comb) -> npt.NDArray[np.uint32]:
    strides = tuple(stride * CONTENT_BYTES for stride in comb.strides)
    return np.lib.stride_tricks.as_strided(words[comb.first :], comb.counts, strides)


@lru_cache(maxsize=256)
def _blocks(size: int, combs: tuple[_Comb, ...]) -> tuple[int, ...]:
    words = np.zeros(size, dtype=np.uint32)
    for comb in combs:
        blocks = np.arange(comb.counts[0], dtype=np.uint32)
        _by_token(words, comb)[:] = blocks[:, None, None, None]
    return tuple(words.tolist())
