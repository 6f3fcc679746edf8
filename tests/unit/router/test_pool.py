"""Who is ready, who is chosen, and what is forgotten."""

from __future__ import annotations

from contextlib import ExitStack
from random import Random

import msgspec
import pytest

from kvferry.router.engines.breaker import FAILURES_MAX, OPEN_SECONDS
from kvferry.router.engines.pace import FRESH_SECONDS
from kvferry.router.engines.pool import Ask, Model, Pool, Role, Worker, same_engine
from kvferry.router.ground.policy import KEEP_LEGS, Queue
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
    assert made.gain_seconds(early) == 0.0
    for worker in (early, late):
        made.alive(worker)
        worker.pace.note(0.1, 0.0, legs=1)
    assert made.next(Role.DECODE) is early
    assert made.gain_seconds(early) == 0.0
    with early.leg(7):
        assert made.gain_seconds(early, leg_tokens=7) == 0.0, "a prompt is no load to itself"
        assert made.gain_seconds(early) == pytest.approx(0.075)
        with early.leg(7):
            assert made.gain_seconds(early, leg_tokens=7) == pytest.approx(0.075)
    assert made.gain_seconds(early, leg_tokens=7) == 0.0, "the leg has ended"


def test_a_policy_that_counts_tokens_leaves_a_prompts_own_leg_out_of_its_gain() -> None:
    made = Pool(chance=Random(0), changed=lambda worker: None, clock=lambda: 0.0)
    made.add(Role.DECODE, ["http://early", "http://late"], "least_load")
    early, late = made.workers(Role.DECODE)
    for worker, seconds in ((early, 0.1), (late, 0.5)):
        made.alive(worker)
        worker.pace.note(seconds, 0.0, legs=1)
    with early.leg(700):
        assert made.gain_seconds(early, leg_tokens=700) == 0.0
        with early.leg(1):
            assert made.gain_seconds(early, leg_tokens=700) == pytest.approx(0.1 - 0.125)


def test_where_affinity_has_settled_the_engine_the_policy_has_no_next_one() -> None:
    made, _ = pool(decode=2)
    first, second = made.workers(Role.DECODE)
    made.alive(first)
    made.alive(second)
    assert made.next(Role.DECODE) is first
    assert made.next(Role.DECODE, second) is None
    assert made.next(Role.DECODE, None, Ask(session=b"mine")) is None
    with ExitStack() as busy:
        for _ in range(KEEP_LEGS + 1):
            busy.enter_context(second.leg())
        assert made.next(Role.DECODE, second) is first


def test_a_late_choice_is_measured_among_those_that_could_serve() -> None:
    """Neither an engine of another model nor one with an open breaker is what a late choice would take."""
    made = Pool(chance=Random(0), changed=lambda worker: None, clock=lambda: 0.0)
    made.add(Role.DECODE, ["http://early", "http://other", "http://broken"], "least_wait")
    early, other, broken = made.workers(Role.DECODE)
    for worker, seconds in ((early, 0.5), (other, 0.1), (broken, 0.1)):
        made.alive(worker)
        worker.pace.note(seconds, 0.0)
        worker.models = (Model("theirs" if worker is other else "mine"),)
    while broken.breaker.permits(0.0):
        broken.breaker.failed(0.0)
    ask = Ask(model="mine")
    assert made.next(Role.DECODE, None, ask) is early
    assert made.gain_seconds(early, ask) == 0.0
    assert [queue.wait_seconds for queue in made.queues(Role.DECODE, ask)] == [0.5]


def test_what_a_blind_policy_gains_may_be_less_than_nothing() -> None:
    made = Pool(chance=Random(0), changed=lambda worker: None, clock=lambda: 0.0)
    made.add(Role.DECODE, ["http://slow", "http://fast"], "round_robin")
    slow, fast = made.workers(Role.DECODE)
    for worker, seconds in ((slow, 1.0), (fast, 0.1)):
        made.alive(worker)
        worker.pace.note(seconds, 0.0)
    assert made.gain_seconds(fast) == pytest.approx(-0.9)


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


