"""`bench pool`: what follows from the runs, and one case by the router's side door."""

from __future__ import annotations

import pytest

from kvferry.bench.pool import CaseResult, PoolRun
from kvferry.bench.pool_cases import CASES, planned


def run(
    arm: str, milliseconds: float, seed: int = 0, pulled: int = 0, failures: tuple[str, ...] = ()
) -> PoolRun:
    """A hundred requests, of which the last ten took ten times as long."""
    seconds = milliseconds / 1e3
    return PoolRun(arm, seed, (seconds,) * 90 + (10 * seconds,) * 10, pulled, failures)


def result(push: float, pull: float, auto: float, **more: int) -> CaseResult:
    return CaseResult("case", (run("push", push), run("pull", pull), run("auto", auto, **more)))


def test_auto_is_compared_with_the_better_mode() -> None:
    assert (result(2.0, 4.0, 3.0).better, result(2.0, 4.0, 3.0).ratio) == ("push", pytest.approx(1.5))
    assert (result(4.0, 2.0, 3.0).better, result(4.0, 2.0, 3.0).ratio) == ("pull", pytest.approx(1.5))


def test_quantiles_are_of_all_seeds_together() -> None:
    both = CaseResult("case", (run("push", 1.0, seed=0), run("push", 3.0, seed=1)))
    assert both.quantile("push", 0.0) == pytest.approx(0.001)
    assert both.quantile("push", 0.95) == pytest.approx(0.03)
    assert both.quantile("push", 1.0) == pytest.approx(0.03)


def test_the_share_of_pulls_is_autos() -> None:
    assert result(1.0, 1.0, 1.0, pulled=25).pulled_share == 0.25


def test_failures_are_named() -> None:
    failed = CaseResult("case", (run("push", 1.0, failures=("pool-0-1: answered 500",)),))
    assert failed.failures == ["case, push, seed 0: pool-0-1: answered 500"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_seed_decides_the_requests_of_a_case(case) -> None:
    asks, due = planned(case, 1, 50)
    assert planned(case, 1, 50) == (asks, due)
    assert planned(case, 2, 50) != (asks, due)
    assert due == sorted(due)
    assert all(case.load.prompt_tokens[0] <= ask.prompt.tokens <= case.load.prompt_tokens[1] for ask in asks)
    assert all(len(ask.prompt.encoded) == 4 * ask.prompt.tokens + 2 for ask in asks)
    assert len({bytes(ask.prompt.encoded)[:16] for ask in asks}) == len(asks)
