"""The first interrupt ends a block, and the others are not heard."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from kvferry.cli.interrupts import SIGNALS, first_interrupt_only


@pytest.fixture(autouse=True)
def handlers_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("first", SIGNALS)
def test_the_first_one_ends_the_block_and_no_other_disturbs_its_end(first: signal.Signals) -> None:
    heard = 0
    try:
        with first_interrupt_only():
            os.kill(os.getpid(), first)
            signal.sigtimedwait([], 1.0)
    except KeyboardInterrupt:
        heard += 1
        for number in SIGNALS:
            os.kill(os.getpid(), number)
    assert heard == 1
    assert [signal.getsignal(number) for number in SIGNALS] == [signal.SIG_IGN] * 2


def test_without_an_interrupt_all_is_as_before() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with first_interrupt_only():
        assert all(signal.getsignal(number) not in before for number in SIGNALS)
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_what_is_ignored_stays_ignored() -> None:
    """A shell lets what it starts in the background ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with first_interrupt_only():
        os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_another_thread_may_use_it_and_changes_nothing() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    seen: list[object] = []

    def work() -> None:
        with first_interrupt_only():
            seen.extend(signal.getsignal(number) for number in SIGNALS)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == before
