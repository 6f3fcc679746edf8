"""What excuses a transfer that is given up without any fault: engines that wait for each other's memory.

Only an engine that computes nothing for `starved_seconds` may give anything up, and only what stands still:
a destination whose prefill has not begun or has not come further since it was last asked for, or the lease of
KV for which nobody has a destination. What a rank cannot have heard of yet does not count against it.
"""

from __future__ import annotations

import math

from kvferry.ids import ConsumerId, EngineId, PeerName, TransferId
from kvferry.protocol.commands import (
    Advance,
    Receive,
    Received,
    ReceiveFailed,
    Reclaim,
    Released,
    Relinquish,
)
from kvferry.protocol.reasons import STARVED, code_of
from kvferry.simulator.ground.events import Commanded, DecodeStarted, Landed, Reported
from kvferry.simulator.watch.checkers.base import Oracle
from kvferry.simulator.watch.checkers.ledger import Ledger

HEARD_HOPS = 4
HEARD_SECONDS = 0.25
"""A registration, or the answer to a renewal, has been heard within so many delays of network and threads."""
STEPS_SECONDS = 1.0
"""What a step computes may be told so long after it was planned."""

Destination = tuple[PeerName, TransferId, ConsumerId]


class Starving:
    """Keeps what goes on where, in a history without faults, and says what is no excuse."""

    def __init__(self, ledger: Ledger, oracle: Oracle) -> None:
        self._ledger, self._oracle = ledger, oracle
        self._heard_seconds = HEARD_SECONDS + HEARD_HOPS * oracle.delay_seconds
        self._computed_at: dict[EngineId, float] = {}
        self._advanced: dict[TransferId, list[float]] = {}
        self._landed: dict[Destination, list[float]] = {}
        self._received_at: dict[Destination, float] = {}
        """When each destination was handed to its rank, until its end."""
        self._relinquished: dict[Destination, list[float]] = {}
        self._reclaimed_at: dict[tuple[PeerName, TransferId], float] = {}

    def decoding(self, event: DecodeStarted) -> None:
        """An engine has computed something."""
        self._computed_at[event.engine] = event.at_seconds

    def landed(self, event: Landed) -> None:
        """Something of a transfer has come."""
        opening = self._ledger.writes[event.rank, event.handle].opening
        if opening is not None:
            key = opening.rank, opening.transfer, opening.consumer
            self._landed.setdefault(key, []).append(event.at_seconds)

    def commanded(self, event: Commanded) -> str:
        """Take a command; what is wrong with it, if anything is."""
        command, rank, now = event.command, event.rank, event.at_seconds
        if isinstance(command, Advance):
            self._advanced.setdefault(command.transfer, []).append(now)
            self._computed_at[self._ledger.life_of[rank].engine] = now
        elif isinstance(command, Receive):
            self._received_at[rank, command.transfer, command.consumer] = now
        elif isinstance(command, Relinquish):
            self._relinquished.setdefault((rank, command.transfer, command.consumer), []).append(now)
            return self._is_busy(rank, now)
        elif isinstance(command, Reclaim) and code_of(command.reason) == STARVED:
            self._reclaimed_at[rank, command.transfer] = now
            return self._is_busy(rank, now)
        return ""

    def _is_busy(self, rank: PeerName, now: float) -> str:
        engine = self._ledger.life_of[rank].engine
        idle_seconds = now - self._computed_at.get(engine, -math.inf)
        starved_seconds = self._oracle.limits_of(rank).starved_seconds
        if idle_seconds >= starved_seconds - STEPS_SECONDS:
            return ""
        return f"{engine} gives something up {idle_seconds:.3f} s after it has computed something"

    def reported(self, event: Reported) -> str:
        """Take a result; why it cannot be excused, if it is one of starvation."""
        result = event.result
        if isinstance(result, Received):
            self._received_at.pop((event.rank, result.transfer, result.consumer), None)
        elif isinstance(result, ReceiveFailed):
            key = event.rank, result.transfer, result.consumer
            problem = self._of_destination(key)
            self._received_at.pop(key, None)
            return problem
        elif isinstance(result, Released):
            at_seconds = self._reclaimed_at.get((event.rank, result.transfer))
            return (
                "nobody wanted its blocks back" if at_seconds is None else self._of_lease(result, at_seconds)
            )
        return ""

    def _of_destination(self, key: Destination) -> str:
        """Whether a destination was given up though its KV was on the way."""
        asked = self._relinquished.get(key, [])
        if not asked:
            reclaimed = [at for (_, transfer), at in self._reclaimed_at.items() if transfer == key[1]]
            return "" if reclaimed else "nobody wanted its blocks back"
        known_at = asked[-1] - self._heard_seconds - self._oracle.limits_of(key[0]).renew_seconds
        moves = sorted([*self._advanced.get(key[1], ()), *self._landed.get(key, ())])
        if not moves or moves[0] > known_at:
            return ""
        if len(asked) < 2:
            return f"its prefill had begun {asked[-1] - moves[0]:.3f} s before"
        lately = [move for move in moves if asked[-2] < move < known_at]
        return f"it has come further since {asked[-2]:.3f}, when it was asked for before" if lately else ""

    def _of_lease(self, result: Released, at_seconds: float) -> str:
        """Whether a lease was given up though somebody had a destination for its KV."""
        for key, since in self._received_at.items():
            is_known = key[1] == result.transfer and since < at_seconds - self._heard_seconds
            if is_known and not any(asked <= at_seconds for asked in self._relinquished.get(key, ())):
                return f"{key[2]} had its destination {at_seconds - since:.3f} s before"
        return ""
