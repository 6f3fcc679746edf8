"""When an engine must give something up, because it and another engine wait for each other's memory.

One engine's blocks are leased to requests that wait for memory on a second one, whose own memory waits for
prefills that find no block on the first. Each of these waits is right by itself and none of them ends. An
engine that is part of it computes nothing, though requests of its own ask for memory.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Starvation:
    """How long an engine has been stuck. `limit_seconds` is `Limits.starved_seconds`."""

    limit_seconds: float
    _since: float | None = None

    def is_over(self) -> None:
        """The engine computes something, or nobody asks it to; `is_due` need not be asked then."""
        self._since = None

    def is_due(self, now: float, *, stuck: bool) -> bool:
        """Whether it is time to give something up; asked once per step, and again a limit later."""
        if not stuck:
            self._since = None
            return False
        if self._since is None:
            self._since = now
        if now - self._since < self.limit_seconds:
            return False
        self._since = now
        return True
