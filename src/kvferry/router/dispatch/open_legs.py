"""Legs that are open without a task: their answers come by callbacks, and count as those of tasks do."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Protocol

import msgspec

from kvferry.router.api.openai import PARAMS, Body
from kvferry.router.dispatch.services import Services
from kvferry.router.engines.queueing import Ticket
from kvferry.router.engines.worker import Leg, Worker
from kvferry.router.http.answers import Answer
from kvferry.router.legs.failures import LegError, Reason
from kvferry.router.legs.guard import judge, silent
from kvferry.router.legs.streams import DecodeStream, Sink
from kvferry.router.legs.tasks import (
    ERROR_BYTES_MAX,
    EVENT_STREAM,
    PrefillAnswer,
    Sent,
    object_of,
    refusal,
    too_long,
    unanswered,
)
from kvferry.router.record.timeline import Timeline


class _Prefilled(msgspec.Struct):
    """What the router wants to know of a prefill leg's answer; the rest of it is not made into objects."""

    usage: Any = None
    kv_transfer_params: Any = None


_PREFILLED = msgspec.json.Decoder(_Prefilled)


class Served(Sink, Protocol):
    """Who the legs are for: also where the decode leg's events go."""

    def prefilled(self, answer: PrefillAnswer | None, failure: LegError | None) -> None:
        """The prefill leg has ended, in one of two ways."""

    def decode_failed(self, failure: LegError) -> None:
        """The decode leg has failed before its first event, or before the end of its only answer."""

    def decoded(self, answer: Body, length: int) -> None:
        """The decode leg that is not streamed has been answered by so many bytes."""

    def broken(self, error: Exception) -> None:
        """Something has gone wrong in one of these."""


class OpenLeg(Leg):
    """One leg that is open at an engine."""

    __slots__ = ("_bytes", "_pieces", "_served", "_services", "answer", "at", "open", "worker")

    def __init__(self, services: Services, served: Served, worker: Worker, tokens: int, at: float) -> None:
        super().__init__(max(tokens, 1))
        self._services = services
        self._served: Served | None = served
        """None once all has been told: the two know each other, and only a collection would free them."""
        self._pieces: list[bytes] = []
        self._bytes = 0
        self.worker = worker
        self.at = at
        """When it was sent."""
        self.answer: Answer | None = None
        self.open = True
        worker.legs.add(self)
        worker.waits.add(self)
        worker.tokens += self.tokens

    def watch(self) -> None:
        """Take in the answer from now on."""
        if self.answer is not None and self.open:
            self.answer.pour(self.received)

    def close(self) -> None:
        """It is over; an answer that is not complete is given up. Can be called again."""
        if self.open:
            self._count_out()
            if self.answer is not None:
                self.answer.close()

    def pass_on(self) -> Sent:
        """What there is of it, for a task that goes on with it; here it does not count any more."""
        self._count_out()
        assert self.answer is not None
        self.answer.stop_pouring(self._pieces)
        self._served = None
        return Sent(self.answer, self.at)

    def _count_out(self) -> None:
        self.open = False
        worker = self.worker
        worker.legs.discard(self)
        worker.waits.discard(self)
        worker.tokens -= self.tokens

    def lose(self) -> None:
        """Its engine is found to be gone."""
        if self.open:
            self._failed(silent(self.worker))

    def received(self, data: bytes) -> None:
        """A piece of the answer has come, nothing at its end."""
        served = self._served
        if not self.open or served is None:
            return
        try:
            self._received(data)
        except Exception as error:  # noqa: BLE001 - the connection that tells it can do nothing about it
            served.broken(error)

    @abstractmethod
    def _received(self, data: bytes) -> None:
        """A piece of the answer has come."""

    @abstractmethod
    def _ended_by(self, failure: LegError) -> None:
        """It is over by this failure."""

    def _last(self) -> Served:
        """Who the leg is for, to be told for the last time."""
        served, self._served = self._served, None
        assert served is not None
        return served

    def _failed(self, failure: LegError) -> None:
        self.close()
        self._ended_by(judge(self._services.pool, failure))

    def _gathered(self, data: bytes) -> bytes | None:
        """The whole answer if this was the last piece of it."""
        answer = self.answer
        assert answer is not None
        if data:
            self._bytes += len(data)
            settings = self._services.settings
            bytes_max = settings.answer_bytes_max if answer.status == 200 else ERROR_BYTES_MAX
            if self._bytes > bytes_max:
                self._failed(too_long(self.worker, bytes_max))
                return None
            if answer.ended and not self._pieces and answer.status == 200:
                return data
            self._pieces.append(data)
            return None
        if answer.failure is not None:
            self._failed(unanswered(self._services.pool, self.worker, answer.failure))
            return None
        raw = b"".join(self._pieces)
        if answer.status != 200:
            self._failed(refusal(self.worker, answer, raw))
            return None
        return raw

    def _read(self, raw: bytes) -> Body | None:
        """The answer as an object; None when it is none, which has been told."""
        try:
            return object_of(self.worker, raw)
        except LegError as failure:
            self._failed(failure)
            return None


