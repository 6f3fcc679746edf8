"""What is known of an ordinary push, and how tasks go on with its legs: as if they had sent them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from kvferry.handoff import SourceParams
from kvferry.ids import TransferId
from kvferry.router.api.openai import Body, ClientRequest
from kvferry.router.dispatch.affinity import Continuation
from kvferry.router.dispatch.attempts import Beginning
from kvferry.router.dispatch.choosing import Choosing
from kvferry.router.dispatch.dispatcher import Dispatcher
from kvferry.router.dispatch.open_legs import OpenLeg, PrefillLeg
from kvferry.router.dispatch.prompt import Prompt
from kvferry.router.dispatch.prompts import close_stream, leg_task, may_be_held
from kvferry.router.dispatch.push import Begun, Legs
from kvferry.router.dispatch.sending import Sending
from kvferry.router.engines.pool import Worker
from kvferry.router.http.reading import Request
from kvferry.router.http.server import Reply
from kvferry.router.legs.failures import LegError
from kvferry.router.legs.tasks import Call, PrefillAnswer
from kvferry.router.record.timeline import Timeline
from kvferry.router.serving.accounting import Accounting
from kvferry.router.serving.admission import Admission
from kvferry.router.serving.exchange import Deadlines


@dataclass(frozen=True, slots=True)
class Desk:
    """What all of them use."""

    dispatcher: Dispatcher
    admission: Admission
    deadlines: Deadlines
    accounting: Accounting


@dataclass(slots=True)
class Asked:
    """A client's request that is to be pushed."""

    request: Request
    reply: Reply
    request_id: str
    read: ClientRequest
    prompt: Prompt
    timeline: Timeline


@dataclass(slots=True)
class Chosen:
    """Between which engines."""

    prefill: Worker
    source: SourceParams
    decode: Worker
    transfer: TransferId
    leg_id: str
    """What tells this dispatch's legs from those of other ones."""
    before: Continuation | None
    met: int
    """Legs in flight at the decode engine when it was chosen."""


def handed_over(
    desk: Desk,
    asked: Asked,
    chosen: Chosen,
    prefill: tuple[PrefillLeg, PrefillAnswer | LegError | None],
    decode: tuple[OpenLeg, Body | LegError | None],
) -> Begun:
    """The push for a task to go on with; of each leg what it came to, None for one that is open."""
    legs = Legs(chosen.prefill, chosen.source, chosen.transfer, _prefill(desk, asked, *prefill))
    legs.consumer = chosen.decode
    leg, ended = decode
    if ended is not None:
        legs.decode = _ended(ended)
    else:
        call = _call(asked, leg)
        going_on = sending_of(desk, asked.prompt).decode_call(leg.worker, call)
        legs.decode = _closing(leg_task(going_on), call)
    beginning = Beginning(chosen.before, chosen.met)
    return Begun(legs, asked.prompt, beginning, asked.read, asked.request_id, asked.timeline)


def abandon(desk: Desk, begun: Begun) -> None:
    """Nobody goes on with it: end both legs, and give back what the prefill engine may hold."""
    legs = begun.legs
    legs.worker.transfers -= 1
    assert legs.decode is not None
    legs.decode.add_done_callback(close_stream)
    legs.decode.cancel()
    if not legs.prefill.done() or may_be_held(legs.prefill):
        legs.prefill.cancel()
        sending_of(desk, begun.prompt).release(legs.worker, legs.source, legs.transfer)


def sending_of(desk: Desk, prompt: Prompt) -> Sending:
    """What sends a prompt's legs by tasks."""
    return Sending(desk.dispatcher, prompt, Choosing(desk.dispatcher, prompt))


def _prefill(
    desk: Desk, asked: Asked, leg: PrefillLeg, ended: PrefillAnswer | LegError | None
) -> asyncio.Future[PrefillAnswer]:
    if ended is not None:
        return _ended(ended)
    ticket, worker = leg.ticket, leg.worker
    call = _call(asked, leg)
    going_on = leg_task(sending_of(desk, asked.prompt).prefill_call(worker, call, ticket))
    # A task that is cancelled before it has begun runs no `finally` of its own.
    going_on.add_done_callback(lambda _: worker.queue.left(ticket))
    return _closing(going_on, call)


def _call(asked: Asked, leg: OpenLeg) -> Call:
    """An open leg as one that a task can go on with."""
    return Call(asked.read.endpoint.value, None, {}, leg.tokens, asked.timeline, leg.pass_on())


def _ended(how: Any) -> asyncio.Future[Any]:
    """A leg that has ended, as who waits for legs sees it."""
    future = asyncio.get_running_loop().create_future()
    if isinstance(how, LegError):
        future.set_exception(how)
        # It may stay unread: the other leg may have decided before.
        future.exception()
    else:
        future.set_result(how)
    return future


def _closing(future: asyncio.Future[Any], call: Call) -> asyncio.Future[Any]:
    """The same future; an answer that nobody will read is closed with it."""

    def ended(leg: asyncio.Future[Any]) -> None:
        if call.sent is not None and (leg.cancelled() or leg.exception() is not None):
            call.sent.answer.close()

    future.add_done_callback(ended)
    return future
