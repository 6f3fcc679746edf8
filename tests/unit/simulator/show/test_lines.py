"""A replay's lines: runs of renewals folded, and marks where what never ends began."""

from __future__ import annotations

import math
import re

import pytest

from kvferry.simulator.ground import events as ev
from kvferry.simulator.ground.outcome import Violation
from kvferry.simulator.show.lines import RUN_MAX, SHOWN, told
from kvferry.simulator.watch.trace import TraceLines
from tests.support.sample_history import D_RANK, OURS, P_RANK, RENEWALS, hanging, one_transfer

HANGING = hanging()
OWED = Violation(6, 2.01, f"{D_RANK} never reported received for {OURS}, owed since 2.01", unfinished=True)
LEFT = Violation(7, math.inf, "left over", unfinished=True)


def lines(events: list[ev.Observed]) -> list[str]:
    trace = TraceLines()
    for event in events:
        trace.observe(event)
    return trace.lines


def test_a_long_run_of_renewals_is_folded_and_says_so() -> None:
    every = lines(HANGING)
    shown = told(HANGING, every, ())
    first = len(every) - 4 * RENEWALS
    assert shown[: first + SHOWN] == every[: first + SHOWN]
    end = HANGING[-1].at_seconds
    (left_out,) = shown[first + SHOWN :]
    what = "lines of renewals and their answers"
    said = f"{4 * RENEWALS - SHOWN} {what}, until {end:.6f}; --verbose shows them"
    assert left_out.split(maxsplit=1) == ["...", said]


def test_everything_is_shown_on_request() -> None:
    every = lines(HANGING)
    assert told(HANGING, every, (), folded=False) == every


def test_a_short_run_and_everything_else_is_shown() -> None:
    for events in (one_transfer(fails=True), hanging(renewals=RUN_MAX // 4)):
        assert told(events, lines(events), ()) == lines(events)


def test_a_renewal_that_is_lost_is_shown() -> None:
    events = list(HANGING)
    at = max(index for index, event in enumerate(events[:-60]) if isinstance(event, ev.MessageEnded))
    lost = events[at]
    events[at] = ev.MessageEnded(lost.at_seconds, lost.rank, lost.target, lost.number, arrived=False)
    shown = told(events, lines(events), ())
    assert sum("is lost" in line for line in shown) == 1
    assert sum("lines of renewals" in line for line in shown) == 2


def test_what_is_owed_is_marked_since_when_and_once_late() -> None:
    events = hanging(deadline_seconds=12.0)
    shown = told(events, lines(events), (OWED, LEFT))
    labels = [line.split()[1:3] for line in shown]
    owed, late = labels.index(["NEVER", "ENDS"]), labels.index(["DEADLINE", "everything"])
    assert shown[owed].split()[0] == "2.010000"
    assert "promise 6: D0/d-one/tp0 never reported received for transfer-1" in shown[owed]
    assert float(shown[owed - 1].split()[0]) <= 2.01 < float(shown[owed + 1].split()[0])
    assert shown[late].split()[0] == "12.000000"
    assert sum("lines of renewals" in line for line in shown) == 2


def test_without_a_deadline_that_passed_the_end_says_why_it_ends() -> None:
    _, label, what = re.split(r"  +", told(HANGING, lines(HANGING), (OWED,))[-1].strip())
    assert (label, what) == ("GIVEN UP", "nothing ends any more; what is unfinished now stays so")


@pytest.mark.parametrize("folded", [True, False])
def test_another_violation_is_marked_at_its_time(folded: bool) -> None:
    events = one_transfer()
    shown = told(events, lines(events), [Violation(2, 2.03, f"{P_RANK} wrote")], folded=folded)
    (marked,) = (line for line in shown if "VIOLATION" in line)
    assert marked.split() == ["2.030000", "VIOLATION", "promise", "2:", "P0/p-one/tp0", "wrote"]
    assert len(shown) == len(events) + 1


def test_a_history_without_an_event_has_no_line() -> None:
    assert told([], [], (LEFT,)) == []
