"""Which beginnings of prompts are where, and what that is worth in a choice."""

from __future__ import annotations

from contextlib import ExitStack
from random import Random

from kvferry.router.engines.pool import Ask, Pool, Role, Worker
from kvferry.router.engines.prefixes import WORKERS_MAX, Prefixes
from kvferry.router.ground.policy import prefix_costs, rendezvous

CHAIN = tuple(bytes([number]) for number in range(10))


def workers(count: int) -> list[Worker]:
    return [Worker(f"http://p{number}", Role.PREFILL) for number in range(count)]


def test_the_share_is_counted_from_the_beginning() -> None:
    first, second, third = workers(3)
    prefixes = Prefixes()
    prefixes.note(CHAIN, first, 0.0)
    prefixes.note(CHAIN[:4], second, 0.0)
    prefixes.note(CHAIN[2:], third, 0.0)
    assert prefixes.matched(CHAIN, [first, second, third], 1.0) == [1.0, 0.4, 0.0]
    assert prefixes.matched((b"other", *CHAIN), [first], 1.0) == [0.0]
    assert prefixes.matched((), [first], 1.0) == [0.0]


def test_what_is_old_or_of_an_engine_that_was_lost_is_not_there() -> None:
    first, second = workers(2)
    prefixes = Prefixes(seconds=10.0)
    prefixes.note(CHAIN, first, 0.0)
    prefixes.note(CHAIN, second, 5.0)
    second.losses += 1
    assert prefixes.matched(CHAIN, [first, second], 9.0) == [1.0, 0.0]
    assert prefixes.matched(CHAIN, [first], 10.0) == [0.0]


def test_the_table_is_bounded_in_hashes_and_in_engines() -> None:
    many = workers(WORKERS_MAX + 1)
    prefixes = Prefixes(entries_max=5)
    for worker in many:
        prefixes.note(CHAIN[:1], worker, 0.0)
    assert prefixes.matched(CHAIN[:1], many, 0.0) == [0.0] + [1.0] * WORKERS_MAX
    prefixes.note(CHAIN, many[0], 0.0)
    assert len(prefixes) == 5


def test_a_prefix_is_worth_its_tokens_and_no_more() -> None:
    assert prefix_costs([0, 0], [0.0, 0.9], 1000) == [1000, 100]
    assert prefix_costs([0, 901], [0.0, 0.9], 1000) == [1000, 1001]


def pool(policy: str, count: int = 3) -> Pool:
    made = Pool(chance=Random(0), changed=lambda worker: None, clock=lambda: 0.0)
    made.add(Role.DECODE, [f"http://d{number}" for number in range(count)], policy)
    for worker in made.workers():
        made.alive(worker)
    return made


def test_a_cache_aware_choice_follows_the_prefix_until_its_engine_is_too_busy() -> None:
    made = pool("cache_aware")
    _, second, _ = made.workers()
    made.prefixes.note(CHAIN, second, 0.0)
    ask = Ask(tokens=1000, chain=CHAIN)
    assert [made.choose(Role.DECODE, ask=ask) for _ in range(3)] == [second] * 3
    with second.leg(1001):
        assert made.choose(Role.DECODE, ask=ask) is not second


def test_the_least_load_is_counted_in_tokens() -> None:
    first, second, third = (made := pool("least_load")).workers()
    with first.leg(10_000), second.leg(100), second.leg(100), third.leg(300):
        assert made.choose(Role.DECODE) is second
    assert [worker.tokens for worker in made.workers()] == [0, 0, 0]


def test_power_of_two_compares_tokens() -> None:
    first, second = (made := pool("power_of_two", 2)).workers()
    with first.leg(500), second.leg(100), second.leg(100):
        assert {made.choose(Role.DECODE) for _ in range(10)} == {second}


def test_a_sessions_engine_follows_from_its_name() -> None:
    """The same in every router, spread over engines, and moved only when its engine is gone."""
    names = [f"http://d{number}" for number in range(5)]
    chosen = {key: names[rendezvous(names, key)] for key in (b"%d" % number for number in range(200))}
    assert set(chosen.values()) == set(names)
    left = names[1:]
    for key, name in chosen.items():
        if name != names[0]:
            assert left[rendezvous(left, key)] == name


def test_a_session_stays_at_its_engine_unless_that_is_much_busier() -> None:
    made = pool("round_robin")
    ask = Ask(session=b"one")
    (home,) = {made.choose(Role.DECODE, ask=ask) for _ in range(5)}
    assert home is not None
    with ExitStack() as legs:
        for _ in range(20):
            legs.enter_context(home.leg())
        assert {made.choose(Role.DECODE, ask=ask) for _ in range(6)} == set(made.workers())
    assert {made.choose(Role.DECODE, ask=ask) for _ in range(5)} == {home}
