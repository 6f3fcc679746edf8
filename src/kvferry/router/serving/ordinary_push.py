"""One push by callbacks: both legs written at once, the decode engine's bytes handed on as they come.

No task runs for it. It ends here when all goes well, when the client leaves, and when something fails after
the client's first byte. Whatever else happens, a leg that fails or a prefill engine that is another one, is
handed over to the tasks of `push`, with both legs as they are: they know what a failure leads to.
"""

from __future__ import annotations

import logging
from contextlib import suppress

import msgspec

from kvferry.router.api.openai import PARAMS, Body, client_answer
from kvferry.router.api.sse import DONE, event_of
from kvferry.router.dispatch.open_legs import OpenLeg, PrefillLeg, StreamLeg, WholeLeg
from kvferry.router.dispatch.prompt import Route
from kvferry.router.engines.pool import same_engine
from kvferry.router.ground.errors import JSON, Cause, RequestError
from kvferry.router.legs.failures import LegError, Reason
from kvferry.router.legs.tasks import DecodeStream, PrefillAnswer
from kvferry.router.serving.handing_over import Asked, Chosen, Desk, abandon, handed_over, sending_of
from kvferry.router.serving.outlet import StreamOutlet
from kvferry.router.serving.relay import client_event, params_in

logger = logging.getLogger(__name__)

_WHOLE_BYTES_MAX = 32 << 10
"""A longer answer may have to wait for its client, for which a task is due."""


