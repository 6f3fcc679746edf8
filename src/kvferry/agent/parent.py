"""Whether this process has outlived the one that started it.

A rank whose engine is gone must post nothing more: peers count the engine as dead as soon as its side channel
refuses them, and allow only a moment for its orphans (`Limits.orphan_seconds`).
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable

from kvferry.errors import TransportError

LOOK_SECONDS = 0.1
"""How often to look; a system call each."""


class ParentWatch:
    """Looks now and then. A process that `multiprocessing` has not started has no parent to outlive."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._parent = multiprocessing.parent_process()
        self._clock = clock
        self._look_at = clock()

    def is_gone(self) -> bool:
        """Whether the parent has ended, as of at most `LOOK_SECONDS` ago."""
        if self._parent is None or self._clock() < self._look_at:
            return False
        self._look_at = self._clock() + LOOK_SECONDS
        return not self._parent.is_alive()

    def check(self) -> None:
        """Raise when the parent is gone.

        Raises:
            TransportError: it is.
        """
        if self.is_gone():
            raise TransportError("the engine that started this rank is gone")
