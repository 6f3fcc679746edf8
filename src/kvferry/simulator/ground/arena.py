"""Memory for the ranks of a world, at addresses that are the same in every process.

Addresses travel in handshakes, and every byte that travels is part of a history's hash. One reservation
serves all histories of a process, one after the other; descriptions of caches are made once.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvferry.errors import UsageError
from kvferry.ids import Rank
from kvferry.layout.describe import describe
from kvferry.layout.spec import CacheSpec, encode_spec

_BASE = 0x1000_0000_0000
_FIXED_NOREPLACE = 0x10_0000
SLOT_BYTES = 1 << 16
SLOTS_MAX = 1 << 11
CONTENT_BYTES = 4
"""Of one token in one layer and head."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Sizes of a rank's cache. Every rank holds one KV head."""

    order: str
    layers: int
    block_count: int
    block_tokens: int
    tp_size: int


@dataclass(frozen=True, slots=True)
class Slot:
    """The memory of one rank in one life."""

    number: int
    cache: CacheSpec
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
def slot(number: int, shape: CacheShape, tp: int) -> Slot:
    """The memory of the history's `number`th rank. Its content is whatever it was."""
    if number >= SLOTS_MAX:
        raise UsageError(f"a history has at most {SLOTS_MAX} lives of ranks; make it shorter or smaller")
    group, region = describe(
        shape.order,
        layers=shape.layers,
        blocks=shape.block_count,
        heads=1,
        block_tokens=shape.block_tokens,
        content_bytes=CONTENT_BYTES,
        address=address_of(number),
        head_first=tp,
        heads_total=shape.tp_size,
    )
    if region.bytes > SLOT_BYTES:
        raise UsageError(f"a rank's cache has {region.bytes} bytes, at most {SLOT_BYTES} are possible")
    cache = CacheSpec(
        model="simulated",
        dtype="float32",
        kv_dtype="float32",
        rank=Rank(0, tp),
        tp_size=shape.tp_size,
        pp_size=1,
        groups=(group,),
        regions=(region,),
    )
    first = number * SLOT_BYTES
    words = _reservation()[first : first + region.bytes].view(np.uint32)
    return Slot(number, cache, encode_spec(cache), _by_token(words, shape), _blocks(shape))


def _by_token(words: npt.NDArray[np.uint32], shape: CacheShape) -> npt.NDArray[np.uint32]:
    counts = {"L": shape.layers, "B": shape.block_count, "H": 1, "N": shape.block_tokens}
    axes = shape.order[:4]
    cube = words.reshape([counts[axis] for axis in axes])
    return cube.transpose([axes.index(axis) for axis in "BNLH"])


@lru_cache(maxsize=64)
def _blocks(shape: CacheShape) -> tuple[int, ...]:
    words = np.empty(shape.layers * shape.block_count * shape.block_tokens, dtype=np.uint32)
    _by_token(words, shape)[:] = np.arange(shape.block_count, dtype=np.uint32)[:, None, None, None]
    return tuple(words.tolist())
