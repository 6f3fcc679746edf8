"""One table of deadlines for a core. Setting a key again moves it; no two deadlines share a key."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Timers(Generic[Key]):
    """Deadlines ordered by time whatever order they were set or moved in.

    Moved and cancelled entries stay in the heap until they surface; the heap is rebuilt when they
    outnumber the live ones, so memory is bounded by the number of live keys.
    """

    def __init__(self) -> None:
        self._due: dict[Key, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self._due)

    def __contains__(self, key: Key) -> bool:
        return key in self._due

    def set(self, key: Key, when: float) -> None:
        """Arm `key` for `when`, instead of any earlier or later deadline that it had."""
        entry = (when, next(self._order))
        self._due[key] = entry
        heapq.heappush(self._heap, (*entry, key))
        if len(self._heap) > 64 and len(self._heap) > 2 * len(self._due):
            self._heap = [(when, order, key) for key, (when, order) in self._due.items()]
            heapq.heapify(self._heap)

    def cancel(self, key: Key) -> None:
        """Disarm `key`; unknown keys are ignored."""
        self._due.pop(key, None)

    def next_due(self) -> float | None:
        """The earliest deadline, None when nothing is armed."""
        self._drop_stale()
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> list[Key]:
        """Disarm and return every key whose deadline is at or before `now`, in order of deadline."""
        due = []
        while (when := self.next_due()) is not None and when <= now:
            key = heapq.heappop(self._heap)[2]
            del self._due[key]
            due.append(key)
        return due

    def _drop_stale(self) -> None:
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][:2]:
            heapq.heappop(self._heap)
