"""The legs of one prompt: how they are made, sent and judged."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

import msgspec

from kvferry.handoff import SourceParams
from kvferry.ids import TransferId
from kvferry.router.api.openai import Body, Endpoint, decode_body, prefill_body
from kvferry.router.dispatch.choosing import Choosing
from kvferry.router.dispatch.prompt import Prompt
from kvferry.router.dispatch.prompts import in_a_task, leg_task
from kvferry.router.dispatch.services import Services
from kvferry.router.engines.pool import Role, Worker
from kvferry.router.engines.probe import release_body
from kvferry.router.engines.queueing import Ticket
from kvferry.router.legs.guard import Guard
from kvferry.router.legs.tasks import Call, DecodeStream, PrefillAnswer

T = TypeVar("T")


class Sending:
    """Sends one prompt's legs. What `choosing` has counted for a leg ends when the leg is open."""

    def __init__(self, services: Services, prompt: Prompt, choosing: Choosing) -> None:
        self._services = services
        self._settings = services.settings
        self._prompt = prompt
        self._choosing = choosing

    async def decode(
        self, worker: Worker, headers: Mapping[str, str], params: Body | None
    ) -> Body | DecodeStream:
        """Run a decode leg to its answer, or to its first event in a stream.

        Raises:
            LegError: it failed before.
        """
        seconds = self._settings.leg_timeout_seconds
        return await in_a_task(self.decode_leg(worker, headers, params, seconds))

    async def decode_leg(
        self, worker: Worker, headers: Mapping[str, str], params: Body | None, seconds: float = 0.0
    ) -> Body | DecodeStream:
        """The same, to be run as a task of its own; within `seconds` unless they are 0.

        Raises:
            LegError: it failed before.
        """
        self._choosing.sent(Role.DECODE)
        body = decode_body(self._prompt.body, params)
        call = self._call(worker, headers, body, self._prompt.expected_tokens)
        return await self.decode_call(worker, call, seconds)

    async def decode_call(self, worker: Worker, call: Call, seconds: float = 0.0) -> Body | DecodeStream:
        """Run a decode leg that is made, or even under way.

        Raises:
            LegError: it failed before its answer.
        """
        engines = self._services.engines
        with Guard(self._services.pool, worker):
            answer: Body | DecodeStream
            if self._prompt.stream:
                answer = await _within(seconds, engines.stream(worker, call))
            else:
                answer = await _within(seconds, engines.answer(worker, call))
        self._services.remember_prefix(self._prompt, worker)
        return answer

    def send_prefill(
        self, worker: Worker, headers: Mapping[str, str], params: Body
    ) -> tuple[asyncio.Task[PrefillAnswer], Ticket]:
        """Start a prefill leg, which may end with a LegError; and its place in the engine's queue."""
        ticket = worker.queue.enter(self._prompt.estimated_tokens, asyncio.get_running_loop().time())
        leg = leg_task(self._prefill(worker, headers, params, ticket))
        # A task that is cancelled before it has begun runs no `finally` of its own.
        leg.add_done_callback(lambda _: worker.queue.left(ticket))
        return leg, ticket

    async def _prefill(
        self, worker: Worker, headers: Mapping[str, str], params: Body, ticket: Ticket
    ) -> PrefillAnswer:
        self._choosing.sent(Role.PREFILL)
        body = prefill_body(self._prompt.endpoint, self._prompt.body, params)
        call = self._call(worker, headers, body, self._prompt.estimated_tokens)
        return await self.prefill_call(worker, call, ticket)

    async def prefill_call(self, worker: Worker, call: Call, ticket: Ticket) -> PrefillAnswer:
        """Run a prefill leg that is made, or even under way.

        Raises:
            LegError: it failed.
        """
        with Guard(self._services.pool, worker):
            leg = self._services.engines.prefill(worker, call)
            answer = await _within(self._settings.leg_timeout_seconds, leg)
        worker.queue.finished(ticket, answer.cached_tokens or 0, asyncio.get_running_loop().time())
        self._services.remember_prefix(self._prompt, worker)
        return answer

    def release(self, worker: Worker, source: SourceParams | None, transfer: TransferId) -> None:
        """Give back what a decode leg leaves behind that its engine may never have heard of."""
        if source is None or source.incarnation is None:
            # An engine with another connector would take the release for a request; its lease ends by itself.
            return
        body = release_body(self._prompt.body.get("model"), transfer)
        headers = {**self.headers(), **worker.headers}
        call = Call(Endpoint.COMPLETIONS.value, msgspec.json.encode(body), headers)
        self._services.background.run(self._services.engines.release(worker, call))

    def headers(self) -> dict[str, str]:
        """The headers of one dispatch's legs, with an id of its own."""
        return leg_headers(self._prompt)

    def _call(self, worker: Worker, headers: Mapping[str, str], body: Body, tokens: int) -> Call:
        if worker.rank is not None:
            headers = {**headers, **worker.headers}
        encoded = msgspec.json.encode(body)
        return Call(self._prompt.endpoint.value, encoded, headers, tokens, self._prompt.timeline)


def leg_headers(prompt: Prompt, own: str | None = None) -> dict[str, str]:
    """The headers of one dispatch's legs, with an id of its `own`: 16 random hexadecimal digits."""
    # Engines that pair legs by the id strip `-` and 8 hexadecimal digits; 16 are not mistaken for these.
    request_id = f"{prompt.request_id}-{own or secrets.token_hex(8)}"
    return {**prompt.headers, "Content-Type": "application/json", "X-Request-Id": request_id}


async def _within(seconds: float, leg: Coroutine[Any, Any, T]) -> T:
    if not seconds:
        return await leg
    async with asyncio.timeout(seconds):
        return await leg
