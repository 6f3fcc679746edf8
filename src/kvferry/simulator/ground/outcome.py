"""What a simulated history came to."""

from __future__ import annotations

from dataclasses import dataclass, field

TransitionKey = tuple[str, str, str]
"""Machine (source, delivery, reception, part), state, event."""
CellKey = tuple[str, str]
"""Stage and fault of the grid."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A promise that did not hold. `promise` is its number in the design (1 to 8), 0 for a broken invariant
    or an exception of the code under test."""

    promise: int
    at_seconds: float
    what: str


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
