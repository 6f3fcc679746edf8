"""What is going to happen, in order of time; things due together happen in the order they were planned."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

Action = Callable[[], object]


@dataclass(slots=True, eq=False)
class Entry:
    """One planned action; `cancel` makes it nothing."""

    at_seconds: float
    action: Action | None

    def cancel(self) -> None:
        """It shall not happen."""
        self.action = None


@dataclass(slots=True)
class Schedule:
    """Planned actions of one history."""

    _heap: list[tuple[float, int, Entry]] = field(default_factory=list)
    _count: int = 0

    def at(self, at_seconds: float, action: Action) -> Entry:
        """Plan an action."""
        entry = Entry(at_seconds, action)
        self._count += 1
        heapq.heappush(self._heap, (at_seconds, self._count, entry))
        return entry

    def next_due(self) -> float | None:
        """When the next action happens; None when there is none."""
        heap = self._heap
        while heap and heap[0][2].action is None:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def pop(self) -> Action:
        """Take the next action out; `next_due` has said that there is one."""
        action = heapq.heappop(self._heap)[2].action
        assert action is not None, "cancelled entries were dropped by next_due"
        return action
