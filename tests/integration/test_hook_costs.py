"""The harness behind `kvferry bench hooks`: what it drives, what it charges, and what it makes of limits."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from kvferry.connector import hook_costs, hook_engine
from kvferry.connector.connector import FerryConnector
from kvferry.connector.hook_costs import BenchError, Options, Report, measure
from kvferry.connector.hook_engine import NO_COST, Cost, Meter, engine_pair
from kvferry.connector.turn_costs import turn_costs
from kvferry.host.worker import FerryWorker
from tests.support.memory_agents import agents_in_memory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvferry.agent.agent import Agent
    from kvferry.host.orders import StepOrders

SMALL = Options(requests=3, blocks=8, repeats=1, sizes=(4, 12))
IDLE_STEPS = 2
WORKER_HOOKS = (
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_save",
    "build_connector_worker_meta",
)
SCHEDULER_HOOKS = ("build_connector_meta", "update_connector_output", "has_pending_push_work")
REQUEST_HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "request_finished_all_groups",
)


@pytest.fixture(scope="module")
def short() -> Iterator[pytest.MonkeyPatch]:
    """No more steps than a test needs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hook_costs, "WARM_UPS", 1)
        patch.setattr(hook_costs, "IDLE_STEPS_PER_REPEAT", IDLE_STEPS)
        yield patch


@pytest.fixture(scope="module")
def report(short: pytest.MonkeyPatch) -> Report:
    """One repeat."""
    return measure(SMALL, make_agent=agents_in_memory())


def count_of(report: Report, side: str, name: str) -> int:
    (count,) = [
        figure.count
        for figure in (*report.hooks, *report.figures)
        if (figure.side, figure.name) == (side, name)
    ]
    return count


def test_a_repeat_calls_every_hook_for_every_request_and_step(report: Report) -> None:
    requests = 1 + 1 + len(SMALL.sizes) + SMALL.requests + hook_costs.ADVANCING
    for side in ("prefill", "decode"):
        assert [count_of(report, side, name) for name in REQUEST_HOOKS] == [requests] * len(REQUEST_HOOKS)
        steps = {count_of(report, side, name) for name in (*WORKER_HOOKS, *SCHEDULER_HOOKS)}
        assert len(steps) == 1
        assert steps.pop() > count_of(report, side, "step, idle") == IDLE_STEPS


def test_what_is_promised_has_a_figure_with_its_limit(report: Report) -> None:
    limits = {(figure.side, figure.name): figure.limit for figure in report.figures}
    for side in ("prefill", "decode"):
        assert limits[side, "step, idle"] == 200
        for together in (1, SMALL.requests):
            assert limits[side, f"request, whole life, {together} at once"] == 300
        assert limits[side, "request, 12 blocks"] == 500
    assert limits["prefill", "step, 16 prefills advance by a chunk"] == 200
    assert set(report.ratios) == {
        "prefill, request, whole life",
        "prefill, request, end of prefill",
        "decode, request, whole life",
    }
    assert set(report.pull_ratios) == {"prefill", "decode"}
    assert report.repeats == 1


def test_a_turns_digests_are_told_by_side_and_size_and_have_no_limit(report: Report) -> None:
    told = {(figure.side, figure.name): figure for figure in report.turns}
    assert set(told) == {
        (side, f"{what}, {blocks} blocks")
        for side, what in (
            ("decode", "turn kept"),
            ("decode", "of it digests"),
            ("prefill", "turn gone on with"),
        )
        for blocks in SMALL.sizes
    }
    assert {(figure.count, figure.limit) for figure in told.values()} == {(1, None)}
    assert not {figure.name for figure in report.figures} & {name for _, name in told}


def test_a_turn_that_is_measured_does_what_an_engine_does() -> None:
    """The digests of both sides agree: `turn_costs` asserts it; and pins come back, or room would end."""
    costs = turn_costs((4, 40), repeats=3)
    assert {name: len(times) for (_, name), times in costs.items()} == {
        f"{what}, {blocks} blocks": 3
        for what in ("turn kept", "of it digests", "turn gone on with")
        for blocks in (4, 40)
    }


@pytest.mark.usefixtures("short")
def test_a_pulled_request_is_one_that_the_decode_engine_reads() -> None:
    """Its cost is compared with a pushed one's; a bench that pushes both would never find a difference."""
    agents: list[Agent] = []
    make = agents_in_memory()

    def kept(*arguments: Any) -> Agent:
        agents.append(make(*arguments))
        return agents[-1]

    repeats = 1 + hook_costs.WARM_UPS
    measure(SMALL, make_agent=kept)
    pulled = SMALL.blocks * hook_engine.BLOCK_TOKENS * hook_engine.LAYERS * hook_engine.CONTENT_BYTES
    read = [agent.snapshot()["bytes_read"] for agent in agents]
    assert read == [0, repeats * pulled]


