"""Late against eager decode legs under a prefill queue, by the router's own dispatch on virtual time.

Goal: decode engines hold room for prompts that wait for prefill for less than half as long, and clients wait
at most a twentieth longer. Method: one seed, one P at 90 % of what it can do, four D; see `queued_pool`.
"""

from __future__ import annotations

from functools import cache

import pytest

from kvferry.router.ground.settings import DecodeDispatch
from tests.support.queued_pool import DecodeModel, Outcome, PoolModel, dispatched, p95

ALIKE = (DecodeModel(),) * 4
QUEUED = {"prompt_tokens": (1000, 16_000), "requests_per_second": 4.2, "requests": 300}
CASES = {
    "steady": PoolModel(decode=ALIKE, **QUEUED),
    "noisy": PoolModel(decode=ALIKE, prefill_noise=0.3, **QUEUED),
}


@cache
def outcome(case: str, dispatch: DecodeDispatch) -> Outcome:
    return dispatched(CASES[case], dispatch)


@pytest.mark.parametrize("case", CASES)
def test_late_decode_legs_hold_less_and_cost_nothing(case: str) -> None:
    eager, late = (outcome(case, dispatch) for dispatch in ("eager", "late"))
    assert late.held_block_seconds <= 0.5 * eager.held_block_seconds
    assert p95(late.ttfts) <= 1.05 * p95(eager.ttfts)
