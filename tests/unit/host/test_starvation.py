"""When an engine that is stuck gives something up."""

from __future__ import annotations

import pytest

from kvferry.host.starvation import Starvation


def test_only_an_engine_that_stays_stuck_gives_up_and_once_per_limit() -> None:
    starvation = Starvation(10.0)
    due = [(second, starvation.is_due(float(second), stuck=True)) for second in range(25)]
    assert [second for second, is_due in due if is_due] == [10, 20]


@pytest.mark.parametrize("free_at", [1, 9])
def test_one_step_of_work_starts_the_wait_anew(free_at: int) -> None:
    starvation = Starvation(10.0)
    found = [second for second in range(25) if starvation.is_due(float(second), stuck=second != free_at)]
    assert found[0] == free_at + 11
