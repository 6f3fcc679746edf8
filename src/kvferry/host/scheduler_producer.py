"""Scheduler side, prefill requests: from the engine's steps to the commands that let KV leave early.

A request is `expected` when it arrives, `published` once a step has been told to advance its frontier, and
`ended` when the engine has finished it. From the first publication on its blocks are pinned, because a
write may read them: until every rank has released the transfer, or, after a preemption, until every rank
has drained its writes. So no other request gets a block that is still being read, whatever the engine does
with its own references.

`published` outlasts a preemption: from then on the engine keeps the request's blocks at its end for every
status, and each rank reports `finished_sending` exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable, KeysView
from dataclasses import dataclass, field

import msgspec

from kvferry.handoff import PrefillParams, TransferMode, paired_by_request_id
from kvferry.host.events import PreemptAnswer, RankIndex, RequestId
from kvferry.host.facts import EngineFacts
from kvferry.host.orders import Scheduled, Sender, StepOrders
from kvferry.host.pins import Pins
from kvferry.host.published import PublishedBlocks
from kvferry.host.requests import EngineRequest, ended_normally, is_preempted
from kvferry.ids import TransferId
from kvferry.protocol import reasons
from kvferry.protocol.commands import Abandon, Advance, Command, Expect, Finish, Preempt, Reclaim

_UNWANTED = reasons.because(reasons.CANCELLED, "released by its router")


class HandedOver(msgspec.Struct, frozen=True):
    """What a request that has ended well leaves to its consumers: KV of its first `tokens` tokens."""

    transfer: TransferId
    mode: TransferMode
    tokens: int


@dataclass(slots=True)
class _Sending:
    """One prefill request."""

    request: EngineRequest
    transfer: TransferId
    mode: TransferMode
    blocks: PublishedBlocks
    frontier: int = 0
    published: bool = False
    ended: bool = False
    unwanted: bool = False
    """Nobody will come for it, whoever dispatched it says."""


@dataclass(slots=True)
class _Ticket:
    """A preemption's pins. `waiting` ranks have not drained; `answered` ones have said so at least once."""

    waiting: set[RankIndex]
    answered: set[RankIndex] = field(default_factory=set)