def test_an_idle_step_is_told_hook_by_hook_and_a_request_by_its_size(report: Report) -> None:
    for side in ("prefill", "decode"):
        idle = {figure.name: figure for figure in report.idle_hooks if figure.side == side}
        assert set(idle) >= {*WORKER_HOOKS, *SCHEDULER_HOOKS}
        assert not set(idle) & set(REQUEST_HOOKS)
        assert {figure.count for figure in idle.values()} == {IDLE_STEPS}
        names = [figure.name for figure in report.figures if figure.side == side]
        assert [name for name in names if name.endswith("blocks")] == [
            "request, 4 blocks",
            "request, 12 blocks",
        ]
        assert count_of(report, side, "request, 4 blocks") == 1


@pytest.mark.usefixtures("short")
def test_hooks_of_requests_before_are_not_an_idle_steps() -> None:
    report = measure(Options(requests=2, blocks=8, repeats=2, sizes=(4,)), make_agent=agents_in_memory())
    idle = [figure for figure in report.idle_hooks if figure.side == "decode"]
    assert {figure.count for figure in idle} == {2 * IDLE_STEPS}
    assert not {figure.name for figure in idle} & set(REQUEST_HOOKS)


def test_a_larger_request_may_cost_more_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook_costs, "SIZED_BLOCKS", 8)
    monkeypatch.setattr(hook_costs, "WARM_UPS", 1)
    report = measure(SMALL, make_agent=agents_in_memory())
    limits = {figure.name: figure.limit for figure in report.figures if figure.side == "decode"}
    assert (limits["request, 4 blocks"], limits["request, 12 blocks"]) == (500, 750)


@pytest.mark.usefixtures("short")
def test_each_limit_that_does_not_hold_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("STEP_MICROSECONDS_MAX", "REQUEST_MICROSECONDS_MAX", "SIZED_MICROSECONDS_MAX", "RATIO_MAX")
    for constant in names:
        monkeypatch.setattr(hook_costs, constant, float("-inf"))
    problems = "\n".join(measure(SMALL, make_agent=agents_in_memory()).problems)
    for side in ("prefill", "decode"):
        assert f"{side}, step, idle: " in problems
        assert f"{side}, request, whole life, 1 at once: " in problems
        assert f"{side}, request, whole life, 3 at once: " in problems
        assert f"{side}, request, 12 blocks: " in problems
        assert f"{side}, request, whole life: 3 at once cost " in problems
        assert f"{side}: a pulled request costs " in problems
    assert "prefill, step, 16 prefills advance by a chunk: " in problems
    assert "prefill, request, end of prefill: 3 at once cost " in problems


@pytest.mark.usefixtures("short")
def test_a_hook_that_dawdles_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: a hook of every step takes at least 1 ms, five times what a step may cost."""
    monkeypatch.setattr(FerryConnector, "start_load_kv", lambda self, context: time.sleep(0.001))
    problems = "\n".join(measure(SMALL, make_agent=agents_in_memory()).problems)
    assert "prefill, step, idle: " in problems
    assert "decode, step, idle: " in problems


@pytest.mark.usefixtures("short")
def test_no_repeat_begins_once_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook_costs, "MEASURE_SECONDS_MAX", -1.0)
    said: list[str] = []
    report = measure(Options(requests=2, blocks=4, repeats=1000), said.append, agents_in_memory())
    assert report.repeats == 1
    assert said[-1] == "repeat 1 of 1000"


@pytest.mark.usefixtures("short")
def test_a_transfer_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: only a prefill's first chunk is published, so that the rest never comes."""
    save = FerryWorker.save

    def save_first(worker: FerryWorker, orders: StepOrders, *, succeeded: bool) -> None:
        if orders.senders:
            save(worker, orders, succeeded=succeeded)

    monkeypatch.setattr(FerryWorker, "save", save_first)
    with pytest.raises(BenchError, match="decode engine has not received"):
        measure(SMALL, make_agent=agents_in_memory())


@pytest.mark.usefixtures("short")
def test_a_transfer_that_does_not_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook_costs, "TRANSFER_SECONDS_MAX", -1.0)
    with pytest.raises(BenchError, match="1 of 1 transfers did not arrive"):
        measure(SMALL, make_agent=agents_in_memory())


def test_blocks_are_scattered() -> None:
    """Neighbours would be one span, and the hooks would look cheaper than they are."""
    with engine_pair(1000, agents_in_memory()) as (engine, _):
        ids = engine.allocate(engine.request("local", 1, {}), 100, announced=False)
        assert len(set(ids)) == 100
        assert sum(second == first + 1 for first, second in pairwise(ids)) < 5


def test_a_meter_charges_a_hook_by_name_until_it_is_read() -> None:
    meter = Meter()
    assert meter.call(sum, [1, 2], name="first") == 3
    meter.call(len, "ab")
    first, second = meter.hooks["first"][0], meter.hooks["len"][0]
    assert first.wall > 0
    assert meter.take() == first + second
    assert meter.take() == NO_COST
    assert (Cost(7, 9) - Cost(1, 3)) // 2 == Cost(3, 3)
