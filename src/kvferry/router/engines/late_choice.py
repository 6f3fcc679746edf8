"""What it is worth to choose the decode engine after prefill: measured for every prompt, in either mode.

When a prompt's prefill ends, the router compares two engines by what it knows then: the one that an early
choice has taken, or would have taken, and the one that a late choice takes. How much sooner the first token
is expected at the latter is what a late choice has gained, or would have.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.router.engines.pace import FRESH_SECONDS

_WEIGHT = 0.03
"""Of the newest observation in the mean: most gain nothing, few a lot. The first ones weigh the same each."""


@dataclass(slots=True)
class LateChoice:
    """A moving mean of gains, forgotten when nothing new comes."""

    _seconds: float = 0.0
    _count: int = 0
    _until: float | None = None

    def note(self, seconds: float, now: float) -> None:
        """One more prompt's late choice was worth so much; less than 0 where it was the worse one."""
        self._count = 1 if self.worth(now) is None else self._count + 1
        self._seconds += max(_WEIGHT, 1 / self._count) * (seconds - self._seconds)
        self._until = now + FRESH_SECONDS

    def worth(self, now: float) -> float | None:
        """What to expect of the next one in seconds; None when nothing is known."""
        return None if self._until is None or now > self._until else self._seconds
