"""A history as lines for people: long runs of renewals folded, and what never ends marked where it began."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence

from kvferry.protocol import messages as msg
from kvferry.simulator.ground import events as ev
from kvferry.simulator.ground.outcome import Violation, broken_words, plain
from kvferry.simulator.watch.trace import MessageReader, line

RUN_MAX = 12
"""So many lines of renewals one after the other are shown as they are."""
SHOWN = 4
"""Of a longer run: one renewal and its answer, each sent and arrived."""


def told(
    events: Sequence[ev.Observed],
    lines: Sequence[str],
    violations: Sequence[Violation],
    *,
    folded: bool = True,
) -> list[str]:
    """The lines of these events, one each, with marks; runs of renewals are folded where that is wanted."""
    marks = _marks(events, violations)
    routine = _routine(events) if folded else [False] * len(events)
    shown: list[str] = []
    start = 0
    while start < len(lines):
        stop = start + 1
        while routine[start] and stop < len(lines) and routine[stop] and stop not in marks:
            stop += 1
        run = lines[start:stop]
        shown += marks.get(start, [])
        if len(run) > RUN_MAX:
            until = events[stop - 1].at_seconds
            shown += [*run[:SHOWN], _left_out(len(run) - SHOWN, until)]
        else:
            shown += run
        start = stop
    return shown + marks.get(len(lines), [])


def _left_out(count: int, until: float) -> str:
    what = f"{count:,} lines of renewals and their answers, until {until:.6f}; --verbose shows them"
    return f"{'...':>11}  {'':<20}  {what}"


def _routine(events: Sequence[ev.Observed]) -> list[bool]:
    """Which events are renewals, or answers to them, that arrive."""
    reader = MessageReader()
    renewals: set[int] = set()
    found: list[bool] = []
    for event in events:
        routine = False
        if isinstance(event, ev.MessageSent):
            message = reader.read(event.rank, event.target, event.payload)
            routine = isinstance(message, msg.Renew | msg.Status)
            if routine:
                renewals.add(event.number)
        elif isinstance(event, ev.MessageEnded):
            routine = event.arrived and event.number in renewals
        found.append(routine)
    return found


def _marks(events: Sequence[ev.Observed], violations: Sequence[Violation]) -> dict[int, list[str]]:
    """Lines by the index of the event before which they stand."""
    times = [event.at_seconds for event in events]
    marks: dict[int, list[str]] = {}
    for at, words in sorted(_noted(events, violations)):
        marks.setdefault(bisect_right(times, at), []).append(words)
    return marks


def _noted(events: Sequence[ev.Observed], violations: Sequence[Violation]) -> Iterator[tuple[float, str]]:
    for violation in violations:
        at = violation.at_seconds
        if math.isfinite(at):
            label = "NEVER ENDS" if violation.unfinished else "VIOLATION"
            yield at, line(at, label, f"{broken_words(violation.promise)}: {plain(violation.what)}")
    if not any(violation.unfinished for violation in violations) or not events:
        return
    end = events[-1].at_seconds
    deadline = next((event.deadline_seconds for event in events if isinstance(event, ev.Healed)), math.inf)
    if deadline <= end:
        yield deadline, line(deadline, "DEADLINE", "everything should have ended by now")
    else:
        yield end, line(end, "GIVEN UP", "nothing ends any more; what is unfinished now stays so")
