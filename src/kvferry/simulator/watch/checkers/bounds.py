"""Promise 6, transfer by transfer: each ends within the bounds that follow from the settings of its rank.

`EveryTransferEndsOnce` wants an end at last. Here every wait is measured, while faults happen too, by the
clock of the rank that waits and without the time for which its agent was kept from running:

- who hears nothing of a transfer gives it up after the silence limit,
- who has given one up has its blocks back when the permission and the transport's bound are over, or its
  own READs have ended,
- who is told again and again that the other leg is unknown does not ask for ever,
- a producer keeps its blocks for a lease after the last sign of life, and not less after prefill's end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from kvferry.ids import ConsumerId, PeerName, TransferId
from kvferry.protocol.commands import (
    Abandon,
    BlocksSafe,
    Finish,
    Receive,
    Received,
    ReceiveFailed,
    Released,
    Withdraw,
)
from kvferry.protocol.messages import Announce, Fetch, Hello, Register, Renew, Status
from kvferry.protocol.reasons import LEASE_EXPIRED, code_of
from kvferry.simulator.ground.events import Commanded, MessageEnded, MessageSent, PostEnded, Reported
from kvferry.simulator.watch.checkers.base import Checker, Handlers, Oracle
from kvferry.simulator.watch.checkers.fences import DRIFT, EPSILON_SECONDS
from kvferry.simulator.watch.checkers.ledger import Ledger, Opening
from kvferry.simulator.watch.checkers.letters import Letters, named
from kvferry.simulator.watch.checkers.wakes import Wakes

SLACK_SECONDS = 0.5
"""From something that has become true until the agent has noticed and said so."""

SourceKey = tuple[PeerName, TransferId]


@dataclass(slots=True)
class Wait:
    """One destination on a consumer's rank."""

    since: float
    heard_at: float = -math.inf
    """When a producer rank last said something of it."""
    given_up_at: float | None = None
    """When its host withdrew it, or its rank said that it failed and may still be written."""
    overdue_at: float | None = None
    """When a producer rank first said `unknown` though the limit for that was over."""


@dataclass(slots=True)
class Hold:
    """A transfer on a producer's rank whose host has ended it."""

    since: float
    finished: bool
    """By the end of its prefill; it was abandoned otherwise."""
    keep_seconds: float | None = None
    """Its lease while nobody comes, if that is one of its own."""


