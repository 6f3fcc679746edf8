"""How many retries all requests of one router have together."""

from __future__ import annotations

import pytest

from kvferry.router.dispatch.budget import RESERVE, RetryBudget
from tests.support.fake_engine import failing
from tests.support.router_world import router_world


def spent(budget: RetryBudget) -> int:
    """Take retries until none is allowed; how many there were."""
    count = 0
    while budget.allows:
        budget.spend()
        count += 1
    return count


def test_a_router_begins_with_a_reserve() -> None:
    assert spent(RetryBudget(0.2)) == RESERVE


def test_each_request_earns_a_share_of_a_retry() -> None:
    budget = RetryBudget(0.25)
    spent(budget)
    for _ in range(3):
        budget.request()
    assert not budget.allows
    budget.request()
    assert spent(budget) == 1


def test_no_more_is_saved_than_the_reserve() -> None:
    """After a quiet week a fleet that fails is asked no more often than after a start."""
    budget = RetryBudget(1.0)
    for _ in range(10_000):
        budget.request()
    assert spent(budget) == RESERVE


async def test_a_retry_is_taken_from_it() -> None:
    """And the request that was not retried for its sake is told its engine's error."""
    async with router_world(decode=2, retries=1, retry_budget=0.0) as world:
        budget = world.router.dispatcher.budget
        while budget._saved > 1.0:
            budget.spend()
        for engine in world.decode:
            engine.plan(failing(500))
        async with world.complete() as response:
            assert response.status == 500
        assert budget._saved == pytest.approx(0.0)
        assert world.retries("decode", "error") == 1
        world.decode[0].plan(failing(500))
        world.decode[1].plan(failing(500))
        async with world.complete() as response:
            assert response.status == 500
        assert sum(len(engine.requests) for engine in world.decode) == 3
