"""Promise 6, for the consumers of a lease: it ends well only when each was served, and is not taken back from
one whose KV is travelling."""

from __future__ import annotations

from typing import ClassVar

from kvferry.ids import ConsumerId, PeerName, TransferId
from kvferry.protocol.commands import Expect, Reclaim, Released
from kvferry.protocol.messages import Failed, Fetch, Register
from kvferry.protocol.reasons import FETCHED, WRITTEN, code_of
from kvferry.simulator.ground.events import Commanded, MessageEnded, MessageSent, Posted, Reported
from kvferry.simulator.watch.checkers.base import Checker, Handlers
from kvferry.simulator.watch.checkers.ledger import Ledger, Opening
from kvferry.simulator.watch.checkers.letters import Letters, Named, named

SourceKey = tuple[PeerName, TransferId]
Place = tuple[PeerName, Named]
"""A consumer's rank and what it has asked for: ranks count their attempts each for itself."""


class TravellingIsKept(Checker):
    """Compares what was posted before a lease was asked back with whom the producer then fails for it."""

    promise: ClassVar[int] = 6

    def __init__(self, ledger: Ledger, letters: Letters) -> None:
        self._ledger, self._letters = ledger, letters
        self._attempts: dict[Opening, int] = {}
        self._travelling: dict[SourceKey, set[Place]] = {}
        self._reclaimed: dict[SourceKey, tuple[str, frozenset[Place]]] = {}
        """Why a lease was asked back, and what had been posted for whom by then."""
        super().__init__()

    def handlers(self) -> Handlers:
        """What is called for which kind of event."""
        return {Commanded: self._commanded, Posted: self._posted, MessageSent: self._sent}

    def _commanded(self, event: Commanded) -> None:
        command = event.command
        if isinstance(command, Expect):
            self._travelling.pop((event.rank, command.transfer), None)
            self._reclaimed.pop((event.rank, command.transfer), None)
        elif isinstance(command, Reclaim):
            key = event.rank, command.transfer
            self._reclaimed[key] = command.reason, frozenset(self._travelling.get(key, ()))

    def _posted(self, event: Posted) -> None:
        opening = self._ledger.writes[event.rank, event.handle].opening
        if opening is not None and opening in self._attempts:
            name = opening.transfer, opening.consumer, self._attempts[opening]
            self._travelling.setdefault((event.source, opening.transfer), set()).add((opening.rank, name))

    def _sent(self, event: MessageSent) -> None:
        message = self._letters.message
        if isinstance(message, Register | Fetch):
            for opening in self._ledger.openings.get((event.rank, message.transfer, message.consumer), ())[
                -1:
            ]:
                self._attempts[opening] = max(self._attempts.get(opening, 0), message.attempt)
        elif isinstance(message, Failed):
            reason, places = self._reclaimed.get((event.rank, message.transfer), ("", frozenset[Place]()))
            name = message.transfer, message.consumer, message.attempt
            if message.reason == reason and (event.target, name) in places:
                self._found(event, message.consumer, reason)

    def _found(self, event: MessageSent, consumer: ConsumerId, reason: str) -> None:
        text = f"{event.rank} took the lease back of {consumer}, whose KV was travelling"
        self.broken(event.at_seconds, f"{text}: {reason}")


class ServedToAll(Checker):
    """Compares for how many consumers a prefill was made with how many have spoken when its lease ends."""

    promise: ClassVar[int] = 6

    def __init__(self, letters: Letters) -> None:
        self._letters = letters
        self._wanted: dict[SourceKey, int] = {}
        self._spoke: dict[SourceKey, set[ConsumerId]] = {}
        """Ever, not since the last prefill of that name: what came before a Hello is read later."""
        super().__init__()

    def handlers(self) -> Handlers:
        """What is called for which kind of event."""
        return {Commanded: self._commanded, MessageEnded: self._arrived, Reported: self._reported}

    def _commanded(self, event: Commanded) -> None:
        if isinstance(event.command, Expect):
            self._wanted[event.rank, event.command.transfer] = event.command.consumers

    def _arrived(self, event: MessageEnded) -> None:
        if self._letters.message is None:
            return
        for transfer, consumer, _ in named(self._letters.message):
            self._spoke.setdefault((event.target, transfer), set()).add(consumer)

    def _reported(self, event: Reported) -> None:
        result = event.result
        if not isinstance(result, Released) or code_of(result.outcome) not in {WRITTEN, FETCHED}:
            return
        key = event.rank, result.transfer
        wanted, spoke = self._wanted.get(key, 1), len(self._spoke.get(key, ()))
        if spoke < wanted:
            text = f"{event.rank} released {result.transfer} as {result.outcome}"
            self.broken(event.at_seconds, f"{text}, and only {spoke} of {wanted} consumers had spoken")
