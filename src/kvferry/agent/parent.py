"""Whether this process has outlived the one that started it.

A rank whose engine is gone must post nothing more: peers count the engine as dead as soon as its side channel
refuses them, and allow only a moment for its orphans (`Limits.orphan_seconds`).

What is watched is the process that started ours by `multiprocessing`, as an engine does with its ranks. A
rank that was not started so is its engine's own process, and ends with it; where that is not so (Ray, several
nodes), the engine's directory says so, and its end proves nothing of the rank.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable

from kvferry.errors import TransportError

LOOK_SECONDS = 0.1
"""How often to look while nothing is posted."""


class ParentWatch:
    """Looks now and then, and before each post.

    A process that `multiprocessing` has not started has no parent to outlive. It may be a shell, which ends.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._parent = multiprocessing.parent_process()
        # A fork server stands between: then only the parent's own sign tells that it has ended.
        self._is_child = self._parent is not None and self._parent.pid == os.getppid()
        self._clock = clock
        self._look_at = clock()

    def is_gone(self) -> bool:
        """Whether the parent has ended, as of now if we are its child, else of at most `LOOK_SECONDS` ago."""
        if self._parent is None:
            return False
        if self._is_child and os.getppid() != self._parent.pid:
            return True
        if self._clock() < self._look_at:
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

    def check_now(self) -> None:
        """As `check`, and always as of now: what follows cannot be taken back. A system call or a few.

        Raises:
            TransportError: the parent is gone.
        """
        if not self._is_child:
            self._look_at = self._clock()
        self.check()
