"""Each judge of a soak is content with a good round, and not with one that breaks its promise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvferry.cli import soak_judge
from kvferry.cli.soak_client import Kind
from kvferry.cli.soak_judge import (
    MEBIBYTE,
    MEMORY_ALLOWANCE_BYTES,
    MEMORY_ROUNDS_MIN,
    Bounds,
    RoundResult,
    figure,
    memory_growth,
    memory_problems,
    round_line,
    round_problems,
    summary,
)
from kvferry.cli.soak_load import Outcome
from kvferry.cli.soak_plan import Fault, RoundPlan, Stage, Target
from kvferry.protocol.limits import Limits

BOUNDS = Bounds(
    limits=Limits(),
    retry_bound_seconds=30.0,
    decode_recovery_seconds=30.0,
    health_seconds=4.0,
    probe_seconds=30.0,
    stop_seconds=25.0,
    compute_seconds=60.0,
)
RECOVERED_AT = 100.0


def outcome(kind: Kind = Kind.RIGHT, *, began: float = 50.0, seconds: float = 2.0) -> Outcome:
    return Outcome(what="load: 7 tokens", kind=kind, began=began, seconds=seconds, detail="as it was")


AFTER = outcome(began=RECOVERED_AT + 1)
GOOD = RoundResult(
    plan=RoundPlan(number=3, stage=Stage.HALF, target=Target.DECODE, fault=Fault.KILL, seconds=1.0),
    server="decode-0",
    outcomes=(outcome(), outcome(Kind.FAILED), outcome(Kind.LEFT), AFTER),
    away_seconds=20.0,
    pushed_again_seconds=3.0,
    recovered_at=RECOVERED_AT,
    settled_seconds=0.5,
    memory_bytes={("prefill-0", 1): 900 * MEBIBYTE, ("reference", 2): 800 * MEBIBYTE},
)
STRUCK_P = replace(GOOD.plan, target=Target.PREFILL)


def with_outcomes(*more: Outcome, result: RoundResult = GOOD) -> RoundResult:
    return replace(result, outcomes=(*result.outcomes, *more))


def test_a_good_round_has_no_problem() -> None:
    assert round_problems(GOOD, BOUNDS) == []
    no_failure = replace(GOOD, plan=STRUCK_P, outcomes=(outcome(), outcome(Kind.LEFT), AFTER))
    assert round_problems(no_failure, BOUNDS) == []


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (with_outcomes(outcome(Kind.WRONG)), "wrong answer: load: 7 tokens, 2.0 s: as it was"),
        (with_outcomes(outcome(Kind.SILENT)), "no answer and no error"),
        (with_outcomes(outcome(Kind.REJECTED)), "a well-formed request was rejected"),
        (with_outcomes(outcome(Kind.LATE)), "not ended within 135 s"),
        (with_outcomes(outcome(seconds=137.0)), "not ended within 135 s"),
        (with_outcomes(outcome(Kind.FAILED, began=RECOVERED_AT)), "failed after the recovery"),
        (replace(GOOD, plan=STRUCK_P), "failed although only P was struck"),
        (replace(GOOD, survivors_ended=("router",)), "router ended or is unwell"),
        (
            replace(GOOD, pushed_again_seconds=None, recovered_at=None),
            "no pushed transfer within 104 s of decode-0's return",
        ),
        (replace(GOOD, outcomes=(outcome(),)), "no request was answered after the recovery"),
        (
            replace(GOOD, settled_seconds=None, left_over="decode-0: held 1"),
            "not empty within 70 s: decode-0: held 1",
        ),
    ],
)
def test_a_broken_promise_is_one_problem(broken: RoundResult, said: str) -> None:
    problems = round_problems(broken, BOUNDS)
    assert len(problems) == 1
    assert said in problems[0]


@pytest.mark.parametrize("judge", soak_judge.JUDGES)
def test_every_judge_can_object(judge: soak_judge.Judge) -> None:
    bad = replace(
        with_outcomes(
            outcome(Kind.WRONG), outcome(Kind.SILENT), outcome(Kind.FAILED, began=RECOVERED_AT + 5)
        ),
        survivors_ended=("router",),
        pushed_again_seconds=None,
        settled_seconds=None,
    )
    assert judge(bad, BOUNDS)
    assert not judge(GOOD, BOUNDS)


def test_the_bounds_follow_from_the_settings() -> None:
    assert BOUNDS.request_seconds == 25 + 10 + 10 + 30 + 60
    assert BOUNDS.pushed_again_seconds == 4 + 30 + 10 + 60
    assert BOUNDS.settle_seconds == pytest.approx((10 + 30) * 1.01 + 30)
    patient = replace(BOUNDS, limits=Limits(silence_seconds=20.0, unknown_seconds=90.0, lease_seconds=300.0))
    assert patient.request_seconds == 25 + 10 + 20 + 90 + 60
    assert patient.settle_seconds == 300 + 30
    assert "within 135 s" in BOUNDS.text
    assert "within 104 s" in BOUNDS.text
    assert "within 70 s" in BOUNDS.text


def life(sizes: Sequence[int], name: str = "prefill-0", pid: int = 1) -> list[RoundResult]:
    return [replace(GOOD, memory_bytes={(name, pid): size * MEBIBYTE}) for size in sizes]


def test_memory_that_stays_is_no_problem() -> None:
    # The first round fills caches, and noise comes and goes.
    (growth,) = memory_growth(life([500, 900, 910, 905, 990, 903, 908, 906, 904]))
    assert (growth.server, growth.rounds) == ("prefill-0", 9)
    assert growth.early_bytes == 905 * MEBIBYTE
    assert growth.late_bytes == 906 * MEBIBYTE
    assert memory_problems([growth]) == []


def test_memory_that_grows_is_a_problem() -> None:
    step = MEMORY_ALLOWANCE_BYTES // MEBIBYTE // 4
    growths = memory_growth(life([900 + step * number for number in range(9)]))
    (problem,) = memory_problems(growths)
    assert "prefill-0 grew by" in problem
    assert "over 9 rounds, more than" in problem


def both(sizes: Sequence[int], reference: Sequence[int], name: str = "decode-0") -> list[RoundResult]:
    pairs = zip(sizes, reference, strict=True)
    return [
        replace(GOOD, memory_bytes={(name, 1): own * MEBIBYTE, ("reference", 9): other * MEBIBYTE})
        for own, other in pairs
    ]


def test_what_the_engine_without_kvferry_grows_by_is_not_counted() -> None:
    growing, steady = [900 + 40 * number for number in range(9)], [900] * 9
    assert memory_problems(memory_growth(both(growing, growing))) == []
    assert len(memory_problems(memory_growth(both(growing, steady)))) == 1
    # A reference that shrinks forbids nothing, and one that grows excuses no router.
    assert memory_problems(memory_growth(both(steady, growing[::-1]))) == []
    assert len(memory_problems(memory_growth(both(growing, growing, "router")))) == 1
    growth = memory_growth(both(growing, [900 + 10 * number for number in range(9)]))[0]
    assert (growth.reference_bytes, growth.bytes) == (50 * MEBIBYTE, 150 * MEBIBYTE)
    assert growth.text == (
        "memory of decode-0, 9 rounds: 980 MiB early, 1180 MiB late, "
        "+150 MiB beyond what the reference grew by"
    )


def test_only_a_life_that_is_long_enough_is_judged_and_each_by_itself() -> None:
    short = life([900] * (MEMORY_ROUNDS_MIN - 1), pid=1)
    assert memory_growth(short) == []
    long = life([400] * MEMORY_ROUNDS_MIN, pid=2)
    assert [(g.rounds, g.bytes) for g in memory_growth([*short, *long])] == [(MEMORY_ROUNDS_MIN, 0)]


def test_a_round_is_one_line() -> None:
    line = round_line(GOOD)
    assert "\n" not in line
    for part in (
        "round   3  kill decode-0 at half",
        "away 20.0 s",
        "2 right, 1 failed, 1 left",
        "longest  2.0 s",
        "pushed again after 3.0 s",
        "empty after 0 s",
        "prefill-0 900",
    ):
        assert part in line
    assert "BAD" not in line
    assert "reference" not in line
    stopped = replace(
        with_outcomes(outcome(Kind.WRONG)),
        plan=replace(GOOD.plan, fault=Fault.STOP),
        pushed_again_seconds=None,
        settled_seconds=None,
    )
    assert "stopped 20.0 s" in round_line(stopped)
    assert "1 BAD" in round_line(stopped)
    assert "pushed again after never" in round_line(stopped)
    assert "empty after never" in round_line(stopped)


def test_the_summary_ends_with_the_figure() -> None:
    results = [
        GOOD,
        replace(with_outcomes(outcome(Kind.WRONG, seconds=11.24)), pushed_again_seconds=4.0),
        replace(GOOD, pushed_again_seconds=None),
    ]
    lines = summary(results, ["it broke"])
    assert lines[0] == f"memory was not judged: no server lived through {MEMORY_ROUNDS_MIN} rounds"
    assert lines[1] == "requests: 6 right, 1 wrong, 3 failed, 3 left"
    assert lines[2] == "longest: wrong, load: 7 tokens, 11.2 s: as it was"
    assert lines[3:5] == ["PROBLEM: it broke", "FAILED: 1 problems"]
    assert lines[-1] == (
        "3 rounds, 1 wrong answers, 13 requests, longest 11.2 s, pushed again after 3.5 s (median)"
    )
    assert summary([GOOD], [])[-2] == "PASSED"
    assert summary(life([900] * 6), [])[0] == "memory of prefill-0, 6 rounds: 900 MiB early, 900 MiB late"


def test_a_figure_of_nothing_is_honest() -> None:
    assert figure([]) == "0 rounds, 0 wrong answers, 0 requests, longest 0.0 s, never pushed again"