def opened(worker: Worker) -> None:
    for _ in range(FAILURES_MAX):
        worker.breaker.failed(0.0)


def timed(decode: int = 2) -> tuple[Pool, list[float]]:
    """A pool whose workers are all ready, and its clock."""
    now = [0.0]
    made = Pool(chance=Random(0), changed=lambda worker: None, clock=lambda: now[0])
    made.add(Role.PREFILL, ["http://p0"], "round_robin")
    made.add(Role.DECODE, [f"http://d{number}" for number in range(decode)], "round_robin")
    for worker in made.workers():
        made.alive(worker)
    made.learn(made.workers(Role.PREFILL)[0], source())
    return made, now


def test_an_open_breaker_is_passed_over_and_tried_once_when_its_time_is_over() -> None:
    made, now = timed()
    failing, other = made.workers(Role.DECODE)
    opened(failing)
    assert {made.choose(Role.DECODE) for _ in range(4)} == {other}
    now[0] = OPEN_SECONDS
    chosen = [made.choose(Role.DECODE) for _ in range(6)]
    assert chosen.count(failing) == 1


def test_no_prompt_is_without_a_decode_engine_for_a_breaker() -> None:
    made, _ = timed()
    for worker in made.workers(Role.DECODE):
        opened(worker)
    assert made.choose(Role.DECODE) is not None
    assert made.any_ready(Role.DECODE)
    assert made.ready


def test_without_a_usable_prefill_engine_there_is_none() -> None:
    """The decode engine computes the prompt then, so nobody needs the one that fails."""
    made, now = timed()
    opened(made.workers(Role.PREFILL)[0])
    assert made.choose(Role.PREFILL) is None
    assert not made.ready
    now[0] = OPEN_SECONDS
    assert made.any_ready(Role.PREFILL)
    assert made.choose(Role.PREFILL) is not None
    assert made.choose(Role.PREFILL) is None


def test_a_conversation_does_not_go_on_at_an_engine_that_fails() -> None:
    made, _ = timed()
    first, second = made.workers(Role.DECODE)
    assert made.choose(Role.DECODE, preferred=first) is first
    opened(first)
    assert not made.keeps(first)
    assert made.choose(Role.DECODE, preferred=first) is second


def test_another_incarnation_is_known_for_nothing_that_the_one_before_has_done() -> None:
    made, _ = timed()
    (worker,) = made.workers(Role.PREFILL)
    for _ in range(3):
        worker.queue.times.note(100, 1.0)
    opened(worker)
    worker.models = (Model("tiny"),)
    made.learn(worker, source())
    assert worker.queue.times.seconds(100) == 1.0
    losses = worker.losses
    made.learn(worker, source(incarnation="second"))
    assert worker.queue.times.seconds(100) is None
    assert worker.breaker.permits(0.0)
    assert worker.models == ()
    assert worker.losses == losses + 1


def test_a_model_is_asked_of_engines_that_serve_it_or_may() -> None:
    made, _ = timed(decode=3)
    with_a, with_b, silent = made.workers(Role.DECODE)
    with_a.models, with_b.models = (Model("a"),), (Model("b"), Model("b-lora"))
    assert {made.choose(Role.DECODE, ask=Ask(model="b-lora")) for _ in range(3)} == {with_b}
    assert {made.choose(Role.DECODE, ask=Ask(model="c")) for _ in range(3)} == {silent}
    silent.models = (Model("a"),)
    assert {made.choose(Role.DECODE, ask=Ask(model="c")) for _ in range(3)} == {with_a, with_b, silent}


def test_a_worker_is_drained_when_no_leg_and_no_transfer_is_left() -> None:
    """X18."""
    made, _ = timed()
    (worker,) = made.workers(Role.PREFILL)
    with worker.transferring():
        with worker.leg():
            made.drain(worker)
            assert not worker.drained
        assert not worker.drained
    assert worker.drained
    assert not worker.ready
    made.undrain(worker)
    assert worker.ready
    assert not worker.drained
