"""An event loop whose time jumps to the next timer, so that schedules are tested to the microsecond."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class _Selector(selectors.SelectSelector):
    """Waits for nothing: what it would have slept is added to the loop's time."""

    def __init__(self) -> None:
        super().__init__()
        self.passed_seconds = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("every task waits for something that nothing will bring")
        self.passed_seconds += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs coroutines without I/O on virtual time, which starts at 1,000 seconds."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return 1000.0 + self._virtual.passed_seconds


def run_virtually(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine to its end on virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
