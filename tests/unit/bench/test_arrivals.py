"""When requests are due."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from kvferry.bench.arrivals import schedule
from kvferry.errors import UsageError


def gaps(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    due = schedule(count + 1, rate, burstiness, seed)
    assert due is not None
    return [later - earlier for earlier, later in pairwise(due)]


def test_the_first_request_is_due_at_once_and_the_rest_in_order() -> None:
    due = schedule(50, 4.0, 1.0, seed=3)
    assert due is not None
    assert due[0] == 0.0
    assert due == sorted(due)
    assert len(due) == 50


def test_a_seed_decides_everything() -> None:
    assert schedule(20, 2.0, 1.0, seed=1) == schedule(20, 2.0, 1.0, seed=1)
    assert schedule(20, 2.0, 1.0, seed=1) != schedule(20, 2.0, 1.0, seed=2)


@pytest.mark.parametrize("rate", [0.5, 8.0])
def test_the_mean_gap_is_that_of_the_rate(rate: float) -> None:
    found = gaps(20_000, rate, 1.0, seed=5)
    assert sum(found) / len(found) == pytest.approx(1 / rate, rel=0.03)


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_burstiness_is_the_shape_of_the_gaps(burstiness: float) -> None:
    """A gamma distribution's variance is its mean squared over its shape; 1 is a Poisson process."""
    found = gaps(40_000, 2.0, burstiness, seed=6)
    mean = sum(found) / len(found)
    variance = sum((gap - mean) ** 2 for gap in found) / len(found)
    assert variance / mean**2 == pytest.approx(1 / burstiness, rel=0.06)


def test_an_infinite_rate_has_no_schedule() -> None:
    assert schedule(3, math.inf, 1.0, seed=0) is None


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(UsageError, match="--request-rate must be above 0"):
        schedule(3, rate, 1.0, seed=0)


@pytest.mark.parametrize("burstiness", [0.0, -1.0, math.inf, math.nan])
def test_a_burstiness_that_is_none_is_refused(burstiness: float) -> None:
    with pytest.raises(UsageError, match="--burstiness must be above 0"):
        schedule(3, 1.0, burstiness, seed=0)
