"""A decode leg that streams: its events, awaited in batches or poured to the client as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from kvferry.router.api.openai import error_message
from kvferry.router.api.sse import DONE, EventSplitter, data_of
from kvferry.router.engines.worker import Worker
from kvferry.router.ground.errors import JSON, EngineAnswer, EventTooLongError
from kvferry.router.http.answers import Answer, LostError
from kvferry.router.legs.failures import LegError, Reason

_END_OF_BODY_SECONDS = 0.5
_ERROR = b'data: {"error"'
_LAST = b"\n\n" + DONE


class Sink(Protocol):
    """Where a stream's events go."""

    def told(self, events: list[bytes]) -> None:
        """Events with something in them that may have to change."""

    def plain(self, piece: bytes) -> None:
        """Whole events that go on as they are."""

    def end(self, error: Exception | None) -> None:
        """No more comes; with `[DONE]`, which was told to nobody, if there is no error."""


class DecodeStream:
    """An answered decode leg whose first event has arrived; `close` it in every case."""

    def __init__(self, worker: Worker, answer: Answer, event_bytes_max: int) -> None:
        self.worker = worker
        self.reads = 0
        """How often something has come."""
        self._answer = answer
        self._event_bytes_max = event_bytes_max
        self._splitter = EventSplitter(event_bytes_max)
        self._give_back: Callable[[], None] = lambda: None
        self._first: list[bytes] | None = None
        self._first_whole = False
        """Whether the first events are one piece that was not cut."""
        self._failure: LegError | None = None
        self.finished = False
        """Whether `[DONE]` has come; a sink that is told of events then is told of the end at once."""
        self._sink: Sink | None = None

    async def open(self) -> None:
        """Wait for the first event with data.

        Raises:
            LegError: the stream ends or fails before it.
        """
        self._first = await self._opening()
        if self._first is None:
            raise LegError(self.worker, Reason.LOST, "the stream ended without an event")

    def closes(self, give_back: Callable[[], None]) -> None:
        """Hand over what `close` calls once: it gives back the connection and the worker's slot."""
        self._give_back = give_back

    async def more(self) -> list[bytes] | None:
        """The events that have arrived since, at least one; None after `[DONE]`, which is not one of them.

        Raises:
            LegError: the engine reports an error, or the stream ends without `[DONE]`.
        """
        if self._first is not None:
            first, self._first = self._first, None
            return self._events(first[0]) if self._first_whole else first
        return await self._next()

    async def pour(self, told: Callable[[list[bytes]], None], plain: Callable[[bytes], None]) -> None:
        """Give all events that come until `[DONE]` to `told`, each as soon as it is there.

        Whole events that have nothing in them that is changed on its way, no usage and no
        `kv_transfer_params`, go to `plain` instead, in pieces as they were read.

        Raises:
            LegError: the engine reports an error, or the stream ends without `[DONE]`.
        """
        if self._first is not None:
            first, self._first = self._first, None
            if self._first_whole:
                plain(first[0])
            else:
                told(first)
        if self._failure is not None:
            raise self._failure
        if not self.finished:
            poured = _Poured(told, plain)
            self.flow(poured)
            self._answer.pour(self.arrived)
            try:
                await poured.over
            finally:
                self._answer.stop_pouring()

    def flow(self, sink: Sink) -> None:
        """Give what `arrived` is told of to `sink`."""
        self._sink = sink

    def hold(self) -> None:
        """Read no more for now."""
        self._answer.hold()

    def go_on(self) -> None:
        """Read again."""
        self._answer.go_on()

    def abort(self) -> None:
        """End the leg as if its connection were lost: whoever waits for more gets a `LegError`."""
        self._answer.abort()

    def close(self) -> None:
        """End the leg; an engine that has not finished learns it by the closed connection.

        After `[DONE]` the body's end is still read, for a moment, so that the connection can serve again.
        """
        give_back, self._give_back = self._give_back, lambda: None
        self._sink = None
        if not self.finished or self._answer.ended:
            give_back()
            return
        late = asyncio.get_running_loop().call_later(_END_OF_BODY_SECONDS, give_back)

        def ended(data: bytes) -> None:
            if not data:
                late.cancel()
                give_back()

        self._answer.pour(ended)

    def arrived(self, data: bytes) -> None:
        """Take in what the connection has read, nothing at the end; called by it."""
        if self._sink is None:
            return
        try:
            self._sort(self._sink, data)
        except Exception as error:  # noqa: BLE001 - whatever it is, the one who pours gets it
            self._tell_end(error)
        else:
            if self.finished:
                self._tell_end(None)

    def _tell_end(self, error: Exception | None) -> None:
        # The sink may be another one than before: the first events make a leg a stream.
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.end(error)

    def _sort(self, sink: Sink, data: bytes) -> None:
        if not data:
            raise self._ended()
        self.reads += 1
        if self._splitter.empty and len(data) <= self._event_bytes_max:
            end = _plain_until(data)
            if end:
                # If it is not all, the rest is `[DONE]`.
                self.finished = end < len(data)
                sink.plain(data[:end])
                return
        events = self._events(data)
        if events:
            sink.told(events)
        if self._failure is not None:
            raise self._failure

    async def _opening(self) -> list[bytes] | None:
        """The first events: one piece, not cut, when they are whole and plain."""
        data = await self._read()
        if _plain_until(data) == len(data) <= self._event_bytes_max:
            self._first_whole = True
            return [data]
        return self._events(data) or await self._next()

    async def _next(self) -> list[bytes] | None:
        while not self.finished:
            if self._failure is not None:
                raise self._failure
            events = self._events(await self._read())
            if events:
                return events
        return None

    async def _read(self) -> bytes:
        try:
            data = await self._answer.read()
        except LostError as error:
            raise LegError(self.worker, Reason.LOST, f"the stream broke: {error}") from error
        if not data:
            raise self._ended()
        self.reads += 1
        return data

    def _ended(self) -> LegError:
        failure = self._answer.failure
        if failure is not None:
            return LegError(self.worker, Reason.LOST, f"the stream broke: {failure}")
        return LegError(self.worker, Reason.LOST, "the stream ended before its answer did")

    def _events(self, data: bytes) -> list[bytes]:
        try:
            events = self._splitter.feed(data)
        except EventTooLongError as error:
            raise LegError(self.worker, Reason.ERROR, str(error)) from error
        told, self.finished, self._failure = self._sorted(events)
        return told

    def _sorted(self, events: list[bytes]) -> tuple[list[bytes], bool, LegError | None]:
        """`(events for the client, whether [DONE] was among them, the engine's error)`."""
        told: list[bytes] = []
        for event in events:
            data = data_of(event)
            if data is None:
                continue
            if data == b"[DONE]":
                return told, True, None
            if data.startswith(b'{"error"'):
                return told, False, self._told_failure(data)
            told.append(event)
        return told, False, None

    def _told_failure(self, data: bytes) -> LegError:
        code = _error_code(data)
        reason = Reason.REJECTED if 400 <= code < 500 else Reason.ERROR
        message = error_message(data) or "an error without a message"
        return LegError(self.worker, reason, message, EngineAnswer(code, data, JSON))


