"""Promise 2, as it is argued: blocks go back only on evidence that nothing can write them any more.

`NoLandingInFreedTargets` sees the harm, which needs a coincidence. Here the evidence itself is looked for, in
what has been said: a destination may be called safe when each producer rank that was permitted to write it
has answered, has been dead for long enough, or cannot be permitted any more; and who has given such an answer
writes nothing.
"""

from __future__ import annotations

from typing import ClassVar

from kvferry.ids import PeerName
from kvferry.protocol.commands import BlocksSafe, Received, ReceiveFailed
from kvferry.protocol.messages import (
    AnyMessage,
    Cancelled,
    Failed,
    Register,
    Renew,
    Status,
    Written,
)
from kvferry.simulator.ground.events import (
    EngineCrashed,
    FaultInjected,
    MessageEnded,
    MessageSent,
    Posted,
    PostEnded,
    Reported,
)
from kvferry.simulator.watch.checkers.base import Checker, Handlers, Oracle
from kvferry.simulator.watch.checkers.ledger import Ledger, Opening
from kvferry.simulator.watch.checkers.letters import Letters, Named, named
from kvferry.simulator.watch.checkers.wakes import Wakes

DRIFT = 0.01
"""By so much of a duration two clocks may differ in how fast they run."""
EPSILON_SECONDS = 1e-4
"""Clocks far from zero have coarse readings."""

Pair = tuple[PeerName, PeerName]
"""Consumer rank and producer rank."""


