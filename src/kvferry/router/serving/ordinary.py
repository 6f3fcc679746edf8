"""Which requests are served by callbacks: one prompt, pushed eagerly, with engines of both roles at hand.

Everything that this asks can be answered at once. A request that is not ordinary, or not well formed, is
left to the tasks, which find out anew what to do with it.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

from kvferry.handoff import DecodeParams, PrefillParams, SourceParams
from kvferry.ids import TransferId
from kvferry.router.api.openai import Endpoint, decode_body, prefill_body, read, with_params
from kvferry.router.dispatch.choosing import ask_of
from kvferry.router.dispatch.prompt import Prompt
from kvferry.router.dispatch.sending import leg_headers
from kvferry.router.engines.pool import Role
from kvferry.router.ground.errors import JSON, RequestError
from kvferry.router.ground.randoms import randoms
from kvferry.router.http.messages import header_lines
from kvferry.router.http.reading import Request
from kvferry.router.http.server import Reply
from kvferry.router.record.timeline import Timeline
from kvferry.router.serving.asking import forwarded, request_id_of, session_of
from kvferry.router.serving.handing_over import Asked, Chosen, Desk
from kvferry.router.serving.ordinary_push import OrdinaryPush

_ENDPOINTS = {endpoint.value: endpoint for endpoint in Endpoint}


class Ordinary:
    """Begins what is ordinary."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._dispatcher = desk.dispatcher
        settings = self._settings = desk.dispatcher.settings
        self._possible = (
            settings.transfer_mode == "push"
            and settings.decode_dispatch == "eager"
            and not settings.leg_timeout_seconds
        )
        self._begun = desk.dispatcher.metrics.transfers.labels("push", "fixed")

    def begin(self, request: Request, reply: Reply) -> OrdinaryPush | None:
        """Serve the request, which its client may send, and tell `reply` when it is over; None if not so."""
        endpoint = _ENDPOINTS.get(request.path)
        if endpoint is None or not self._possible or request.method != "POST" or request.problem is not None:
            return None
        if not self._desk.admission.free:
            return None
        now = self._dispatcher.clock()
        try:
            asked = self._asked(request, reply, endpoint, now)
            chosen = None if asked is None else self._chosen(asked.prompt)
            if asked is None or chosen is None:
                return None
            bodies = _bodies(asked, chosen, self._dispatcher.pool.clock())
        except (RequestError, RecursionError):
            return None
        self._desk.admission.enter_now()
        self._dispatcher.budget.request()
        self._begun.inc()
        if chosen.before is not None:
            chosen.before.tell(chosen.decode)
        push = OrdinaryPush(self._desk, asked, chosen, now)
        try:
            push.begin(_lines(asked.prompt, chosen.leg_id), *bodies)
        except Exception as error:  # noqa: BLE001 - the connection that tells it can do nothing about it
            push.broken(error)
        return push

    def _asked(self, request: Request, reply: Reply, endpoint: Endpoint, now: float) -> Asked | None:
        settings = self._settings
        asked = read(endpoint, request.body, settings.prompts_max)
        if len(asked.bodies) != 1 or asked.whole_prompt:
            return None
        timeline = Timeline(now)
        request_id = request_id_of(request)
        prompt = Prompt(
            endpoint=endpoint,
            body=asked.bodies[0],
            n=asked.n,
            stream=asked.stream,
            whole_prompt=False,
            request_id=f"{request_id}-0",
            headers=forwarded(request, settings),
            session=session_of(request),
            timeline=timeline,
        )
        if settings.local_prefill_below and prompt.estimated_tokens < settings.local_prefill_below:
            return None
        return Asked(request, reply, request_id, asked, prompt, timeline)

    def _chosen(self, prompt: Prompt) -> Chosen | None:
        pool, settings = self._dispatcher.pool, self._settings
        before = self._dispatcher.continuation(prompt)
        ask = ask_of(settings.prefill_policy, settings.affinity, prompt)
        prefill = pool.choose(Role.PREFILL, (), None if before is None else before.worker(Role.PREFILL), ask)
        if prefill is None or prefill.source is None:
            return None
        if settings.decode_policy != settings.prefill_policy:
            ask = ask_of(settings.decode_policy, settings.affinity, prompt)
        decode = pool.choose(Role.DECODE, (), None if before is None else before.worker(Role.DECODE), ask)
        if decode is None:
            return None
        transfer, leg_id = TransferId(randoms.digits(32)), randoms.digits(16)
        return Chosen(prefill, prefill.source, decode, transfer, leg_id, before, decode.in_flight)


def _bodies(asked: Asked, chosen: Chosen, now: float) -> tuple[bytes, bytes]:
    """What is sent to the prefill engine, and what to the decode engine."""
    prompt = asked.prompt
    history = {} if chosen.before is None else chosen.before.take_held(now)
    transfer = chosen.transfer.encode()
    if history:
        producing = PrefillParams(transfer=chosen.transfer, mode="push", consumers=prompt.n).to_params()
        prefill = msgspec.json.encode(prefill_body(prompt.endpoint, prompt.body, history | producing))
    else:
        # Encoded once, what is the same for all.
        alone = msgspec.json.encode(prefill_body(prompt.endpoint, prompt.body, None))
        prefill = with_params(alone, b'%b"%b"}' % (_producing(prompt.n), transfer))
    if asked.read.untouched:
        consuming = b'%b"%b"}' % (_consuming(chosen.source, prompt.n), transfer)
        return prefill, with_params(asked.request.body, consuming)
    params = DecodeParams(
        source=chosen.source, transfer=chosen.transfer, mode="push", consumers=prompt.n
    ).to_params()
    return prefill, msgspec.json.encode(decode_body(prompt.body, params))


@lru_cache(maxsize=256)
def _producing(consumers: int) -> bytes:
    """A prefill leg's parameters up to the transfer's id."""
    params = PrefillParams(mode="push", consumers=consumers).to_params()
    return msgspec.json.encode(params)[:-1] + b',"transfer_id":'


@lru_cache(maxsize=4096)
def _consuming(source: SourceParams, consumers: int) -> bytes:
    """A decode leg's parameters up to the transfer's id."""
    params = DecodeParams(source=source, mode="push", consumers=consumers).to_params()
    return msgspec.json.encode(params)[:-1] + b',"transfer_id":'


def _lines(prompt: Prompt, leg_id: str) -> bytes:
    """The headers of both legs."""
    if prompt.headers:
        return header_lines(leg_headers(prompt, leg_id))
    return f"Content-Type: {JSON}\r\nX-Request-Id: {prompt.request_id}-{leg_id}\r\n".encode()
