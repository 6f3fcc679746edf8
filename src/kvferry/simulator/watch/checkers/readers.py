"""Pull: the promises of those who read, and of those who are read.

Like the others these judge by what hosts, ranks and messages have said. A reader's promise is looked for in
the messages: an offer names a mark of the reader's own, and the history knows when that was made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from kvferry.ids import PeerName
from kvferry.protocol.commands import BlocksSafe, Drained, Received, ReceiveFailed, Released
from kvferry.protocol.messages import AnyMessage, Cancel, Fetch, Fetched, Offer, Renew, Status
from kvferry.simulator.ground.events import Landed, MessageEnded, MessageSent, Posted, PostEnded, Reported
from kvferry.simulator.watch.checkers.base import Checker, Handlers, Oracle
from kvferry.simulator.watch.checkers.ledger import Ledger, Lot, Opening
from kvferry.simulator.watch.checkers.letters import Letters, Named
from kvferry.simulator.watch.checkers.wakes import Wakes
from kvferry.transport.base import PostState

DRIFT = 0.01
"""By so much of a duration two clocks may differ in how fast they run."""
EPSILON_SECONDS = 1e-4
"""Clocks far from zero have coarse readings."""

LoanKey = tuple[PeerName, PeerName, Named]
"""Producer rank, reader and what is read."""


@dataclass(slots=True)
class Loan:
    """What a reader was promised: how long from when, by its own clock."""

    lots: tuple[Lot, ...]
    promises: list[tuple[float, float]] = field(default_factory=list)
    """When the mark was made that it counts from, in true time, and for how long."""


class LoansAreKept(Checker):
    """A READ is posted only under a promise, and what is promised is kept until the reader is silent.

    A promise counts for the producer from when it was said, and for the reader from when it arrived.
    """

    promise: ClassVar[int] = 3

    def __init__(self, ledger: Ledger, letters: Letters, wakes: Wakes) -> None:
        self._ledger, self._letters, self._wakes = ledger, letters, wakes
        self._asked_at: dict[tuple[PeerName, float], float] = {}
        """When each mark of a reader was made, in true time."""
        self._attempts: dict[Opening, int] = {}
        self._said: dict[LoanKey, Loan] = {}
        self._heard: dict[LoanKey, Loan] = {}
        self._returned: set[LoanKey] = set()
        """Of which the reader has said that it is silent, and that has arrived."""
        super().__init__()

    def handlers(self) -> Handlers:
        """What is called for which kind of event."""
        return {
            MessageSent: self._sent,
            MessageEnded: self._arrived,
            Posted: self._posted,
            Reported: self._reported,
        }

    def _sent(self, event: MessageSent) -> None:
        message, rank = self._letters.message, event.rank
        if isinstance(message, Fetch | Renew) and message.asked is not None:
            self._asked_at.setdefault((rank, message.asked), event.at_seconds)
        if isinstance(message, Fetch):
            for opening in self._ledger.openings.get((rank, message.transfer, message.consumer), ())[-1:]:
                self._attempts[opening] = max(self._attempts.get(opening, 0), message.attempt)
        elif message is not None:
            self._promised(self._said, rank, event.target, message)

    def _arrived(self, event: MessageEnded) -> None:
        message = self._letters.message
        if isinstance(message, Cancel | Fetched):
            name = message.transfer, message.consumer, message.attempt
            # An offer may be said afterwards, by who has not read this yet.
            self._returned.add((event.target, event.rank, name))
        elif message is not None:
            self._promised(self._heard, event.rank, event.target, message)

    def _promised(
        self, loans: dict[LoanKey, Loan], producer: PeerName, reader: PeerName, message: AnyMessage
    ) -> None:
        if isinstance(message, Offer):
            name = message.transfer, message.consumer, message.attempt
            holding = self._ledger.holdings.get((producer, message.transfer))
            loan = Loan(() if holding is None else (holding.lot,))
            loan = loans.setdefault((producer, reader, name), loan)
            self._extend(loan, reader, message.asked, message.keep_seconds)
        elif isinstance(message, Status) and message.asked is not None:
            for entry in message.transfers:
                found = loans.get((producer, reader, (entry.transfer, entry.consumer, entry.attempt)))
                if found is not None and entry.keep_seconds > 0:
                    self._extend(found, reader, message.asked, entry.keep_seconds)

    def _extend(self, loan: Loan, reader: PeerName, asked: float, keep_seconds: float) -> None:
        at_seconds = self._asked_at.get((reader, asked))
        if at_seconds is not None:
            loan.promises.append((at_seconds, keep_seconds))

    def _left_seconds(self, loan: Loan | None, reader: PeerName, now: float) -> float:
        """For how long a promise runs on by the reader's clock; not more than 0 when none does."""
        promises = () if loan is None else loan.promises
        return max(
            (
                keep_seconds / (1 + DRIFT) - self._wakes.own_seconds(reader, since, now)
                for since, keep_seconds in promises
            ),
            default=0.0,
        )

    def _posted(self, event: Posted) -> None:
        opening = self._ledger.writes[event.rank, event.handle].opening
        if not event.read or opening is None:
            return
        name = opening.transfer, opening.consumer, self._attempts.get(opening, 0)
        loan = self._heard.get((event.source, event.rank, name))
        if self._left_seconds(loan, event.rank, event.at_seconds) < -EPSILON_SECONDS or loan is None:
            text = f"{event.rank} posted read {event.handle} from {event.source} for {opening.consumer}"
            self.broken(event.at_seconds, f"{text} without a promise that its blocks are kept")

    def _reported(self, event: Reported) -> None:
        if not isinstance(event.result, Released | Drained):
            return
        for key, loan in list(self._said.items()):
            producer, reader, name = key
            if producer != event.rank or not any(lot.given_back for lot in loan.lots):
                continue
            left = self._left_seconds(loan, reader, event.at_seconds)
            if left > EPSILON_SECONDS and key not in self._returned:
                text = f"{producer} gave back what it lends to {name[1]} on {reader}"
                self.broken(event.at_seconds, f"{text}, {left:.3f} s before its promise ends")
            del self._said[key]