class FencesHold(Checker):
    """Keeps who was permitted to write what, and who has said or shown that it will not."""

    promise: ClassVar[int] = 2

    def __init__(self, ledger: Ledger, letters: Letters, wakes: Wakes, oracle: Oracle) -> None:
        self._ledger, self._letters, self._wakes, self._oracle = ledger, letters, wakes, oracle
        self._marks: dict[Pair, dict[float, float]] = {}
        """When each mark of a producer rank came in."""
        self._granted: dict[Named, dict[Pair, float]] = {}
        """When the mark came in that the newest grant repeats."""
        self._told: set[tuple[Pair, Named]] = set()
        """Who knows of a request's blocks; who does not cannot write them, whatever was granted."""
        self._answers: dict[tuple[Pair, Named], AnyMessage] = {}
        """What has come in of `Written`, `Failed` and `Cancelled`; nothing takes a `Written` back."""
        self._died_at: dict[PeerName, float] = {}
        """When a rank's engine died; its ranks may linger."""
        self._attempts: dict[Opening, int] = {}
        """The newest attempt whose blocks were told to anybody."""
        self._fenced: dict[tuple[Pair, Named], str] = {}
        """What a producer rank has answered for good."""
        self._complete: set[tuple[Pair, Named]] = set()
        """What it has called written."""
        self._in_flight: dict[Pair, dict[int, Named | None]] = {}
        super().__init__()

    def handlers(self) -> Handlers:
        """What is called for which kind of event."""
        return {
            MessageSent: self._sent,
            MessageEnded: self._arrived,
            Posted: self._posted,
            PostEnded: self._post_ended,
            Reported: self._reported,
            FaultInjected: self._injected,
            EngineCrashed: self._crashed,
        }

    # --- the consumer's side -------------------------------------------------------------------------

    def _sent(self, event: MessageSent) -> None:
        message = self._letters.message
        if isinstance(message, Register):
            openings = self._ledger.openings.get((event.rank, message.transfer, message.consumer))
            if openings:
                newest = openings[-1]
                self._attempts[newest] = max(self._attempts.get(newest, 0), message.attempt)
            name = message.transfer, message.consumer, message.attempt
            self._told.add(((event.rank, event.target), name))
        if isinstance(message, Register | Renew):
            self._grant((event.rank, event.target), message)
        elif isinstance(message, Failed | Cancelled | Written):
            self._answered((event.target, event.rank), event, message)

    def _grant(self, pair: Pair, message: Register | Renew) -> None:
        at_seconds = None if message.mark is None else self._marks.get(pair, {}).get(message.mark)
        if at_seconds is None:
            return
        for name in named(message):
            granted = self._granted.setdefault(name, {})
            granted[pair] = max(granted.get(pair, at_seconds), at_seconds)

    def _arrived(self, event: MessageEnded) -> None:
        message, pair = self._letters.message, (event.target, event.rank)
        if isinstance(message, Status):
            if message.mark is not None:
                self._marks.setdefault(pair, {}).setdefault(message.mark, event.at_seconds)
        elif isinstance(message, Written | Failed | Cancelled):
            name = message.transfer, message.consumer, message.attempt
            if not isinstance(self._answers.get((pair, name)), Written):
                self._answers[pair, name] = message

    def _reported(self, event: Reported) -> None:
        result, opening = event.result, self._ledger.settled
        if not isinstance(result, Received | ReceiveFailed | BlocksSafe) or opening is None:
            return
        if not opening.closed:
            return
        attempt = self._attempts.pop(opening, None)
        if attempt is None:
            # Nobody was told of its blocks.
            return
        name = opening.transfer, opening.consumer, attempt
        for pair, granted_at in self._granted.get(name, {}).items():
            if pair[0] != event.rank or (pair, name) not in self._told:
                continue
            answer = self._answers.get((pair, name))
            if isinstance(result, Received):
                if not isinstance(answer, Written):
                    text = f"{event.rank} calls {opening.consumer} received, and {pair[1]} has not said so"
                    self.broken(event.at_seconds, text)
            elif answer is None and not self._is_silenced(pair, granted_at, event.at_seconds):
                text = f"{event.rank} calls the blocks of {opening.consumer} safe, but {pair[1]}"
                why = (
                    "was permitted to write them and has neither answered, nor died, nor lost its permission"
                )
                self.broken(event.at_seconds, f"{text} {why}")

    def _is_silenced(self, pair: Pair, granted_at: float, now: float) -> bool:
        """Whether time alone proves it. A refusal does not, whatever it says of its sender.

        It names no grant, and may have crossed one that was accepted.
        """
        rank, peer = pair
        limits = self._oracle.limits_of(rank)
        died_at = self._died_at.get(peer)
        if died_at is not None:
            dead_seconds = self._wakes.own_seconds(rank, died_at, now)
            if dead_seconds >= limits.orphan_seconds - EPSILON_SECONDS:
                return True
        bound = (limits.write_seconds + self._oracle.retry_bound_seconds) * (1 + DRIFT)
        return self._wakes.own_seconds(rank, granted_at, now) >= bound - EPSILON_SECONDS

    def _injected(self, event: FaultInjected) -> None:
        if event.kind == "crash":
            # Told before the processes die.
            engine = event.what.partition(",")[0]
            for name, life in self._ledger.lives.items():
                if name == engine:
                    self._die(life.ranks, event.at_seconds)

    def _crashed(self, event: EngineCrashed) -> None:
        self._die(event.ranks, event.at_seconds)

    def _die(self, ranks: tuple[PeerName, ...], at_seconds: float) -> None:
        for rank in ranks:
            self._died_at.setdefault(rank, at_seconds)

    # --- the producer's side -------------------------------------------------------------------------

    def _answered(self, pair: Pair, event: MessageSent, message: Failed | Cancelled | Written) -> None:
        name, what = (message.transfer, message.consumer, message.attempt), type(message).__name__
        before = self._fenced.get((pair, name))
        if isinstance(message, Written):
            # Who asks again after both is told either: both are true for good.
            if before is not None and (pair, name) not in self._complete:
                text = f"{event.rank} says Written of {message.consumer} to {event.target}"
                self.broken(event.at_seconds, f"{text} after it has said {before}")
            self._complete.add((pair, name))
            return
        self._fenced[pair, name] = what
        writes = [handle for handle, of in self._in_flight.get(pair, {}).items() if of == name]
        if writes:
            text = f"{event.rank} says {what} of {message.consumer} to {event.target}"
            self.broken(event.at_seconds, f"{text} while its writes {writes} for it are in flight")

    def _posted(self, event: Posted) -> None:
        opening = self._ledger.writes[event.rank, event.handle].opening
        attempt = None if opening is None else self._attempts.get(opening)
        name = None
        if opening is not None and attempt is not None:
            name = opening.transfer, opening.consumer, attempt
        if event.read:
            return
        pair = event.target, event.rank
        self._in_flight.setdefault(pair, {})[event.handle] = name
        if name is not None and (pair, name) in self._fenced:
            text = f"{event.rank} posted write {event.handle} for {name[1]} to {event.target}"
            self.broken(event.at_seconds, f"{text} after it has said {self._fenced[pair, name]}")

    def _post_ended(self, event: PostEnded) -> None:
        self._in_flight.get((event.target, event.rank), {}).pop(event.handle, None)
