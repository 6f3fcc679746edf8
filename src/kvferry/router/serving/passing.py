"""Requests that go to one engine whole: no KV is handed over for them.

Embeddings, scores and the tokenizer need none. The Responses API and Anthropic's messages could have a
hand-over, for engines take `kv_transfer_params` there, too; but the router does not know how to make prefill
legs of them, which may call tools and go on with stored responses. So a decode engine computes them from the
prompt on.
"""

from __future__ import annotations

import msgspec

from kvferry.router.api.openai import PARAMS, own_body, read_object
from kvferry.router.api.sse import EventSplitter
from kvferry.router.dispatch.dispatcher import Dispatcher
from kvferry.router.engines.pool import Ask, Role, Worker
from kvferry.router.ground.errors import JSON, EventTooLongError, nobody_decodes
from kvferry.router.http.answers import Answer
from kvferry.router.http.reading import Request
from kvferry.router.http.server import Reply
from kvferry.router.legs.failures import LegError, Reason
from kvferry.router.legs.tasks import Call, read_bounded
from kvferry.router.record.timeline import Timeline
from kvferry.router.serving.asking import forwarded
from kvferry.router.serving.exchange import send_whole
from kvferry.router.serving.outlet import StreamOutlet

PASSED = frozenset(
    {
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/embeddings",
        "/v1/score",
        "/v1/rerank",
        "/score",
        "/rerank",
        "/pooling",
        "/classify",
        "/tokenize",
        "/detokenize",
    }
)
_PARAMS_KEY = PARAMS.encode()
_FORWARDED = ("anthropic-version", "anthropic-beta", "x-api-key")


class Passing:
    """Passes requests to a fitting engine, and its answers back as they are."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._settings = dispatcher.settings

    async def run(self, request: Request, reply: Reply, request_id: str, timeline: Timeline) -> int:
        """Serve one request; the status of the answer.

        Raises:
            RequestError: no engine has answered, or one with an error.
            ConnectionError: the client is gone.
        """
        body = read_object(request.body)
        own = own_body(body)
        raw = request.body if own == body else msgspec.json.encode(own)
        headers = forwarded(request, self._settings) | {"Content-Type": JSON, "X-Request-Id": request_id}
        for name in _FORWARDED:
            if value := request.header(name.encode()):
                headers[name] = value
        model = own.get("model")
        ask = Ask(model=model if isinstance(model, str) else None)
        tried: set[Worker] = set()
        failure = nobody_decodes()
        while True:
            worker = await self._dispatcher.worker(Role.DECODE, tried, ask=ask)
            if worker is None or worker in tried:
                raise failure
            tried.add(worker)
            call = Call(request.path, raw, {**headers, **worker.headers}, timeline=timeline)
            try:
                return await self._passed(worker, call, reply, timeline)
            except LegError as error:
                failure = error.request_error()
                # One that has seen the request may have done what it asks.
                if reply.started or error.reason is not Reason.REFUSED:
                    raise failure from error

    async def _passed(self, worker: Worker, call: Call, reply: Reply, timeline: Timeline) -> int:
        engines = self._dispatcher.engines
        request_id = call.headers["X-Request-Id"]
        with worker.leg(call.tokens), engines.failures(worker):
            answer = await engines.send(worker, call)
            try:
                if answer.content_type == "text/event-stream":
                    outlet = StreamOutlet(reply, request_id, timeline, self._dispatcher.metrics)
                    await self._stream(worker, answer, outlet)
                    reply.end()
                    return 200
                raw = await read_bounded(worker, answer, self._settings.answer_bytes_max)
            finally:
                answer.close()
        headers = {"X-Request-Id": request_id, "Content-Type": answer.header(b"content-type") or JSON}
        await send_whole(reply, answer.status, headers, _without_params(raw), timeline)
        return answer.status

    async def _stream(self, worker: Worker, answer: Answer, outlet: StreamOutlet) -> None:
        splitter = EventSplitter(self._settings.event_bytes_max)
        while data := await answer.read():
            try:
                events = splitter.feed(data)
            except EventTooLongError as error:
                raise LegError(worker, Reason.ERROR, str(error)) from error
            if events:
                outlet.write(b"".join([_event_without_params(event) for event in events]))
                await outlet.room()


def _event_without_params(event: bytes) -> bytes:
    if _PARAMS_KEY not in event:
        return event
    lines = event.splitlines()
    return (
        b"\n".join(
            b"data: " + _without_params(line[5:].strip()) if line.startswith(b"data:") else line
            for line in lines
        )
        + b"\n\n"
    )


def _without_params(raw: bytes) -> bytes:
    """An answer without coordinates of KV, at its top or in the response that an event carries."""
    if _PARAMS_KEY not in raw:
        return raw
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return raw
    if not isinstance(body, dict):
        return raw
    body.pop(PARAMS, None)
    inner = body.get("response")
    if isinstance(inner, dict):
        inner.pop(PARAMS, None)
    return msgspec.json.encode(body)
