"""Promise 6, where nothing goes wrong: every transfer succeeds, and soon.

A wake-up that is lost, a lease that is not renewed or a timer that is armed once only cost a failed transfer
or some seconds, which any fault would excuse. So a history without faults has to do without them.
"""

from __future__ import annotations

from typing import ClassVar

from kvferry.ids import PeerName, TransferId
from kvferry.protocol.commands import Advance, Expect, Finish, Receive, Received, ReceiveFailed, Released
from kvferry.protocol.reasons import STARVED, code_of
from kvferry.simulator.ground.events import (
    Commanded,
    DecodeStarted,
    EngineCrashed,
    FabricFault,
    FaultInjected,
    Landed,
    MessageEnded,
    Observed,
    Posted,
    Reported,
)
from kvferry.simulator.watch.checkers.base import Checker, Handlers, Oracle
from kvferry.simulator.watch.checkers.ledger import Ledger
from kvferry.simulator.watch.checkers.starving import Starving

SOON_SECONDS = 0.25
SOON_HOPS = 25
POST_HOPS = 4
"""KV is expected within so many delays of the world's network and threads, beyond `SOON_SECONDS`.

A greeting, a registration and their answers take fewer; each post into the same rank, in the turns of others
too, adds a few. What is only healed by the next renewal comes later, where the network is not slow: nothing
is posted meanwhile.
"""
GOOD_RELEASES = frozenset({"written", "fetched", "cancelled"})
"""Without an abort a consumer cancels only what it has already."""


class CalmSucceeds(Checker):
    """Judges histories in which no fault may happen; in others it is silent.

    Two engines may have too little memory for each other without any fault; one of them then gives way. What
    excuses that is up to `Starving`.
    """

    promise: ClassVar[int] = 6

    def __init__(self, ledger: Ledger, oracle: Oracle) -> None:
        self._calm = oracle.is_calm
        self._starving = Starving(ledger, oracle)
        self._delay_seconds = oracle.delay_seconds
        self._posted_at: dict[PeerName, list[float]] = {}
        self._tokens: dict[TransferId, int] = {}
        self._complete_at: dict[TransferId, float] = {}
        """When the last rank had computed the whole prompt."""
        self._finished_at: dict[TransferId, float] = {}
        """When the last rank heard that prefill had ended: who reads is offered it then."""
        self._reads: set[tuple[PeerName, TransferId, str]] = set()
        self._allocated_at: dict[tuple[PeerName, TransferId, str], float] = {}
        super().__init__()

    def handlers(self) -> Handlers:
        """What is called for which kind of event."""
        if not self._calm:
            return {}
        return {
            Commanded: self._commanded,
            Reported: self._reported,
            Posted: self._posted,
            Landed: self._starving.landed,
            DecodeStarted: self._starving.decoding,
            FaultInjected: self._disturbed,
            FabricFault: self._disturbed,
            EngineCrashed: self._disturbed,
            MessageEnded: self._message_ended,
        }

    def _message_ended(self, event: MessageEnded) -> None:
        if not event.arrived:
            self._disturbed(event)

    def _disturbed(self, event: Observed) -> None:
        self.broken(event.at_seconds, f"a calm history was disturbed by {type(event).__name__}")

    def _posted(self, event: Posted) -> None:
        self._posted_at.setdefault(event.target, []).append(event.at_seconds)

    def _commanded(self, event: Commanded) -> None:
        command = event.command
        problem = self._starving.commanded(event)
        if problem:
            self.broken(event.at_seconds, problem)
        if isinstance(command, Expect):
            self._tokens[command.transfer] = command.tokens
        elif isinstance(command, Advance):
            if command.frontier >= self._tokens.get(command.transfer, 0):
                self._complete_at[command.transfer] = event.at_seconds
        elif isinstance(command, Finish):
            self._finished_at[command.transfer] = event.at_seconds
        elif isinstance(command, Receive):
            key = event.rank, command.transfer, command.consumer
            self._allocated_at[key] = event.at_seconds
            if command.mode == "pull":
                self._reads.add(key)

    def _reported(self, event: Reported) -> None:
        result, at = event.result, event.at_seconds
        problem = self._starving.reported(event)
        if isinstance(result, Received):
            key = event.rank, result.transfer, result.consumer
            begins = self._finished_at if key in self._reads else self._complete_at
            ready_at = max(self._allocated_at.get(key, at), begins.get(result.transfer, at))
            posts = sum(1 for posted_at in self._posted_at.get(event.rank, ()) if posted_at >= ready_at)
            soon_seconds = SOON_SECONDS + (SOON_HOPS + POST_HOPS * posts) * self._delay_seconds
            if at > ready_at + soon_seconds:
                text = f"{event.rank} received {result.consumer} {at - ready_at:.3f} s after it could have"
                self.broken(at, f"{text}, expected within {soon_seconds:.3f} s")
        elif isinstance(result, ReceiveFailed):
            self._judge(event, result.reason, problem, f"did not receive {result.consumer}")
        elif isinstance(result, Released) and code_of(result.outcome) not in GOOD_RELEASES:
            self._judge(event, result.outcome, problem, f"released {result.transfer}")

    def _judge(self, event: Reported, reason: str, problem: str, what: str) -> None:
        if code_of(reason) != STARVED:
            self.broken(event.at_seconds, f"{event.rank} {what} without a fault: {reason}")
        elif problem:
            self.broken(event.at_seconds, f"{event.rank} {what}: {reason}, but {problem}")
