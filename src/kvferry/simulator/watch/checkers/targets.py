"""Promise 2: nothing lands in blocks that the consumer's host has got back."""

from __future__ import annotations

from typing import ClassVar

from kvferry.simulator.ground.events import BlocksReturned, Landed
from kvferry.simulator.watch.checkers.base import Checker, Handlers
from kvferry.simulator.watch.checkers.ledger import Ledger


class NoLandingInFreedTargets(Checker):
    """A destination is the writers' until its rank has said that it is not, and the pool's only then."""

    promise: ClassVar[int] = 2

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        super().__init__()

    def handlers(self) -> Handlers:
        """What is called for which kind of event."""
        return {Landed: self._landed, BlocksReturned: self._returned}

    def _landed(self, event: Landed) -> None:
        write = self._ledger.writes.get((event.rank, event.handle))
        if write is None or not self._ledger.is_alive(event.target):
            return
        what = f"write {event.handle} of {event.rank} landed in {write.target_blocks} of {event.target}"
        if write.opening is not None and write.opening.closed:
            self.broken(
                event.at_seconds, f"{what} after the rank had declared {write.opening.consumer} closed"
            )
        elif self._ledger.target_came_back(write):
            self.broken(event.at_seconds, f"{what} after the engine's pool had got them back")

    def _returned(self, event: BlocksReturned) -> None:
        for rank in self._ledger.lives[event.engine].ranks:
            opened = self._ledger.opened.get(rank)
            if not opened:
                continue
            for block in event.blocks:
                opening = opened.get(block)
                if opening is not None and not opening.closed:
                    text = f"block {block} of {event.engine} was freed while {rank} has it open"
                    self.broken(event.at_seconds, f"{text} for {opening.consumer}")
                    break