class SchedulerProducer:
    """All prefill requests of one engine that hand their KV over."""

    def __init__(self, facts: EngineFacts, pins: Pins) -> None:
        self._facts = facts
        self._pins = pins
        self._requests: dict[RequestId, _Sending] = {}
        self._transfers: dict[TransferId, RequestId] = {}
        self._leaving: dict[RequestId, tuple[TransferId, set[RankIndex]]] = {}
        """Requests that ended unpublished, and the ranks that have not let go of the transfer yet: until
        then its id is taken, or a rank would take one request's end for another's."""
        self._senders: list[Sender] = []
        self._commands: list[Command] = []
        self._held: dict[RequestId, None] = {}
        """In the order in which they ended."""
        self._tickets: dict[int, _Ticket] = {}
        self._next_ticket = 0

    def __len__(self) -> int:
        return len(self._requests)

    def expect(self, request: EngineRequest, params: PrefillParams) -> bool:
        """A prefill request has arrived; False when an earlier one still has its transfer id or its name."""
        transfer = params.transfer or paired_by_request_id(request.request_id)
        name = request.request_id
        if transfer in self._transfers or name in self._requests or name in self._leaving:
            return False
        self._transfers[transfer] = request.request_id
        mode = params.mode or "push"
        self._requests[request.request_id] = _Sending(
            request, transfer, mode, PublishedBlocks(self._facts.tables, request.num_prompt_tokens)
        )
        self._senders.append(Sender(transfer, request.request_id, mode))
        self._commands.append(Expect(transfer, request.num_prompt_tokens, params.consumers))
        return True

    def is_ours(self, request: RequestId) -> bool:
        """Whether a request hands its KV over; all others need not be named to `plan`."""
        return request in self._requests

    def has_any_of(self, requests: KeysView[RequestId]) -> bool:
        """Whether some of these hand their KV over."""
        return not self._requests.keys().isdisjoint(requests)

    @property
    def has_orders(self) -> bool:
        """Whether `plan` may have something to tell the ranks: while it has no request it has not."""
        return bool(self._requests or self._commands or self._senders)

    def plan(
        self, scheduled: Iterable[Scheduled], preempted: Iterable[RequestId], orders: StepOrders
    ) -> None:
        """Add what the ranks have to hear of a step to its orders.

        `scheduled`: what the step computes of our requests. Not read while there are none.
        """
        orders.senders, self._senders = self._senders, []
        orders.commands += self._commands
        self._commands = []
        if not self._requests:
            return
        orders.preempt = self._preempt(preempted)
        for one in scheduled:
            sending = self._requests[one.request]
            sending.blocks.add(one.blocks, replaced=one.replaced)
            if one.replaced:
                sending.frontier = 0
            advance = self._advance(sending, min(one.stop, sending.request.num_prompt_tokens))
            if advance is not None:
                orders.advances.append(advance)

    def finish(self, request: EngineRequest) -> tuple[bool, HandedOver | None]:
        """The engine ends a request: whether to keep its blocks, and what it hands over."""
        sending = self._requests.get(request.request_id)
        if sending is None or sending.ended:
            return False, None
        sending.ended = True
        complete = sending.frontier >= request.num_prompt_tokens
        handed_over = complete and ended_normally(request) and not sending.unwanted
        if handed_over:
            self._commands.append(Finish(sending.transfer))
        elif sending.unwanted:
            self._commands.append(Abandon(sending.transfer, _UNWANTED))
        else:
            reason = reasons.INCOMPLETE if ended_normally(request) else reasons.ABANDONED
            detail = request.status.name.removeprefix("FINISHED_").lower()
            self._commands.append(Abandon(sending.transfer, reasons.because(reason, f"prefill {detail}")))
        if sending.published:
            self._held[request.request_id] = None
        else:
            self._pins.drop(request.request_id)
            del self._requests[request.request_id]
            self._leaving[request.request_id] = sending.transfer, set(self._facts.ranks)
        left = HandedOver(sending.transfer, sending.mode, request.num_prompt_tokens) if handed_over else None
        return sending.published, left

    def reclaim(self) -> bool:
        """Give up the longest held lease, unless its KV is travelling; False without one."""
        for name in self._held:
            self._commands.append(Reclaim(self._requests[name].transfer, reasons.STARVED))
            # Should it be travelling, the next one's turn comes next.
            del self._held[name]
            self._held[name] = None
            return True
        return False

    def release(self, transfer: TransferId) -> None:
        """Whoever dispatched a transfer says that nobody will come for it; unknown ones are ignored."""
        sending = self._requests.get(self._transfers.get(transfer, ""))
        if sending is None:
            return
        sending.unwanted = True
        if sending.ended:
            self._commands.append(Reclaim(transfer, _UNWANTED))

    def rank_ended(self, rank: RankIndex, request: RequestId) -> None:
        """A rank has let go of a request's transfer."""
        transfer, ranks = self._leaving.get(request, (None, set()))
        ranks.discard(rank)
        if transfer is not None and not ranks:
            del self._leaving[request]
            self._transfers.pop(transfer, None)

    def released(self, requests: Iterable[RequestId]) -> None:
        """Every rank has let go of these requests' blocks."""
        for request in requests:
            self._forget(request)

    def answered(self, answer: PreemptAnswer) -> None:
        """A rank has waited for the writes of a preemption."""
        ticket = self._tickets.get(answer.ticket)
        if ticket is None:
            return
        ticket.answered.add(answer.rank)
        if answer.drained:
            ticket.waiting.discard(answer.rank)
        if not ticket.waiting:
            del self._tickets[answer.ticket]
            self._pins.drop(answer.ticket)

    def has_pending_frees(self) -> bool:
        """Whether blocks of a preempted request come back as soon as ranks have answered.

        A rank that could not drain in time has answered too: the engine must not wait for it any longer.
        """
        if any(not self._facts.ranks <= ticket.answered for ticket in self._tickets.values()):
            return True
        return any(
            is_preempted(sending.request) and self._pins.count(name) > 0
            for name, sending in self._requests.items()
        )

    @property
    def quarantined_blocks(self) -> int:
        """Blocks of preempted requests that writes still read after the wait."""
        return sum(
            self._pins.count(number)
            for number, ticket in self._tickets.items()
            if self._facts.ranks <= ticket.answered
        )

    @property
    def needs_steps(self) -> bool:
        """Whether the workers must be heard or told something although the engine has no request to run."""
        return bool(self._commands or self._tickets or self._held or self._leaving)

    @property
    def held_count(self) -> int:
        """Requests that have ended and whose blocks are kept."""
        return len(self._held)

    def _preempt(self, preempted: Iterable[RequestId]) -> Preempt | None:
        ticket = self._next_ticket
        transfers = []
        for name in preempted:
            sending = self._requests.get(name)
            if sending is None or not self._pins.count(name):
                continue
            transfers.append(sending.transfer)
            self._pins.move(name, ticket)
            sending.blocks.clear()
            sending.frontier = 0
        if not transfers:
            return None
        self._next_ticket += 1
        self._tickets[ticket] = _Ticket(waiting=set(self._facts.ranks))
        return Preempt(tuple(transfers), ticket)

    def _advance(self, sending: _Sending, frontier: int) -> Advance | None:
        if frontier <= sending.frontier:
            return None
        new = sending.blocks.advance(frontier)
        sending.frontier = frontier
        sending.published = True
        self._pins.add(sending.request.request_id, new.held)
        return Advance(sending.transfer, frontier, new.first_block, new.spans, new.first_blocks)

    def _forget(self, request: RequestId) -> None:
        self._pins.drop(request)
        self._held.pop(request, None)
        sending = self._requests.pop(request, None)
        if sending is not None:
            self._transfers.pop(sending.transfer, None)
