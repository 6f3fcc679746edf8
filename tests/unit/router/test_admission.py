"""Who is served, who waits, and who is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from kvferry.bench.virtual_time import run_virtually
from kvferry.router.ground.errors import RequestError
from kvferry.router.serving.admission import Admission


def gate(**more: Any) -> Admission:
    return Admission(**({"serving_max": 1, "queue_max": 10, "queue_seconds": 5.0} | more))


def virtually(test: Callable[[], Any]) -> Callable[[], None]:
    def run() -> None:
        run_virtually(test())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class Crowd:
    """Requests that enter, are served until they are told to leave, and note when their turn came."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.served: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._leave: dict[str, asyncio.Event] = {}

    async def come(self, name: str, key: str = "") -> None:
        self._leave[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._one(name, key.encode()))
        await settle()

    async def go(self, name: str) -> None:
        self._leave[name].set()
        await self.tasks[name]
        await settle()

    async def refused(self, name: str) -> RequestError:
        with pytest.raises(RequestError) as caught:
            await self.tasks[name]
        return caught.value

    async def _one(self, name: str, key: bytes) -> None:
        async with self.admission.enter(key):
            self.served.append(name)
            await self._leave[name].wait()


@virtually
async def test_turns_come_in_the_order_of_arrival() -> None:
    crowd = Crowd(gate(serving_max=2))
    for name in "abcde":
        await crowd.come(name)
    assert crowd.served == ["a", "b"]
    await crowd.go("b")
    await crowd.go("a")
    assert crowd.served == ["a", "b", "c", "d"]
    for name in "cde":
        await crowd.go(name)
    assert (crowd.admission.serving, crowd.admission.waiting) == (0, 0)


@virtually
async def test_a_full_queue_is_a_429_that_says_when_to_come_back() -> None:
    crowd = Crowd(gate(queue_max=1))
    for name in "abc":
        await crowd.come(name)
    error = await crowd.refused("c")
    assert (error.status, error.cause.value) == (429, "overloaded")
    assert int(error.headers()["Retry-After"]) >= 1
    await crowd.go("a")
    await crowd.go("b")


@virtually
async def test_nobody_waits_with_a_queue_of_none() -> None:
    crowd = Crowd(gate(queue_max=0))
    await crowd.come("a")
    await crowd.come("b")
    assert (await crowd.refused("b")).status == 429
    await crowd.go("a")


@virtually
async def test_a_turn_that_does_not_come_in_time_is_a_503() -> None:
    crowd = Crowd(gate(queue_seconds=5.0))
    await crowd.come("a")
    start = asyncio.get_running_loop().time()
    await crowd.come("b")
    error = await crowd.refused("b")
    assert (error.status, error.cause.value) == (503, "queue_timeout")
    assert "Retry-After" in error.headers()
    assert asyncio.get_running_loop().time() - start == pytest.approx(5.0)
    assert crowd.admission.waiting == 0
    await crowd.go("a")


@virtually
async def test_a_client_that_leaves_the_queue_takes_nobodys_turn() -> None:
    crowd = Crowd(gate())
    for name in "abc":
        await crowd.come(name)
    crowd.tasks["b"].cancel()
    await settle()
    await crowd.go("a")
    assert crowd.served == ["a", "c"]
    await crowd.go("c")
    assert (crowd.admission.serving, crowd.admission.waiting) == (0, 0)


@virtually
async def test_a_client_that_leaves_in_the_moment_of_its_turn_passes_it_on() -> None:
    crowd = Crowd(gate())
    for name in "abc":
        await crowd.come(name)
    crowd._leave["a"].set()
    # One step: the first has left and the second has been given its place, but does not know yet.
    while crowd.admission.waiting == 2:  # noqa: ASYNC110 - that one step is what is looked for
        await asyncio.sleep(0)
    crowd.tasks["b"].cancel()
    await settle()
    assert crowd.served == ["a", "c"]
    await crowd.go("c")
    assert (crowd.admission.serving, crowd.admission.waiting) == (0, 0)


@virtually
async def test_fairness_gives_turns_by_key() -> None:
    crowd = Crowd(gate(fair=True))
    await crowd.come("first", "busy")
    for number in range(4):
        await crowd.come(f"busy{number}", "busy")
    await crowd.come("other", "other")
    await crowd.go("first")
    await crowd.go("busy0")
    assert crowd.served == ["first", "busy0", "other"]
    await crowd.go("other")
    for number in range(1, 4):
        await crowd.go(f"busy{number}")


@virtually
async def test_without_fairness_keys_make_no_difference() -> None:
    crowd = Crowd(gate())
    for name, key in (("a", "x"), ("b", "x"), ("c", "x"), ("d", "y")):
        await crowd.come(name, key)
    for name in "abcd":
        await crowd.go(name)
    assert crowd.served == list("abcd")


@virtually
async def test_a_burst_of_one_key_gives_up_room_for_another_key() -> None:
    crowd = Crowd(gate(fair=True, queue_max=3))
    await crowd.come("first", "busy")
    for number in range(3):
        await crowd.come(f"busy{number}", "busy")
    await crowd.come("other", "other")
    assert (await crowd.refused("busy2")).status == 429
    await crowd.come("busy9", "busy")
    assert (await crowd.refused("busy9")).status == 429
    for name in ("first", "busy0", "other", "busy1"):
        await crowd.go(name)


@virtually
async def test_a_closed_gate_refuses_who_waits_and_lets_the_served_finish() -> None:
    crowd = Crowd(gate())
    await crowd.come("a")
    await crowd.come("b")
    crowd.admission.close()
    assert (await crowd.refused("b")).cause.value == "shutting_down"
    await crowd.come("c")
    error = await crowd.refused("c")
    assert (error.status, error.headers()["Retry-After"]) == (503, "1")
    idle = asyncio.create_task(crowd.admission.idle())
    await settle()
    assert not idle.done()
    await crowd.go("a")
    await idle


@virtually
async def test_a_failure_inside_gives_the_place_back() -> None:
    admission = gate()
    with pytest.raises(ZeroDivisionError):
        async with admission.enter():
            raise ZeroDivisionError
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(admission.enter())
        assert admission.serving == 1
    assert admission.serving == 0


@virtually
async def test_the_numbers_are_told() -> None:
    told: list[tuple[int, int]] = []
    crowd = Crowd(gate(changed=lambda serving, waiting: told.append((serving, waiting))))
    await crowd.come("a")
    await crowd.come("b")
    assert told[-1] == (1, 1)
    await crowd.go("a")
    await crowd.go("b")
    assert told[-1] == (0, 0)
