"""Server-sent events: cutting a byte stream into events, reading and writing their data."""

from __future__ import annotations

import re

from kvferry.router.ground.errors import EventTooLongError

DONE = b"data: [DONE]\n\n"
_END = re.compile(rb"\n\r?\n")
_END_BYTES_MAX = 3


class EventSplitter:
    """Cuts a stream of bytes into whole events, each with its blank line."""

    def __init__(self, event_bytes_max: int) -> None:
        self._event_bytes_max = event_bytes_max
        self._rest = bytearray()
        self._searched = 0
        """How many bytes of the rest have no end in them: a long event is not searched again and again."""

    @property
    def empty(self) -> bool:
        """Whether no event has begun."""
        return not self._rest

    def feed(self, data: bytes) -> list[bytes]:
        """The events that `data` completes.

        Raises:
            EventTooLongError: an event, finished or not, is over the limit.
        """
        rest = self._rest
        rest += data
        events = []
        start = 0
        for end in _END.finditer(rest, self._searched):
            events.append(bytes(rest[start : end.end()]))
            start = end.end()
        del rest[:start]
        self._searched = max(len(rest) - _END_BYTES_MAX + 1, 0)
        if any(len(event) > self._event_bytes_max for event in (*events, rest)):
            raise EventTooLongError(f"an event has more than {self._event_bytes_max} bytes")
        return events


def data_of(event: bytes) -> bytes | None:
    """The data of an event; None for a comment or an event without data."""
    if event.startswith(b"data:") and event.count(b"\n") <= 2:
        return event[5:].strip()
    lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


def event_of(data: bytes) -> bytes:
    """An event that carries `data`, which has no line end."""
    return b"data: " + data + b"\n\n"
