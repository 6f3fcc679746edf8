"""Figures of a comparison against what was made up for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.bench.analysis import GAP, HANDOVER, Comparison, mean_phases
from kvferry.bench.connectors import BASELINE
from kvferry.bench.grid import Cell
from kvferry.bench.phases import Phases
from kvferry.bench.results import Results
from tests.support.bench_results import NAMES, World, imagined, options

LONG, BUSY, SHORT = Cell(1, 16384), Cell(8, 16384), Cell(1, 1024)


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return Comparison(imagined())


def test_what_has_run_is_known_without_the_baseline(comparison: Comparison) -> None:
    assert comparison.connectors == list(NAMES)
    assert comparison.cells == [SHORT, LONG, BUSY]
    assert comparison.ours() == ["ferry-push"]
    assert comparison.stock(LONG) == ["vllm-push", "vllm-pull"]
    assert comparison.stock(LONG, synchronous=True) == []


def test_synchronous_posting_stands_apart() -> None:
    made = options(connectors=("ferry-push", "vllm-push", "vllm-push-sync"), baseline=False)
    world = World(handover={"ferry-push": 0.03, "vllm-push": 0.13, "vllm-push-sync": 0.06})
    view = Comparison(imagined(world, made))
    assert view.stock(BUSY) == ["vllm-push"]
    assert view.stock(BUSY, synchronous=True) == ["vllm-push-sync"]
    usual = view.against_better("ferry-push", BUSY, HANDOVER, 0.5)
    synchronous = view.against_better("ferry-push", BUSY, HANDOVER, 0.5, synchronous=True)
    assert usual is not None
    assert synchronous is not None
    assert usual.ratio.figure < synchronous.ratio.figure < 1


def test_a_quantile_has_its_interval_around_it(comparison: Comparison) -> None:
    found = comparison.figure("ferry-push", BUSY, "ttft", 0.5)
    assert found is not None
    assert 0.15 < found.low < found.figure < found.high < 0.4


def test_the_better_stock_connector_is_chosen_per_metric(comparison: Comparison) -> None:
    ttft = comparison.against_better("ferry-push", BUSY, "ttft", 0.5)
    tpot = comparison.against_better("ferry-push", BUSY, "tpot", 0.5)
    assert ttft is not None
    assert tpot is not None
    assert (ttft.connector, tpot.connector) == ("vllm-pull", "vllm-push")
    assert 0.6 < ttft.ratio.low <= ttft.ratio.figure <= ttft.ratio.high < 0.9
    assert tpot.ratio.figure == pytest.approx(1.0, abs=0.001)


def test_hand_overs_are_those_that_engines_noted(comparison: Comparison) -> None:
    """A fifth and up to nine tenths more of 30 ms, and 12 ms for the wait and the first step."""
    found = comparison.figure("ferry-push", LONG, HANDOVER, 0.5)
    assert found is not None
    assert 0.0396 <= found.figure <= 0.0468


def test_gaps_are_pooled_and_have_no_interval(comparison: Comparison) -> None:
    found = comparison.figure("vllm-pull", BUSY, GAP, 0.95)
    assert found is not None
    assert found.low == found.figure == found.high
    assert found.figure == pytest.approx(0.0066 * 1.018, rel=0.01)
    ratio = comparison.against("ferry-push", "vllm-pull", BUSY, GAP, 0.95)
    assert ratio is not None
    assert ratio.figure == pytest.approx(5.7 / 6.6, rel=0.01)


def test_what_was_not_run_has_no_figure(comparison: Comparison) -> None:
    nowhere = Cell(3, 100)
    assert comparison.figure("ferry-push", nowhere, "ttft", 0.5) is None
    assert comparison.figure("ferry-push", nowhere, GAP, 0.5) is None
    assert comparison.against("ferry-push", "vllm-push", nowhere, "ttft", 0.5) is None
    assert comparison.against("ferry-push", BASELINE, LONG, GAP, 0.5) is None
    assert comparison.against_better("ferry-push", nowhere, "ttft", 0.5) is None
    assert comparison.costs.hooks_per_request("ferry-push", nowhere, "prefill") is None
    assert comparison.costs.steps("ferry-push", nowhere, "prefill") is None
    assert comparison.costs.cpu_share("ferry-push", nowhere, "prefill") is None
    assert comparison.costs.idle_share("vllm-pull-sync", "prefill") is None


def test_only_requests_that_both_answered_are_compared() -> None:
    view = Comparison(imagined(World(failing="vllm-push"), options(cells=((1, 16384),))))
    assert len(view.named_samples("vllm-push", LONG, "ttft")[0]) == 7
    assert len(view.named_samples("ferry-push", LONG, "ttft")[0]) == 8
    compared = view.against("ferry-push", "vllm-push", LONG, HANDOVER, 0.5)
    assert compared is not None
    # The requests are the same, so their own spread is in neither interval nor ratio.
    assert compared.high - compared.low < 0.02


def test_phases_are_means_that_add_up(comparison: Comparison) -> None:
    phases = comparison.phases("vllm-push", LONG)
    assert phases["prefill"] == pytest.approx(0.11)
    samples = [
        value for named in comparison.named_samples("vllm-push", LONG, "ttft") for value in named.values()
    ]
    assert sum(phases.values()) == pytest.approx(sum(samples) / len(samples), abs=1e-4)


def test_a_pull_reads_whatever_its_rows_call_it(comparison: Comparison) -> None:
    """These rows say `write` under every connector, as those of older runs do."""
    moved = {name: set(comparison.phases(name, LONG)) & {"read", "write"} for name in NAMES}
    assert moved == {"ferry-push": {"write"}, "vllm-push": {"write"}, "vllm-pull": {"read"}}


def test_a_phase_that_only_some_requests_have_counts_as_nothing_for_the_others() -> None:
    rows = [
        Phases(request="a", seconds={"prefill": 0.2, "wait": 0.1}),
        Phases(request="b", seconds={"prefill": 0.4}),
    ]
    assert mean_phases(rows) == pytest.approx({"prefill": 0.3, "wait": 0.05})
    assert mean_phases([]) == {}


def test_costs_are_per_request_and_per_second(comparison: Comparison) -> None:
    assert comparison.costs.hooks_per_request("vllm-push", LONG, "prefill") == pytest.approx(0.008)
    assert comparison.costs.hooks_per_request("vllm-push", LONG, "prefill", cpu=True) == pytest.approx(0.004)
    (hook,) = comparison.costs.hook_costs("vllm-push", LONG, "prefill")
    assert (hook.count, hook.seconds) == (64 * 16, pytest.approx(0.128))
    assert comparison.costs.idle_share("vllm-push", "decode") == pytest.approx(1.0)
    assert comparison.costs.idle_share("ferry-push", "decode") == pytest.approx(0.01)
    assert comparison.costs.idle_thread_share("ferry-push", "decode") == pytest.approx(0.005)
    assert comparison.costs.idle_thread_share(BASELINE, "prefill") is None
    assert comparison.costs.idle_share(BASELINE, "prefill") is None
    seconds = sum(run.load.seconds for run in comparison.runs_of("ferry-push", LONG))
    assert comparison.costs.cpu_share("ferry-push", LONG, "decode") == pytest.approx(3.0 / seconds)
    steps = comparison.costs.steps("ferry-push", LONG, "decode")
    assert steps is not None
    assert steps.p95 == pytest.approx(0.0007)


def test_the_hidden_share_is_counted_in_bytes_and_only_ours_is(comparison: Comparison) -> None:
    assert comparison.costs.hidden_share("ferry-push", LONG) == pytest.approx(0.9)
    assert comparison.costs.hidden_share("vllm-push", LONG) is None
    counted = comparison.costs.counted("ferry-push", LONG, "prefill")
    assert counted["kvferry_transfer_bytes_total"] == pytest.approx(2e9)
    assert comparison.costs.counted("vllm-push", LONG, "prefill") == {}


def test_the_connector_with_the_fewest_requests_decides_whether_a_cell_is_judged() -> None:
    view = Comparison(imagined(World(failing="vllm-push"), options(cells=((1, 16384),), cell_seconds=6.0)))
    assert view.shortage(("ferry-push", "vllm-pull"), LONG, "ttft", 0.5) is None
    both = view.shortage(("ferry-push", "vllm-push"), LONG, HANDOVER, 0.5)
    assert both == view.shortage(("vllm-push",), LONG, GAP, 0.5) == "10 requests, at least 12 are needed"
    assert view.shortage(("ferry-push",), Cell(3, 100), "ttft", 0.5) == "0 requests, at least 12 are needed"


def test_what_is_wrong_is_counted() -> None:
    made = options(cells=((1, 16384),))
    view = Comparison(imagined(World(mismatches=3, failing="vllm-pull", answers={"vllm-push": 100}), made))
    assert view.checks.mismatches() == 6
    assert view.checks.pages() == 8 * 1000
    assert len(view.checks.failures()) == 2
    # Every request of both repeats has another answer under vllm-push.
    assert view.checks.different_answers() == 16


def test_the_baselines_answers_are_not_compared() -> None:
    view = Comparison(imagined(World(answers={BASELINE: 7}), options(cells=((1, 16384),))))
    assert view.checks.different_answers() == 0


def test_nothing_measured_is_an_empty_comparison() -> None:
    view = Comparison(Results(Path("nowhere"), options(), ()))
    assert (view.connectors, view.cells, view.checks.failures(), view.checks.mismatches()) == ([], [], [], 0)