class OnlyKeptIsUsed(Checker):
    """What a READ brought after its source was given back must not be called good."""

    promise: ClassVar[int] = 5

    def __init__(self, ledger: Ledger, oracle: Oracle) -> None:
        self._ledger, self._oracle = ledger, oracle
        self._tainted: set[tuple[PeerName, int]] = set()
        self._last: dict[tuple[PeerName, int], tuple[PeerName, int]] = {}
        """Per rank and block the READ that filled it last."""
        super().__init__()

    def handlers(self) -> Handlers:
        """What is called for which kind of event."""
        return {Landed: self._landed, PostEnded: self._ended, Reported: self._reported}

    def _landed(self, event: Landed) -> None:
        read = self._ledger.writes.get((event.rank, event.handle))
        if read is None or not read.read or not self._ledger.is_alive(read.source):
            return
        lost = not read.lots or any(lot.given_back for lot in read.lots)
        if lost or self._ledger.source_came_back(read):
            self._tainted.add((event.rank, event.handle))

    def _ended(self, event: PostEnded) -> None:
        key = event.rank, event.handle
        read = self._ledger.writes.get(key)
        if read is not None and read.read and event.state is PostState.DONE:
            self._last.update(((event.rank, block), key) for block in read.target_blocks)

    def _reported(self, event: Reported) -> None:
        result, opening = event.result, self._ledger.settled
        if not isinstance(result, Received | ReceiveFailed) or opening is None or opening.mode != "pull":
            return
        good_until = opening.stop if isinstance(result, Received) else result.valid_until
        shapes = self._oracle.groups_of(event.rank)
        for index, first, blocks in opening.needed(shapes, good_until):
            count = shapes[index].blocks(good_until) - first // shapes[index].block_tokens
            self._look(event, opening, blocks[:count])

    def _look(self, event: Reported, opening: Opening, blocks: Sequence[int]) -> None:
        for block in blocks:
            key = self._last.get((event.rank, block))
            if key is None or self._ledger.writes[key].opening is not opening:
                self.broken(event.at_seconds, f"{event.rank} calls block {block} good and has never read it")
            elif key in self._tainted:
                text = (
                    f"{event.rank} calls block {block} of {opening.consumer} good, and its read {key[1]} came"
                )
                self.broken(event.at_seconds, f"{text} after its source had been given back")


class ReadersAreSilent(Checker):
    """Who reads calls its blocks safe, and says that it is silent, only with none of its READs in flight."""

    promise: ClassVar[int] = 2

    def __init__(self, ledger: Ledger, letters: Letters) -> None:
        self._ledger, self._letters = ledger, letters
        self._attempts: dict[Opening, int] = {}
        self._in_flight: dict[tuple[PeerName, int], Opening] = {}
        super().__init__()

    def handlers(self) -> Handlers:
        """What is called for which kind of event."""
        return {
            Posted: self._posted,
            PostEnded: self._ended,
            Reported: self._reported,
            MessageSent: self._sent,
        }

    def _posted(self, event: Posted) -> None:
        opening = self._ledger.writes[event.rank, event.handle].opening
        if event.read and opening is not None:
            self._in_flight[event.rank, event.handle] = opening

    def _ended(self, event: PostEnded) -> None:
        self._in_flight.pop((event.rank, event.handle), None)

    def _reported(self, event: Reported) -> None:
        opening = self._ledger.settled
        if not isinstance(event.result, Received | ReceiveFailed | BlocksSafe) or opening is None:
            return
        if opening.closed and (reads := self._reads(event.rank, opening, None)):
            text = f"{event.rank} calls the blocks of {opening.consumer} safe"
            self.broken(event.at_seconds, f"{text} while its reads {reads} into them are in flight")

    def _sent(self, event: MessageSent) -> None:
        message = self._letters.message
        if isinstance(message, Fetch):
            for opening in self._ledger.openings.get((event.rank, message.transfer, message.consumer), ())[
                -1:
            ]:
                self._attempts[opening] = message.attempt
        if not isinstance(message, Cancel | Fetched):
            return
        for opening in set(self._in_flight.values()):
            name = opening.transfer, opening.consumer, self._attempts.get(opening)
            if name != (message.transfer, message.consumer, message.attempt):
                continue
            if reads := self._reads(event.rank, opening, event.target):
                text = f"{event.rank} says {type(message).__name__} of {message.consumer} to {event.target}"
                self.broken(event.at_seconds, f"{text} while its reads {reads} from there are in flight")

    def _reads(self, rank: PeerName, opening: Opening, source: PeerName | None) -> list[int]:
        return [
            handle
            for (reader, handle), of in self._in_flight.items()
            if reader == rank
            and of is opening
            and source in (None, self._ledger.writes[reader, handle].source)
        ]
