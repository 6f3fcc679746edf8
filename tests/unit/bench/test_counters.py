"""Counters about transfers from an engine's metrics."""

from __future__ import annotations

import aiohttp
import pytest

from kvferry.bench.counters import parse_counters, read_counters, since
from kvferry.bench.stream import LegError
from tests.support.stub_engines import StubEngine, serving

TEXT = """
# TYPE kvferry_transfer_bytes counter
kvferry_transfer_bytes_total{mode="push",engine="0"} 100.0
kvferry_transfer_bytes_total{mode="pull",engine="0"} 20.0
# TYPE vllm:nixl_xfer_time_seconds histogram
vllm:nixl_xfer_time_seconds_bucket{le="0.1"} 3.0
vllm:nixl_xfer_time_seconds_bucket{le="+Inf"} 4.0
vllm:nixl_xfer_time_seconds_sum 0.5
vllm:nixl_xfer_time_seconds_count 4.0
# TYPE kvferry_ready gauge
kvferry_ready 1.0
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total 7.0
"""


def test_counters_about_transfers_are_summed_over_labels() -> None:
    assert parse_counters(TEXT) == {
        "kvferry_transfer_bytes_total": 120.0,
        "vllm:nixl_xfer_time_seconds_sum": 0.5,
        "vllm:nixl_xfer_time_seconds_count": 4.0,
    }


def test_only_what_has_moved_is_kept() -> None:
    assert since({"a": 5.0, "b": 2.0, "c": 1.0}, {"a": 3.0, "b": 2.0}) == {"a": 2.0, "c": 1.0}


async def test_they_are_asked_of_the_engine() -> None:
    engine = StubEngine()
    engine.metrics = TEXT
    async with serving(engine) as url, aiohttp.ClientSession() as session:
        assert (await read_counters(session, url))["kvferry_transfer_bytes_total"] == 120.0
        engine.status = 500
        with pytest.raises(LegError, match="/metrics: answered 500"):
            await read_counters(session, url)


async def test_an_engine_that_is_not_there_is_told() -> None:
    async with serving(StubEngine()) as url:
        pass
    async with aiohttp.ClientSession() as session:
        with pytest.raises(LegError, match=f"{url}/metrics: "):
            await read_counters(session, url)
