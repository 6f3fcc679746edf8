"""An answer of an engine, read as it comes: awaited piece by piece, or poured into a function."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from kvferry.router.http import awaiting
from kvferry.router.http.failures import ConnectError, LostError
from kvferry.router.http.messages import Headers

_AHEAD_BYTES_MAX = 256 << 10
"""How much of an answer may wait to be read."""


class Source(Protocol):
    """What an answer comes from."""

    def hold(self) -> None:
        """Read no more for now."""

    def go_on(self) -> None:
        """Read again."""

    def abort(self) -> None:
        """Close the connection at once."""


class Answer:
    """An answer that arrives; `close` it in every case."""

    __slots__ = (
        "_ahead_bytes", "_chunks", "_held", "_loop", "_waiter",
        "connection", "ended", "failure", "headers", "sink", "status",
    )  # fmt: skip

    def __init__(self, connection: Source, loop: asyncio.AbstractEventLoop) -> None:
        self.status = 0
        self.headers: Headers = {}
        self.connection = connection
        self._loop = loop
        self._chunks: list[bytes] = []
        self._ahead_bytes = 0
        self._held = False
        self.ended = False
        """Whether the whole of it has arrived."""
        self.failure: LostError | ConnectError | None = None
        """Why no more comes, when the answer is not complete."""
        self.sink: Callable[[bytes], None] | None = None
        """Who is given what arrives; it may name another one."""
        self._waiter: asyncio.Future[None] | None = None

    @property
    def content_type(self) -> str:
        """Its media type, without parameters; empty when it tells none."""
        return self.header(b"content-type").partition(";")[0].strip().lower()

    def head(self) -> Awaitable[None]:
        """Wait for status and headers.

        Raises:
            ConnectError: there is no connection.
            LostError: the connection ends before.
        """
        return awaiting.head(self)

    def read(self) -> Awaitable[bytes]:
        """What has arrived since, at least one byte; empty after the end.

        Raises:
            LostError: the connection ended before the answer did.
        """
        return awaiting.read(self)

    def pour(self, sink: Callable[[bytes], None]) -> None:
        """Give what has arrived, and all that will, to `sink`; an empty piece says that no more comes.

        After that `failure` tells whether the answer is complete.
        """
        self.sink = sink
        if self._chunks:
            sink(self.taken())
        if self.ended or self.failure is not None:
            self._told_end()

    def stop_pouring(self, pieces: Sequence[bytes] = ()) -> None:
        """Give nothing more to the sink; the `pieces` that it has not used can be read again."""
        self.sink = None
        self._chunks[:0] = pieces

    def header(self, name: bytes) -> str:
        """A header by its name in lower case; empty when it is absent."""
        return self.headers.get(name, b"").decode("latin-1")

    @property
    def drained(self) -> bool:
        """Whether all that has arrived has been read."""
        return not self._chunks

    def hold(self) -> None:
        """Read no more for now."""
        if not self._held:
            self._held = True
            self.connection.hold()

    def go_on(self) -> None:
        """Read again."""
        if self._held:
            self._held = False
            self.connection.go_on()

    def abort(self) -> None:
        """Give the answer up; whoever reads it gets a `LostError`."""
        self.fail(LostError("given up"))
        self.connection.abort()

    def close(self) -> None:
        """End it; the other side of an answer that is not complete learns it by the closed connection."""
        self.sink = None
        self._chunks.clear()
        if not self.ended:
            self.connection.abort()

    # --- told by the connection ----------------------------------------------

    def fed(self, data: bytes) -> None:
        """A piece of the body has arrived, and there is no sink for it."""
        self._chunks.append(data)
        self._ahead_bytes += len(data)
        if self._ahead_bytes > _AHEAD_BYTES_MAX and not self.ended:
            self.hold()
        self.wake()

    def end(self) -> None:
        """The body is complete."""
        self.ended = True
        self._told_end()

    def fail(self, failure: LostError | ConnectError) -> None:
        """Nothing more comes."""
        if not self.ended and self.failure is None:
            self.failure = failure
            self._told_end()

    def wake(self) -> None:
        """Whoever waits looks again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -------------------------------------------------------------------------

    def _told_end(self) -> None:
        sink, self.sink = self.sink, None
        if sink is not None:
            sink(b"")
        if self._waiter is not None:
            self.wake()

    def taken(self) -> bytes:
        """What has arrived and was not read; there must be something."""
        chunks = self._chunks
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self._ahead_bytes = 0
        self.go_on()
        return data

    def waiter(self) -> asyncio.Future[None]:
        """A future that is done as soon as something has come, or nothing more will."""
        self._waiter = self._loop.create_future()
        return self._waiter

    def raise_failure(self) -> None:
        """Raise why no more comes, if nothing more does."""
        if self.failure is not None:
            raise self.failure
