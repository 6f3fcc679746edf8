"""How long an engine has lately let requests wait."""

from __future__ import annotations

from dataclasses import dataclass

FRESH_SECONDS = 60.0
"""An observation says nothing of now after so long."""
_WEIGHT = 0.25
"""Of the newest observation in the mean."""


@dataclass(slots=True)
class Pace:
    """A moving mean of waits in seconds, forgotten when nothing new comes."""

    _seconds: float = 0.0
    _until: float | None = None

    def note(self, seconds: float, now: float) -> None:
        """One more request has waited for so long."""
        before = self.recent(now)
        self._seconds = seconds if before is None else before + _WEIGHT * (seconds - before)
        self._until = now + FRESH_SECONDS

    def recent(self, now: float) -> float | None:
        """The mean; None when nothing was noted lately."""
        return None if self._until is None or now > self._until else self._seconds

    def forget(self) -> None:
        """Another engine may be there now."""
        self._until = None
