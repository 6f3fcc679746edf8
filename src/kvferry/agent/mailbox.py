"""The queue from an engine's main thread to the agent's thread.

Neither end waits for the other: `put` appends and rings, `drain` takes everything. Admission of new
transfers is what bounds it, since all other commands belong to a transfer that was admitted.

The engine's thread must not even wait for a lock that the agent's thread holds: it would give up the
interpreter for it, and get it back when the agent has done its work. So the bell is a bare lock that is held
while nothing has arrived; to ring is to release it, which never waits.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from kvferry.protocol.commands import Command

Item = TypeVar("Item")


class Gated(msgspec.Struct, frozen=True):
    """A command that holds only once `ready` says so: a device event has completed.

    Commands of the producer side that follow it wait behind it, so that their order stays.
    """

    command: Command
    ready: Callable[[], bool]


class Mailbox(Generic[Item]):
    """An unbounded-by-itself queue with one reader, which can sleep until something arrives."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._bell = threading.Lock()
        self._bell.acquire()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Item) -> None:
        """Append and wake the reader. Any thread."""
        self._items.append(item)
        # A bell that rings still was rung for a reader that has not looked yet: it will see this item too.
        if self._bell.locked():
            self._ring()

    def drain(self) -> list[Item]:
        """Everything that has arrived, in order. The reader's thread."""
        self._bell.acquire(blocking=False)
        return [self._items.popleft() for _ in range(len(self._items))]

    def wake(self) -> None:
        """End the reader's sleep without an item."""
        self._ring()

    def wait(self, timeout_seconds: float) -> bool:
        """Sleep until something arrives; False when the time is over first. The reader's thread."""
        return bool(self._items) or self._bell.acquire(timeout=max(timeout_seconds, 0.0))

    def _ring(self) -> None:
        try:
            self._bell.release()
        except RuntimeError:
            # Another thread has rung it in the meantime.
            return
