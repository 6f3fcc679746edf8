"""Byte addresses: registered regions and the pairs of runs that a copy consists of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

AddressArray = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Region:
    """One piece of memory that a rank registers. `address` and `bytes` in bytes; `device` as NIXL counts."""

    address: int
    bytes: int
    device: int = 0
    kind: str = "DRAM"
    """NIXL memory type: DRAM or VRAM."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Pairs of byte runs: `source[i]` to `target[i]`, `length[i]` bytes. Three uint64 arrays of one length.

    For a write the sources are local and the targets the peer's; for a read the other way round.
    """

    source: AddressArray
    target: AddressArray
    length: AddressArray

    @property
    def bytes(self) -> int:
        """Bytes that the runs move."""
        return int(self.length.sum())

    def __len__(self) -> int:
        return len(self.length)
