"""Registered memory: what a peer's metadata says of it, and in which region a run lies."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.errors import TransportError, UsageError
from kvferry.ids import PeerName
from kvferry.layout.runs import AddressArray, Region

REGIONS_MAX = 1 << 16
METADATA_BYTES_MAX = 64 << 20
ADDRESS_MAX = (1 << 64) - 1
KINDS = ("DRAM", "VRAM")


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """What `local_metadata` of every transport consists of.

    `transport` names the implementation, `blob` is its own part (NIXL's metadata), `regions` is the memory
    that peers may address, each with the device and kind that a descriptor into it needs.
    """

    transport: str
    name: PeerName
    regions: tuple[Region, ...]
    blob: bytes = b""

    def encoded(self) -> bytes:
        """The bytes that travel."""
        return msgspec.msgpack.encode(self)


_decoder = msgspec.msgpack.Decoder(Envelope)


def decode_envelope(metadata: bytes, *, transport: str, peer: PeerName) -> Envelope:
    """Read a peer's metadata.

    Raises:
        TransportError: it is too long, damaged, of another transport, or of another peer.
    """
    if len(metadata) > METADATA_BYTES_MAX:
        raise TransportError(
            f"metadata of {peer} has {len(metadata)} bytes, the most allowed is {METADATA_BYTES_MAX}"
        )
    try:
        envelope = _decoder.decode(metadata)
    except msgspec.MsgspecError as problem:
        raise TransportError(f"metadata of {peer} cannot be read: {problem}") from None
    if envelope.transport != transport:
        raise TransportError(
            f"{peer} runs transport {envelope.transport!r}, we run {transport!r}; both need the same one"
        )
    if envelope.name != peer:
        raise TransportError(f"metadata of {peer} names another peer: {envelope.name!r}")
    return envelope


class RegionIndex:
    """Finds the region that holds an address, for whole arrays at once.

    Regions may touch but not overlap; naming the same region twice counts once.
    """

    def __init__(self, regions: Sequence[Region]) -> None:
        """Sort and check `regions`.

        Raises:
            UsageError: a region is empty, of an unknown kind, leaves the address space or overlaps another.
        """
        if len(regions) > REGIONS_MAX:
            raise UsageError(f"{len(regions)} regions are registered, the most allowed is {REGIONS_MAX}")
        self.regions = sorted(set(regions), key=lambda region: region.address)
        for region in self.regions:
            _check_region(region)
        for before, after in zip(self.regions, self.regions[1:], strict=False):
            if before.address + before.bytes > after.address:
                raise UsageError(f"regions overlap: {before} and {after}")
        self._starts = np.array([region.address for region in self.regions], dtype=np.uint64)
        self._stops = np.array([region.address + region.bytes for region in self.regions], dtype=np.uint64)
        self._devices = np.array([region.device for region in self.regions], dtype=np.uint64)

    def holding_all(self, address: AddressArray, length: AddressArray) -> Region | None:
        """The region that all runs lie in, as far as their extremes tell; None: each has to be located."""
        at = bisect_right(self.regions, int(address.min()), key=lambda region: region.address) - 1
        if at < 0 or not length.min():
            return None
        region = self.regions[at]
        past = int(address.max()) + int(length.max())
        return region if past <= region.address + region.bytes else None

    def locate(self, address: AddressArray, length: AddressArray, whose: str) -> npt.NDArray[np.int64]:
        """The index in `regions` of the one that holds each run; `whose` is for the message.

        Raises:
            TransportError: a run is empty, or does not lie whole in one region.
        """
        if not self.regions:
            raise TransportError(f"{whose} has registered no memory")
        index = np.searchsorted(self._starts, address, side="right").astype(np.int64) - 1
        # `stop - address` cannot wrap once the address lies before the stop; `address + length` can.
        inside = index >= 0
        stop = self._stops[np.maximum(index, 0)]
        inside &= address < stop
        inside &= length > 0
        inside &= length <= np.where(inside, stop - address, 0)
        if not inside.all():
            bad = int(np.argmin(inside))
            raise TransportError(
                f"run {bad} of {len(address)}, {int(length[bad])} bytes at {int(address[bad]):#x}, "
                f"is not within the memory that {whose} has registered"
            )
        return index

    def descriptors(
        self, address: AddressArray, length: AddressArray, whose: str
    ) -> tuple[npt.NDArray[np.uint64], str]:
        """Rows (address, bytes, device) of the runs, and the one kind of memory that they lie in.

        Raises:
            TransportError: a run is empty or does not lie whole in one region, or kinds are mixed.
        """
        rows = np.empty((len(address), 3), np.uint64)
        rows[:, 0], rows[:, 1] = address, length
        region = self.holding_all(address, length)
        if region is not None:
            rows[:, 2] = region.device
            return rows, region.kind
        index = self.locate(address, length, whose)
        kinds = {self.regions[at].kind for at in np.unique(index).tolist()}
        if len(kinds) > 1:
            raise TransportError(
                f"one transfer cannot mix kinds of memory, {whose} has {sorted(kinds)}; split it"
            )
        rows[:, 2] = self._devices[index]
        return rows, kinds.pop()


def _check_region(region: Region) -> None:
    if region.bytes <= 0 or region.address <= 0 or region.address + region.bytes > ADDRESS_MAX:
        raise UsageError(f"region {region} is empty or leaves the address space")
    if region.kind not in KINDS:
        raise UsageError(f"region kind {region.kind!r} is unknown; use one of {', '.join(KINDS)}")
    if region.device < 0:
        raise UsageError(f"region device {region.device} is negative")


def peer_regions(envelope: Envelope) -> RegionIndex:
    """The memory that a peer's metadata names.

    Raises:
        TransportError: the regions are not sound.
    """
    try:
        return RegionIndex(envelope.regions)
    except UsageError as problem:
        raise TransportError(f"metadata of {envelope.name} is not sound: {problem}") from None
