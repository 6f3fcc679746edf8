"""Quantiles against known values; intervals against what theory says of them."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.bench.statistics import Summary, interval, mean, quantile, ratio, seed_of, summary

MEDIAN = quantile(0.5)


def test_a_summary_interpolates_between_the_nearest_samples() -> None:
    found = summary([float(value) for value in range(1, 101)])
    assert found is not None
    assert found.count == 100
    assert (found.mean, found.p50) == pytest.approx((50.5, 50.5))
    assert (found.p90, found.p95, found.p99) == pytest.approx((90.1, 95.05, 99.01))


def test_one_sample_is_every_quantile_and_none_is_no_summary() -> None:
    assert summary([7.0]) == Summary(1, 7.0, 7.0, 7.0, 7.0, 7.0)
    assert summary([]) is None


def test_the_interval_of_a_mean_is_as_wide_as_that_of_the_normal_distribution() -> None:
    chance = np.random.default_rng(1)
    widths = []
    for seed in range(30):
        values = chance.normal(10.0, 2.0, 400)
        found = interval([values], mean, seed=seed, draws=500)
        assert found.figure == pytest.approx(values.mean())
        assert found.low < found.figure < found.high
        widths.append(found.high - found.low)
    # 2 x 1.96 x 2 / sqrt(400)
    assert np.mean(widths) == pytest.approx(0.392, rel=0.08)


def test_an_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    chance = np.random.default_rng(2)
    covered = 0
    for seed in range(200):
        found = interval(
            [chance.exponential(1.0, 60), chance.exponential(1.0, 60)], MEDIAN, seed=seed, draws=400
        )
        covered += found.low <= np.log(2) <= found.high
    # 95 % of 200 is 190; a normal-sized bootstrap of a median of 120 samples falls a little short.
    assert 178 <= covered <= 199


def test_neighbours_that_depend_on_each_other_widen_the_interval() -> None:
    chance = np.random.default_rng(3)
    independent = chance.normal(size=512)
    dependent = np.repeat(chance.normal(size=64), 8)
    narrow, wide = (interval([one], mean, seed=1) for one in (independent, dependent))
    assert wide.high - wide.low > 1.8 * (narrow.high - narrow.low)


def test_a_seed_decides_the_interval() -> None:
    values = np.random.default_rng(4).normal(size=50)
    assert interval([values], MEDIAN, seed=1) == interval([values], MEDIAN, seed=1)
    assert interval([values], MEDIAN, seed=1) != interval([values], MEDIAN, seed=2)


def test_the_same_requests_are_compared_one_by_one() -> None:
    """Every request is a fifth faster; how much they differ among themselves then does not matter."""
    values = np.random.default_rng(5).lognormal(0.0, 1.0, 100)
    found = ratio([0.8 * values], [values], MEDIAN, seed=1)
    assert (found.figure, found.low, found.high) == pytest.approx((0.8, 0.8, 0.8))


def test_different_numbers_of_requests_are_compared_as_a_whole() -> None:
    chance = np.random.default_rng(6)
    found = ratio([chance.normal(8.0, 1.0, 90)], [chance.normal(10.0, 1.0, 100)], mean, seed=1)
    assert found.low < 0.8 < found.high
    assert 0.7 < found.low < found.high < 0.9


def test_repeats_keep_their_share_in_every_draw() -> None:
    found = interval([np.full(10, 1.0), np.full(30, 2.0)], mean, seed=1)
    assert (found.low, found.figure, found.high) == pytest.approx((1.75, 1.75, 1.75))


def test_a_repeat_without_samples_does_no_harm_but_nothing_at_all_is_refused() -> None:
    empty = np.array([])
    assert interval([empty, np.array([3.0])], MEDIAN, seed=1).figure == 3.0
    for groups in ([], [empty]):
        with pytest.raises(ValueError, match="no samples"):
            interval(groups, MEDIAN, seed=1)


def test_a_seed_follows_from_names() -> None:
    assert seed_of("a", 1) == seed_of("a", 1) != seed_of("a", 2)
