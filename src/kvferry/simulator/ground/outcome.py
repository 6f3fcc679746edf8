"""What a simulated history came to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

TransitionKey = tuple[str, str, str]
"""Machine (source, delivery, reception, part), state, event."""
CellKey = tuple[str, str]
"""Stage and fault of the grid."""

ITEMS_MAX = 3000
"""Workload items count from 0, faults by chance from 1000, aims from 2000. What always happens lies above."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A promise that did not hold. `promise` is its number in the design (1 to 8), 0 for a broken invariant
    or an exception of the code under test."""

    promise: int
    at_seconds: float
    what: str
    unfinished: bool = False
    """Whether it is something that never happened, which only the end of the history shows."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A violation, and those that follow from it."""

    violation: Violation
    consequences: tuple[Violation, ...] = ()


def _urgency(violation: Violation) -> tuple[bool, float]:
    """What is owed to somebody says more than who has not ended, and since it began."""
    return "owed since" not in violation.what, violation.at_seconds


def findings(violations: Sequence[Violation]) -> tuple[Finding, ...]:
    """What is unfinished at the end as one finding: one thing that hangs keeps others, blocks and table rows.

    It is told by what has been owed for longest. Other violations are findings by themselves.
    """
    unfinished = sorted((one for one in violations if one.unfinished), key=_urgency)
    found: list[Finding] = []
    for violation in violations:
        if not violation.unfinished:
            found.append(Finding(violation))
        elif unfinished:
            found.append(Finding(unfinished[0], tuple(unfinished[1:])))
            unfinished = []
    return tuple(found)


def plain(text: str) -> str:
    """A text with ranks' names as people read them: `kvferry/P0/i1/pp0/tp1` is P0/i1/tp1."""
    return re.sub(r"\bkvferry/(\S+?)/pp0/", r"\1/", text)


def broken_words(promise: int) -> str:
    """What was broken, for people."""
    return f"promise {promise}" if promise else "an error"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One history. Pickles, so that worker processes can return it."""

    seed: int
    violations: tuple[Violation, ...]
    trace_hash: str
    """Of every observed event, in order; the same seed, options and code give the same."""
    events: int
    virtual_seconds: float
    transfers: int
    outcomes: dict[str, int] = field(default_factory=dict)
    transitions: dict[TransitionKey, int] = field(default_factory=dict)
    cells: dict[CellKey, int] = field(default_factory=dict)
    items: tuple[tuple[int, str], ...] = ()
    """Number and words of each workload item and random fault of this history, for `Options.drop`."""
    trace: tuple[str, ...] = ()
    """Readable lines; only when asked for."""
