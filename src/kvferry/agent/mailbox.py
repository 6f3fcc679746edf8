"""The two queues between an engine's main thread and the agent's thread.

Neither end waits for the other: `put` appends and wakes, `drain` takes everything. Admission of new
transfers is what bounds them, since all other commands belong to a transfer that was admitted.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvferry.protocol.commands import Command

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Gated:
    """A command that holds only once `ready` says so: a device event has completed.

    Commands of the producer side that follow it wait behind it, so that their order stays.
    """

    command: Command
    ready: Callable[[], bool]


class Mailbox(Generic[Item]):
    """An unbounded-by-itself queue with one reader, which can sleep until something arrives."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._arrived = threading.Event()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Item) -> None:
        """Append and wake the reader. Any thread."""
        self._items.append(item)
        self._arrived.set()

    def drain(self) -> list[Item]:
        """Everything that has arrived, in order. The reader's thread."""
        self._arrived.clear()
        items = []
        while self._items:
            items.append(self._items.popleft())
        return items

    def wake(self) -> None:
        """End the reader's sleep without an item."""
        self._arrived.set()

    def wait(self, timeout_seconds: float) -> bool:
        """Sleep until something arrives; False when the time is over first."""
        return self._arrived.wait(timeout_seconds)
