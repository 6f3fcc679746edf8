"""Memory for the ranks of a world, at addresses that are the same in every process.

Addresses travel in handshakes, and every byte that travels is part of a history's hash. One reservation
serves all histories of a process, one after the other; descriptions of caches are made once.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.errors import UsageError
from kvferry.ids import Rank
from kvferry.layout.describe import describe
from kvferry.layout.ranks import heads_of
from kvferry.layout.spec import CacheSpec, GroupSpec, Plane, encode_spec

_BASE = 0x1000_0000_0000
_FIXED_NOREPLACE = 0x10_0000
SLOT_BYTES = 1 << 16
SLOTS_MAX = 1 << 11
CONTENT_BYTES = 4
"""Of one token in one layer and head."""
LAYER_NAME = "model.layers.{}.self_attn.attn"


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Sizes of an engine's caches. Stages hold equally many of the model's `layers`."""

    order: str
    layers: int
    block_count: int
    block_tokens: int
    tp_size: int
    pp_size: int = 1
    heads: int = 0
    """KV heads of the model; 0: one for each rank of a stage."""

    @property
    def heads_total(self) -> int:
        """KV heads of the model."""
        return self.heads or self.tp_size

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """All ranks of the engine, stage by stage."""
        return tuple(Rank(pp, tp) for pp in range(self.pp_size) for tp in range(self.tp_size))

    def layers_of(self, stage: int) -> range:
        """The layers of a pipeline stage."""
        each = self.layers // self.pp_size
        return range(stage * each, (stage + 1) * each)


@dataclass(frozen=True, slots=True)
class Slot:
    """The memory of one rank in one life."""

    number: int
    cache: CacheSpec
    layers: range
    heads: range
    """The model's layers and KV heads that it holds."""
    encoded: bytes
    """The description as it travels."""
    values: npt.NDArray[np.uint32]
    """The memory, indexed `[block, token, layer, head]`."""
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
    layers, heads = shape.layers_of(rank.pp), heads_of(rank.tp, shape.tp_size, shape.heads_total)
    group, region = describe(
        shape.order,
        layers=len(layers),
        blocks=shape.block_count,
        heads=len(heads),
        block_tokens=shape.block_tokens,
        content_bytes=CONTENT_BYTES,
        address=address_of(number),
        head_first=heads.start,
        heads_total=shape.heads_total,
        layer_name=LAYER_NAME,
    )
    if region.bytes > SLOT_BYTES:
        raise UsageError(f"a rank's cache has {region.bytes} bytes, at most {SLOT_BYTES} are possible")
    cache = CacheSpec(
        model="simulated",
        dtype="float32",
        kv_dtype="float32",
        rank=rank,
        tp_size=shape.tp_size,
        pp_size=shape.pp_size,
        groups=(_on_stage(group, shape, rank.pp),),
        regions=(region,),
    )
    first = number * SLOT_BYTES
    words = _reservation()[first : first + region.bytes].view(np.uint32)
    axes = shape.order, _counts(shape, layers, heads)
    return Slot(number, cache, layers, heads, encode_spec(cache), _by_token(words, *axes), _blocks(*axes))


def _on_stage(group: GroupSpec, shape: CacheShape, stage: int) -> GroupSpec:
    """The group with its layers' own names, and those of all stages."""
    if shape.pp_size == 1:
        return group
    stages = [[LAYER_NAME.format(layer) for layer in shape.layers_of(pp)] for pp in range(shape.pp_size)]
    planes = [Plane(name, plane.address) for name, plane in zip(stages[stage], group.planes, strict=True)]
    names = tuple(tuple(names) for names in stages)
    return msgspec.structs.replace(group, planes=tuple(planes), stages=names)


Counts = tuple[tuple[str, int], ...]
"""Elements of each axis."""


def _counts(shape: CacheShape, layers: range, heads: range) -> Counts:
    return (("L", len(layers)), ("B", shape.block_count), ("H", len(heads)), ("N", shape.block_tokens))


def _by_token(words: npt.NDArray[np.uint32], order: str, counts: Counts) -> npt.NDArray[np.uint32]:
    axes = order[:4]
    cube = words.reshape([dict(counts)[axis] for axis in axes])
    return cube.transpose([axes.index(axis) for axis in "BNLH"])


@lru_cache(maxsize=256)
def _blocks(order: str, counts: Counts) -> tuple[int, ...]:
    words = np.empty(prod(count for _, count in counts), dtype=np.uint32)
    blocks = np.arange(dict(counts)["B"], dtype=np.uint32)
    _by_token(words, order, counts)[:] = blocks[:, None, None, None]
    return tuple(words.tolist())
