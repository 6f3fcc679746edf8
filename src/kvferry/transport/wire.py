"""What is under way between nodes of a memory fabric: events in order of their due time.

Deterministic for one seed: events due at the same time come in an order drawn from the given random source,
except that messages of one link keep their order. Not thread-safe; the fabric locks.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from kvferry.ids import PeerName

LinkKey = tuple[PeerName, PeerName]
"""`(from, to)`, the direction in which bytes move."""


class Traffic(enum.Enum):
    """What moves on a link; each kind can be held back alone."""

    POSTS = "posts"
    MESSAGES = "messages"


@dataclass(slots=True)
class Event:
    """One thing that lands. `action` does it; `due` is clock seconds."""

    due: float
    link: LinkKey
    traffic: Traffic
    action: Callable[[], None]
    overtakes: bool = False
    """A message that need not wait for earlier ones of its link."""


class Wire:
    """A queue of events; links can be blocked for any number of named reasons."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._heap: list[tuple[float, float, int, Event]] = []
        self._pushed = 0
        self._last_message: dict[LinkKey, tuple[float, float]] = {}
        self._reasons: dict[tuple[LinkKey, Traffic], set[str]] = {}
        self._waiting: dict[tuple[LinkKey, Traffic], list[Event]] = {}

    def __len__(self) -> int:
        return len(self._heap) + sum(len(events) for events in self._waiting.values())

    def push(self, event: Event) -> None:
        """Queue an event; on a blocked link it waits for `unblock`."""
        key = (event.link, event.traffic)
        if self._reasons.get(key):
            self._waiting.setdefault(key, []).append(event)
            return
        place = (event.due, self._random.random())
        if event.traffic is Traffic.MESSAGES and not event.overtakes:
            last = self._last_message.get(event.link)
            if last is not None and last[0] >= event.due:
                place = last
            self._last_message[event.link] = place
        self._pushed += 1
        heapq.heappush(self._heap, (*place, self._pushed, event))

    def block(self, link: LinkKey, traffic: Traffic, reason: str) -> None:
        """Hold back what is under way on a link and what will be."""
        key = (link, traffic)
        self._reasons.setdefault(key, set()).add(reason)
        staying = []
        for entry in sorted(self._heap):
            event = entry[3]
            if (event.link, event.traffic) == key:
                self._waiting.setdefault(key, []).append(event)
            else:
                staying.append(entry)
        self._heap = staying
        if traffic is Traffic.MESSAGES:
            self._last_message.pop(link, None)

    def unblock(self, link: LinkKey, traffic: Traffic, reason: str, now: float) -> None:
        """Take one reason away; with the last one gone, what waited becomes due at `now` or later."""
        key = (link, traffic)
        reasons = self._reasons.get(key, set())
        reasons.discard(reason)
        if reasons:
            return
        self._reasons.pop(key, None)
        for event in self._waiting.pop(key, []):
            event.due = max(event.due, now)
            self.push(event)

    def next_due(self) -> float | None:
        """When the next event that nothing holds back is due."""
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> Event | None:
        """The next event that is due by `now`."""
        if not self._heap or self._heap[0][0] > now:
            return None
        return heapq.heappop(self._heap)[3]
