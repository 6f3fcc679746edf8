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


NO_RUNS = Runs(*[np.empty(0, np.uint64)] * 3)


@dataclass(frozen=True, slots=True, eq=False)
class Barriers:
    """Addresses at which a run may start but through which none may pass, per side.

    Two registrations that happen to be neighbours stay two for the network card.
    """

    source: AddressArray
    target: AddressArray

    @property
    def flipped(self) -> Barriers:
        """The same with the sides exchanged."""
        return Barriers(self.target, self.source)


NO_BARRIERS = Barriers(np.empty(0, np.uint64), np.empty(0, np.uint64))


def flipped(runs: Runs) -> Runs:
    """The copies back: sources and targets exchanged."""
    return Runs(runs.target, runs.source, runs.length)


def merge(runs: Runs, barriers: Barriers = NO_BARRIERS) -> Runs:
    """The same copies in as few runs as possible, in the order of their source addresses.

    Runs are joined that follow each other on both sides. No byte may be the source of two runs; with that,
    neighbours in the order of sources are the only candidates.
    """
    # Rebound so that the unordered arrays are free before the merged ones are made.
    runs = _ordered(runs)
    source, target, length = runs.source, runs.target, runs.length
    touches = source[:-1] + length[:-1] == source[1:]
    touches &= target[:-1] + length[:-1] == target[1:]
    if len(barriers.source):
        touches &= ~np.isin(source[1:], barriers.source)
    if len(barriers.target):
        touches &= ~np.isin(target[1:], barriers.target)
    if not touches.any():
        return runs
    starts = np.flatnonzero(np.concatenate(([True], ~touches)))
    ends = np.append(starts[1:], len(length)) - 1
    first = source[starts]
    return Runs(first, target[starts], source[ends] + length[ends] - first)


def _ordered(runs: Runs) -> Runs:
    if np.all(runs.source[:-1] <= runs.source[1:]):
        return runs
    order = np.argsort(runs.source)
    return Runs(runs.source[order], runs.target[order], runs.length[order])
