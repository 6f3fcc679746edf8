"""The second process may end or hang: then the measurement says so, and does not wait for ever."""

from __future__ import annotations

from multiprocessing import Pipe

import pytest

from kvferry.microbench.producer import MicrobenchError, await_answer
from kvferry.microbench.tasks import Arrived, Ready


def test_an_answer_is_what_was_sent() -> None:
    ours, theirs = Pipe()
    theirs.send(Arrived((1.0,), 2))
    assert await_answer(ours, Arrived, 10.0) == Arrived((1.0,), 2)


def test_a_process_that_has_ended_is_told_from_one_that_hangs() -> None:
    ours, theirs = Pipe()
    with pytest.raises(MicrobenchError, match="does not answer"):
        await_answer(ours, Ready, 0.0)
    theirs.close()
    with pytest.raises(MicrobenchError, match="has ended"):
        await_answer(ours, Ready, 10.0)
