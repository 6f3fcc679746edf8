"""Choices over loads, and of the mode: pure, with chance as an argument."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.router.ground.policy import (
    COORDINATION_SECONDS,
    OVERLAP_FROM_TOKENS,
    POLICIES,
    Queue,
    at_random,
    expected_waits,
    least_load,
    overlap_seconds,
    power_of_two,
    round_robin,
    transfer_mode,
    worth_keeping,
)

WAITS = st.floats(0.0, 100.0)
MEASURED = st.lists(st.builds(Queue, st.integers(0, 1000), WAITS), min_size=2, max_size=8)
QUEUES = st.lists(st.builds(Queue, st.integers(0, 1000), st.none() | WAITS), min_size=1, max_size=8)
TOKENS = st.integers(0, 1 << 20)
GAINS = st.none() | st.floats(-10.0, 10.0)
LOADS = st.lists(st.integers(0, 100), min_size=1, max_size=8)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
@given(loads=LOADS, turn=st.integers(0, 1000), seed=st.integers(0, 1000))
def test_a_choice_is_one_of_the_workers_and_depends_on_nothing_else(
    policy: object, loads: list[int], turn: int, seed: int
) -> None:
    chosen = policy(loads, turn, Random(seed))
    assert 0 <= chosen < len(loads)
    assert policy(loads, turn, Random(seed)) == chosen


def test_round_robin_takes_turns() -> None:
    assert [round_robin([5, 0, 9], turn, Random(0)) for turn in range(4)] == [0, 1, 2, 0]


@given(loads=LOADS, turn=st.integers(0, 100))
def test_least_load_never_takes_a_busier_one(loads: list[int], turn: int) -> None:
    assert loads[least_load(loads, turn, Random(0))] == min(loads)


def test_equal_loads_take_turns() -> None:
    assert [least_load([1, 0, 0], turn, Random(0)) for turn in range(3)] == [1, 2, 1]


@given(seed=st.integers(0, 1000))
def test_power_of_two_never_takes_the_busiest(seed: int) -> None:
    assert power_of_two([3, 1, 9, 2], 0, Random(seed)) != 2


def test_random_takes_all() -> None:
    chance = Random(1)
    counts = Counter(at_random([0, 0, 0], 0, chance) for _ in range(300))
    assert min(counts.values()) > 50


# --- expected waits ------------------------------------------------------------------------------


@given(queues=QUEUES, wait=WAITS, usual=st.floats(0.0, 1000.0))
def test_more_legs_never_make_an_engine_look_better(queues: list[Queue], wait: float, usual: float) -> None:
    one, other = expected_waits([*queues, Queue(3, wait, usual), Queue(4, wait, usual)])[-2:]
    assert one <= other


@given(queues=QUEUES, legs=st.integers(0, 1000))
def test_a_slower_engine_never_looks_better(queues: list[Queue], legs: int) -> None:
    one, other = expected_waits([*queues, Queue(legs, 1.0, 5.0), Queue(legs, 2.0, 5.0)])[-2:]
    assert one < other


@given(queues=QUEUES, legs=st.integers(0, 1000), wait=WAITS)
def test_with_as_many_legs_as_usual_a_wait_is_what_it_was(
    queues: list[Queue], legs: int, wait: float
) -> None:
    assert expected_waits([*queues, Queue(legs, wait, float(legs))])[-1] == wait


def test_a_wait_grows_faster_than_the_legs() -> None:
    """A queue is what there is no room for, and not a share of all."""
    assert expected_waits([Queue(7, 0.1, 3.0)]) == pytest.approx([0.4])


@given(queues=st.lists(st.builds(Queue, st.integers(0, 1000), st.none()), min_size=1, max_size=8))
def test_with_nothing_measured_the_legs_decide(queues: list[Queue]) -> None:
    waits = expected_waits(queues)
    assert waits.index(min(waits)) == min(range(len(queues)), key=lambda at: queues[at].in_flight)


def test_an_engine_that_nobody_knows_counts_as_the_best_that_is_known() -> None:
    assert expected_waits([Queue(1, 3.0, 1.0), Queue(1, 2.0, 1.0), Queue(1, None)]) == [3.0, 2.0, 2.0]


@given(load=st.integers(0, 1000), least=st.integers(0, 1000))
def test_a_conversation_is_kept_by_an_engine_that_is_not_much_busier(load: int, least: int) -> None:
    assert worth_keeping(least, least)
    assert worth_keeping(load, least) == (load <= 2 * least + 4)


# --- push or pull --------------------------------------------------------------------------------


@given(queues=QUEUES, tokens=TOKENS, late=GAINS)
def test_a_mode_depends_on_nothing_else_and_its_reasons_are_few(
    queues: list[Queue], tokens: int, late: float | None
) -> None:
    chosen = transfer_mode(tokens, queues, late)
    assert chosen == transfer_mode(tokens, list(queues), late)
    reasons = {"push": {"one_decode", "overlap"}, "pull": {"unknown", "late"}}
    assert chosen.reason in reasons[chosen.mode]


@given(
    queues=st.lists(st.builds(Queue, st.integers(0, 9), st.none() | WAITS), max_size=1),
    tokens=TOKENS,
    late=GAINS,
)
def test_with_nothing_to_choose_from_it_is_push(queues: list[Queue], tokens: int, late: float | None) -> None:
    assert transfer_mode(tokens, queues, late).reason == "one_decode"


@given(queues=QUEUES, legs=st.integers(0, 1000), tokens=TOKENS, late=GAINS)
def test_with_an_engine_that_nobody_knows_it_is_pull(
    queues: list[Queue], legs: int, tokens: int, late: float | None
) -> None:
    assert transfer_mode(tokens, [*queues, Queue(legs, None)], late).reason == "unknown"


@given(queues=MEASURED, tokens=TOKENS)
def test_with_no_late_choice_ever_seen_it_is_pull(queues: list[Queue], tokens: int) -> None:
    assert transfer_mode(tokens, queues, None).reason == "unknown"


@given(queues=QUEUES, tokens=TOKENS, late=GAINS)
def test_what_affinity_has_settled_is_pushed(queues: list[Queue], tokens: int, late: float | None) -> None:
    assert transfer_mode(tokens, queues, late, settled=True).mode == "push"


@given(queues=MEASURED, tokens=TOKENS)
def test_where_a_late_choice_gains_nothing_it_is_push(queues: list[Queue], tokens: int) -> None:
    """Engines may differ as they will: the early choice knows that, too."""
    assert transfer_mode(tokens, queues, 0.0).reason == "overlap"


@given(queues=MEASURED, tokens=TOKENS, more=TOKENS, late=st.floats(0.0, 10.0))
def test_a_longer_prompt_never_turns_push_into_pull(
    queues: list[Queue], tokens: int, more: int, late: float
) -> None:
    if transfer_mode(tokens, queues, late).mode == "push":
        assert transfer_mode(tokens + more, queues, late).mode == "push"


@given(queues=MEASURED, tokens=TOKENS, late=st.floats(-10.0, 10.0))
def test_pull_means_that_a_late_choice_gains_more_than_overlap_saves(
    queues: list[Queue], tokens: int, late: float
) -> None:
    assert (transfer_mode(tokens, queues, late).mode == "pull") == (late > overlap_seconds(tokens))


@given(tokens=TOKENS)
def test_overlap_is_worth_the_coordination_and_what_earlier_steps_computed(tokens: int) -> None:
    saved = overlap_seconds(tokens)
    assert (saved == COORDINATION_SECONDS) == (tokens <= OVERLAP_FROM_TOKENS)
    assert overlap_seconds(tokens + OVERLAP_FROM_TOKENS + 1) > saved


def test_a_gain_of_ten_milliseconds_turns_short_prompts_into_pulls_and_leaves_long_ones_alone() -> None:
    """The numbers of the page."""
    queues = [Queue(4, 0.01, 4.0)] * 4
    assert transfer_mode(3000, queues, 0.01).mode == "pull"
    assert transfer_mode(4000, queues, 0.01).mode == "push"
