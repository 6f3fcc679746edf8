"""Plans are kept by peer within a bound, and made anew when they were dropped."""

from __future__ import annotations

from kvferry.ids import Rank
from kvferry.layout.plan import CopyPlan, plan
from kvferry.layout.plans import PLAN_OVERHEAD_BYTES, PlanCache
from tests.support.engines import Sizes, cache_of_rank


def made() -> CopyPlan:
    """A plan of 16 pieces."""
    ours = cache_of_rank(Sizes(split=(4,)), Rank(0, 0), 1 << 20)
    theirs = cache_of_rank(Sizes(split=(4,), order="LBNHC"), Rank(0, 0), 1 << 30)
    return plan(ours, theirs)


ONE = made().bytes + PLAN_OVERHEAD_BYTES


def refuse() -> CopyPlan:
    raise AssertionError("it is kept")


def test_a_plan_is_made_once_while_it_is_kept() -> None:
    plans = PlanCache()
    found = plans.find("a", made)
    assert found.bytes == 24 * 16
    assert plans.find("a", refuse) is found
    assert (len(plans), plans.bytes) == (1, ONE)


def test_the_plan_that_was_longest_unused_is_dropped() -> None:
    plans = PlanCache(bytes_max=2 * ONE)
    first = plans.find("a", made)
    plans.find("b", made)
    plans.find("a", refuse)
    plans.find("c", made)
    assert plans.bytes == 2 * ONE
    assert plans.find("a", refuse) is first
    again = made()
    assert plans.find("b", lambda: again) is again


def test_memory_stays_bounded_with_many_peers() -> None:
    """Thousands of links with plans of any size."""
    plans = PlanCache(bytes_max=3 * ONE)
    one = made()
    for peer in range(10_000):
        plans.keep(peer, one)
        assert plans.bytes <= 3 * ONE
    assert len(plans) == 3


def test_the_newest_plan_stays_however_large() -> None:
    plans = PlanCache(bytes_max=1)
    plans.find("a", made)
    assert (len(plans), plans.bytes) == (1, ONE)
    plans.find("b", made)
    assert (len(plans), plans.bytes) == (1, ONE)


def test_a_new_plan_of_a_peer_takes_the_place_of_its_old_one() -> None:
    plans = PlanCache()
    plans.keep("a", made())
    again = plans.keep("a", made())
    assert plans.find("a", refuse) is again
    assert plans.bytes == ONE
    plans.drop("a")
    plans.drop("a")
    assert (len(plans), plans.bytes) == (0, 0)
