"""Choices over loads: pure, with chance as an argument."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.router.policy import POLICIES, at_random, least_load, power_of_two, round_robin

LOADS = st.lists(st.integers(0, 100), min_size=1, max_size=8)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
@given(loads=LOADS, turn=st.integers(0, 1000), seed=st.integers(0, 1000))
def test_a_choice_is_one_of_the_workers_and_depends_on_nothing_else(
    policy: object, loads: list[int], turn: int, seed: int
) -> None:
    chosen = policy(loads, turn, Random(seed))
    assert 0 <= chosen < len(loads)
    assert policy(loads, turn, Random(seed)) == chosen


def test_round_robin_takes_turns() -> None:
    assert [round_robin([5, 0, 9], turn, Random(0)) for turn in range(4)] == [0, 1, 2, 0]


@given(loads=LOADS, turn=st.integers(0, 100))
def test_least_load_never_takes_a_busier_one(loads: list[int], turn: int) -> None:
    assert loads[least_load(loads, turn, Random(0))] == min(loads)


def test_equal_loads_take_turns() -> None:
    assert [least_load([1, 0, 0], turn, Random(0)) for turn in range(3)] == [1, 2, 1]


@given(seed=st.integers(0, 1000))
def test_power_of_two_never_takes_the_busiest(seed: int) -> None:
    assert power_of_two([3, 1, 9, 2], 0, Random(seed)) != 2


def test_random_takes_all() -> None:
    chance = Random(1)
    counts = Counter(at_random([0, 0, 0], 0, chance) for _ in range(300))
    assert min(counts.values()) > 50
