"""One rank's side of its engine's transfers, on the thread that also launches the model.

Nothing here touches the transport. Commands go into the agent's mailbox, results come out of it, and the
work per step is in proportion to what has changed: a step that changes nothing makes no report and takes no
lock. The order within a step: `preempt`, `begin`, the forward pass, `save`, `collect` (`save` may come after
`collect` under speculative decoding).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable
from operator import mul
from typing import Protocol

import msgspec

from kvferry.host.events import Event, PreemptAnswer, RankIndex, RequestId
from kvferry.host.metrics import BYTES, BYTES_EARLY
from kvferry.host.orders import StepOrders
from kvferry.host.reports import NOTHING, Reported
from kvferry.host.worker_consumer import WorkerConsumer
from kvferry.host.worker_producer import WorkerProducer
from kvferry.ids import BlockId, TransferId, redacted
from kvferry.layout.spans import count, cut, from_spans, scaled_spans
from kvferry.protocol import reasons
from kvferry.protocol.commands import (
    Abandon,
    Advance,
    BlocksSafe,
    Command,
    Drained,
    Expect,
    Finish,
    Groups,
    Preempt,
    Receive,
    Received,
    ReceiveFailed,
    Released,
    Result,
    Withdraw,
)

logger = logging.getLogger(__name__)

_MOVED = (BYTES, BYTES_EARLY)
_NOT_MOVED = (0, 0)
UNSAID_SECONDS_MAX = 0.1
"""How long bytes that have moved may wait to be told with other news, as long as the engine steps."""
Clock = Callable[[], float]
Damage = Callable[[BlockId], None]
Ready = Callable[[], bool]
Record = Callable[[], Ready]
"""Marks a point in the device's work; what it returns says, on any thread, whether that has passed."""


class AgentFace(Protocol):
    """The agent, as the worker side uses it. Every method may be called from any thread."""

    def submit(self, command: Command, ready: Ready | None = None) -> bool:
        """Take a command; False only for an `Expect`, `AnnounceCommand` or `Receive` that finds no room.

        A producer's command with `ready` counts only once that returns True; later ones keep their order.
        """
        ...

    def results(self) -> list[Result]:
        """What has come since the last call."""
        ...

    def drain(self, transfers: tuple[TransferId, ...], timeout_seconds: float) -> bool:
        """Wait until no write reads the transfers' blocks; False when that took too long."""
        ...

    def close(self, timeout_seconds: float) -> object:
        """Stop. Idempotent."""
        ...


