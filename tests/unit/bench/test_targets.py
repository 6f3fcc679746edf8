"""Every target is met, missed or open as the made-up figures say."""

from __future__ import annotations

import re

import pytest

from kvferry.bench.analysis import Comparison
from kvferry.bench.connectors import BASELINE
from kvferry.bench.plan import Options
from kvferry.bench.targets import Target, targets
from tests.support.bench_results import World, imagined, options

LOADS = ((1, 1024), (1, 16384), (4, 16384), (8, 16384))
FAST = {"ferry-push": 0.008, "vllm-push": 0.13, "vllm-pull": 0.2, BASELINE: 0.0}


def judged(world: World, made: Options | None = None) -> dict[str, Target]:
    made = made or options(cells=LOADS, cell_seconds=8.0)
    return {one.what: one for one in targets(Comparison(imagined(world, made)))}


def test_a_fast_connector_meets_what_it_should() -> None:
    found = judged(World(handover=FAST))
    verdicts = {what: one.verdict for what, one in found.items()}
    assert verdicts["hand-over p50, chunks of 2048 at 1 x 16k"] == "met"
    assert verdicts["hand-over p50, chunks of 2048 at 4 x 16k"] == "met"
    assert verdicts["TTFT p50 at 8 x 16k"] == "met"
    assert verdicts["every cell, TTFT and TPOT p50"] == "met"
    assert verdicts["TPOT p50 at 8 x 16k"] == "met"
    assert verdicts["hooks per request on decode at 1 x 16k"] == "met"
    assert verdicts["idle CPU of kvferry's threads, prefill"] == "met"
    assert verdicts["pages, answers, requests"] == "met"
    assert "vLLM push" in found["TTFT p50 at 8 x 16k"].figure


@pytest.mark.parametrize(
    ("world", "what", "said"),
    [
        (World(), "TTFT p95 at 8 x 16k", "x vLLM pull"),
        (World(), "gap between chunks p95 at 8 x 16k", "1.00 x vLLM push"),
        (World(tpot={"ferry-push": 0.006, BASELINE: 0.0056}), "TPOT p50 at 8 x 16k", "1.071 x"),
        (
            World(hooks={"ferry-push": 0.0006, "vllm-push": 0.008}),
            "hooks per request on prefill at 1 x 16k",
            "0.60 ms; with the idle calls of an answer's steps 0.60 ms (vLLM push 8.00 and 8.00 ms",
        ),
        (
            World(hooks={"ferry-push": 0.0006, "vllm-push": 0.008}, tells_idle_calls=True),
            "hooks per request on decode at 1 x 16k",
            "0.60 ms; with the idle calls of an answer's steps 0.63 ms",
        ),
        (World(idle={"ferry-push": 0.04}), "idle CPU of kvferry's threads, decode", "2.0% of a core"),
        (World(mismatches=1), "pages, answers, requests", "of 26,000 pages wrong"),
        (World(failing="vllm-pull"), "pages, answers, requests", "8 requests failed"),
    ],
)
def test_a_slow_or_wrong_one_misses(world: World, what: str, said: str) -> None:
    found = judged(world)[what]
    assert found.verdict == "missed"
    assert said in found.figure


def test_a_cell_that_is_worse_is_named() -> None:
    slow = {"ferry-push": 0.3, "vllm-push": 0.13, "vllm-pull": 0.11, BASELINE: 0.0}
    found = judged(World(handover=slow))["every cell, TTFT and TPOT p50"]
    assert found.verdict == "missed"
    assert "TTFT at 1 x 1k" in found.figure
    assert "x vLLM push" in found.figure
    assert "TPOT" not in found.figure


