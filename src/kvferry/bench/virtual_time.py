"""An event loop whose time jumps to the next timer: schedules are exact, and minutes pass in a moment.

Sockets work as long as everybody who talks runs in this loop: what one end has sent over loopback is there
for the other before time moves.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")

_PATIENCE_SECONDS = 2.0
"""Of real time: how long a loop without timers waits for a socket before it says that nothing will come."""
_LOOKS = 2
"""How often sockets are looked at before time moves: the kernel may deliver between two."""


class _Selector(selectors.DefaultSelector):
    """Waits for nothing: where no socket is ready, what it would have slept is added to the loop's time."""

    def __init__(self) -> None:
        super().__init__()
        self.passed_seconds = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        for _ in range(1 if timeout == 0 else _LOOKS):
            ready = super().select(0)
            if ready:
                return ready
        if timeout is not None:
            self.passed_seconds += max(timeout, 0.0)
            return []
        ready = super().select(_PATIENCE_SECONDS)
        if not ready:
            raise RuntimeError("every task waits for something that nothing will bring")
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs coroutines on virtual time, which starts at 1,000 seconds."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        """Seconds of virtual time."""
        return 1000.0 + self._virtual.passed_seconds


def run_virtually(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine to its end on virtual time.

    Raises:
        RuntimeError: it waits for something that nothing will bring.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
