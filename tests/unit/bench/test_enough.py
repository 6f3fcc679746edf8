"""From how many requests and repeats on a figure is judged."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvferry.bench.enough import requests_needed, shortage, too_few_repeats
from kvferry.bench.statistics import interval, quantile


@pytest.mark.parametrize(("share", "needed"), [(0.5, 12), (0.9, 60), (0.95, 120), (0.05, 120), (0.99, 600)])
def test_six_requests_are_expected_on_either_side(share: float, needed: int) -> None:
    assert requests_needed(share) == needed
    assert shortage(needed, 2, share) is None
    assert shortage(needed - 1, 2, share) == f"{needed - 1} requests, at least {needed} are needed"


def test_the_words_are_of_one_and_of_many() -> None:
    assert shortage(1, 1, 0.5) == "1 request, at least 12 are needed"
    assert shortage(0, 0, 0.5) == "0 requests, at least 12 are needed"
    assert shortage(900, 1, 0.5) == too_few_repeats(1) == "1 repeat, at least 2 are needed"
    assert too_few_repeats(2) is None


@pytest.mark.parametrize("share", [0.5, 0.95])
def test_intervals_of_as_many_hold_the_true_value_and_of_a_sixth_often_do_not(share: float) -> None:
    """What the number is made of; seeded, so it is the same every time."""
    true = -math.log(1 - share)

    def held(requests: int) -> float:
        chance = np.random.default_rng(7)
        trials = [[chance.exponential(size=requests // 2) for _ in range(2)] for _ in range(150)]
        found = [interval(one, quantile(share), seed=seed, draws=200) for seed, one in enumerate(trials)]
        return sum(one.low <= true <= one.high for one in found) / len(found)

    assert held(requests_needed(share)) > 0.8
    assert held(requests_needed(share) // 6) < 0.7
