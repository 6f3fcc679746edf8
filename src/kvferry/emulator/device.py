"""The emulated device: work is done in order, and each piece is complete only after its modelled time.

A submission takes its place on one timeline: it starts when the piece before it ends, or at once on an idle
device. What it does to memory runs on the device's own thread, timed so that it is done by the modelled end:
a real device writes its KV during the step, not after it. The `Mark` of a submission is reached when its
modelled end has passed *and* its memory work, and all before it, is done. So a mark is never early, and it is
late only where this machine could not do in time what the device would have done.

Any thread may ask a mark or wait for it; only one, the engine's, submits. Nothing polls: a waiting thread
sleeps until the modelled end, and the device's thread until its next work is due.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvferry.agent.threads import show_name

logger = logging.getLogger(__name__)

Work = Callable[[], None]
MARGIN_SECONDS = 1e-3
"""Work begins at least so long before it must be done: waking up takes time too."""
_SMOOTHING = 0.3


class Clock(Protocol):
    """Monotonic seconds."""

    def now(self) -> float:
        """The time."""
        ...

    def sleep(self, seconds: float) -> None:
        """Let so much time pass."""
        ...

    def wait(self, condition: threading.Condition, seconds: float | None) -> None:
        """Wait on a held condition until it is notified or the time has passed."""
        ...


class MonotonicClock:
    """The host's clock."""

    def now(self) -> float:
        """The time."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Let so much time pass."""
        time.sleep(seconds)

    def wait(self, condition: threading.Condition, seconds: float | None) -> None:
        """Wait on a held condition until it is notified or the time has passed."""
        condition.wait(seconds)


class DeviceError(Exception):
    """Memory work of a step has raised; the step's result does not exist."""


class Mark:
    """A point on the device's timeline."""

    __slots__ = ("_device", "_works", "end", "start")

    def __init__(self, device: Device, start: float, end: float, works: int) -> None:
        self._device = device
        self._works = works
        self.start = start
        """Modelled start of the work before this point, on the device's clock."""
        self.end = end
        """Modelled time of this point."""

    def ready(self) -> bool:
        """Whether the device has passed this point."""
        return self._device.has_done(self._works) and self._device.clock.now() >= self.end

    def wait(self) -> float:
        """Wait until the device has passed this point; the time when it was seen to.

        Raises:
            DeviceError: memory work before this point has failed.
        """
        return self._device.wait(self._works, self.end)


@dataclass(slots=True)
class _Queued:
    due: float
    """When the work must be done."""
    units: int
    work: Work


class Device:
    """One rank's device."""

    def __init__(self, clock: Clock | None = None, *, name: str = "kvferry-device") -> None:
        self.clock: Clock = clock or MonotonicClock()
        self._free_at = self.clock.now()
        self._condition = threading.Condition()
        self._queue: deque[_Queued] = deque()
        self._submitted = 0
        self._done = 0
        self._failure: BaseException | None = None
        self._closed = False
        self._unit_seconds = 0.0
        self._last = Mark(self, self._free_at, self._free_at, 0)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def last(self) -> Mark:
        """The end of everything that has been submitted."""
        return self._last

    def submit(
        self,
        seconds: float,
        *,
        at_start: Work | None = None,
        at_end: Work | None = None,
        units: int = 0,
    ) -> Mark:
        """Put `seconds` of compute on the timeline; the mark of their end.

        Args:
            seconds: how long the device would compute.
            at_start: memory work that must precede the compute, such as reading what it works on.
            at_end: memory work that is its result.
            units: how large `at_end` is, in any unit that its duration is in proportion to.
        """
        start = max(self.clock.now(), self._free_at)
        end = start + seconds
        self._free_at = end
        with self._condition:
            for due, size, work in ((start, 0, at_start), (end, units, at_end)):
                if work is not None:
                    self._queue.append(_Queued(due, size, work))
                    self._submitted += 1
            self._last = Mark(self, start, end, self._submitted)
            self._condition.notify_all()
        return self._last

    def has_done(self, works: int) -> bool:
        """Whether so many pieces of memory work are done. Takes no lock."""
        return self._done >= works

    def wait(self, works: int, end: float) -> float:
        """Wait for so many pieces of memory work and for a time; see `Mark.wait`."""
        if self._done < works:
            with self._condition:
                while self._done < works and self._failure is None and not self._closed:
                    self.clock.wait(self._condition, None)
        if self._failure is not None:
            raise DeviceError(f"memory work on the emulated device has failed: {self._failure}") from (
                self._failure
            )
        if self._done < works:
            raise DeviceError("the emulated device was closed before the work was done")
        while (now := self.clock.now()) < end:
            self.clock.sleep(end - now)
        return now

    def close(self) -> None:
        """Stop the thread; work that has not begun is dropped. Idempotent."""
        with self._condition:
            self._closed = True
            self._queue.clear()
            self._condition.notify_all()
        self._thread.join()

    def _run(self) -> None:
        show_name()
        while True:
            queued = self._next()
            if queued is None:
                return
            begun = self.clock.now()
            try:
                queued.work()
            except Exception as error:
                # It is raised to whoever waits for the step, which is the engine's own thread.
                logger.exception("memory work on the emulated device has failed")
                self._failure = error
            self._learn(queued.units, self.clock.now() - begun)
            with self._condition:
                self._done += 1
                self._condition.notify_all()

    def _next(self) -> _Queued | None:
        """The next work, when it is time for it; None when the device is closed."""
        with self._condition:
            while not self._closed:
                if not self._queue:
                    self.clock.wait(self._condition, None)
                    continue
                first = self._queue[0]
                ahead = first.due - self._lead(first.units) - self.clock.now()
                if ahead <= 0:
                    return self._queue.popleft()
                self.clock.wait(self._condition, ahead)
        return None

    def _lead(self, units: int) -> float:
        """How long before its time a work of this size begins; one without a size waits for its time."""
        return self._unit_seconds * units + MARGIN_SECONDS if units else 0.0

    def _learn(self, units: int, seconds: float) -> None:
        if units:
            measured = seconds / units
            known = self._unit_seconds
            self._unit_seconds = measured if not known else known + _SMOOTHING * (measured - known)
