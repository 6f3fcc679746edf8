from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import TransportError, UsageError
from kvferry.ids import PeerName
from kvferry.layout.runs import Region
from kvferry.transport.regions import (
    METADATA_BYTES_MAX,
    Envelope,
    RegionIndex,
    decode_envelope,
)

PEER = PeerName("peer")


def addresses(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


def test_an_envelope_survives_the_trip():
    regions = (Region(4096, 100), Region(1 << 47, 1 << 30, device=3, kind="VRAM"))
    envelope = Envelope(transport="memory", name=PEER, regions=regions, blob=b"\x00\xff")
    assert decode_envelope(envelope.encoded(), transport="memory", peer=PEER) == envelope


def test_metadata_over_the_limit_is_refused():
    with pytest.raises(TransportError, match="the most allowed"):
        decode_envelope(bytes(METADATA_BYTES_MAX + 1), transport="memory", peer=PEER)


@given(st.binary(max_size=200))
def test_random_metadata_is_refused_with_a_transport_error(blob):
    with pytest.raises(TransportError):
        decode_envelope(blob, transport="memory", peer=PEER)


def test_runs_are_located_in_any_order_of_regions():
    index = RegionIndex([Region(2000, 100, kind="VRAM"), Region(1000, 100), Region(1100, 50)])
    found = index.locate(addresses(1000, 2099, 1149, 1050), addresses(100, 1, 1, 50), "we")
    assert [index.regions[at].address for at in found] == [1000, 2000, 1100, 1000]


@pytest.mark.parametrize(
    ("address", "length"),
    [
        (999, 1),
        (999, 2),
        (1000, 101),
        (1100, 1),
        (1099, 2),
        (1000, 0),
        (0, 1),
        (1000, (1 << 64) - 1),
        ((1 << 64) - 1, 1),
        (1050, (1 << 64) - 1050),
    ],
)
def test_a_run_that_leaves_its_region_is_named(address, length):
    index = RegionIndex([Region(1000, 100)])
    with pytest.raises(TransportError, match=r"run 1 of 2, .* is not within the memory that we"):
        index.locate(addresses(1000, address), addresses(1, length), "we")


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=6, unique=True),
    st.integers(0, 70),
    st.integers(0, 70),
)
def test_locate_agrees_with_a_slow_oracle(starts, address, length):
    starts = sorted(starts)
    stops = [*starts[1:], 64]
    regions = [Region(start, max(1, (stop - start) // 2)) for start, stop in zip(starts, stops, strict=True)]
    index = RegionIndex(regions)
    holding = [
        region
        for region in regions
        if length and region.address <= address and address + length <= region.address + region.bytes
    ]
    try:
        found = [index.regions[at] for at in index.locate(addresses(address), addresses(length), "we")]
    except TransportError:
        found = []
    assert found == holding


def test_nothing_is_found_without_regions():
    with pytest.raises(TransportError, match="has registered no memory"):
        RegionIndex([]).locate(addresses(1), addresses(1), "we")


@pytest.mark.parametrize(
    ("regions", "problem"),
    [
        ([Region(1000, 100), Region(1099, 1)], "overlap"),
        ([Region(1000, 0)], "empty"),
        ([Region(0, 10)], "empty"),
        ([Region((1 << 64) - 5, 10)], "leaves"),
        ([Region(1000, 10, kind="FILE")], "kind"),
        ([Region(1000, 10, device=-1)], "device"),
    ],
)
def test_unsound_regions_are_refused(regions, problem):
    with pytest.raises(UsageError, match=problem):
        RegionIndex(regions)


def test_the_same_region_twice_counts_once():
    assert len(RegionIndex([Region(1000, 10), Region(1000, 10)]).regions) == 1


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=6, unique=True),
    st.lists(st.tuples(st.integers(0, 70), st.integers(0, 70)), min_size=1, max_size=4),
)
def test_a_region_that_is_said_to_hold_all_runs_does(starts, runs):
    starts = sorted(starts)
    stops = [*starts[1:], 64]
    regions = [Region(start, max(1, (stop - start) // 2)) for start, stop in zip(starts, stops, strict=True)]
    index = RegionIndex(regions)
    held = index.holding_all(addresses(*(at for at, _ in runs)), addresses(*(size for _, size in runs)))
    if held is not None:
        assert all(size > 0 and held.address <= at for at, size in runs)
        assert all(at + size <= held.address + held.bytes for at, size in runs)


def test_one_region_is_found_by_the_extremes_and_several_are_not():
    index = RegionIndex([Region(1000, 100), Region(2000, 100, device=1)])
    assert index.holding_all(
        addresses(2090, 2000),
        addresses(10, 10),
    ) == Region(2000, 100, device=1)
    assert index.holding_all(addresses(1000, 2000), addresses(10, 10)) is None
    assert index.holding_all(addresses(2090, 2000), addresses(10, 11)) is None
    assert index.holding_all(addresses(2000, (1 << 64) - 1), addresses(10, 10)) is None
    assert index.holding_all(addresses(999), addresses(1)) is None
    assert index.holding_all(addresses(1000), addresses(0)) is None
    assert RegionIndex([]).holding_all(addresses(1000), addresses(1)) is None


@pytest.mark.parametrize("where", [[1000, 1050], [1000, 2000]])
def test_descriptors_carry_the_device_of_each_run(where):
    index = RegionIndex([Region(1000, 100), Region(2000, 100, device=1)])
    rows, kind = index.descriptors(addresses(*where), addresses(10, 20), "we")
    assert rows.tolist() == [[where[0], 10, 0], [where[1], 20, int(where[1] == 2000)]]
    assert (rows.dtype, kind) == (np.uint64, "DRAM")


def test_descriptors_of_one_kind_only():
    index = RegionIndex([Region(1000, 100), Region(2000, 100, device=1, kind="VRAM")])
    assert index.descriptors(addresses(2000), addresses(10), "we")[1] == "VRAM"
    with pytest.raises(TransportError, match=r"cannot mix kinds of memory, we has \['DRAM', 'VRAM'\]"):
        index.descriptors(addresses(1000, 2000), addresses(10, 10), "we")
