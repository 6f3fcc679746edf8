"""A progress bar with the time left: one line that rewrites itself, or lines where no terminal reads them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

BAR_CHARACTERS = 30
INTERVAL_SECONDS = 0.2
"""On a terminal; elsewhere a line comes every `LINE_INTERVAL_SECONDS`."""
LINE_INTERVAL_SECONDS = 30.0


class Progress:
    """Counts towards `total`; a context manager that leaves the terminal on a new line.

    Time left follows from the pace so far, or from `estimate_seconds` before there is one.
    """

    def __init__(
        self,
        total: float,
        unit: str,
        *,
        estimate_seconds: float | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total
        self._unit = unit
        self._estimate_seconds = estimate_seconds
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._began = clock()
        self._shown: float | None = None
        self._done = 0.0
        self._doing = ""
        self._terminal = self._stream.isatty()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._show()
        if self._terminal:
            self._stream.write("\n")
            self._stream.flush()

    def advance(self, amount: float = 1) -> None:
        """So much more is done."""
        self._done += amount
        self._show_if_due()

    def doing(self, what: str) -> None:
        """What is being done now."""
        self._doing = what
        self._show_if_due()

    def say(self, line: str) -> None:
        """A line that stays, above the bar."""
        self._stream.write(f"\r\x1b[K{line}\n" if self._terminal else f"{line}\n")
        self._stream.flush()

    def line(self) -> str:
        """The bar as it stands."""
        share = min(1.0, self._done / self._total) if self._total else 1.0
        filled = round(share * BAR_CHARACTERS)
        bar = "#" * filled + "." * (BAR_CHARACTERS - filled)
        left = self.seconds_left()
        parts = [f"[{bar}] {self._done:g} of {self._total:g} {self._unit}"]
        parts += [f"{_clocked(left)} left"] if left is not None else []
        parts += [self._doing] if self._doing else []
        return ", ".join(parts)

    def seconds_left(self) -> float | None:
        """By the pace so far, or the estimate; None when neither is known."""
        passed = self._clock() - self._began
        if self._done > 0:
            return max(0.0, passed * (self._total - self._done) / self._done)
        return None if self._estimate_seconds is None else max(0.0, self._estimate_seconds - passed)

    def _show_if_due(self) -> None:
        interval = INTERVAL_SECONDS if self._terminal else LINE_INTERVAL_SECONDS
        if self._shown is None or self._clock() - self._shown >= interval:
            self._show()

    def _show(self) -> None:
        self._shown = self._clock()
        line = self.line()
        self._stream.write(f"\r\x1b[K{line}" if self._terminal else f"{line}\n")
        self._stream.flush()


def _clocked(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
