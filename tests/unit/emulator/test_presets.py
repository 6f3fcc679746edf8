"""The presets: what their docstrings and comments say of them holds."""

from __future__ import annotations

import pytest

from kvferry.emulator.cost import Chunk, step_seconds
from kvferry.emulator.presets import DEFAULT, PRESETS, Link, preset_of
from kvferry.errors import UsageError

LONG = 16384
CHUNK = 8192


def prefill_seconds(name: str) -> float:
    costs = preset_of(name).costs
    return sum(step_seconds(costs, [Chunk(CHUNK, context)], []) for context in range(0, LONG, CHUNK))


def test_an_unknown_preset_is_refused_with_those_that_exist() -> None:
    with pytest.raises(UsageError, match=r"'h300' is unknown.*llama-3\.1-8b-h100"):
        preset_of("h300")


@pytest.mark.parametrize(
    ("name", "seconds"), [("qwen3-32b-h200-tp8", 0.330), ("qwen3-32b-unsaturated", 0.110)]
)
def test_a_long_prompt_takes_what_the_preset_says(name: str, seconds: float) -> None:
    assert prefill_seconds(name) == pytest.approx(seconds, rel=0.02)


def test_the_default_is_below_saturation_in_the_published_grids_highest_cell() -> None:
    assert 8 * prefill_seconds(DEFAULT) < 0.95


def test_the_published_time_per_output_token_at_low_load_is_met() -> None:
    costs = preset_of(DEFAULT).costs
    assert 5.6e-3 <= step_seconds(costs, [], [1024]) <= 5.8e-3


def test_a_rank_of_qwen3_has_pages_of_8_kib() -> None:
    shape = preset_of("qwen3-32b-h200-tp8").shape
    assert 16 * shape.kv_heads * shape.content_bytes() == 8192
    assert 16 * shape.kv_heads * shape.content_bytes(scale=4) == 2048


def test_a_latent_is_one_row_per_token_and_no_pair_of_key_and_value() -> None:
    shape = preset_of("deepseek-v2-lite-h200").shape
    assert 16 * shape.kv_heads * shape.content_bytes() == 16 * 576 * 2
    assert 16 * shape.kv_heads * shape.content_bytes(scale=4) == 16 * 144 * 2


@pytest.mark.parametrize("scale", [0, 3, 32, 128])
def test_a_scale_that_does_not_fit_is_refused(scale: int) -> None:
    with pytest.raises(UsageError, match="content_scale"):
        preset_of(DEFAULT).shape.scaled_head_elements(scale)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("latency_seconds", {"latency_seconds": -1.0, "bytes_per_second": 1.0}),
        ("bytes_per_second", {"bytes_per_second": 0.0}),
    ],
)
def test_a_senseless_link_is_refused_by_name(field: str, values: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=field):
        Link(**values)


def test_every_preset_is_listed_under_its_own_name() -> None:
    assert all(preset.name == name and preset.about for name, preset in PRESETS.items())
