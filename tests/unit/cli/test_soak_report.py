"""What a soak says can be read, and its last line claims no more than was compared and judged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.cli.soak_client import Kind
from kvferry.cli.soak_judge import MEBIBYTE, MEMORY_ROUNDS_MIN, RoundResult
from kvferry.cli.soak_plan import Fault, Stage
from kvferry.cli.soak_report import figure, result_lines, strike_line, summary
from tests.unit.cli.test_soak_judge import GOOD, STRUCK_P, outcome, with_outcomes

STOPPED = replace(GOOD.plan, fault=Fault.STOP, stage=Stage.WAITING, seconds=3.25)


def test_a_strike_says_who_how_and_where() -> None:
    assert strike_line(GOOD.plan, "decode-0", seen=True) == "round 3: D (decode-0) killed at stage half"
    assert strike_line(replace(STOPPED, target=STRUCK_P.target), "prefill-1", seen=True, rounds=20) == (
        "round 3 of 20: P (prefill-1) stopped for 3.2 s at stage waiting"
    )
    assert strike_line(GOOD.plan, "decode-0", seen=False).endswith(
        "killed at another stage than half, which did not show"
    )


def test_a_round_says_what_became_of_the_fleet_and_of_the_requests() -> None:
    assert result_lines(GOOD) == [
        "    away for 20.0 s, pushed again 3.0 s after its return, empty 0.5 s after the last request",
        "    requests: 2 right, 1 failed while D was away (expected), 1 left by their client; longest 2.0 s",
    ]
    never = replace(GOOD, pushed_again_seconds=None, settled_seconds=None, outcomes=())
    assert result_lines(never) == [
        "    away for 20.0 s, never pushed again, never empty",
        "    requests: 0 right; longest 0.0 s",
    ]


@pytest.mark.parametrize("kind", [Kind.WRONG, Kind.REJECTED, Kind.SILENT, Kind.LATE])
def test_what_must_not_be_is_seen_at_once(kind: Kind) -> None:
    assert f"1 {kind.value.upper()}" in result_lines(with_outcomes(outcome(kind)))[1]


def test_a_failure_that_nothing_excuses_is_not_told_as_expected() -> None:
    text = result_lines(replace(GOOD, plan=STRUCK_P))[1]
    assert "1 FAILED" in text
    assert "expected" not in text


def lives(rounds: int, *names: str, dies: str = "") -> list[RoundResult]:
    """Rounds that these servers live through; `dies` is killed in each."""
    return [
        replace(
            GOOD,
            memory_bytes={
                **{(name, 1): 900 * MEBIBYTE for name in (*names, "reference")},
                **({(dies, number): 900 * MEBIBYTE} if dies else {}),
            },
        )
        for number in range(2, rounds + 2)
    ]


def test_the_last_line_says_how_much_was_compared_and_whose_memory_was_judged() -> None:
    assert figure(lives(3, "decode-0", "router")) == (
        "3 rounds, 6 of 6 answers equal one engine's; longest request 2.0 s, pushed again after 3.0 s "
        "(median); memory: not judged, 20 rounds needed"
    )
    judged = lives(MEMORY_ROUNDS_MIN, "decode-0", "router")
    assert figure(judged).endswith("; memory: judged for decode-0, router")
    some = lives(MEMORY_ROUNDS_MIN, "router", dies="decode-0")
    assert figure(some).endswith("; memory: judged for router, not for decode-0 (20 rounds needed)")


def test_the_reference_alone_judges_nothing() -> None:
    assert figure(lives(MEMORY_ROUNDS_MIN)).endswith("memory: not judged, 20 rounds needed")


def test_a_figure_of_nothing_is_honest() -> None:
    assert figure([]) == (
        "0 rounds, 0 of 0 answers equal one engine's; longest request 0.0 s, never pushed again; "
        "memory: not judged, 20 rounds needed"
    )


def test_the_summary_ends_with_the_verdict() -> None:
    results = [
        GOOD,
        replace(with_outcomes(outcome(Kind.WRONG, seconds=11.24)), pushed_again_seconds=4.0),
        replace(GOOD, pushed_again_seconds=None),
    ]
    lines = summary(results, ["it broke"])
    assert lines[0] == (
        "requests: 6 right, 3 failed while D was away (expected), 3 left by their client, 1 WRONG"
    )
    assert lines[1] == "longest request: wrong, load: 7 tokens, 11.2 s: as it was"
    assert lines[2] == "PROBLEM: it broke"
    assert lines[3].startswith(
        "FAILED: 1 problem; 3 rounds, 6 of 7 answers equal one engine's; longest request 11.2 s, "
        "pushed again after 3.5 s (median); memory: "
    )
    assert len(lines) == 4
    assert summary(results, ["a", "b"])[-1].startswith("FAILED: 2 problems; 3 rounds, ")
    assert summary([GOOD], [])[-1].startswith("PASSED: 1 round, 2 of 2 answers equal")
    assert summary([GOOD], [], interrupted=True)[-1].startswith("INTERRUPTED: 1 round, ")
    assert summary([GOOD], ["it broke"], interrupted=True)[-1].startswith("FAILED: 1 problem; ")


def test_memory_is_shown_of_each_life() -> None:
    lines = summary(lives(MEMORY_ROUNDS_MIN, "prefill-0"), [])
    assert "memory of prefill-0, 6 rounds: 900 MiB early, 900 MiB late" in lines


def test_a_missed_stage_is_named_and_counted() -> None:
    lines = summary([GOOD, replace(GOOD, seen=False)], [])
    assert "stages that did not show, struck at another one: half of round 3" in lines
    assert lines[-1].startswith("PASSED: 2 rounds (1 at another stage than planned), ")
