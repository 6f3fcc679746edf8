"""One dispatch by push: both legs at once, the decode engine chosen before; or the decode leg later.

The decode leg's answer decides, whatever the prefill leg does; see `dispatch` for the rules.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from kvferry.handoff import DecodeParams, PrefillParams, SourceParams
from kvferry.ids import TransferId
from kvferry.router.api.openai import Body, ClientRequest
from kvferry.router.dispatch.attempts import Attempts, Beginning
from kvferry.router.dispatch.prompt import Prompt, Route
from kvferry.router.dispatch.prompts import Served, cancelled, close_stream, leg_task, may_be_held
from kvferry.router.engines.pool import Role, Worker, same_engine
from kvferry.router.engines.queueing import Ticket
from kvferry.router.ground.policy import overlap_seconds
from kvferry.router.legs.failures import LegError, Reason
from kvferry.router.legs.guard import too_slow
from kvferry.router.legs.tasks import DecodeStream, PrefillAnswer
from kvferry.router.record.timeline import Timeline

_HOLD_SECONDS_MIN = 0.001
"""Less is not worth a timer, and may be less than the clock can tell."""


@dataclass(slots=True)
class Legs:
    """The two legs of one dispatch."""

    worker: Worker
    """The prefill engine."""
    source: SourceParams
    """Where the decode leg is told to expect the KV from."""
    transfer: TransferId
    prefill: asyncio.Future[PrefillAnswer]
    consumer: Worker | None = None
    """The decode engine, once it has been asked."""
    decode: asyncio.Future[Body | DecodeStream] | None = None

    async def cancel(self) -> None:
        """End both, and give back what an answer that came too late holds."""
        if self.decode is None:
            await cancelled(self.prefill)
            return
        self.decode.add_done_callback(close_stream)
        await cancelled(self.prefill, self.decode)


@dataclass(slots=True)
class Begun:
    """A request whose legs are under way, for a task that goes on with it."""

    legs: Legs
    prompt: Prompt
    beginning: Beginning
    request: ClientRequest
    request_id: str
    timeline: Timeline


async def push(
    attempts: Attempts, prefill: Worker, source: SourceParams, decode: Worker | None = None
) -> Served:
    """Send both legs and wait for the decode leg's answer; with no `decode` engine, the second leg late.

    Raises:
        Again: both legs shall be sent anew.
        LegError: a leg failed for good.
        RequestError: no decode engine is ready when one is needed.
    """
    transfer = TransferId(secrets.token_hex(16))
    headers = attempts.legs.headers()
    producing = PrefillParams(transfer=transfer, mode="push", consumers=attempts.prompt.n)
    params = attempts.history() | producing.to_params()
    leg, ticket = attempts.legs.send_prefill(prefill, headers, params)
    legs = Legs(prefill, source, transfer, leg)

    return await _served(attempts, legs, _both(attempts, legs, headers, decode, ticket))


async def go_on(attempts: Attempts, legs: Legs) -> Served:
    """Wait for the decode leg's answer, both legs being under way.

    Raises:
        Again: both legs shall be sent anew.
        LegError: a leg failed for good.
    """
    # Who has sent the legs has counted the transfer, so that the engine is not taken to be drained meanwhile.
    legs.worker.transfers -= 1
    return await _served(attempts, legs, _outcome(attempts, legs))


async def _served(
    attempts: Attempts, legs: Legs, outcome: Coroutine[Any, Any, Body | DecodeStream]
) -> Served:
    try:
        with legs.worker.transferring():
            answer = await outcome
    except BaseException:
        await legs.cancel()
        if may_be_held(legs.prefill):
            attempts.legs.release(legs.worker, legs.source, legs.transfer)
        raise
    assert legs.consumer is not None
    route = Route(decode=legs.consumer, prefill=legs.worker, mode="push", transfer=legs.transfer)
    return Served(answer, route, legs.prefill, attempts.services.background)


async def _both(
    attempts: Attempts, legs: Legs, headers: Mapping[str, str], decode: Worker | None, ticket: Ticket
) -> Body | DecodeStream:
    """Send the decode leg, too, and wait for its answer."""
    if decode is None:
        decode = await _late_decode(attempts, legs, ticket)
    _send_decode(attempts, legs, headers, decode)
    return await _outcome(attempts, legs)


async def _late_decode(attempts: Attempts, legs: Legs, ticket: Ticket) -> Worker:
    """Wait until a decode engine should be asked, and choose it."""
    queue = legs.worker.queue
    lead_seconds = queue.lead_seconds(attempts.prompt.estimated_tokens)
    clock = asyncio.get_running_loop().time
    while not legs.prefill.done():
        left_seconds = queue.seconds_left(ticket, clock())
        if left_seconds is None or left_seconds < lead_seconds + _HOLD_SECONDS_MIN:
            break
        # What is ahead may take longer than expected, so this is asked again.
        await asyncio.wait({legs.prefill}, timeout=left_seconds - lead_seconds)
    if legs.prefill.done():
        await _check_prefill(attempts, legs)
    decode = await attempts.choose(Role.DECODE)
    if decode is None:
        raise attempts.nobody_decodes()
    return decode


async def _check_prefill(attempts: Attempts, legs: Legs) -> None:
    """A prefill leg that has ended before any decode engine was asked: go on with what it has told."""
    try:
        answer = legs.prefill.result()
    except LegError as failure:
        attempts.prefill_failed(failure)
        if await attempts.another_prefill():
            attempts.again(Role.PREFILL, failure.reason.value)
        attempts.decode_alone(failure.reason.value)
    if answer.source is not None:
        legs.source = answer.source


def _send_decode(attempts: Attempts, legs: Legs, headers: Mapping[str, str], decode: Worker) -> None:
    consuming = DecodeParams(
        source=legs.source, transfer=legs.transfer, mode="push", consumers=attempts.prompt.n
    )
    legs.consumer = decode
    legs.decode = leg_task(attempts.legs.decode_leg(decode, headers, consuming.to_params()))


async def _outcome(attempts: Attempts, legs: Legs) -> Body | DecodeStream:
    """Wait for the decode leg, minding what the prefill leg does before."""
    decode, consumer = legs.decode, legs.consumer
    assert decode is not None
    assert consumer is not None
    clock = asyncio.get_running_loop().time
    sent, late = clock(), legs.prefill.done()
    try:
        both: set[asyncio.Future[Any]] = {legs.prefill, decode}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    finally:
        attempts.held(0.0 if late else clock() - sent)
    attempts.early.prefilled(consumer)
    if decode.done():
        answer = decode.result()
        attempts.waited(consumer, 0.0)
        return answer
    prefilled = clock()
    with attempts.waiting(consumer):
        recovery_seconds = await _after_prefill(attempts, legs)
        patience_seconds = recovery_seconds or attempts.settings.leg_timeout_seconds or None
        await asyncio.wait({decode}, timeout=patience_seconds)
    if recovery_seconds is not None:
        _after_recovery(attempts, decode)
        return decode.result()
    if not decode.done():
        raise _stalled(attempts, consumer)
    answer = decode.result()
    overlapped = overlap_seconds(attempts.prompt.estimated_tokens) if late else 0.0
    attempts.waited(consumer, clock() - prefilled - overlapped)
    return answer


async def _after_prefill(attempts: Attempts, legs: Legs) -> float | None:
    """How many seconds the decode leg has from now; None for as many as any leg has."""
    try:
        answer = legs.prefill.result()
    except LegError as failure:
        return await _after_prefill_failure(attempts, legs, failure)
    if answer.source is None or same_engine(answer.source, legs.source):
        return None
    if attempts.may_retry:
        attempts.again(Role.PREFILL, "identity")
    return None


async def _after_prefill_failure(attempts: Attempts, legs: Legs, failure: LegError) -> float:
    """End, restart, or give the running decode leg time to recompute.

    A prefill engine that dies may have written most of the KV: the decode engine knows how much, and
    recomputes from the last good token. That is worth waiting for, unless a prefill engine can be had.
    """
    assert legs.decode is not None
    attempts.prefill_failed(failure)
    another = await attempts.another_prefill()
    # The decode leg may have been answered while engines were looked for; then it counts.
    if another and not legs.decode.done():
        attempts.again(Role.PREFILL, failure.reason.value)
    if legs.decode.done() or failure.may_have_started:
        return attempts.settings.decode_recovery_seconds
    attempts.decode_alone(failure.reason.value)


def _after_recovery(attempts: Attempts, decode: asyncio.Future[Body | DecodeStream]) -> None:
    """A decode leg that could not recover is sent anew: its engine may fail requests whose KV is lost."""
    if not decode.done():
        attempts.decode_alone("recovery")
    failure = decode.exception()
    if isinstance(failure, LegError) and failure.reason is not Reason.REJECTED:
        attempts.decode_alone("recovery")


def _stalled(attempts: Attempts, consumer: Worker) -> LegError:
    """The prompt is prefilled, and its decode engine makes nothing of it."""
    consumer.breaker.failed(attempts.services.pool.clock())
    return too_slow(consumer)
