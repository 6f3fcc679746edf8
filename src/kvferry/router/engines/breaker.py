"""A circuit breaker per engine: one that keeps failing is left alone, then tried with one request. Pure.

Closed: requests go to the engine. After enough failures in a row it opens, for a time that doubles with each
opening up to a bound. When that is over one request is let through: its success closes the breaker, its
failure opens it again, and as long as neither has come the next trial waits as long as an opening.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

FAILURES_MAX = 5
"""So many failures in a row open it."""
OPEN_SECONDS = 1.0
OPEN_SECONDS_MAX = 30.0


class BreakerState(enum.StrEnum):
    """What a breaker lets through."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(slots=True)
class Breaker:
    """One engine's."""

    _failures: int = 0
    """In a row."""
    _openings: int = 0
    """In a row, without a success."""
    _until: float | None = None
    """When the next trial may be made; None while closed."""
    _trying: bool = False
    """Whether something was sent since it has opened last."""

    def state(self, now: float) -> BreakerState:
        """What it lets through now."""
        if self._until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._until else BreakerState.HALF_OPEN

    def permits(self, now: float) -> bool:
        """Whether a request may be sent."""
        return self._until is None or now >= self._until

    def sent(self, now: float) -> None:
        """A request is sent: if it is a trial, no other one is for a while."""
        if self._until is not None:
            self._until = now + self._open_seconds()
            self._trying = True

    def succeeded(self) -> None:
        """The engine has answered, be it with a rejection."""
        self._failures = self._openings = 0
        self._until = None
        self._trying = False

    def failed(self, now: float) -> None:
        """The engine has failed a request that it had accepted."""
        if self._until is not None and not self._trying:
            # It was sent before the breaker opened: one fault of an engine fails all that is open there.
            return
        self._failures += 1
        if self._trying or self._failures >= FAILURES_MAX:
            self._openings += 1
            self._until = now + self._open_seconds()
            self._trying = False

    def reset(self) -> None:
        """Another process is behind the address."""
        self.succeeded()

    def _open_seconds(self) -> float:
        return min(OPEN_SECONDS * 2.0 ** min(self._openings - 1, 10), OPEN_SECONDS_MAX)
