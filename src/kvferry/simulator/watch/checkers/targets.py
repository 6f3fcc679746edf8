"""Promise 2: nothing lands in blocks that the consumer's host has got back."""

from __future__ import annotations

from typing import ClassVar

from kvferry.ids import PeerName
from kvferry.simulator.ground.events import BlocksReturned, Landed, Posted
from kvferry.simulator.watch.checkers.base import Checker, Handlers
from kvferry.simulator.watch.checkers.ledger import Ledger, Write


class NoLandingInFreedTargets(Checker):
    """A destination is the writers' until its rank has said that it is not, and the pool's only then."""

    promise: ClassVar[int] = 2

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._returns: dict[tuple[PeerName, int], int] = {}
        super().__init__()

    def handlers(self) -> Handlers:
        """What is called for which kind of event."""
        return {Posted: self._posted, Landed: self._landed, BlocksReturned: self._returned}

    def _posted(self, event: Posted) -> None:
        write = self._ledger.writes[event.rank, event.handle]
        self._returns[event.rank, event.handle] = self._times_returned(write)

    def _landed(self, event: Landed) -> None:
        write = self._ledger.writes.get((event.rank, event.handle))
        if write is None or not self._ledger.is_alive(event.target):
            return
        what = f"write {event.handle} of {event.rank} landed in {write.target_blocks} of {event.target}"
        if write.opening is not None and write.opening.closed:
            self.broken(
                event.at_seconds, f"{what} after the rank had declared {write.opening.consumer} closed"
            )
        elif self._times_returned(write) != self._returns[event.rank, event.handle]:
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

    def _times_returned(self, write: Write) -> int:
        life = self._ledger.life_of.get(write.target)
        return 0 if life is None else sum(life.returns.get(block, 0) for block in write.target_blocks)
