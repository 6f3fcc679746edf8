"""When each request passed each stage on this engine: one row per request, when it has ended.

Used on the engine's thread only, but for `transfer`. A stage that a request passes again, after a preemption
say, keeps its first time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

from kvferry.emulator.journal import Row, WallClock

Stage = Literal[
    "arrived", "scheduled", "allocated", "received", "prefill_end", "first_step", "first_token", "finished"
]


class Timelines:
    """The requests that have reached the engine and have not ended. Their number is the engine's to bound."""

    def __init__(self, append: Callable[[Row], None], wall: WallClock | None = None) -> None:
        self._append = append
        self._wall = wall or WallClock()
        self._open: dict[str, dict[str, Any]] = {}

    def arrive(self, request: str, prompt_tokens: int) -> None:
        """A request has reached the scheduler."""
        self._open[request] = {"kind": "request", "request": request, "prompt_tokens": prompt_tokens}
        self.reach(request, "arrived")

    def reach(self, request: str, stage: Stage, at: float | None = None) -> None:
        """A request has reached a stage; `at` on the monotonic clock, now unless given."""
        row = self._open.get(request)
        if row is not None:
            row.setdefault(f"{stage}_ns", self._now(at))

    def finish(self, request: str, status: str, output_tokens: int) -> None:
        """A request has ended; its row is written."""
        self.reach(request, "finished")
        row = self._open.pop(request, None)
        if row is not None:
            self._append({**row, "status": status, "output_tokens": output_tokens})

    def note(self, kind: str, request: str) -> None:
        """Something that may come after a request's end."""
        self._append({"kind": kind, "request": request, "at_ns": self._now(None)})

    def step(self, *, start: float, end: float, seen: float, idle: float, **fields: int) -> None:
        """A step: its modelled start and end, and when the engine's thread saw that it had ended.

        `idle`: how long the device had nothing to do before it, because the engine came too late with it.
        """
        self._append(
            {
                "kind": "step",
                "at_ns": self._now(end),
                "intended_seconds": round(end - start, 6),
                "actual_seconds": round(seen - start, 6),
                "idle_seconds": round(idle, 6),
                **fields,
            }
        )

    def transfer(self, *, posted: float, **fields: object) -> None:
        """A transfer that has just been seen done. Any thread."""
        done = self._now(None)
        self._append({"kind": "transfer", "posted_ns": self._now(posted), "done_ns": done, **fields})

    def _now(self, at: float | None) -> int:
        return self._wall.ns(time.monotonic() if at is None else at)
