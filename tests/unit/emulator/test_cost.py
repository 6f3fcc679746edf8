"""The cost model: what a step would take."""

from __future__ import annotations

import dataclasses

import pytest

from kvferry.emulator.cost import Chunk, Costs, step_seconds
from kvferry.errors import UsageError

COSTS = Costs(
    prefill_tokens_per_second=1000.0,
    attention_seconds_per_pair=1e-6,
    decode_seconds=0.005,
    decode_seconds_per_sequence=0.0001,
    decode_seconds_per_context_token=1e-6,
    step_seconds=0.001,
)


def test_a_step_without_work_takes_no_time() -> None:
    assert step_seconds(COSTS, [], []) == 0.0


def test_a_prompt_costs_its_tokens_and_their_pairs() -> None:
    pairs = 100 * 101 / 2
    assert step_seconds(COSTS, [Chunk(100, 0)], []) == pytest.approx(0.001 + 0.1 + pairs * 1e-6)


def test_context_makes_a_chunk_dearer_by_one_pair_per_token_of_each() -> None:
    without = step_seconds(COSTS, [Chunk(100, 0)], [])
    assert step_seconds(COSTS, [Chunk(100, 50)], []) - without == pytest.approx(100 * 50 * 1e-6)


def test_chunks_cost_together_what_the_whole_costs() -> None:
    whole = step_seconds(COSTS, [Chunk(300, 0)], [])
    parts = sum(step_seconds(COSTS, [Chunk(100, context)], []) for context in (0, 100, 200))
    assert parts == pytest.approx(whole + 2 * COSTS.step_seconds)


def test_decoding_costs_its_base_each_sequence_and_each_token_of_context() -> None:
    wanted = 0.001 + 0.005 + 2 * 0.0001 + (10 + 30) * 1e-6
    assert step_seconds(COSTS, [], [10, 30]) == pytest.approx(wanted)


def test_computing_and_reading_weights_overlap() -> None:
    """A mixed step takes the longer of the two, so a small chunk is free beside a decode."""
    alone = step_seconds(COSTS, [], [10])
    small = step_seconds(COSTS, [Chunk(2, 0)], [10])
    large = step_seconds(COSTS, [Chunk(99, 0)], [10])
    assert small == pytest.approx(alone + 3 * 1e-6)
    assert large == pytest.approx(0.001 + 0.1 + 0.0001 + 10 * 1e-6 + 99 * 100 / 2 * 1e-6)


@pytest.mark.parametrize(
    ("field", "value"),
    [("prefill_tokens_per_second", 0.0), ("decode_seconds", -1.0), ("step_seconds", -0.1)],
)
def test_senseless_costs_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(UsageError, match=field):
        dataclasses.replace(COSTS, **{field: value})