def test_the_limit_of_a_hand_over_depends_on_the_chunk() -> None:
    engines = {"preset": "made-up", "step_tokens": 8192}
    found = judged(World(), options(cells=LOADS, cell_seconds=8.0, engines=engines))
    assert "0.55" in found["hand-over p50, chunks of 8192 at 1 x 16k"].limit
    assert found["hand-over p50, chunks of 8192 at 1 x 16k"].verdict == "met"
    other = judged(World(), options(cells=LOADS, cell_seconds=8.0, engines={"step_tokens": 512}))
    assert not [what for what in other if what.startswith("hand-over p50, chunks")]


def test_the_bound_of_a_hand_over_is_a_chunks_share_of_the_moving_three_steps_and_3_ms() -> None:
    """About 43 ms. KV moves for 0.16 s, in eight chunks; a step takes 5.5 ms."""
    late = judged(World(moving=0.16))["hand-over p50 at 1 x 16k"]
    assert late.verdict == "missed"
    total, bound, write = (float(part) for part in re.findall(r"\d+\.\d", late.figure))
    assert total == pytest.approx(43, abs=2)
    assert (write, bound) == (pytest.approx(20.0), pytest.approx(20.0 + 16.5 + 3.0))
    in_time = judged(World(moving=0.24))["hand-over p50 at 1 x 16k"]
    assert in_time.verdict == "met"
    assert judged(World(moving=None))["hand-over p50 at 1 x 16k"].verdict == "not measured"


def test_a_prompt_of_one_chunk_moves_after_its_prefill() -> None:
    engines = {"preset": "made-up", "step_tokens": 32768}
    found = judged(World(moving=0.03), options(cells=LOADS, cell_seconds=8.0, engines=engines))
    assert "30.0 of them for the write" in found["hand-over p50 at 1 x 16k"].figure


def test_what_was_not_measured_is_open() -> None:
    found = judged(World(), options(cells=((2, 1024),), connectors=("ferry-push",), baseline=False))
    open_ones = {what for what, one in found.items() if one.verdict == "not measured"}
    assert "TTFT p50 at 8 x 16k" in open_ones
    assert "every cell, TTFT and TPOT p50" in open_ones
    assert "TPOT p50 at 8 x 16k" in open_ones
    assert "hooks per request on prefill at 1 x 16k" in open_ones
    assert {found[what].figure for what in open_ones} == {""}


FEW = "not judged"


def test_a_tiny_run_is_not_judged_but_for_what_was_wrong_in_it() -> None:
    """Four requests at 1/s and 30 at 8/s in each of two repeats: only medians at 8/s are judged."""
    made = options(cells=((1, 16384), (8, 16384)), cell_seconds=3.75)
    found = judged(World(handover=FAST, hooks={"ferry-push": 0.1}, mismatches=1), made)
    assert found["TTFT p50 at 8 x 16k"].verdict == "met"
    assert found["TPOT p50 at 8 x 16k"].verdict == "met"
    assert found["every cell, TTFT and TPOT p50"] == Target(
        "every cell, TTFT and TPOT p50",
        "not worse than a stock connector beyond the interval",
        "none of 4 comparisons; 4 not judged, such as with 8 requests, at least 12 are needed",
        "met",
    )
    alone = found["hand-over p50, chunks of 2048 at 1 x 16k"]
    assert (alone.verdict, alone.figure[-44:]) == (FEW, "vLLM push; 8 requests, at least 12 are needed"[-44:])
    assert "(" not in alone.figure, "an interval of eight requests"
    for what in ("hand-over p50 at 1 x 16k", "hooks per request on decode at 1 x 16k"):
        assert found[what].verdict == FEW
        assert found[what].figure.endswith("; 8 requests, at least 12 are needed")
    for what in ("TTFT p95 at 8 x 16k", "gap between chunks p95 at 8 x 16k"):
        assert found[what].verdict == FEW
        assert found[what].figure.endswith("; 60 requests, at least 120 are needed")
    assert found["idle CPU of kvferry's threads, decode"].verdict == "met"
    assert found["pages, answers, requests"].verdict == "missed"


