"""The queue into the agent's thread: nothing is lost, the reader wakes, and the writer never waits."""

from __future__ import annotations

import threading

import pytest

from kvferry.agent.mailbox import Mailbox

WAIT_SECONDS = 10.0
"""A bound that only a broken build reaches."""


def test_items_come_in_order_and_once() -> None:
    box: Mailbox[int] = Mailbox()
    for item in range(3):
        box.put(item)
    assert len(box) == 3
    assert box.drain() == [0, 1, 2]
    assert (box.drain(), len(box)) == ([], 0)


def test_whoever_waits_for_nothing_waits_out_the_time() -> None:
    box: Mailbox[int] = Mailbox()
    assert not box.wait(0.0)
    assert not box.wait(-1.0)
    assert not box.wait(0.001)


def test_what_has_arrived_ends_a_wait_until_it_is_taken() -> None:
    box: Mailbox[int] = Mailbox()
    box.put(1)
    assert box.wait(WAIT_SECONDS)
    assert box.wait(WAIT_SECONDS), "it is there still"
    box.drain()
    assert not box.wait(0.0)
    box.put(2)
    assert box.wait(WAIT_SECONDS)


def test_a_reader_can_be_woken_without_an_item() -> None:
    box: Mailbox[int] = Mailbox()
    box.wake()
    box.wake()
    assert box.wait(WAIT_SECONDS)
    assert not box.wait(0.0)


def test_a_wait_that_an_item_ended_does_not_swallow_the_next_ones_bell() -> None:
    box: Mailbox[int] = Mailbox()
    box.put(1)
    assert box.wait(WAIT_SECONDS)
    box.put(2)
    assert box.drain() == [1, 2]
    box.put(3)
    assert box.wait(WAIT_SECONDS)
    assert box.drain() == [3]


def test_many_writers_lose_nothing_and_the_reader_never_sleeps_over_an_item() -> None:
    writers, each = 4, 500
    box: Mailbox[tuple[int, int]] = Mailbox()
    started = threading.Barrier(writers + 1)

    def write(writer: int) -> None:
        started.wait()
        for number in range(each):
            box.put((writer, number))

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(writers)]
    for thread in threads:
        thread.start()
    started.wait()
    found: list[tuple[int, int]] = []
    while len(found) < writers * each:
        assert box.wait(WAIT_SECONDS), f"asleep with {len(box)} items, {len(found)} found"
        found += box.drain()
    for thread in threads:
        thread.join()
    for writer in range(writers):
        assert [number for who, number in found if who == writer] == list(range(each))


def test_two_who_ring_at_once_do_no_harm() -> None:
    """The second finds the bell rung between its look and its ring."""
    box: Mailbox[int] = Mailbox()
    box.wake()
    box._ring()
    assert box.wait(WAIT_SECONDS)


class Held:
    """A lock that somebody holds: whoever would wait for it says so instead."""

    def __init__(self, bell: threading.Lock) -> None:
        self._bell = bell

    def locked(self) -> bool:
        return self._bell.locked()

    def release(self) -> None:
        self._bell.release()

    def acquire(self, *_: object, **__: object) -> bool:
        raise AssertionError("the writer waits for the reader")


@pytest.mark.parametrize("rings", [False, True])
def test_a_writer_takes_no_lock(rings: bool) -> None:
    """It would give up the interpreter for one that the reader holds, until the reader has done its work."""
    box: Mailbox[int] = Mailbox()
    if rings:
        box.wake()
    box._bell = Held(box._bell)  # type: ignore[assignment]
    box.put(1)
    box.put(2)
    assert len(box) == 2
