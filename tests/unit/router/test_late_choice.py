"""What a late choice is worth: a slow mean of gains."""

from __future__ import annotations

import pytest

from kvferry.router.engines.late_choice import LateChoice
from kvferry.router.engines.pace import FRESH_SECONDS


def test_nothing_is_known_before_the_first_and_after_a_while() -> None:
    gains = LateChoice()
    assert gains.worth(0.0) is None
    gains.note(0.5, 0.0)
    assert gains.worth(FRESH_SECONDS) == 0.5
    assert gains.worth(FRESH_SECONDS + 0.001) is None
    gains.note(0.1, FRESH_SECONDS + 1.0)
    assert gains.worth(FRESH_SECONDS + 1.0) == pytest.approx(0.1)


def test_one_great_gain_among_many_of_nothing_changes_little() -> None:
    gains = LateChoice()
    for number in range(100):
        gains.note(1.0 if number == 99 else 0.0, 0.0)
    assert gains.worth(0.0) == pytest.approx(0.03)


def test_the_first_ones_weigh_the_same() -> None:
    """A great gain while nothing is known yet is not remembered for long."""
    gains = LateChoice()
    for number in range(10):
        gains.note(0.0 if number else 1.0, 0.0)
    assert gains.worth(0.0) == pytest.approx(0.1)


def test_many_gains_are_what_it_comes_to() -> None:
    gains = LateChoice()
    for number in range(200):
        gains.note(0.0 if number < 50 else 1.0, 0.0)
    assert (gains.worth(0.0) or 0.0) > 0.95
