"""The meter of a connector's hooks: counts every call once, and changes nothing of what the hooks do."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvferry.emulator.hooks import Meter


class Connector:
    """Has some hooks."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def begin(self, name: str, *, size: int = 0) -> str:
        self.calls.append((name, size))
        return name * 2

    def results(self) -> tuple[str, ...]:
        return (self.begin("inner"),)

    def fail(self) -> None:
        raise ValueError("on purpose")


def wrapped(observers: dict[str, Any] | None = None) -> tuple[Connector, Meter]:
    connector, meter = Connector(), Meter()
    meter.wrap(connector, "worker", ("begin", "results", "fail", "not_there"), observers or {})
    return connector, meter


def counts(meter: Meter) -> dict[str, float]:
    return {name: cost["count"] for name, cost in meter.to_dict().items()}


def test_arguments_and_results_pass_through() -> None:
    connector, meter = wrapped()
    assert connector.begin("a", size=3) == "aa"
    assert connector.calls == [("a", 3)]
    assert counts(meter) == {"worker.begin": 1}


def test_a_hook_that_calls_another_is_charged_once() -> None:
    connector, meter = wrapped()
    connector.results()
    assert counts(meter) == {"worker.results": 1}


def test_an_error_passes_and_is_counted() -> None:
    connector, meter = wrapped()
    with pytest.raises(ValueError, match="on purpose"):
        connector.fail()
    connector.begin("after")
    assert counts(meter) == {"worker.fail": 1, "worker.begin": 1}


def test_observers_hear_of_arguments_and_result() -> None:
    heard: list[Any] = []
    connector, _ = wrapped({"begin": lambda args, result: heard.append((args, result))})
    connector.begin("a", size=1)
    assert heard == [(("a",), "aa")]


def test_calls_on_other_threads_are_not_the_main_threads_cost() -> None:
    connector, meter = wrapped()
    other = threading.Thread(target=connector.begin, args=("b",))
    other.start()
    other.join()
    assert connector.calls == [("b", 0)]
    assert counts(meter) == {}


def test_times_add_up() -> None:
    connector, meter = wrapped()
    for _ in range(3):
        connector.begin("a")
    cost = meter.costs["worker.begin"]
    assert cost.count == 3
    assert 0 < cost.max_seconds <= cost.seconds