class OrdinaryPush:
    """Its request has been admitted; it gives the place back, and tells the connection when it is over."""

    __slots__ = (
        "_answered", "_asked", "_cached_tokens", "_chosen", "_decode", "_decode_ended", "_desk", "_held",
        "_last", "_outlet", "_over", "_prefill", "_prefill_ended", "_prefilled", "_sent",
    )  # fmt: skip

    def __init__(self, desk: Desk, asked: Asked, chosen: Chosen, now: float) -> None:
        self._desk = desk
        self._asked = asked
        self._chosen = chosen
        self._sent = now
        dispatcher, prompt, timeline = desk.dispatcher, asked.prompt, asked.timeline
        self._prefill = PrefillLeg(dispatcher, self, chosen.prefill, prompt.estimated_tokens, timeline, now)
        leg = StreamLeg if prompt.stream else WholeLeg
        self._decode: OpenLeg = leg(dispatcher, self, chosen.decode, prompt.expected_tokens, now)
        self._prefill_ended: PrefillAnswer | LegError | None = None
        self._decode_ended: Body | LegError | None = None
        self._prefilled = 0.0
        """When the prefill leg has ended, if it has before the decode leg's answer."""
        self._answered = False
        """Whether the decode leg's answer is there, or begins to be."""
        self._outlet: StreamOutlet | None = None
        self._last = b""
        """Events that came with the stream's end, and go out with it."""
        self._held: object = None
        self._cached_tokens: int | None = None
        self._over = False
        chosen.prefill.transfers += 1
        timeline.leg_sent("prefill", chosen.prefill.name, now)
        timeline.leg_sent("decode", chosen.decode.name, now)
        desk.deadlines.pushes.add(self, timeline.arrived)

    def begin(self, lines: bytes, prefill: bytes, decode: bytes) -> None:
        """Send both legs."""
        client = self._desk.dispatcher.engines.client
        path = self._asked.read.endpoint.value
        for leg, body in ((self._prefill, prefill), (self._decode, decode)):
            leg.answer = client.start(leg.worker.url, path, lines + leg.worker.header_lines, body)
        self._prefill.watch()
        self._decode.watch()

    # --- told by the legs ----------------------------------------------------

    def prefilled(self, answer: PrefillAnswer | None, failure: LegError | None) -> None:
        """The prefill leg has ended."""
        if answer is not None:
            self._desk.dispatcher.remember_prefix(self._asked.prompt, self._chosen.prefill)
            self._cached_tokens = answer.cached_tokens
        self._prefill_ended = answer or failure
        if self._answered:
            self._desk.dispatcher.background.lingering.discard(self._prefill)
            return
        self._first_ended()
        if answer is None or not (
            answer.source is None
            or answer.source is self._chosen.source
            or same_engine(answer.source, self._chosen.source)
        ):
            self._hand_over()
            return
        if self._asked.prompt.stream:
            self._chosen.decode.pace.begin(self, self._desk.dispatcher.pool.clock())

    def decode_failed(self, failure: LegError) -> None:
        """No answer has come of it."""
        self._decode_ended = failure
        self._first_ended()
        self._hand_over()

    def decoded(self, answer: Body, length: int) -> None:
        """The whole answer is there."""
        if length > _WHOLE_BYTES_MAX:
            self._decode_ended = answer
            self._first_ended()
            self._hand_over()
            return
        self._decode_answered()
        asked = self._asked
        told = msgspec.json.encode(client_answer(answer, self._cached_tokens))
        asked.timeline.first_byte = asked.timeline.answered
        asked.reply.send(200, {"X-Request-Id": asked.request_id, "Content-Type": JSON}, told)
        self._held = answer.get(PARAMS)
        self._served()

    def told(self, events: list[bytes]) -> None:
        """Events of the stream in which something may have to change."""
        self._held = params_in(events) or self._held
        self.plain(b"".join([client_event(event, self._cached_tokens) for event in events]))

    def plain(self, piece: bytes) -> None:
        """Events of the stream, as the client gets them."""
        outlet = self._outlet
        if outlet is None:
            self._decode_answered()
            asked = self._asked
            metrics = self._desk.dispatcher.metrics
            outlet = self._outlet = StreamOutlet(asked.reply, asked.request_id, asked.timeline, metrics)
        stream = self._decode.stream
        assert isinstance(stream, DecodeStream)
        if stream.finished:
            self._last = piece
        elif outlet.write(piece):
            stream.hold()
            outlet.when_room(stream.go_on)

    def end(self, error: Exception | None) -> None:
        """The stream is over."""
        if error is None:
            try:
                assert self._outlet is not None
                self._outlet.end(self._last + DONE)
            except ConnectionError as gone:
                self.broken(gone)
            else:
                self._served()
        elif isinstance(error, LegError):
            pool = self._desk.dispatcher.pool
            if error.reason is Reason.LOST:
                pool.down(error.worker, str(error))
            if error.reason is not Reason.REJECTED:
                error.worker.breaker.failed(pool.clock())
            self._fail(error.request_error())
        else:
            self.broken(error)

    def broken(self, error: Exception) -> None:
        """Something has gone wrong: the client has left amid a write, or the router has a fault."""
        if isinstance(error, ConnectionError):
            self._leave(Cause.CLIENT_GONE)
            return
        logger.error("a request failed by a fault of the router", exc_info=error)
        self._fail(RequestError(500, Cause.INTERNAL, "internal error of the router; see its log"))

    # --- told by the connection, and by the deadline -------------------------

    def cancel(self) -> None:
        """The client has left, or the router ends."""
        self._leave(Cause.SHUTTING_DOWN if self._desk.admission.closed else Cause.CLIENT_GONE)

    def late(self) -> None:
        """The request's time is over."""
        self._fail(self._desk.deadlines.over())

    # -------------------------------------------------------------------------

    def _first_ended(self) -> None:
        """The first of the legs has ended, or the decode leg before its answer."""
        if not self._prefilled:
            prompt = self._asked.prompt
            self._prefilled = self._desk.dispatcher.clock()
            self._desk.dispatcher.note_held(prompt.estimated_tokens, self._prefilled - self._sent)

    def _decode_answered(self) -> None:
        self._answered = True
        dispatcher, asked, chosen = self._desk.dispatcher, self._asked, self._chosen
        now = asked.timeline.answered = dispatcher.clock()
        prefilled = self._prefilled
        self._first_ended()
        if asked.prompt.stream:
            chosen.decode.pace.end(self)
            waited = max(now - prefilled, 0.0) if prefilled else 0.0
            chosen.decode.pace.note(waited, self._desk.dispatcher.pool.clock(), chosen.met)
        chosen.prefill.transfers -= 1
        dispatcher.remember_prefix(asked.prompt, chosen.decode)

    def _served(self) -> None:
        """The client has its answer."""
        chosen, dispatcher = self._chosen, self._desk.dispatcher
        route = Route(chosen.decode, chosen.prefill, "push", transfer=chosen.transfer)
        dispatcher.remember(self._asked.prompt, route, self._held)
        if self._prefill.open:
            dispatcher.background.lingering.add(self._prefill, dispatcher.clock())
        self._close_decode()
        self._note("ok", Cause.NONE, 200)
        self._asked.reply.over()

    def _leave(self, cause: Cause) -> None:
        if not self._over:
            self._drop()
            self._note("cancelled", cause, 499)
            self._asked.reply.over()

    def _fail(self, error: RequestError) -> None:
        if self._over:
            return
        self._drop()
        asked = self._asked
        reply = asked.reply
        self._note("error", error.cause, error.status)
        # Nobody may be left to tell.
        with suppress(ConnectionError):
            if not reply.started:
                headers = error.headers() | {"Content-Type": error.content_type()}
                reply.send(error.status, headers | {"X-Request-Id": asked.request_id}, error.body())
            elif reply.ended:
                # It has all.
                pass
            elif reply.full:
                # A client that does not read would keep what is buffered for it for ever.
                reply.hang_up()
            else:
                reply.write(event_of(msgspec.json.encode(error.shape())))
                reply.end()
        reply.over()

    def _note(self, outcome: str, cause: Cause, status: int) -> None:
        """It is over; count it."""
        if self._over:
            return
        self._over = True
        desk, asked = self._desk, self._asked
        desk.deadlines.pushes.discard(self)
        desk.admission.leave()
        path = "push" if self._answered else "none"
        desk.accounting.note(asked.request, asked.request_id, asked.timeline, (path, outcome, cause), status)

    def _drop(self) -> None:
        """End both legs; what the decode engine may never have heard of is given back."""
        prefill, chosen = self._prefill, self._chosen
        held = prefill.open or isinstance(self._prefill_ended, PrefillAnswer)
        prefill.close()
        self._close_decode()
        if not self._answered:
            chosen.decode.pace.end(self)
            chosen.prefill.transfers -= 1
            if held:
                sending = sending_of(self._desk, self._asked.prompt)
                sending.release(chosen.prefill, chosen.source, chosen.transfer)

    def _close_decode(self) -> None:
        stream = self._decode.stream
        if self._answered and isinstance(stream, DecodeStream):
            stream.close()
        else:
            self._decode.close()

    # --- what is not ordinary ------------------------------------------------

    def _hand_over(self) -> None:
        """Let tasks go on, from here on as if they had sent the legs."""
        if self._over:
            return
        self._over = True
        desk, asked, chosen = self._desk, self._asked, self._chosen
        desk.deadlines.pushes.discard(self)
        chosen.decode.pace.end(self)
        prefill, decode = (self._prefill, self._prefill_ended), (self._decode, self._decode_ended)
        begun = handed_over(desk, asked, chosen, prefill, decode)

        def abandoned() -> None:
            # The client has left before the task that was to go on has begun.
            abandon(desk, begun)
            self._over = False
            cause = Cause.SHUTTING_DOWN if desk.admission.closed else Cause.CLIENT_GONE
            self._note("cancelled", cause, 499)

        asked.reply.serve_on(begun, abandoned)