class FerryWorker:
    """One rank's worker side."""

    def __init__(
        self,
        agent: AgentFace,
        *,
        rank: RankIndex,
        block_tokens: int,
        group_tokens: tuple[int, ...] = (),
        ratios: tuple[int, ...] = (1,),
        keeps_good_prefixes: bool = True,
        drain_seconds: float = 1.0,
        can_start_over: bool = True,
        record: Record | None = None,
        moved: Callable[[], tuple[int, int]] = lambda: _NOT_MOVED,
        clock: Clock = time.monotonic,
    ) -> None:
        """`ratios`: blocks of the cache description per block of the engine, by cache group; `group_tokens`:
        tokens per block of the engine, where not all are those of the first group.

        `keeps_good_prefixes`: see `EngineFacts`; where it does not, `can_start_over` must be true.
        `record` is None where the forward pass has ended when its hooks run; elsewhere it marks its end.
        `moved`: bytes that the agent has posted since its start, and those of them before the end of their
        prefill; the same object while nothing has been posted.
        """
        self._agent = agent
        self._rank = rank
        self._ratios = ratios
        self._group_tokens = group_tokens or (block_tokens,) * len(ratios)
        self._scales = any(ratio != 1 for ratio in ratios)
        self._drain_seconds = drain_seconds
        self._clock = clock
        self._producer = WorkerProducer(rank)
        self._consumer = WorkerConsumer(
            rank, block_tokens, can_start_over=can_start_over, keeps_good_prefixes=keeps_good_prefixes
        )
        self._record = record
        self._refused: list[Result] = []
        self._undrained: set[int] = set()
        self._opened: set[RequestId] = set()
        """Requests whose destinations this step has opened."""
        self._out = Reported()
        self._moved = moved
        self._seen_moved = _NOT_MOVED
        self._told_at = -math.inf
        """When bytes that have moved were told."""
        self._has_news = False
        """Whether this step's `collect` had something to report."""
        self._damage: tuple[int, Damage] | None = None

    def damage_block(self, index: int, damage: Damage) -> None:
        """Test hook: call `damage` with the id of each prompt's block `index` before it is published."""
        self._damage = index, damage

    def preempt(self, preempt: Preempt | None) -> None:
        """Blocks have been taken away: wait, bounded, until nothing reads them."""
        if preempt is None:
            return
        drained = self._agent.drain(preempt.transfers, self._drain_seconds)
        self._out.events.append(PreemptAnswer(self._rank, preempt.ticket, drained))
        if not drained:
            # Asked again under our own number, the agent reports when it has.
            self._undrained.add(preempt.ticket)
            self._agent.submit(preempt)

    def begin(self, orders: StepOrders) -> None:
        """The step begins: submit its commands, before the forward pass."""
        if self._opened:
            self._opened.clear()
        for sender in orders.senders:
            self._producer.start(sender)
        if orders.commands:
            now = self._clock()
            for command in orders.commands:
                self._command(command, now)

    def save(self, orders: StepOrders, *, succeeded: bool) -> None:
        """The forward pass has been launched, or has raised: then what it computed does not exist."""
        advances = orders.advances
        if not advances:
            return
        self._producer.publish(advance.transfer for advance in advances)
        if not succeeded:
            return
        if self._damage is not None:
            self._apply_damage(advances)
        ready = None if self._record is None else self._record()
        for advance in advances:
            if not self._producer.is_refused(advance.transfer):
                self._agent.submit(self._in_kernel_blocks(advance), ready)

    def collect(self, finished: Collection[RequestId]) -> Reported:
        """Take what has come: the reports of this step, `NOTHING` when there are none.

        `finished`: requests that the engine has ended.
        """
        results = self._agent.results()
        self._has_news = bool(results or finished or self._refused or self._out.events)
        if not self._has_news:
            return NOTHING
        out, self._out = self._out, Reported()
        now = self._clock()
        self._producer.finish(finished)
        # A name that ended and was used again at once is both finished and new in one step.
        self._consumer.withdraw(name for name in finished if name not in self._opened)
        candidates = [transfer for name in finished if (transfer := self._producer.transfer_of(name))]
        refused, self._refused = self._refused, []
        for result in (*refused, *results):
            self._result(result, now, out, candidates)
        out.finished.sending.update(self._producer.take_released(candidates))
        self._out = Reported(bad_blocks=out.bad_blocks, events=out.events)
        return out

    def take_bad_blocks(self) -> set[BlockId]:
        """Blocks whose load has failed, of the same step as `collect`."""
        bad = self._out.bad_blocks
        self._out.bad_blocks = set()
        return bad

    def take_events(self) -> list[Event]:
        """The events of the same step as `collect`."""
        events = self._out.events
        self._out.events = []
        return events

    def take_moved(self) -> dict[str, int]:
        """By how much the agent's counters of bytes have grown since they were told; none that stood still.

        Told in steps that have other news, or after `UNSAID_SECONDS_MAX`: what follows from a report in every
        step that has posted a slice would cost the engine more than the slice does.
        """
        totals, seen = self._moved(), self._seen_moved
        if totals == seen:
            return {}
        now = self._clock()
        if not self._has_news and now - self._told_at < UNSAID_SECONDS_MAX:
            return {}
        self._told_at = now
        self._seen_moved = totals
        grown = (total - before for total, before in zip(totals, seen, strict=True))
        return {name: amount for name, amount in zip(_MOVED, grown, strict=True) if amount}

    @property
    def has_refused(self) -> bool:
        """Whether `collect` has something to report that the agent does not know of."""
        return bool(self._refused)

    @property
    def open_count(self) -> int:
        """Transfers that have not ended on this rank, and preemptions whose writes have not drained."""
        return len(self._producer) + len(self._consumer) + len(self._undrained)

    def close(self, timeout_seconds: float) -> None:
        """Stop the agent. Idempotent."""
        self._agent.close(timeout_seconds)

    def _command(self, command: Command, now: float) -> None:
        if isinstance(command, Expect):
            if not self._agent.submit(command):
                self._producer.refuse(command.transfer)
        elif isinstance(command, Finish | Abandon):
            if isinstance(command, Finish):
                self._producer.prefill_ended(command.transfer, now)
            if self._producer.is_refused(command.transfer):
                self._refused.append(Released(command.transfer, reasons.TABLE_FULL))
            else:
                self._agent.submit(command)
        elif isinstance(command, Receive):
            self._receive(command, now)
        elif isinstance(command, Advance):
            # Of what is kept after a turn: computed by earlier steps, so no forward pass is waited for.
            if not self._producer.is_refused(command.transfer):
                self._agent.submit(self._in_kernel_blocks(command))
        else:
            if isinstance(command, Withdraw):
                self._consumer.withdraw([RequestId(command.consumer)])
            # A refused announcement costs a reminder; the registration is what counts.
            self._agent.submit(command)

    def _receive(self, command: Receive, now: float) -> None:
        self._consumer.open(command, now)
        self._opened.add(RequestId(command.consumer))
        target = command
        if self._scales:
            target = msgspec.structs.replace(command, groups=self._kernel_target(command))
        if not self._agent.submit(target):
            # Its announcement may have been taken; nobody shall wait for what it announced.
            self._agent.submit(
                Withdraw(command.transfer, command.consumer, command.source, reasons.TABLE_FULL)
            )
            self._refused.append(
                ReceiveFailed(
                    command.transfer,
                    command.consumer,
                    reasons.TABLE_FULL,
                    valid_until=command.start,
                    fenced=True,
                )
            )

    def _result(self, result: Result, now: float, out: Reported, candidates: list[TransferId]) -> None:
        if isinstance(result, Received):
            self._consumer.received(result, now, out)
        elif isinstance(result, Released):
            ended = self._producer.release(result, now)
            if ended is not None:
                out.events.append(ended)
                candidates.append(result.transfer)
        elif isinstance(result, ReceiveFailed):
            if not result.cancelled:
                logger.warning(
                    "request %s: the KV of transfer %s has not come beyond token %d: %s",
                    result.consumer,
                    redacted(result.transfer),
                    result.valid_until,
                    result.reason,
                )
            self._consumer.failed(result, out)
        elif isinstance(result, BlocksSafe):
            self._consumer.safe(result, out)
        elif isinstance(result, Drained) and result.ticket in self._undrained:
            self._undrained.discard(result.ticket)
            out.events.append(PreemptAnswer(self._rank, result.ticket, drained=True))

    def _kernel_groups(self, groups: Groups) -> Groups:
        return tuple(scaled_spans(*pair) for pair in zip(groups, self._ratios, strict=True))

    def _kernel_target(self, receive: Receive) -> Groups:
        """The blocks of a destination; what of the engine's last block lies behind its last token is none."""
        groups = []
        for spans, ratio, tokens in zip(
            self._kernel_groups(receive.groups), self._ratios, self._group_tokens, strict=True
        ):
            behind = -(-receive.stop // tokens) * ratio - -(-receive.stop * ratio // tokens)
            groups.append(cut(spans, 0, max(count(spans) - behind, 0)))
        return tuple(groups)

    def _in_kernel_blocks(self, advance: Advance) -> Advance:
        if not self._scales:
            return advance
        return Advance(
            advance.transfer,
            advance.frontier,
            advance.first_block * self._ratios[0],
            self._kernel_groups(advance.blocks),
            tuple(map(mul, advance.first_blocks, self._ratios)),
        )

    def _apply_damage(self, advances: Iterable[Advance]) -> None:
        if self._damage is None:
            return
        index, damage = self._damage
        for advance in advances:
            blocks = from_spans(advance.blocks[0])
            if advance.first_block <= index < advance.first_block + len(blocks):
                damage(int(blocks[index - advance.first_block]))
