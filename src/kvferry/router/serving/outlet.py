"""Where a streamed answer goes: to the client, and into the books."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from kvferry.router.http.server import Reply
from kvferry.router.record.metrics import RouterMetrics
from kvferry.router.record.timeline import Timeline

_EVENT_STREAM = "text/event-stream; charset=utf-8"


class StreamOutlet:
    """Sends a stream's pieces, and measures the time before and between them."""

    def __init__(self, reply: Reply, request_id: str, timeline: Timeline, metrics: RouterMetrics) -> None:
        self._reply = reply
        self._headers = {
            "X-Request-Id": request_id,
            "Content-Type": _EVENT_STREAM,
            "Cache-Control": "no-cache",
        }
        self._timeline = timeline
        self._metrics = metrics
        self._between = metrics.itl.labels()
        self._clock = asyncio.get_running_loop().time
        self._before = 0.0

    def write(self, piece: bytes) -> bool:
        """Send a piece; whether the client is behind with reading.

        Nothing is promised before the first one, so a failure until then has a status.
        """
        self._note()
        return self._reply.write(piece)

    def end(self, piece: bytes) -> None:
        """Send the last piece, which may be the only one."""
        self._note()
        self._reply.end(piece)

    def _note(self) -> None:
        now = self._clock()
        if self._before:
            self._between.observe(now - self._before)
        else:
            self._reply.begin(self._headers)
            self._timeline.first_byte = now
            self._metrics.ttft.observe(now - self._timeline.arrived)
        self._before = now

    def room(self) -> Awaitable[None]:
        """Wait until the client has caught up."""
        return self._reply.room()

    def when_room(self, resume: Callable[[], None]) -> None:
        """Call `resume` once when it has."""
        self._reply.when_room(resume)
