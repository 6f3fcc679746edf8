"""What may be chosen of a history besides its seed."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.errors import UsageError

WORLDS = ("small", "both", "wide", "tall", "long", "calm")
"""Names of the worlds; `world.shape` says what each is."""

FAULTS = (
    "abort",
    "clock",
    "connection",
    "crash",
    "directory",
    "late_write",
    "leg_late",
    "leg_missing",
    "longer_prompt",
    "mailbox",
    "message_doubled",
    "message_late",
    "message_lost",
    "partition",
    "post_broken",
    "post_failed",
    "post_late",
    "post_refused",
    "post_stalled",
    "preempt",
    "replay",
    "stale_incarnation",
    "stall_agent",
    "stall_engine",
    "table",
)
"""Kinds of faults, each of which can be switched off."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of one history.

    Raises:
        UsageError: an unknown world or fault.
    """

    world: str = "small"
    faults: frozenset[str] = frozenset(FAULTS)
    drop: frozenset[int] = frozenset()
    """Numbers of workload items and random faults that are left out; `Outcome.items` names them."""

    def __post_init__(self) -> None:
        """Refuse unknown names."""
        if self.world not in WORLDS:
            raise UsageError(f"world {self.world!r} is unknown; use one of {', '.join(WORLDS)}")
        unknown = sorted(self.faults - set(FAULTS))
        if unknown:
            raise UsageError(f"faults {', '.join(unknown)} are unknown; use some of {', '.join(FAULTS)}")
