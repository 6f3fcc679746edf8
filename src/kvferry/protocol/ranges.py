"""A set of token ranges that have arrived or left, in any order."""

from __future__ import annotations

from bisect import bisect_left


class Ranges:
    """Disjoint half-open ranges; touching ones are joined, so a prefix that grows in order is one range."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, start: int, stop: int) -> None:
        """Add `[start, stop)`; overlaps are allowed."""
        if start >= stop:
            return
        first = bisect_left(self._stops, start)
        last = first
        while last < len(self._starts) and self._starts[last] <= stop:
            start, stop = min(start, self._starts[last]), max(stop, self._stops[last])
            last += 1
        self._starts[first:last] = [start]
        self._stops[first:last] = [stop]

    def reach(self, start: int) -> int:
        """The end of what is covered without a gap from `start` on; `start` itself when nothing is."""
        at = bisect_left(self._stops, start + 1)
        if at < len(self._starts) and self._starts[at] <= start:
            return self._stops[at]
        return start
