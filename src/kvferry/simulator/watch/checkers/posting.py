"""Promise 1: a WRITE or READ is posted only while its source is held and its destination stands."""

from __future__ import annotations

from typing import ClassVar

from kvferry.simulator.ground.events import Posted
from kvferry.simulator.watch.checkers.base import Checker, Handlers
from kvferry.simulator.watch.checkers.ledger import Ledger


class PostedUnderPermission(Checker):
    """Looks at each post: whose blocks it reads, and whose it will write."""

    promise: ClassVar[int] = 1

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        super().__init__()

    def handlers(self) -> Handlers:
        """What is called for which kind of event."""
        return {Posted: self._posted}

    def _posted(self, event: Posted) -> None:
        if not (self._ledger.is_alive(event.target) and self._ledger.is_alive(event.source)):
            # The dead have no use for their memory, and the poster cannot know yet.
            return
        write = self._ledger.writes[event.rank, event.handle]
        opening = write.opening
        if opening is None:
            self._broken(event, f"blocks {event.target_blocks} are not of one registration")
            return
        if opening.closed:
            self._broken(event, f"the registration of {opening.consumer} has ended")
        readable = set().union(*(lot.blocks for lot in write.lots))
        lost = [block for block in event.source_blocks if block not in readable]
        if lost:
            self._broken(event, f"source blocks {lost} are not held for the transfer of {opening.consumer}")

    def _broken(self, event: Posted, why: str) -> None:
        self.broken(
            event.at_seconds,
            f"{event.rank} posted {_named(event)}, but {why}",
        )


def _named(event: Posted) -> str:
    return (
        f"read {event.handle} from {event.source}"
        if event.read
        else f"write {event.handle} to {event.target}"
    )
