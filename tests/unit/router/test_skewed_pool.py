"""Push, pull and auto on modelled pools, by the router's own dispatch on virtual time: what auto is worth.

Goal: auto is about as good as the better of the two wherever the decode engines are not full, and each of the
two wins somewhere. Method: one seed, one P, four D; see `skewed_pool`. The numbers stand in the docs.
"""

from __future__ import annotations

from functools import cache

import pytest

from kvferry.router.settings import RouterMode
from tests.support.skewed_pool import DecodeModel, PoolModel, p95, ttfts

ALIKE = (DecodeModel(),) * 4
SKEWED = (
    DecodeModel(),
    DecodeModel(),
    DecodeModel(first_seconds=0.3, decode_seconds=3.0),
    DecodeModel(first_seconds=0.15),
)
FULL = (
    DecodeModel(slots=8, decode_seconds=2.0),
    DecodeModel(slots=8, decode_seconds=2.0),
    DecodeModel(slots=8, decode_seconds=6.0, first_seconds=0.3),
    DecodeModel(slots=8, decode_seconds=2.0, first_seconds=0.15),
)
SHORT = {"prompt_tokens": (100, 500), "requests_per_second": 60.0, "requests": 400}
LONG = {"prompt_tokens": (4000, 16_000), "requests_per_second": 3.0, "requests": 300}
MIXED = {"prompt_tokens": (100, 16_000), "requests_per_second": 3.8, "requests": 300}
CASES = {
    "alike, short": PoolModel(decode=ALIKE, **SHORT),
    "alike, long": PoolModel(decode=ALIKE, **LONG),
    "skewed, short": PoolModel(decode=SKEWED, **SHORT),
    "skewed, long": PoolModel(decode=SKEWED, **LONG),
    "skewed, mixed": PoolModel(decode=SKEWED, **MIXED),
}


@cache
def seconds(case: str, mode: RouterMode) -> list[float]:
    return ttfts(CASES[case], mode, "least_wait")


@pytest.mark.parametrize("case", CASES)
def test_auto_is_about_as_good_as_the_better_of_the_two(case: str) -> None:
    best = min(p95(seconds(case, mode)) for mode in ("push", "pull"))
    assert p95(seconds(case, "auto")) <= 1.05 * best


def test_push_wins_where_prompts_are_long_and_engines_alike() -> None:
    pushed, pulled = (seconds("alike, long", mode) for mode in ("push", "pull"))
    middle = len(pushed) // 2
    assert pushed[middle] < 0.95 * pulled[middle]
    assert seconds("alike, long", "auto")[middle] < 1.01 * pushed[middle]


def test_pull_wins_where_decode_engines_are_full() -> None:
    """A pushed prompt holds its slot through the prefill engine's queue, a pulled one does not."""
    model = PoolModel(decode=FULL, prompt_tokens=(1000, 4000), requests_per_second=13.0)
    pushed, pulled = (p95(ttfts(model, mode, "least_load")) for mode in ("push", "pull"))
    assert pulled < 0.9 * pushed


def test_what_is_measured_avoids_the_slow_engine() -> None:
    case = CASES["skewed, short"]
    assert p95(ttfts(case, "push", "least_wait")) < 0.5 * p95(ttfts(case, "push", "least_load"))
