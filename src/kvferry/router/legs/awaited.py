"""A decode leg's stream as a task reads it: the coroutines of a compiled class, as in `http.awaiting`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvferry.router.http.failures import LostError
from kvferry.router.legs.failures import LegError, Reason

if TYPE_CHECKING:
    from kvferry.router.legs.streams import DecodeStream


async def open_stream(stream: DecodeStream) -> None:
    """See `DecodeStream.open`."""
    first = await _opening(stream)
    if first is None:
        raise LegError(stream.worker, Reason.LOST, "the stream ended without an event")
    stream.first = first


async def more(stream: DecodeStream) -> list[bytes] | None:
    """See `DecodeStream.more`."""
    if stream.first is not None:
        first, stream.first = stream.first, None
        return stream.events_in(first[0]) if stream.first_whole else first
    return await _next(stream)


async def pour(
    stream: DecodeStream, told: Callable[[list[bytes]], None], plain: Callable[[bytes], None]
) -> None:
    """See `DecodeStream.pour`."""
    if stream.first is not None:
        first, stream.first = stream.first, None
        if stream.first_whole:
            plain(first[0])
        else:
            told(first)
    if stream.failure is not None:
        raise stream.failure
    if not stream.finished:
        poured = _Poured(told, plain)
        stream.flow(poured)
        stream.answer.pour(stream.arrived)
        try:
            await poured.over
        finally:
            stream.answer.stop_pouring()


async def _opening(stream: DecodeStream) -> list[bytes] | None:
    """The first events: one piece, not cut, when they are whole and plain."""
    data = await _read(stream)
    if stream.is_plain(data):
        stream.first_whole = True
        return [data]
    return stream.events_in(data) or await _next(stream)


async def _next(stream: DecodeStream) -> list[bytes] | None:
    while not stream.finished:
        if stream.failure is not None:
            raise stream.failure
        events = stream.events_in(await _read(stream))
        if events:
            return events
    return None


async def _read(stream: DecodeStream) -> bytes:
    try:
        data = await stream.answer.read()
    except LostError as error:
        raise LegError(stream.worker, Reason.LOST, f"the stream broke: {error}") from error
    if not data:
        raise stream.ended_early()
    stream.reads += 1
    return data


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
