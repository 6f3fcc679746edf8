"""Virtual time, and what the clock of one process makes of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TrueClock:
    """Seconds since the history began. Only the world's main loop moves it."""

    now: float = 0.0

    def __call__(self) -> float:
        """Read it."""
        return self.now


@dataclass(frozen=True, slots=True)
class ProcessClock:
    """A monotonic clock that started somewhere and runs a little fast or slow."""

    true: TrueClock
    offset_seconds: float = 0.0
    rate: float = 1.0

    def __call__(self) -> float:
        """Read it."""
        return self.offset_seconds + self.rate * self.true.now

    def true_at(self, reading_seconds: float) -> float:
        """When this clock shows a reading, or just after it: never so early that a deadline is missed."""
        # A clock far from zero has coarse readings; a microsecond covers them.
        return (reading_seconds - self.offset_seconds) / self.rate + 1e-6
