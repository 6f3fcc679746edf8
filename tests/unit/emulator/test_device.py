"""The device's timeline, on a clock that only moves when somebody sleeps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvferry.emulator.device import MARGIN_SECONDS, Device, DeviceError
from tests.support.fake_clock import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def device(clock: FakeClock) -> Iterator[Device]:
    device = Device(clock)
    yield device
    clock.advance(1e6)
    device.close()


def recorded(log: list[tuple[str, float]], name: str, clock: FakeClock) -> Callable[[], None]:
    return lambda: log.append((name, clock.now()))


def test_an_idle_device_has_passed_all_of_nothing(device: Device) -> None:
    assert device.last.ready()
    assert device.last.wait() == 100.0


def test_a_mark_is_reached_at_its_end_and_never_before(device: Device, clock: FakeClock) -> None:
    mark = device.submit(2.0)
    assert (mark.start, mark.end) == (100.0, 102.0)
    clock.advance(1.999)
    assert not mark.ready()
    clock.advance(0.001)
    assert mark.ready()


def test_waiting_sleeps_exactly_until_the_end(device: Device, clock: FakeClock) -> None:
    assert device.submit(2.0).wait() == pytest.approx(102.0)
    assert clock.now() == pytest.approx(102.0)


def test_submissions_follow_each_other(device: Device) -> None:
    marks = [device.submit(1.0) for _ in range(3)]
    assert [(mark.start, mark.end) for mark in marks] == [(100.0, 101.0), (101.0, 102.0), (102.0, 103.0)]
    assert device.last is marks[-1]


def test_a_submission_to_an_idle_device_starts_at_once(device: Device, clock: FakeClock) -> None:
    device.submit(1.0)
    clock.advance(5.0)
    assert device.submit(1.0).start == 105.0


def test_a_work_is_done_by_the_end_and_not_long_before(device: Device, clock: FakeClock) -> None:
    log: list[tuple[str, float]] = []
    mark = device.submit(1.0, at_end=recorded(log, "end", clock), units=8)
    clock.advance(1.0 - 2 * MARGIN_SECONDS)
    assert not log
    clock.advance(2 * MARGIN_SECONDS)
    mark.wait()
    assert log == [("end", 101.0)]


def test_a_mark_waits_for_late_memory_work_and_for_all_before_it(device: Device, clock: FakeClock) -> None:
    finish = threading.Event()
    first = device.submit(1.0, at_end=finish.wait, units=1)
    second = device.submit(1.0)
    clock.advance(10.0)
    assert not first.ready()
    assert not second.ready()
    finish.set()
    first.wait()
    assert second.ready()


def test_works_keep_their_order(device: Device, clock: FakeClock) -> None:
    log: list[tuple[str, float]] = []
    device.submit(1.0, at_start=recorded(log, "1 start", clock), at_end=recorded(log, "1 end", clock))
    last = device.submit(1.0, at_start=recorded(log, "2 start", clock), at_end=recorded(log, "2 end", clock))
    clock.advance(2.0)
    last.wait()
    assert [name for name, _ in log] == ["1 start", "1 end", "2 start", "2 end"]


def test_work_at_the_start_waits_for_the_step_before(device: Device, clock: FakeClock) -> None:
    log: list[tuple[str, float]] = []
    device.submit(1.0)
    second = device.submit(1.0, at_start=recorded(log, "start", clock))
    clock.advance(0.9)
    assert not log
    clock.advance(1.1)
    second.wait()
    assert [name for name, _ in log] == ["start"]


def test_a_failed_work_is_raised_to_whoever_waits(device: Device, clock: FakeClock) -> None:
    def fail() -> None:
        raise ValueError("no such page")

    mark = device.submit(1.0, at_end=fail)
    clock.advance(1.0)
    with pytest.raises(DeviceError, match="no such page"):
        mark.wait()


def test_closing_drops_what_has_not_begun_and_tells_whoever_waits(clock: FakeClock) -> None:
    log: list[tuple[str, float]] = []
    device = Device(clock)
    mark = device.submit(1.0, at_end=recorded(log, "end", clock))
    closing = threading.Thread(target=device.close)
    closing.start()
    with pytest.raises(DeviceError, match="closed"):
        mark.wait()
    clock.advance(1.0)
    closing.join()
    assert not log
    device.close()


def test_its_thread_can_be_told_from_the_engines_others(device: Device) -> None:
    names: list[str] = []

    def work() -> None:
        task = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
        names.append(task.read_text(encoding="ascii").strip())

    device.submit(0.0, at_start=work).wait()
    assert names == ["kvferry-device"]
