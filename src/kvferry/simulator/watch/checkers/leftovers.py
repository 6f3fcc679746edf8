"""Promise 7: after the last transfer ended, free blocks equal the start value and the tables are empty."""

from __future__ import annotations

import math
from typing import ClassVar

from kvferry.ids import EngineId
from kvferry.simulator.ground.events import BlocksReturned, BlocksTaken, EngineCrashed, EngineStarted
from kvferry.simulator.watch.checkers.base import Checker, Handlers, Oracle
from kvferry.simulator.watch.checkers.ledger import Ledger


class NothingIsLeft(Checker):
    """Keeps each pool's blocks: none is given out twice, none comes back twice, all come back."""

    promise: ClassVar[int] = 7

    def __init__(self, ledger: Ledger, oracle: Oracle) -> None:
        self._ledger = ledger
        self._oracle = oracle
        self._taken: dict[EngineId, dict[int, str]] = {}
        super().__init__()

    def handlers(self) -> Handlers:
        """What is called for which kind of event."""
        return {
            EngineStarted: self._started,
            EngineCrashed: self._crashed,
            BlocksTaken: self._took,
            BlocksReturned: self._returned,
        }

    def finish(self) -> None:
        """Every block must be free and every table empty."""
        for engine, taken in self._taken.items():
            if taken:
                owners = sorted(set(taken.values()))
                text = f"{len(taken)} blocks of {engine} never came back, of {', '.join(owners)}"
                self.broken(math.inf, text)
        for remains in self._oracle.remains():
            self.broken(math.inf, f"left over: {remains}")

    def _started(self, event: EngineStarted) -> None:
        self._taken[event.engine] = {}

    def _crashed(self, event: EngineCrashed) -> None:
        del self._taken[event.engine]

    def _took(self, event: BlocksTaken) -> None:
        taken = self._taken[event.engine]
        count = self._ledger.lives[event.engine].block_count
        for block in event.blocks:
            if block in taken:
                text = f"block {block} of {event.engine} was given to {event.owner}"
                self.broken(event.at_seconds, f"{text} while it is {taken[block]}'s")
            elif not 0 <= block < count:
                self.broken(event.at_seconds, f"{event.engine} has no block {block}, it has {count}")
            taken[block] = event.owner

    def _returned(self, event: BlocksReturned) -> None:
        taken = self._taken[event.engine]
        for block in event.blocks:
            if taken.pop(block, None) is None:
                self.broken(event.at_seconds, f"block {block} of {event.engine} was freed twice")