def test_one_repeat_judges_nothing_but_what_was_wrong() -> None:
    found = judged(World(handover=FAST), options(cells=LOADS, cell_seconds=30.0, repeats=1))
    assert {one.verdict for what, one in found.items() if what != "pages, answers, requests"} == {FEW}
    assert found["TPOT p50 at 8 x 16k"].figure.endswith(" x; 1 repeat, at least 2 are needed")
    assert found["idle CPU of kvferry's threads, prefill"].figure.endswith(
        "; 1 repeat, at least 2 are needed"
    )
    assert found["every cell, TTFT and TPOT p50"].figure.startswith("none of 0 comparisons; 16 not judged")
    assert found["pages, answers, requests"].verdict == "met"


def test_a_pull_beside_too_few_pushes_is_not_judged() -> None:
    made = options(
        cells=((1, 16384),), cell_seconds=4.0, connectors=("ferry-push", "ferry-pull", "vllm-pull")
    )
    found = judged(World(handover={**FAST, "ferry-pull": 0.15}), made)
    assert found["hooks per pulled request on decode at 1 x 16k"].verdict == FEW
    assert found["pull in every cell, TTFT and TPOT p50"].verdict == FEW


def test_synchronous_posting_has_its_own_rows() -> None:
    made = options(
        cells=((8, 16384),), connectors=("ferry-push", "vllm-push", "vllm-push-sync"), baseline=False
    )
    world = World(handover={**FAST, "vllm-push-sync": 0.02})
    found = judged(world, made)
    assert found["TTFT p50 at 8 x 16k"].verdict == "met"
    assert "synchronous" in found["TTFT p50, synchronous posting at 8 x 16k"].figure


def both_modes(world: World) -> dict[str, Target]:
    connectors = ("ferry-push", "ferry-pull", "vllm-push", "vllm-pull")
    return judged(world, options(cells=LOADS, cell_seconds=8.0, connectors=connectors))


def test_pull_is_held_against_stock_pull_and_against_push() -> None:
    found = both_modes(World(handover={**FAST, "ferry-pull": 0.15}, hooks={"ferry-pull": 0.00035}))
    for what in (
        "pull in every cell, TTFT and TPOT p50",
        "hooks per pulled request on decode at 1 x 16k",
        "hooks per pulled request on both engines at 1 x 16k",
    ):
        assert found[what].verdict == "met", found[what]
    assert found["hooks per pulled request on decode at 1 x 16k"].figure == "0.35 and 0.30 ms"
    assert found["hooks per pulled request on both engines at 1 x 16k"].figure == "0.70 and 0.60 ms"
    # Stock push is no measure for pull, and our push is judged as without pull.
    assert found["pull in every cell, TTFT and TPOT p50"].figure == "none of 8 comparisons"
    assert found["every cell, TTFT and TPOT p50"].figure == "none of 16 comparisons"


def test_a_slower_or_costlier_pull_misses() -> None:
    found = both_modes(World(handover={**FAST, "ferry-pull": 0.4}, hooks={"ferry-pull": 0.0004}))
    slow = found["pull in every cell, TTFT and TPOT p50"]
    assert slow.verdict == "missed"
    assert "TTFT at 1 x 16k" in slow.figure
    assert found["hooks per pulled request on decode at 1 x 16k"].verdict == "missed"
    assert found["hooks per pulled request on both engines at 1 x 16k"].verdict == "missed"


def test_pull_alone_has_its_own_targets_and_no_others() -> None:
    made = options(cells=LOADS, connectors=("ferry-pull", "vllm-pull"), baseline=False)
    found = judged(World(handover={**FAST, "ferry-pull": 0.15}), made)
    assert "TTFT p50 at 8 x 16k" not in found
    assert found["pull in every cell, TTFT and TPOT p50"].verdict == "met"
    assert found["hooks per pulled request on decode at 1 x 16k"].verdict == "not measured"
    assert found["pages, answers, requests"].verdict == "met"


def test_a_comparison_without_us_has_no_targets() -> None:
    assert judged(World(), options(connectors=("vllm-push",), baseline=False)) == {}
