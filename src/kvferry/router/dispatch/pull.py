"""One dispatch by pull: the prefill leg alone, then a decode leg that fetches what the prefill engine holds.

The decode engine is chosen when prefill has ended. It is sent what the prefill engine answered, whole: the
published connectors need keys of it that ours do not.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping

from kvferry.handoff import PrefillParams
from kvferry.ids import TransferId
from kvferry.router.api.openai import Body
from kvferry.router.dispatch.attempts import Again, Attempts
from kvferry.router.dispatch.prompt import Route
from kvferry.router.dispatch.prompts import Served, cancelled, may_be_held
from kvferry.router.engines.pool import Role, Worker
from kvferry.router.ground.errors import Cause
from kvferry.router.ground.policy import overlap_seconds
from kvferry.router.legs.tasks import DecodeStream, LegError, PrefillAnswer


async def pull(attempts: Attempts, prefill: Worker) -> Served:
    """Prefill, choose a decode engine, and wait for its answer.

    Raises:
        Again: the prompt shall be served anew, or by the decode engine alone.
        LegError: a leg failed for good.
        RequestError: no decode engine is ready, or the retries are spent.
    """
    transfer = TransferId(secrets.token_hex(16))
    headers = attempts.legs.headers()
    producing = PrefillParams(transfer=transfer, mode="pull", consumers=attempts.prompt.n)
    params = attempts.history() | producing.to_params()
    leg, _ = attempts.legs.send_prefill(prefill, headers, params)
    try:
        with prefill.transferring():
            held = await _held(attempts, leg)
            attempts.early.prefilled()
            decode, answer = await _decode(attempts, headers, held | _ours(producing))
    except BaseException:
        await cancelled(leg)
        if may_be_held(leg):
            source = prefill.source if leg.cancelled() else leg.result().source
            attempts.legs.release(prefill, source, transfer)
        raise
    route = Route(decode=decode, prefill=prefill, mode="pull", transfer=transfer)
    return Served(answer, route, leg, attempts.services.background)


async def _held(attempts: Attempts, leg: asyncio.Task[PrefillAnswer]) -> Body:
    """What the prefill engine's answer says of where the KV can be had."""
    try:
        answer = await leg
    except LegError as failure:
        attempts.prefill_failed(failure)
        if await attempts.another_prefill():
            attempts.again(Role.PREFILL, failure.reason.value)
        attempts.decode_alone(failure.reason.value)
    if answer.source is None:
        # The published connectors hold nothing of a prompt that fills no block.
        attempts.alone = Cause.NOTHING_HELD
        raise Again
    return dict(answer.params)


def _ours(producing: PrefillParams) -> Body:
    """What the decode leg says besides: the transfer, its mode, and that it is the one who receives."""
    ours = producing.to_params()
    return ours | {"do_remote_prefill": True, "do_remote_decode": False}


async def _decode(
    attempts: Attempts, headers: Mapping[str, str], params: Body
) -> tuple[Worker, Body | DecodeStream]:
    """The answer of a decode engine, of another one if the first has not begun while the KV is kept."""
    clock = asyncio.get_running_loop().time
    kept_until = clock() + attempts.settings.prefill_lease_seconds
    while True:
        worker = await attempts.choose(Role.DECODE)
        if worker is None:
            raise attempts.nobody_decodes()
        sent = clock()
        try:
            with attempts.waiting(worker):
                answer = await attempts.legs.decode(worker, headers, params)
        except LegError as failure:
            if failure.may_have_started or clock() >= kept_until:
                raise
            attempts.after_failure(failure)
        else:
            # What push would have overlapped is no fault of the engine.
            attempts.waited(worker, clock() - sent - overlap_seconds(attempts.prompt.estimated_tokens))
            return worker, answer
