"""When an engine that fails is left alone, and when it is tried again."""

from __future__ import annotations

from kvferry.router.engines.breaker import FAILURES_MAX, OPEN_SECONDS, OPEN_SECONDS_MAX, Breaker, BreakerState


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker()
    for _ in range(FAILURES_MAX):
        breaker.failed(now)
    return breaker


def test_it_opens_after_failures_in_a_row() -> None:
    breaker = Breaker()
    for _ in range(FAILURES_MAX - 1):
        breaker.failed(0.0)
    assert breaker.permits(0.0)
    breaker.failed(0.0)
    assert breaker.state(0.0) is BreakerState.OPEN
    assert not breaker.permits(OPEN_SECONDS * 0.99)


def test_an_answer_between_failures_keeps_it_closed() -> None:
    breaker = Breaker()
    for _ in range(3 * FAILURES_MAX):
        breaker.failed(0.0)
        breaker.succeeded()
    assert breaker.state(0.0) is BreakerState.CLOSED


def test_half_open_lets_one_request_through() -> None:
    breaker = opened()
    assert breaker.state(OPEN_SECONDS) is BreakerState.HALF_OPEN
    assert breaker.permits(OPEN_SECONDS)
    breaker.sent(OPEN_SECONDS)
    assert not breaker.permits(OPEN_SECONDS)


def test_a_good_trial_closes_it_and_a_bad_one_opens_it_for_longer() -> None:
    good, bad = opened(), opened()
    good.sent(OPEN_SECONDS)
    good.succeeded()
    assert good.state(OPEN_SECONDS) is BreakerState.CLOSED
    bad.sent(OPEN_SECONDS)
    bad.failed(OPEN_SECONDS)
    assert not bad.permits(OPEN_SECONDS + 1.99 * OPEN_SECONDS)
    assert bad.permits(OPEN_SECONDS + 2 * OPEN_SECONDS)


def test_a_trial_that_is_never_heard_of_again_does_not_block_the_next() -> None:
    breaker = opened()
    breaker.sent(OPEN_SECONDS)
    assert breaker.permits(2 * OPEN_SECONDS)


def test_what_was_sent_before_it_opened_opens_it_for_no_longer() -> None:
    """Everything that is open at an engine fails at once; that is one fault."""
    breaker = opened()
    for _ in range(50):
        breaker.failed(0.1)
    assert breaker.permits(OPEN_SECONDS)


def test_it_stays_open_for_a_bounded_time() -> None:
    breaker = opened()
    for _ in range(2000):
        breaker.sent(0.0)
        breaker.failed(0.0)
    assert not breaker.permits(OPEN_SECONDS_MAX * 0.99)
    assert breaker.permits(OPEN_SECONDS_MAX)


def test_another_process_begins_with_a_clean_record() -> None:
    breaker = opened()
    breaker.reset()
    breaker.failed(0.0)
    assert breaker.permits(0.0)


def test_what_is_sent_while_closed_changes_nothing() -> None:
    breaker = Breaker()
    breaker.sent(0.0)
    assert breaker.state(0.0) is BreakerState.CLOSED
