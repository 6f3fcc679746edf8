"""An answer of an engine, read as it comes: awaited piece by piece, or poured into a function."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from kvferry.errors import KvferryError
from kvferry.router.http.messages import Headers

_AHEAD_BYTES_MAX = 256 << 10
"""How much of an answer may wait to be read."""


class LostError(KvferryError):
    """The connection ended, or what came is no HTTP, before the answer was complete."""


class ConnectError(KvferryError):
    """No connection: the other side has not seen the request."""


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
        "_ahead_bytes", "_chunks", "_connection", "_held", "_loop", "_sink", "_waiter",
        "ended", "failure", "headers", "status",
    )  # fmt: skip

    def __init__(self, connection: Source, loop: asyncio.AbstractEventLoop) -> None:
        self.status = 0
        self.headers: Headers = {}
        self._connection = connection
        self._loop = loop
        self._chunks: list[bytes] = []
        self._ahead_bytes = 0
        self._held = False
        self.ended = False
        """Whether the whole of it has arrived."""
        self.failure: LostError | ConnectError | None = None
        """Why no more comes, when the answer is not complete."""
        self._sink: Callable[[bytes], None] | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def content_type(self) -> str:
        """Its media type, without parameters; empty when it tells none."""
        return self.header(b"content-type").partition(";")[0].strip().lower()

    async def head(self) -> None:
        """Wait for status and headers.

        Raises:
            ConnectError: there is no connection.
            LostError: the connection ends before.
        """
        while not self.status:
            self._raise_failure()
            await self._wait()

    async def read(self) -> bytes:
        """What has arrived since, at least one byte; empty after the end.

        Raises:
            LostError: the connection ended before the answer did.
        """
        while not self._chunks:
            self._raise_failure()
            if self.ended:
                return b""
            await self._wait()
        return self._taken()

    def pour(self, sink: Callable[[bytes], None]) -> None:
        """Give what has arrived, and all that will, to `sink`; an empty piece says that no more comes.

        After that `failure` tells whether the answer is complete.
        """
        self._sink = sink
        if self._chunks:
            sink(self._taken())
        if self.ended or self.failure is not None:
            self._told_end()

    def redirect(self, sink: Callable[[bytes], None]) -> None:
        """Give what will arrive to another sink; called by the one that is being told."""
        self._sink = sink

    def stop_pouring(self) -> None:
        """Give nothing more to the sink."""
        self._sink = None

    def give_back(self, pieces: list[bytes]) -> None:
        """Let what has been poured be read again, by whoever reads it next; nothing is poured any more."""
        self._sink = None
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
            self._connection.hold()

    def go_on(self) -> None:
        """Read again."""
        if self._held:
            self._held = False
            self._connection.go_on()

    def abort(self) -> None:
        """Give the answer up; whoever reads it gets a `LostError`."""
        self.fail(LostError("given up"))
        self._connection.abort()

    def close(self) -> None:
        """End it; the other side of an answer that is not complete learns it by the closed connection."""
        self._sink = None
        self._chunks.clear()
        if not self.ended:
            self._connection.abort()

    # --- told by the connection ----------------------------------------------

    def fed(self, data: bytes) -> None:
        """A piece of the body has arrived."""
        if self._sink is not None:
            self._sink(data)
            return
        self._chunks.append(data)
        self._ahead_bytes += len(data)
        if self._ahead_bytes > _AHEAD_BYTES_MAX and not self.ended:
            self.hold()
        self.wake()

    def end(self) -> None:
        """The body is complete."""
        self.ended = True
        self._told_end()

    def comes_from(self, connection: Source) -> None:
        """There is a connection now."""
        self._connection = connection

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
        sink, self._sink = self._sink, None
        if sink is not None:
            sink(b"")
        if self._waiter is not None:
            self.wake()

    def _taken(self) -> bytes:
        chunks = self._chunks
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self._ahead_bytes = 0
        self.go_on()
        return data

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        await self._waiter

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure
