"""Counters read from an engine's metrics."""

from __future__ import annotations

import pytest

from kvferry.cli.scrape import Counters, parse_counters, read_block_tokens, read_counters
from tests.support.stub_openai import StubOpenAI

EXPOSITION = """\
# HELP kvferry_transfer_bytes_total KV bytes.
# TYPE kvferry_transfer_bytes_total counter
kvferry_transfer_bytes_total{engine="0",model_name="tiny",mode="push"} 1024.0
kvferry_transfer_bytes_total{engine="1",model_name="tiny",mode="push"} 512.0
# TYPE kvferry_bytes_before_prefill_end_total counter
kvferry_bytes_before_prefill_end_total{engine="0",model_name="tiny",mode="push"} 768.0
# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 3.0
vllm:prompt_tokens_by_source_total{engine="0",source="local_cache_hit"} 128.0
vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 500.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="128",engine="0"} 1.0
"""


def test_counters_are_summed_over_their_other_labels() -> None:
    counters = parse_counters(EXPOSITION)
    assert counters == Counters(
        bytes=1536, bytes_early=768, tokens_computed=3, tokens_cached=128, tokens_received=500
    )
    assert counters.prompt_tokens == 631


def test_what_was_never_counted_is_zero() -> None:
    assert parse_counters("") == Counters()


def test_a_difference_is_taken_counter_by_counter() -> None:
    later = Counters(10, 20, 30, 40, 50)
    assert later - Counters(1, 2, 3, 4, 5) == Counters(9, 18, 27, 36, 45)
    assert later - Counters() == later


@pytest.mark.parametrize(("exposition", "tokens"), [(EXPOSITION, 128), ("", 0)])
def test_the_block_size_is_the_engines_own(exposition: str, tokens: int) -> None:
    with StubOpenAI() as engine:
        engine.metrics = exposition
        assert read_block_tokens(engine.url) == tokens
        assert read_counters(engine.url) == parse_counters(exposition)
