"""How long an engine lets requests wait: those that it has served lately, and those that wait now."""

from __future__ import annotations

from dataclasses import dataclass, field

FRESH_SECONDS = 60.0
"""An observation says nothing of now after so long."""
_WEIGHT = 0.25
"""Of the newest observation in the mean."""


@dataclass(slots=True)
class Pace:
    """A moving mean of waits in seconds, forgotten when nothing new comes, and the waits that go on."""

    _seconds: float = 0.0
    _legs: float = 0.0
    _until: float | None = None
    _waiting: dict[object, float] = field(default_factory=dict)
    """Since when, the longest first."""

    def note(self, seconds: float, now: float, legs: int = 0) -> None:
        """One more request has waited for so long, which met so many legs in flight."""
        weight = 1.0 if self._mean(now) is None else _WEIGHT
        self._seconds += weight * (seconds - self._seconds)
        self._legs += weight * (legs - self._legs)
        self._until = now + FRESH_SECONDS

    @property
    def legs(self) -> float:
        """How many legs the requests that were noted have met."""
        return self._legs

    def waiting(self, since: float) -> Waiting:
        """A request waits as long as the block runs."""
        return Waiting(self, since)

    def begin(self, token: object, since: float) -> None:
        """A request waits until `end` is called for the same token."""
        self._waiting[token] = since

    def end(self, token: object) -> None:
        """It waits no more. Can be called again."""
        self._waiting.pop(token, None)

    def recent(self, now: float) -> float | None:
        """The mean, or the longest wait that has not ended if that is more; None when nothing is known.

        What has ended tells of an engine's past; one that has just become slow has not ended much.
        """
        mean = self._mean(now)
        if mean is None or not self._waiting:
            return mean
        return max(mean, now - next(iter(self._waiting.values())))

    def forget(self) -> None:
        """Another engine may be there now."""
        self._until = None

    def _mean(self, now: float) -> float | None:
        return None if self._until is None or now > self._until else self._seconds


class Waiting:
    """A context manager: in its block a request waits."""

    __slots__ = ("_pace", "_since")

    def __init__(self, pace: Pace, since: float) -> None:
        self._pace = pace
        self._since = since

    def __enter__(self) -> None:
        """It waits."""
        self._pace.begin(self, self._since)

    def __exit__(self, *raised: object) -> None:
        """It waits no more."""
        self._pace.end(self)
