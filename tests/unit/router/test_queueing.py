"""What is expected of a prefill engine's queue."""

from __future__ import annotations

import pytest

from kvferry.router.dispatch.budget import RESERVE, RetryBudget
from kvferry.router.engines.queueing import PrefillQueue, ServiceTimes
from kvferry.router.ground.policy import overlap_seconds

FIXED_SECONDS = 0.02
TOKENS_PER_SECOND = 10_000.0


def takes(tokens: int) -> float:
    return FIXED_SECONDS + tokens / TOKENS_PER_SECOND


def measured(*lengths: int) -> ServiceTimes:
    times = ServiceTimes()
    for tokens in lengths:
        times.note(tokens, takes(tokens))
    return times


def test_nothing_is_expected_of_an_engine_that_nobody_has_measured() -> None:
    assert measured(100, 200).seconds(100) is None
    assert PrefillQueue().seconds_left(PrefillQueue().enter(10, 0.0), 0.0) == 0.0
    queue = PrefillQueue()
    assert queue.seconds_left(queue.enter(10, 0.0), 0.0) is None


@pytest.mark.parametrize("tokens", [100, 1000, 16_000])
def test_a_line_is_fitted_through_fixed_cost_and_rate(tokens: int) -> None:
    assert measured(100, 4000, 900, 12_000, 300).seconds(tokens) == pytest.approx(takes(tokens))


def test_equal_lengths_say_nothing_of_the_rate_but_of_themselves() -> None:
    assert measured(*[1000] * 5).seconds(1000) == pytest.approx(takes(1000))


def test_an_engine_that_has_become_slower_is_believed_after_a_while() -> None:
    times = measured(*[100, 2000] * 10)
    for _ in range(30):
        for tokens in (100, 2000):
            times.note(tokens, 3 * takes(tokens))
    assert times.seconds(2000) == pytest.approx(3 * takes(2000), rel=0.05)
    assert times.error_seconds > 0


def test_what_is_ahead_counts_and_the_first_one_less_what_it_has_had() -> None:
    queue = PrefillQueue(times=measured(100, 4000, 900, 12_000))
    first, second, third = (queue.enter(tokens, 10.0) for tokens in (1000, 2000, 3000))
    assert queue.seconds_left(first, 10.0) == pytest.approx(takes(1000))
    assert queue.seconds_left(third, 10.1) == pytest.approx(takes(1000) + takes(2000) + takes(3000) - 0.1)
    queue.finished(first, 0, 10.0 + takes(1000))
    assert queue.seconds_left(second, 10.0 + takes(1000)) == pytest.approx(takes(2000))
    assert queue.seconds_left(third, 99.0) == pytest.approx(takes(3000))


def test_service_begins_when_the_one_before_has_ended() -> None:
    """Five prompts at once, each of 0.1 s: none of them has taken half a second."""
    queue = PrefillQueue()
    tickets = [queue.enter(1000, 0.0) for _ in range(5)]
    for number, ticket in enumerate(tickets, start=1):
        queue.finished(ticket, 0, 0.1 * number)
    assert queue.times.seconds(1000) == pytest.approx(0.1)


def test_tokens_from_the_engines_cache_took_no_time() -> None:
    queue = PrefillQueue()
    for start in range(0, 200, 10):
        queue.finished(queue.enter(5000, float(start)), 4000, start + takes(1000))
        queue.finished(queue.enter(5000, start + 0.5), 0, start + 0.5 + takes(5000))
    assert queue.times.seconds(1000) == pytest.approx(takes(1000), rel=0.01)


def test_a_prompt_that_was_given_up_teaches_nothing_and_is_in_nobodys_way() -> None:
    queue = PrefillQueue(times=measured(100, 4000, 900, 12_000))
    first, second = queue.enter(5000, 0.0), queue.enter(100, 0.0)
    queue.left(first)
    queue.left(first)
    assert queue.seconds_left(second, 0.0) == pytest.approx(takes(100))
    queue.finished(first, 0, 50.0)
    assert queue.times.seconds(100) == pytest.approx(takes(100))


def test_the_lead_grows_with_what_push_overlaps_and_with_the_errors_made() -> None:
    queue = PrefillQueue(times=measured(100, 4000, 900, 12_000))
    short, long = queue.lead_seconds(100), queue.lead_seconds(16_000)
    assert long - short == pytest.approx(overlap_seconds(16_000) - overlap_seconds(100))
    queue.times.note(1000, takes(1000) + 1.0)
    assert queue.lead_seconds(100) == pytest.approx(short + 0.2, rel=0.01)


def test_another_engine_has_to_be_measured_anew() -> None:
    queue = PrefillQueue(times=measured(100, 4000, 900))
    queue.forget()
    assert queue.times.seconds(100) is None


def test_retries_are_bounded_by_requests() -> None:
    budget = RetryBudget(per_request=0.2)
    for _ in range(round(RESERVE)):
        assert budget.allows
        budget.spend()
    assert not budget.allows
    for _ in range(4):
        budget.request()
        assert not budget.allows
    for _ in range(2):
        budget.request()
    assert budget.allows


def test_what_is_not_used_is_saved_up_to_a_bound() -> None:
    budget = RetryBudget(per_request=1.0)
    for _ in range(10 * round(RESERVE)):
        budget.request()
    spent = 0
    while budget.allows:
        budget.spend()
        spent += 1
    assert spent == RESERVE
