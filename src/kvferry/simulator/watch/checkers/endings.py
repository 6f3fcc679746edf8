"""Promise 6: every transfer ends exactly once on each side, within its bound, whatever dies."""

from __future__ import annotations

import math
from collections import deque
from typing import ClassVar

from kvferry.ids import ConsumerId, EngineId, PeerName, TransferId
from kvferry.protocol.commands import (
    Abandon,
    AnnounceCommand,
    BlocksSafe,
    Command,
    Drained,
    Expect,
    Finish,
    Preempt,
    Receive,
    Received,
    ReceiveFailed,
    Released,
)
from kvferry.simulator.ground.events import (
    Commanded,
    EngineCrashed,
    Healed,
    LegSent,
    Observed,
    Reported,
    RequestEnded,
)
from kvferry.simulator.watch.checkers.base import Checker, Handlers
from kvferry.simulator.watch.checkers.ledger import Ledger

Owed = tuple[PeerName, str, str, str]
"""Rank, what it owes its host (released, received, safe, drained), transfer or ticket, consumer."""
Part = tuple[EngineId, TransferId, ConsumerId | None]
"""A request's part in a transfer on one engine; None is the producer's."""


class EveryTransferEndsOnce(Checker):
    """Keeps what each rank owes its host, and which requests have yet to end."""

    promise: ClassVar[int] = 6

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._owed: dict[Owed, deque[float]] = {}
        """Since when, once for each time that the same is owed: names are used again."""
        self._unended: dict[Part, float] = {}
        self._was_ended: set[Part] = set()
        self._deadline_seconds = math.inf
        super().__init__()

    def handlers(self) -> Handlers:
        """What is called for which kind of event."""
        return {
            LegSent: self._sent,
            Commanded: self._commanded,
            Reported: self._reported,
            RequestEnded: self._ended,
            EngineCrashed: self._crashed,
            Healed: self._healed,
        }

    def finish(self) -> None:
        """Whoever still owes something now will owe it for ever."""
        for (rank, what, name, consumer), times in self._owed.items():
            for since in times:
                text = f"{rank} never reported {what} for {name} {consumer}".rstrip()
                self.broken(since, f"{text}, owed since {since:.6f}")
        for (engine, transfer, party), since in self._unended.items():
            side = "prefill request" if party is None else f"decode request {party}"
            self.broken(since, f"the {side} of {transfer} on {engine} has never ended")

    def _sent(self, event: LegSent) -> None:
        # A name may be used again once the earlier request of that name has ended.
        self._was_ended.discard((event.engine, event.transfer, event.consumer))

    def _commanded(self, event: Commanded) -> None:
        command, rank = event.command, event.rank
        owed = _owed_after(rank, command)
        if owed is not None:
            self._owed.setdefault(owed, deque()).append(event.at_seconds)
        if isinstance(command, Expect | AnnounceCommand | Receive):
            life = self._ledger.life_of[rank]
            consumer = None if isinstance(command, Expect) else command.consumer
            part = life.engine, command.transfer, consumer
            if part not in self._was_ended:
                self._unended.setdefault(part, event.at_seconds)

    def _reported(self, event: Reported) -> None:
        result, rank = event.result, event.rank
        if isinstance(result, Released):
            self._settle(event, (rank, "released", result.transfer, ""))
        elif isinstance(result, Received):
            self._settle(event, (rank, "received", result.transfer, result.consumer))
        elif isinstance(result, ReceiveFailed):
            settled = self._settle(event, (rank, "received", result.transfer, result.consumer))
            if settled and not result.fenced:
                safe = rank, "safe", result.transfer, result.consumer
                self._owed.setdefault(safe, deque()).append(event.at_seconds)
        elif isinstance(result, BlocksSafe):
            self._settle(event, (rank, "safe", result.transfer, result.consumer))
        elif isinstance(result, Drained):
            self._settle(event, (rank, "drained", str(result.ticket), ""))

    def _settle(self, event: Reported, owed: Owed) -> bool:
        name = type(event.result).__name__
        times = self._owed.get(owed)
        if not times:
            self.broken(
                event.at_seconds, f"{event.rank} reported {name} for {owed[2]} {owed[3]} that nobody is owed"
            )
            return False
        times.popleft()
        self._judge_bound(event, f"{event.rank} reported {name} for {owed[2]} {owed[3]}")
        return True

    def _ended(self, event: RequestEnded) -> None:
        # A second end of the same request is a break of promise 8, which counts them.
        part = event.engine, event.transfer, event.consumer
        self._unended.pop(part, None)
        if event.consumer is not None:
            # When nothing was needed from the producer, ranks may hear of the request later than that.
            self._was_ended.add(part)
        self._judge_bound(event, f"{event.engine} ended {event.request}")

    def _judge_bound(self, event: Observed, what: str) -> None:
        if event.at_seconds > self._deadline_seconds:
            late = event.at_seconds - self._deadline_seconds
            self.broken(event.at_seconds, f"{what} {late:.3f} s after the bound")

    def _crashed(self, event: EngineCrashed) -> None:
        ranks = set(event.ranks)
        for owed in [owed for owed in self._owed if owed[0] in ranks]:
            del self._owed[owed]
        for part in [part for part in self._unended if part[0] == event.engine]:
            del self._unended[part]

    def _healed(self, event: Healed) -> None:
        self._deadline_seconds = event.deadline_seconds


def _owed_after(rank: PeerName, command: Command) -> Owed | None:
    """What a rank owes its host after a command."""
    if isinstance(command, Finish | Abandon):
        return rank, "released", command.transfer, ""
    if isinstance(command, Receive):
        return rank, "received", command.transfer, command.consumer
    if isinstance(command, Preempt):
        return rank, "drained", str(command.ticket), ""
    return None
