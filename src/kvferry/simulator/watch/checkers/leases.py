"""Promise 6, for whoever's KV is travelling: its lease is not taken back, whoever wants the blocks."""

from __future__ import annotations

from typing import ClassVar

from kvferry.ids import ConsumerId, PeerName, TransferId
from kvferry.protocol.commands import Expect, Reclaim
from kvferry.protocol.messages import Failed, Register
from kvferry.simulator.ground.events import Commanded, MessageSent, Posted
from kvferry.simulator.watch.checkers.base import Checker, Handlers
from kvferry.simulator.watch.checkers.ledger import Ledger, Opening
from kvferry.simulator.watch.checkers.letters import Letters, Named

SourceKey = tuple[PeerName, TransferId]


class TravellingIsKept(Checker):
    """Compares what was posted before a lease was asked back with whom the producer then fails for it."""

    promise: ClassVar[int] = 6

    def __init__(self, ledger: Ledger, letters: Letters) -> None:
        self._ledger, self._letters = ledger, letters
        self._attempts: dict[Opening, int] = {}
        self._travelling: dict[SourceKey, set[Named]] = {}
        self._reclaimed: dict[SourceKey, tuple[str, frozenset[Named]]] = {}
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
            self._travelling.setdefault((event.rank, opening.transfer), set()).add(name)

    def _sent(self, event: MessageSent) -> None:
        message = self._letters.message
        if isinstance(message, Register):
            for opening in self._ledger.openings.get((event.rank, message.transfer, message.consumer), ())[
                -1:
            ]:
                self._attempts[opening] = max(self._attempts.get(opening, 0), message.attempt)
        elif isinstance(message, Failed):
            reason, names = self._reclaimed.get((event.rank, message.transfer), ("", frozenset[Named]()))
            if message.reason == reason and (message.transfer, message.consumer, message.attempt) in names:
                self._found(event, message.consumer, reason)

    def _found(self, event: MessageSent, consumer: ConsumerId, reason: str) -> None:
        text = f"{event.rank} took the lease back of {consumer}, whose KV was travelling"
        self.broken(event.at_seconds, f"{text}: {reason}")