class EndsWithinBounds(Checker):
    """Measures each wait when it ends; one without an end is `EveryTransferEndsOnce`'s."""

    promise: ClassVar[int] = 6

    def __init__(self, ledger: Ledger, letters: Letters, wakes: Wakes, oracle: Oracle) -> None:
        self._ledger, self._letters, self._wakes, self._oracle = ledger, letters, wakes, oracle
        self._waits: dict[Opening, Wait] = {}
        self._holds: dict[SourceKey, Hold] = {}
        self._signs: dict[SourceKey, float] = {}
        """When a consumer last spoke of a transfer to a producer's rank."""
        self._greeted_at: dict[PeerName, float] = {}
        """When a consumer last said `Hello`: what it had said before counts from then on."""
        self._drained_at: dict[PeerName, float] = {}
        """When a rank last saw a write end."""
        super().__init__()

    def handlers(self) -> Handlers:
        """What is called for which kind of event."""
        return {
            Commanded: self._commanded,
            Reported: self._reported,
            MessageSent: self._sent,
            MessageEnded: self._arrived,
            PostEnded: self._post_ended,
        }

    def _commanded(self, event: Commanded) -> None:
        command, rank = event.command, event.rank
        if isinstance(command, Receive):
            self._waits[self._ledger.openings[rank, command.transfer, command.consumer][-1]] = Wait(
                event.at_seconds
            )
        elif isinstance(command, Withdraw):
            for wait in self._open(rank, command.transfer, command.consumer):
                wait.given_up_at = event.at_seconds if wait.given_up_at is None else wait.given_up_at
        elif isinstance(command, Finish | Abandon):
            keep_seconds = command.keep_seconds if isinstance(command, Finish) else None
            hold = Hold(event.at_seconds, isinstance(command, Finish), keep_seconds)
            self._holds.setdefault((rank, command.transfer), hold)

    def _open(self, rank: PeerName, transfer: TransferId, consumer: ConsumerId) -> list[Wait]:
        openings = self._ledger.openings.get((rank, transfer, consumer), ())
        return [wait for opening in openings if (wait := self._waits.get(opening)) is not None]

    # --- the consumer's side -------------------------------------------------------------------------

    def _arrived(self, event: MessageEnded) -> None:
        message, rank, now = self._letters.message, event.target, event.at_seconds
        if isinstance(message, Announce | Register | Fetch | Renew):
            for transfer, _, _ in named(message):
                self._signs[rank, transfer] = now
        elif isinstance(message, Hello):
            self._greeted_at[rank] = now
        elif message is not None:
            for transfer, consumer, _ in named(message):
                for wait in self._open(rank, transfer, consumer):
                    self._judge_silence(rank, wait, now, consumer)
                    wait.heard_at = now
        if isinstance(message, Status):
            for entry in message.transfers:
                if entry.state == "unknown":
                    self._note_unknown(rank, self._open(rank, entry.transfer, entry.consumer), now)

    def _note_unknown(self, rank: PeerName, waits: list[Wait], now: float) -> None:
        limit = self._oracle.limits_of(rank).unknown_seconds + SLACK_SECONDS
        for wait in waits:
            if wait.overdue_at is None and self._wakes.awake_seconds(rank, wait.since, now) > limit:
                wait.overdue_at = now

    def _sent(self, event: MessageSent) -> None:
        message, rank = self._letters.message, event.rank
        if not isinstance(message, Register | Fetch):
            return
        for wait in self._open(rank, message.transfer, message.consumer):
            overdue_at = wait.overdue_at
            if overdue_at is None or wait.given_up_at is not None:
                continue
            late = self._wakes.awake_seconds(rank, overdue_at, event.at_seconds)
            if late > SLACK_SECONDS:
                text = f"{rank} still registers {message.consumer} {late:.3f} s after it was to give up"
                self.broken(event.at_seconds, f"{text} waiting for an unknown transfer")

    def _judge_silence(self, rank: PeerName, wait: Wait, now: float, consumer: ConsumerId) -> None:
        """Whether a wait that has just heard something, or has been given up, was given up in time."""
        if wait.given_up_at is not None:
            return
        limits = self._oracle.limits_of(rank)
        # Who is kept from running does not shake hands meanwhile.
        silent = self._wakes.awake_seconds(rank, wait.since, now) - limits.handshake_seconds
        if wait.heard_at > wait.since:
            silent = min(silent, self._wakes.awake_seconds(rank, wait.heard_at, now))
        bound = limits.silence_seconds + limits.renew_seconds + SLACK_SECONDS
        if silent > bound:
            text = f"{rank} waited {silent:.3f} s for {consumer} without a word of it"
            self.broken(now, f"{text}, and gives up after {bound:.3f} s")

    def _reported(self, event: Reported) -> None:
        result = event.result
        if isinstance(result, Released):
            self._judge_release(event, result)
        elif isinstance(result, Received | ReceiveFailed | BlocksSafe):
            opening = self._ledger.settled
            wait = None if opening is None else self._waits.get(opening)
            if opening is not None and wait is not None:
                self._judge_wait(event, opening, wait)

    def _judge_wait(self, event: Reported, opening: Opening, wait: Wait) -> None:
        rank, now = event.rank, event.at_seconds
        self._judge_silence(rank, wait, now, opening.consumer)
        if wait.given_up_at is None:
            wait.given_up_at = now
        limits = self._oracle.limits_of(rank)
        # A reader is its own fence: its READs end by themselves, or with their connection.
        waits = limits.slice_seconds if opening.mode == "pull" else limits.write_seconds
        bound = (waits + self._oracle.retry_bound_seconds) * (1 + DRIFT) + SLACK_SECONDS
        kept = self._wakes.awake_seconds(rank, wait.given_up_at, now)
        if kept > bound:
            text = f"{rank} kept the blocks of {opening.consumer} for {kept:.3f} s after it was given up"
            self.broken(now, f"{text}, at most {bound:.3f} s are needed")
        if opening.closed:
            del self._waits[opening]

    # --- the producer's side -------------------------------------------------------------------------

    def _post_ended(self, event: PostEnded) -> None:
        self._drained_at[event.rank] = event.at_seconds

    def _judge_release(self, event: Reported, result: Released) -> None:
        rank, now = event.rank, event.at_seconds
        hold = self._holds.pop((rank, result.transfer), None)
        if hold is None:
            return
        lease = self._oracle.limits_of(rank).lease_seconds
        longest = max(lease, hold.keep_seconds or 0.0)
        shortest = min(lease, lease if hold.keep_seconds is None else hold.keep_seconds)
        since = max(hold.since, self._drained_at.get(rank, 0.0))
        if hold.finished:
            since = max(since, self._signs.get((rank, result.transfer), 0.0), self._greeted_at.get(rank, 0.0))
        bound = (longest if hold.finished else 0.0) + SLACK_SECONDS
        kept = self._wakes.awake_seconds(rank, since, now)
        if kept > bound:
            text = f"{rank} kept {result.transfer} for {kept:.3f} s after it had any reason to"
            self.broken(now, f"{text}, at most {bound:.3f} s are right")
        held = self._wakes.own_seconds(rank, hold.since, now)
        if code_of(result.outcome) == LEASE_EXPIRED and held < shortest - EPSILON_SECONDS:
            text = f"{rank} ended the lease of {result.transfer} {held:.3f} s after prefill"
            self.broken(now, f"{text}, and not after {shortest:.3f} s")
