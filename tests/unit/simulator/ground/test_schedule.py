from __future__ import annotations

from kvferry.simulator.ground.clock import ProcessClock, TrueClock
from kvferry.simulator.ground.schedule import Schedule


def run(schedule: Schedule) -> None:
    while schedule.next_due() is not None:
        schedule.pop()()


def test_actions_come_in_order_of_time_and_then_of_planning():
    schedule = Schedule()
    seen: list[str] = []
    for at, name in ((2.0, "c"), (1.0, "a"), (2.0, "d"), (1.5, "b")):
        schedule.at(at, lambda name=name: seen.append(name))
    assert schedule.next_due() == 1.0
    run(schedule)
    assert seen == ["a", "b", "c", "d"]


def test_a_cancelled_action_does_not_happen():
    schedule = Schedule()
    seen: list[str] = []
    schedule.at(1.0, lambda: seen.append("cancelled")).cancel()
    schedule.at(2.0, lambda: seen.append("kept"))
    assert schedule.next_due() == 2.0
    run(schedule)
    assert seen == ["kept"]


def test_an_action_may_plan_another_for_the_same_time():
    schedule = Schedule()
    seen: list[str] = []

    def first() -> None:
        seen.append("first")
        schedule.at(1.0, lambda: seen.append("second"))

    schedule.at(1.0, first)
    run(schedule)
    assert seen == ["first", "second"]


def test_a_process_clock_runs_at_its_own_rate_from_its_own_start():
    true = TrueClock()
    clock = ProcessClock(true, offset_seconds=1e6, rate=1.001)
    true.now = 100.0
    assert clock() == 1e6 + 100.1


def test_a_deadline_of_a_process_is_not_before_its_clock_shows_it():
    """One microsecond early and a timer would not have fired: the agent would be stepped for nothing."""
    true = TrueClock()
    for offset, rate in ((0.0, 1.0), (999_999.7, 0.999), (123_456.789, 1.001)):
        clock = ProcessClock(true, offset, rate)
        for reading in (offset + 0.1, offset + 1 / 3, offset + 12345.678):
            true.now = clock.true_at(reading)
            assert reading <= clock() < reading + 1e-5
