"""One dispatch by push: both legs at once, the decode engine chosen before.

The decode leg's answer decides, whatever the prefill leg does; see `dispatch` for the rules.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass

from kvferry.handoff import DecodeParams, PrefillParams, SourceParams
from kvferry.ids import TransferId
from kvferry.router.attempts import Attempts
from kvferry.router.legs import DecodeStream, LegError, PrefillAnswer, Reason
from kvferry.router.openai import Body
from kvferry.router.pool import Role, Worker, same_engine
from kvferry.router.prompts import Route, Served, cancelled, leg_task, may_be_held


@dataclass(frozen=True, slots=True)
class Legs:
    """The two legs of one dispatch."""

    worker: Worker
    """The prefill engine."""
    consumer: Worker
    """The decode engine."""
    source: SourceParams
    """Where the decode leg was told to expect the KV from."""
    transfer: TransferId
    prefill: asyncio.Task[PrefillAnswer]
    decode: asyncio.Task[Body | DecodeStream]

    async def cancel(self) -> None:
        """End both, and give back what an answer that came too late holds."""
        self.decode.add_done_callback(_close_stream)
        await cancelled(self.prefill, self.decode)


async def push(attempts: Attempts, prefill: Worker, source: SourceParams, decode: Worker) -> Served:
    """Send both legs and wait for the decode leg's answer.

    Raises:
        Again: both legs shall be sent anew.
        LegError: a leg failed for good.
    """
    legs = _start(attempts, prefill, source, decode)
    try:
        answer = await _outcome(attempts, legs)
    except BaseException:
        await legs.cancel()
        if may_be_held(legs.prefill):
            attempts.release(legs.worker, legs.source, legs.transfer)
        raise
    route = Route(decode=decode, prefill=prefill, mode="push", transfer=legs.transfer)
    return Served(answer, route, legs.prefill, attempts.services.background)


def _start(attempts: Attempts, prefill: Worker, source: SourceParams, decode: Worker) -> Legs:
    transfer = TransferId(secrets.token_hex(16))
    consumers = attempts.prompt.n
    producing = PrefillParams(transfer=transfer, mode="push", consumers=consumers)
    consuming = DecodeParams(source=source, transfer=transfer, mode="push", consumers=consumers)
    headers = attempts.headers()
    return Legs(
        worker=prefill,
        consumer=decode,
        source=source,
        transfer=transfer,
        decode=leg_task(attempts.decode(decode, headers, consuming.to_params())),
        prefill=leg_task(attempts.prefill(prefill, headers, attempts.history() | producing.to_params())),
    )


async def _outcome(attempts: Attempts, legs: Legs) -> Body | DecodeStream:
    """Wait for the decode leg, minding what the prefill leg does before."""
    clock = asyncio.get_running_loop().time
    await asyncio.wait({legs.prefill, legs.decode}, return_when=asyncio.FIRST_COMPLETED)
    attempts.early.prefilled(legs.consumer)
    if legs.decode.done():
        answer = legs.decode.result()
        attempts.waited(legs.consumer, 0.0)
        return answer
    prefilled = clock()
    with attempts.waiting(legs.consumer):
        patience_seconds = await _after_prefill(attempts, legs)
        await asyncio.wait({legs.decode}, timeout=patience_seconds)
    if not legs.decode.done():
        attempts.decode_alone("recovery")
    if patience_seconds is not None:
        _after_recovery(attempts, legs.decode)
        return legs.decode.result()
    answer = legs.decode.result()
    attempts.waited(legs.consumer, clock() - prefilled)
    return answer


async def _after_prefill(attempts: Attempts, legs: Legs) -> float | None:
    """How many seconds the decode leg has from now; None for as many as the request has."""
    try:
        answer = legs.prefill.result()
    except LegError as failure:
        return await _after_prefill_failure(attempts, legs, failure)
    if answer.source is None or same_engine(answer.source, legs.source):
        return None
    if attempts.retries_left:
        attempts.again(Role.PREFILL, "identity")
    return None


async def _after_prefill_failure(attempts: Attempts, legs: Legs, failure: LegError) -> float | None:
    """End, restart, or give the running decode leg time to recompute.

    A prefill engine that dies may have written most of the KV: the decode engine knows how much, and
    recomputes from the last good token. That is worth waiting for, unless a prefill engine can be had.
    """
    attempts.prefill_failed(failure)
    another = await attempts.another_prefill()
    # The decode leg may have been answered while engines were looked for; then it counts.
    if another is not None and not legs.decode.done():
        attempts.again(Role.PREFILL, failure.reason.value)
    if legs.decode.done() or failure.may_have_started:
        return attempts.settings.decode_recovery_seconds
    attempts.decode_alone(failure.reason.value)


def _after_recovery(attempts: Attempts, decode: asyncio.Task[Body | DecodeStream]) -> None:
    """A decode leg that could not recover is sent anew: its engine may fail requests whose KV is lost."""
    failure = decode.exception()
    if isinstance(failure, LegError) and failure.reason is not Reason.REJECTED:
        attempts.decode_alone("recovery")


def _close_stream(leg: asyncio.Task[Body | DecodeStream]) -> None:
    if not leg.cancelled() and leg.exception() is None:
        stream = leg.result()
        if isinstance(stream, DecodeStream):
            stream.close()
