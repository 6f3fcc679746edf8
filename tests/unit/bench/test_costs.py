"""What hooks cost: for a request, and in a step in which no hook has anything to do."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.bench.costs import Costs
from kvferry.bench.grid import Cell
from kvferry.bench.records import Load, Record
from kvferry.bench.results import CellRun, EngineCost, HookCost

CELL = Cell(1, 16384)
MICROSECOND = 1e-6


def hook(
    name: str, side: str, count: int, seconds: float, idle: int = 0, idle_seconds: float = 0.0
) -> HookCost:
    return HookCost(
        side=side,
        hook=name,
        count=count,
        seconds=seconds,
        cpu_seconds=seconds / 2,
        max_seconds=seconds,
        idle_count=idle,
        idle_seconds=idle_seconds,
        idle_cpu_seconds=idle_seconds / 2,
    )


def record(name: str) -> Record:
    return Record(request=name, due=0.0, sent=0.0, end=1.0)


def costs(*hooks: HookCost, repeats: int = 1) -> Costs:
    """Two answered requests per repeat."""
    load = Load(started_ns=0, seconds=1.0, records=(record("a"), record("b")))
    runs: list[Any] = [
        CellRun(
            connector="ferry-push",
            repeat=repeat,
            cell=(CELL.rate, CELL.input_tokens),
            load=load,
            phases=(),
            engines={"decode": EngineCost(cpu_seconds=1.0, hooks=hooks, parts={"main": 0.3, "http": 0.1})},
        )
        for repeat in range(repeats)
    ]
    return Costs(lambda _, __: runs, [])


BUILD = hook("build_connector_meta", "scheduler", 100, 700 * MICROSECOND, 98, 98 * MICROSECOND)
RESULTS = hook("get_transfer_results", "worker", 100, 300 * MICROSECOND, 50, 100 * MICROSECOND)
PENDING = hook("has_pending_push_work", "scheduler", 300, 150 * MICROSECOND, 300, 150 * MICROSECOND)
ALLOC = hook("update_state_after_alloc", "scheduler", 2, 400 * MICROSECOND)


@pytest.mark.parametrize("repeats", [1, 3])
def test_a_requests_cost_is_that_of_the_calls_that_had_to_do_with_one(repeats: int) -> None:
    found = costs(BUILD, RESULTS, PENDING, ALLOC, repeats=repeats)
    where = ("ferry-push", CELL, "decode")
    assert found.hooks_per_request(*where) == pytest.approx(1550 / 2 * MICROSECOND)
    assert found.busy_hooks_per_request(*where) == pytest.approx((602 + 200 + 400) / 2 * MICROSECOND)
    assert found.busy_hooks_per_request(*where, cpu=True) == pytest.approx(
        (602 + 200 + 400) / 4 * MICROSECOND
    )


@pytest.mark.parametrize("repeats", [1, 3])
def test_an_idle_step_calls_each_hook_as_often_as_a_step_does(repeats: int) -> None:
    """1 us to build, 2 us for results although half of those calls were busy, three questions of 0.5 us."""
    found = costs(BUILD, RESULTS, PENDING, ALLOC, repeats=repeats)
    assert found.hooks_per_idle_step("ferry-push", CELL, "decode") == pytest.approx(4.5 * MICROSECOND)


@pytest.mark.parametrize(
    "hooks", [(), (RESULTS,), (ALLOC, hook("build_connector_meta", "scheduler", 9, 1.0))]
)
def test_engines_that_do_not_tell_idle_calls_have_no_idle_step(hooks: tuple[HookCost, ...]) -> None:
    assert costs(*hooks).hooks_per_idle_step("ferry-push", CELL, "decode") is None


def test_without_hooks_or_on_another_engine_nothing_is_known() -> None:
    assert costs().busy_hooks_per_request("ferry-push", CELL, "decode") is None
    assert costs(BUILD).busy_hooks_per_request("ferry-push", CELL, "prefill") is None


def test_cpu_time_by_threads_is_per_answered_request_over_all_repeats() -> None:
    found = costs(repeats=3).parts_per_request("ferry-push", CELL, "decode")
    assert found == pytest.approx({"main": 0.15, "http": 0.05})
    assert costs().parts_per_request("ferry-push", CELL, "prefill") == {}
