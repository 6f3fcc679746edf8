"""Who is ready, who is chosen, and what is forgotten."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from kvferry.router.pace import FRESH_SECONDS
from kvferry.router.policy import Queue
from kvferry.router.pool import Pool, Role, Worker, same_engine
from tests.support.fake_engine import source


def pool(prefill: int = 2, decode: int = 2) -> tuple[Pool, list[Worker]]:
    told: list[Worker] = []
    made = Pool(chance=Random(0), changed=told.append)
    made.add(Role.PREFILL, [f"http://p{number}" for number in range(prefill)], "round_robin")
    made.add(Role.DECODE, [f"http://d{number}" for number in range(decode)], "least_load")
    return made, told


def test_nobody_is_ready_before_the_first_check() -> None:
    made, told = pool()
    assert not made.ready
    assert made.choose(Role.DECODE) is None
    assert told == made.workers()


def test_a_prefill_engine_is_ready_when_its_coordinates_are_known() -> None:
    made, _ = pool()
    worker = made.workers(Role.PREFILL)[0]
    made.alive(worker)
    assert made.choose(Role.PREFILL) is None
    assert worker.problem
    made.learn(worker, source())
    assert made.choose(Role.PREFILL) is worker
    assert worker.problem == ""


def test_down_forgets_who_was_there() -> None:
    made, told = pool()
    worker = made.workers(Role.PREFILL)[0]
    made.alive(worker)
    made.learn(worker, source())
    made.down(worker, "gone")
    made.alive(worker)
    assert worker.source is None
    assert not worker.ready
    assert told[-1] is worker


def test_a_tried_worker_is_chosen_only_when_no_other_is_ready() -> None:
    made, _ = pool()
    first, second = made.workers(Role.DECODE)
    made.alive(first)
    made.alive(second)
    assert made.choose(Role.DECODE, {first}) is second
    assert made.choose(Role.DECODE, {first, second}) in {first, second}
    made.down(second, "gone")
    assert made.choose(Role.DECODE, {first}) is first


def test_open_legs_count_as_load_however_they_end() -> None:
    made, _ = pool()
    first, second = made.workers(Role.DECODE)
    made.alive(first)
    made.alive(second)
    with first.leg():
        assert {made.choose(Role.DECODE) for _ in range(4)} == {second}
    with pytest.raises(ZeroDivisionError), first.leg():
        raise ZeroDivisionError
    assert first.in_flight == 0


def test_the_least_wait_is_chosen_by_what_was_measured_and_by_legs() -> None:
    now = [0.0]
    made = Pool(chance=Random(0), changed=lambda worker: None, clock=lambda: now[0])
    made.add(Role.DECODE, ["http://slow", "http://fast"], "least_wait")
    slow, fast = made.workers(Role.DECODE)
    for worker in (slow, fast):
        made.alive(worker)
    slow.pace.note(1.0, now[0])
    fast.pace.note(0.3, now[0])
    assert made.choose(Role.DECODE) is made.next(Role.DECODE) is fast
    with fast.leg(), fast.leg(), fast.leg():
        assert made.choose(Role.DECODE) is slow
    now[0] = FRESH_SECONDS + 1
    assert {made.choose(Role.DECODE) for _ in range(2)} == {slow, fast}


def test_what_a_late_choice_gains_is_the_early_engines_wait_less_that_of_the_one_chosen_now() -> None:
    made = Pool(chance=Random(0), changed=lambda worker: None, clock=lambda: 0.0)
    made.add(Role.DECODE, ["http://early", "http://late"], "least_wait")
    early, late = made.workers(Role.DECODE)
    assert made.next(Role.DECODE) is None
    assert made.gain_seconds(early, has_leg=False) == 0.0
    for worker in (early, late):
        made.alive(worker)
        worker.pace.note(0.1, 0.0, legs=1)
    assert made.next(Role.DECODE) is early
    assert made.gain_seconds(early, has_leg=False) == 0.0
    with early.leg():
        assert made.gain_seconds(early, has_leg=True) == 0.0, "a prompt is no load to itself"
        assert made.gain_seconds(early, has_leg=False) == pytest.approx(0.075)
        with early.leg():
            assert made.gain_seconds(early, has_leg=True) == pytest.approx(0.075)
    assert made.gain_seconds(early, has_leg=True) == 0.0, "the leg has ended"


def test_what_a_blind_policy_gains_may_be_less_than_nothing() -> None:
    made = Pool(chance=Random(0), changed=lambda worker: None, clock=lambda: 0.0)
    made.add(Role.DECODE, ["http://slow", "http://fast"], "round_robin")
    slow, fast = made.workers(Role.DECODE)
    for worker, seconds in ((slow, 1.0), (fast, 0.1)):
        made.alive(worker)
        worker.pace.note(seconds, 0.0)
    assert made.gain_seconds(fast, has_leg=False) == pytest.approx(-0.9)


def test_what_is_known_of_ready_workers_is_told_in_order() -> None:
    made, _ = pool(decode=3)
    first, second, _ = made.workers(Role.DECODE)
    made.alive(first)
    made.alive(second)
    second.pace.note(0.5, made.clock())
    with first.leg():
        assert made.queues(Role.DECODE) == [Queue(1, None), Queue(0, 0.5)]
    made.down(second, "gone")
    made.alive(second)
    assert made.queues(Role.DECODE) == [Queue(0, None), Queue(0, None)]


@pytest.mark.parametrize(
    ("field", "value"),
    [("engine", "e2"), ("incarnation", "i2"), ("incarnation", None), ("host", "h2"), ("port", 2), ("tp", 2)],
)
def test_another_identity_is_another_engine(field: str, value: object) -> None:
    assert not same_engine(source(), msgspec.structs.replace(source(), **{field: value}))


def test_the_default_mode_is_no_part_of_the_identity() -> None:
    assert same_engine(source(), msgspec.structs.replace(source(), mode="pull"))
