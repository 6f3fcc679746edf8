"""Promise 3: nothing lands that reads source blocks which the producer's host has got back."""

from __future__ import annotations

from typing import ClassVar

from kvferry.simulator.ground.events import BlocksReturned, Landed
from kvferry.simulator.watch.checkers.base import Checker, Handlers
from kvferry.simulator.watch.checkers.ledger import Ledger


class NoReadOfFreedSources(Checker):
    """A source block is the readers' until its rank has released or drained it, and the pool's only then."""

    promise: ClassVar[int] = 3

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        super().__init__()

    def handlers(self) -> Handlers:
        """What is called for which kind of event."""
        return {Landed: self._landed, BlocksReturned: self._returned}

    def _landed(self, event: Landed) -> None:
        write = self._ledger.writes.get((event.rank, event.handle))
        if write is None or write.read or not self._ledger.is_alive(event.rank):
            # What a dead engine's memory holds stays as it was. A READ does no harm; see `OnlyKeptIsUsed`.
            return
        what = f"write {event.handle} of {event.rank} to {event.target} read {write.source_blocks}"
        if any(lot.given_back for lot in write.lots):
            self.broken(event.at_seconds, f"{what} after the rank had given them back")
        elif self._ledger.source_came_back(write):
            self.broken(event.at_seconds, f"{what} after the engine's pool had got them back")

    def _returned(self, event: BlocksReturned) -> None:
        for rank in self._ledger.lives[event.engine].ranks:
            if rank not in self._ledger.held:
                continue
            for block in event.blocks:
                if self._ledger.lots_with(rank, block):
                    text = f"block {block} of {event.engine} was freed while {rank} offers it to readers"
                    self.broken(event.at_seconds, text)
                    break