class PrefillLeg(OpenLeg):
    """A prefill leg."""

    __slots__ = ("_timeline", "ticket")

    def __init__(
        self, services: Services, served: Served, worker: Worker, tokens: int, timeline: Timeline, at: float
    ) -> None:
        super().__init__(services, served, worker, tokens, at)
        self._timeline = timeline
        self.ticket: Ticket = worker.queue.enter(tokens, at)

    def late(self) -> None:
        """It has outlived its request for long enough."""
        self.close()

    def close(self) -> None:
        """It is over. Can be called again."""
        super().close()
        self._services.background.lingering.discard(self)
        self.worker.queue.left(self.ticket)

    def _received(self, data: bytes) -> None:
        raw = self._gathered(data)
        body = None if raw is None else self._told(raw)
        if body is None:
            return
        services, worker = self._services, self.worker
        now = services.clock()
        services.metrics.prefill_answer.observe(now - self.at)
        answer = services.engines.prefilled(worker, body, self._timeline)
        worker.breaker.succeeded()
        worker.queue.finished(self.ticket, answer.cached_tokens or 0, now)
        self.close()
        self._last().prefilled(answer, None)

    def _told(self, raw: bytes) -> Body | None:
        try:
            answer = _PREFILLED.decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            # It is to be told as of any other leg.
            return self._read(raw)
        return {"usage": answer.usage, PARAMS: answer.kv_transfer_params}

    def _ended_by(self, failure: LegError) -> None:
        self._last().prefilled(None, failure)


class WholeLeg(OpenLeg):
    """A decode leg that is not streamed."""

    __slots__ = ()

    def _received(self, data: bytes) -> None:
        raw = self._gathered(data)
        body = None if raw is None else self._read(raw)
        if body is None or raw is None:
            return
        self._services.metrics.decode_answer.observe(self._services.clock() - self.at)
        self.worker.breaker.succeeded()
        self.close()
        self._last().decoded(body, len(raw))

    def _ended_by(self, failure: LegError) -> None:
        self._last().decode_failed(failure)


class StreamLeg(OpenLeg):
    """A decode leg that is streamed: a sink of its own until the first event."""

    __slots__ = ("_begun",)

    def __init__(self, services: Services, served: Served, worker: Worker, tokens: int, at: float) -> None:
        super().__init__(services, served, worker, tokens, at)
        self._begun: DecodeStream | None = None

    def _received(self, data: bytes) -> None:
        answer = self.answer
        assert answer is not None
        if self._begun is None:
            if not data or answer.status != 200:
                if self._gathered(data) is not None:
                    self._without_event()
                return
            if answer.content_type != EVENT_STREAM:
                kind = answer.content_type
                self._failed(LegError(self.worker, Reason.ERROR, f"streams {kind!r}, not events"))
                return
            stream = DecodeStream(self.worker, answer, self._services.settings.event_bytes_max)
            stream.flow(self)
            self._begun = self.stream = stream
        self._pieces.append(data)
        self._begun.arrived(data)

    # --- a sink until the first event ----------------------------------------

    def told(self, events: list[bytes]) -> None:
        """The first events are there."""
        self._open().told(events)

    def plain(self, piece: bytes) -> None:
        """The first events are there, and go on as they are."""
        self._open().plain(piece)

    def end(self, error: Exception | None) -> None:
        """No event has come."""
        if error is None:
            self._without_event()
        elif not isinstance(error, LegError):
            raise error
        elif error.reason is Reason.LOST:
            self._lost(error)
        else:
            self._failed(error)

    def _open(self) -> Served:
        stream, served, answer = self._begun, self._last(), self.answer
        assert stream is not None
        assert answer is not None
        self._pieces.clear()
        self.worker.waits.discard(self)
        self.worker.breaker.succeeded()
        stream.flow(served)
        stream.closes(self.close)
        answer.sink = stream.arrived
        self._services.metrics.decode_first.observe(self._services.clock() - self.at)
        return served

    def _without_event(self) -> None:
        self._lost(LegError(self.worker, Reason.LOST, "the stream ended without an event"))

    def _lost(self, failure: LegError) -> None:
        self._services.pool.down(self.worker, str(failure))
        self._failed(failure)

    def _ended_by(self, failure: LegError) -> None:
        self._last().decode_failed(failure)
