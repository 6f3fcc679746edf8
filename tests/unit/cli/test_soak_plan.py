"""What a soak does follows from its seed, and leaves nothing out."""

from __future__ import annotations

import itertools

import pytest

from kvferry.cli.soak_judge import MEMORY_ROUNDS_MIN
from kvferry.cli.soak_plan import (
    DOWN_SECONDS_MAX,
    ROUNDS_WHOLE,
    STOP_SECONDS_MAX,
    STOP_SECONDS_MIN,
    Ask,
    Fault,
    Mix,
    RoundPlan,
    Stage,
    Target,
    plan_rounds,
)

ALL = set(itertools.product(Stage, Target, Fault))
CONTEXT = 8192


def planned(seed: int, count: int) -> list[RoundPlan]:
    return list(itertools.islice(plan_rounds(seed), count))


@pytest.mark.parametrize("seed", range(20))
def test_each_twenty_rounds_hold_every_stage_side_and_fault_once(seed: int) -> None:
    plans = planned(seed, 60)
    assert [plan.number for plan in plans] == list(range(1, 61))
    for first in (0, 20, 40):
        twenty = [(plan.stage, plan.target, plan.fault) for plan in plans[first : first + ROUNDS_WHOLE]]
        assert len(twenty) == len(ALL)
        assert set(twenty) == ALL


@pytest.mark.parametrize("seed", range(20))
def test_a_short_run_sees_both_sides_both_faults_and_several_stages(seed: int) -> None:
    plans = planned(seed, 4)
    for count in (2, 3, 4):
        some = plans[:count]
        assert {plan.target for plan in some} == set(Target)
        assert {plan.fault for plan in some} == set(Fault)
        assert len({plan.stage for plan in some}) == count
    assert len({(plan.target, plan.fault) for plan in plans}) == 4


def lives(plans: list[RoundPlan], target: Target) -> list[int]:
    """How many rounds each life of a side's only engine lasts, by the ends of rounds that see it."""
    found = [0]
    for plan in plans:
        if plan.target is target and plan.fault is Fault.KILL:
            found.append(0)
        found[-1] += 1
    return found


@pytest.mark.parametrize("seed", range(20))
def test_whole_runs_judge_the_memory_of_both_sides(seed: int) -> None:
    plans = planned(seed, ROUNDS_WHOLE)
    for target in Target:
        assert max(lives(plans, target)) >= MEMORY_ROUNDS_MIN + 2


def test_the_same_seed_gives_the_same_rounds_and_another_one_others() -> None:
    assert planned(5, 40) == planned(5, 40)
    assert planned(5, 40) != planned(6, 40)
    assert len({planned(seed, 20)[0].target for seed in range(20)}) == 2


@pytest.mark.parametrize("seed", range(20))
def test_stops_come_from_all_parts_of_the_range(seed: int) -> None:
    for target in Target:
        plans = [plan for plan in planned(seed, 20) if plan.target is target]
        stops = sorted(plan.seconds for plan in plans if plan.fault is Fault.STOP)
        part = (STOP_SECONDS_MAX - STOP_SECONDS_MIN) / 5
        assert [int((stop - STOP_SECONDS_MIN) // part) for stop in stops] == [0, 1, 2, 3, 4]
        kills = [plan.seconds for plan in plans if plan.fault is Fault.KILL]
        assert all(0 <= seconds <= DOWN_SECONDS_MAX for seconds in kills)


def drawn(seed: str, count: int = 400) -> list[Ask]:
    mix = Mix(seed, CONTEXT)
    return [mix.draw() for _ in range(count)]


def test_the_same_seed_gives_the_same_requests() -> None:
    assert drawn("a") == drawn("a")
    assert drawn("a") != drawn("b")


def test_requests_are_mixed_and_fit_the_context() -> None:
    asks = drawn("a")
    lengths = [len(ask.prompt) for ask in asks]
    assert min(lengths) >= 1
    assert max(len(ask.prompt) + ask.answer_tokens for ask in asks) <= CONTEXT
    assert any(length > CONTEXT // 4 for length in lengths)
    assert sum(length <= 300 for length in lengths) > len(asks) / 2
    assert {ask.n for ask in asks} == {1, 2}
    assert {ask.stream for ask in asks} == {False, True}
    assert {ask.leaves_after_seconds is None for ask in asks} == {False, True}
    assert len({ask.prompt for ask in asks if len(ask.prompt) > 5}) == sum(n > 5 for n in lengths)


def test_requests_for_a_stage_fit_the_context_too() -> None:
    mix = Mix("a", CONTEXT)
    for _ in range(50):
        asks = [mix.long(), mix.short(), mix.middling(), mix.talkative()]
        assert all(len(ask.prompt) + ask.answer_tokens <= CONTEXT for ask in asks)
        assert all(ask.leaves_after_seconds is None and ask.n == 1 for ask in asks)
    assert mix.talkative().stream
    assert len(mix.long().prompt) > CONTEXT / 2


def test_every_body_asks_for_one_possible_answer() -> None:
    ask = Ask(prompt=(500, 501), answer_tokens=3)
    body = ask.body("tiny")
    assert body["prompt"] == [500, 501]
    assert (body["model"], body["max_tokens"], body["ignore_eos"]) == ("tiny", 3, True)
    assert (body["temperature"], body["return_token_ids"], body["stream"]) == (0, True, False)
    double = Ask(prompt=(1,), answer_tokens=3, n=2, stream=True).body("tiny")
    assert (double["n"], double["top_k"], double["stream"]) == (2, 1, True)


def test_pauses_and_picks_are_bounded() -> None:
    mix = Mix("a", CONTEXT)
    assert all(0 < mix.pause_seconds() < 1 for _ in range(100))
    assert {mix.pick(3) for _ in range(100)} == {0, 1, 2}
