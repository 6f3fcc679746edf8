"""A moving mean of waits."""

from __future__ import annotations

import pytest

from kvferry.router.engines.pace import FRESH_SECONDS, Pace


def test_nothing_is_known_before_the_first() -> None:
    assert Pace().recent(0.0) is None


def test_the_first_counts_whole_and_later_ones_in_part() -> None:
    pace = Pace()
    pace.note(1.0, 10.0)
    assert pace.recent(10.0) == 1.0
    pace.note(2.0, 11.0)
    assert pace.recent(11.0) == pytest.approx(1.25)


def test_it_follows_what_changes() -> None:
    pace = Pace()
    for second in range(30):
        pace.note(0.1 if second < 5 else 5.0, float(second))
    assert pace.recent(29.0) == pytest.approx(5.0, rel=0.01)


def test_the_legs_that_were_met_have_a_mean_too() -> None:
    pace = Pace()
    pace.note(1.0, 0.0, legs=8)
    pace.note(1.0, 0.0, legs=12)
    assert pace.legs == pytest.approx(9.0)
    pace.note(1.0, FRESH_SECONDS + 1.0, legs=2)
    assert pace.legs == 2.0


def test_what_is_old_is_forgotten_and_does_not_weigh_on_what_comes() -> None:
    pace = Pace()
    pace.note(9.0, 0.0)
    assert pace.recent(FRESH_SECONDS) == 9.0
    late = FRESH_SECONDS + 0.001
    assert pace.recent(late) is None
    pace.note(1.0, late)
    assert pace.recent(late) == 1.0


def test_a_restart_is_a_new_beginning() -> None:
    pace = Pace()
    pace.note(9.0, 0.0)
    pace.forget()
    assert pace.recent(0.0) is None


def test_a_wait_that_has_not_ended_counts_when_it_is_longer_than_the_mean() -> None:
    pace = Pace()
    with pace.waiting(0.0):
        assert pace.recent(5.0) is None
    pace.note(1.0, 0.0)
    with pace.waiting(1.0), pace.waiting(2.0):
        assert pace.recent(1.5) == 1.0
        assert pace.recent(5.0) == 4.0
    assert pace.recent(5.0) == 1.0
    with pytest.raises(ZeroDivisionError), pace.waiting(0.0):
        raise ZeroDivisionError
    assert pace.recent(50.0) == 1.0
