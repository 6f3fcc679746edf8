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
    memory_growth,
    memory_problems,
    memory_unjudged,
    round_problems,
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
STRUCK_AT, RECOVERED_AT = 51.0, 100.0


def outcome(kind: Kind = Kind.RIGHT, *, began: float = 50.0, seconds: float = 2.0) -> Outcome:
    return Outcome(what="load: 7 tokens", kind=kind, began=began, seconds=seconds, detail="as it was")


AFTER = outcome(began=RECOVERED_AT + 1)
GOOD = RoundResult(
    plan=RoundPlan(number=3, stage=Stage.HALF, target=Target.DECODE, fault=Fault.KILL, seconds=1.0),
    server="decode-0",
    outcomes=(outcome(), outcome(Kind.FAILED), outcome(Kind.LEFT), AFTER),
    struck_at=STRUCK_AT,
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
        (
            with_outcomes(outcome(Kind.FAILED, began=RECOVERED_AT)),
            "failed before D was struck or after its return: load: 7 tokens",
        ),
        (
            with_outcomes(outcome(Kind.FAILED, began=STRUCK_AT - 3)),
            "failed before D was struck or after its return: load: 7 tokens",
        ),
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


def test_many_requests_of_one_kind_are_a_few_problems() -> None:
    problems = round_problems(with_outcomes(*[outcome(Kind.SILENT)] * 1203), BOUNDS)
    assert len(problems) == 4
    assert problems[-1] == "no answer and no error: 1,200 more"
    assert len(round_problems(with_outcomes(*[outcome(Kind.SILENT)] * 3), BOUNDS)) == 3


def test_without_a_survivor_nobody_waits_for_a_push() -> None:
    ended = replace(GOOD, survivors_ended=("router",), pushed_again_seconds=None, recovered_at=None)
    assert round_problems(ended, BOUNDS) == [
        "router ended or is unwell, and was not killed",
        "no pushed transfer after decode-0's return",
    ]


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


def test_failures_are_excused_only_while_d_is_away() -> None:
    lost = outcome(Kind.FAILED)
    assert GOOD.is_excused(lost)
    assert GOOD.excused == 1
    assert not GOOD.is_excused(outcome())
    assert not GOOD.is_excused(outcome(Kind.WRONG))
    assert not replace(GOOD, plan=STRUCK_P).is_excused(lost)
    # Under way at the strike, or begun before the recovery; with no recovery there is another problem.
    assert GOOD.is_excused(outcome(Kind.FAILED, began=STRUCK_AT - 1.0, seconds=1.0))
    assert not GOOD.is_excused(outcome(Kind.FAILED, began=STRUCK_AT - 1.0, seconds=0.9))
    assert GOOD.is_excused(outcome(Kind.FAILED, began=RECOVERED_AT - 0.1))
    assert not GOOD.is_excused(outcome(Kind.FAILED, began=RECOVERED_AT))
    assert replace(GOOD, recovered_at=None).is_excused(outcome(Kind.FAILED, began=RECOVERED_AT))


def test_who_did_not_live_long_enough_is_named() -> None:
    assert memory_unjudged([]) == []
    lives = [
        replace(
            GOOD,
            memory_bytes={("prefill-0", number): 1, ("decode-0", 1): 1, ("reference", number): 1},
        )
        for number in range(MEMORY_ROUNDS_MIN)
    ]
    assert memory_unjudged(lives) == ["prefill-0"]
    assert memory_unjudged(lives[1:]) == ["prefill-0", "decode-0"]
