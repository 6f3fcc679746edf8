"""Many waits that may each take equally long, with one timer for all: they end in the order they began in."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Protocol


class Bounded(Protocol):
    """What may take only so long."""

    def late(self) -> None:
        """Its time is over."""


class Timeouts:
    """Those that wait now, the longest first. Each costs an entry in a dictionary, and no timer."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._until: dict[Bounded, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._until)

    def __iter__(self) -> Iterator[Bounded]:
        return iter(tuple(self._until))

    def add(self, bounded: Bounded, since: float) -> None:
        """It waits since then, no earlier than those that were added before."""
        self._until[bounded] = since + self.seconds
        if self._timer is None:
            self._timer = self._loop.call_at(since + self.seconds, self._look)

    def discard(self, bounded: Bounded) -> None:
        """It waits no more, if it did."""
        self._until.pop(bounded, None)

    def close(self) -> None:
        """Nobody is told any more."""
        self._until.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        now = self._loop.time()
        while self._until:
            bounded, until = next(iter(self._until.items()))
            if until > now:
                self._timer = self._loop.call_at(until, self._look)
                return
            del self._until[bounded]
            # One that fails takes no other one along.
            self._loop.call_soon(bounded.late)