class _Poured:
    """A sink that somebody waits for."""

    def __init__(self, told: Callable[[list[bytes]], None], plain: Callable[[bytes], None]) -> None:
        self.told = told
        self.plain = plain
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end(self, error: Exception | None) -> None:
        if self.over.done():
            return
        if error is None:
            self.over.set_result(None)
        else:
            self.over.set_exception(error)


def _plain_until(data: bytes) -> int:
    """Until where whole events may go to the client unread: nothing in them ends or changes anything.

    That is all of it, all but `[DONE]` at the end, or 0.
    """
    if not data.startswith(b"data: {") or not data.endswith(b"\n\n"):
        return 0
    if b'"usage"' in data or b"kv_transfer_params" in data:
        return 0
    if data.find(b"\n") == len(data) - 2:
        # One event, as most pieces are: how it begins tells whether it is an error.
        return 0 if data.startswith(_ERROR) else len(data)
    if b'"error"' in data:
        return 0
    done = data.find(b"[DONE]")
    if done < 0:
        return len(data)
    end = len(data) - len(DONE)
    return end if done == end + len(b"data: ") and data.endswith(_LAST) else 0


def _error_code(data: bytes) -> int:
    try:
        error = msgspec.json.decode(data).get("error")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return 500
    code = error.get("code") if isinstance(error, Mapping) else None
    return code if isinstance(code, int) and 400 <= code < 600 else 500
