"""A decode leg that streams: its events, awaited in batches or poured to the client as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import msgspec

from kvferry.router.api.openai import error_message
from kvferry.router.api.sse import DONE, EventSplitter, data_of
from kvferry.router.engines.worker import Worker
from kvferry.router.ground.errors import JSON, EngineAnswer, EventTooLongError
from kvferry.router.http.answers import Answer
from kvferry.router.legs import awaited
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
        self.answer = answer
        self._event_bytes_max = event_bytes_max
        self.splitter = EventSplitter(event_bytes_max)
        self._give_back: Callable[[], None] | None = None
        self.first: list[bytes] | None = None
        self.first_whole = False
        """Whether the first events are one piece that was not cut."""
        self.failure: LegError | None = None
        self.finished = False
        """Whether `[DONE]` has come; a sink that is told of events then is told of the end at once."""
        self._sink: Sink | None = None

    def open(self) -> Awaitable[None]:
        """Wait for the first event with data.

        Raises:
            LegError: the stream ends or fails before it.
        """
        return awaited.open_stream(self)

    def closes(self, give_back: Callable[[], None]) -> None:
        """Hand over what `close` calls once: it gives back the connection and the worker's slot."""
        self._give_back = give_back

    def more(self) -> Awaitable[list[bytes] | None]:
        """The events that have arrived since, at least one; None after `[DONE]`, which is not one of them.

        Raises:
            LegError: the engine reports an error, or the stream ends without `[DONE]`.
        """
        return awaited.more(self)

    def pour(self, told: Callable[[list[bytes]], None], plain: Callable[[bytes], None]) -> Awaitable[None]:
        """Give all events that come until `[DONE]` to `told`, each as soon as it is there.

        Whole events that have nothing in them that is changed on its way, no usage and no
        `kv_transfer_params`, go to `plain` instead, in pieces as they were read.

        Raises:
            LegError: the engine reports an error, or the stream ends without `[DONE]`.
        """
        return awaited.pour(self, told, plain)

    def flow(self, sink: Sink) -> None:
        """Give what `arrived` is told of to `sink`."""
        self._sink = sink

    def hold(self) -> None:
        """Read no more for now."""
        self.answer.hold()

    def go_on(self) -> None:
        """Read again."""
        self.answer.go_on()

    def abort(self) -> None:
        """End the leg as if its connection were lost: whoever waits for more gets a `LegError`."""
        self.answer.abort()

    def close(self) -> None:
        """End the leg; an engine that has not finished learns it by the closed connection.

        After `[DONE]` the body's end is still read, for a moment, so that the connection can serve again.
        """
        give_back, self._give_back = self._give_back, None
        self._sink = None
        if give_back is None:
            return
        if not self.finished or self.answer.ended:
            give_back()
        else:
            self.answer.pour(_End(give_back).arrived)

    def is_plain(self, data: bytes) -> bool:
        """Whether these are whole events that may go to the client unread."""
        return plain_until(data) == len(data) <= self._event_bytes_max

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
            raise self.ended_early()
        self.reads += 1
        if self.splitter.empty and len(data) <= self._event_bytes_max:
            end = plain_until(data)
            if end:
                # If it is not all, the rest is `[DONE]`.
                self.finished = end < len(data)
                sink.plain(data[:end])
                return
        events = self.events_in(data)
        if events:
            sink.told(events)
        if self.failure is not None:
            raise self.failure

    def ended_early(self) -> LegError:
        """Why no more comes, though `[DONE]` has not come."""
        failure = self.answer.failure
        if failure is not None:
            return LegError(self.worker, Reason.LOST, f"the stream broke: {failure}")
        return LegError(self.worker, Reason.LOST, "the stream ended before its answer did")

    def events_in(self, data: bytes) -> list[bytes]:
        """The events that `data` completes; `finished` and `failure` tell what else was in it.

        Raises:
            LegError: one is too long.
        """
        try:
            events = self.splitter.feed(data)
        except EventTooLongError as error:
            raise LegError(self.worker, Reason.ERROR, str(error)) from error
        told, self.finished, self.failure = self._sorted(events)
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


class _End:
    """Waits for the end of a stream's body, but not for long."""

    __slots__ = ("_give_back", "_late")

    def __init__(self, give_back: Callable[[], None]) -> None:
        self._give_back = give_back
        self._late = asyncio.get_running_loop().call_later(_END_OF_BODY_SECONDS, give_back)

    def arrived(self, data: bytes) -> None:
        """A piece of it has come, nothing at its end."""
        if not data:
            self._late.cancel()
            self._give_back()


def plain_until(data: bytes) -> int:
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
