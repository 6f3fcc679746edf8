"""A clock for the emulated device that only moves when somebody sleeps or a test moves it."""

from __future__ import annotations

import threading


class FakeClock:
    """Time that passes only by sleeping: in `sleep` at once, in a bounded `wait` when it is let pass."""

    def __init__(self) -> None:
        self._now = 100.0
        self._moved = threading.Condition()

    def now(self) -> float:
        """The time."""
        return self._now

    def sleep(self, seconds: float) -> None:
        """Let so much time pass, at once."""
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Let so much time pass, and wake whoever waited for it."""
        with self._moved:
            self._now += seconds
            self._moved.notify_all()

    def wait(self, condition: threading.Condition, seconds: float | None) -> None:
        """Wait on a held condition until it is notified, or until time was let pass."""
        if seconds is None:
            condition.wait()
            return
        due = self._now + seconds
        condition.release()
        try:
            with self._moved:
                self._moved.wait_for(lambda: self._now >= due)
        finally:
            condition.acquire()
