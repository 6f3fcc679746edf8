"""Promise 4: two writes to the same destination bytes are never in flight together."""

from __future__ import annotations

from typing import ClassVar

from kvferry.ids import PeerName
from kvferry.simulator.ground.events import EngineCrashed, Landed, Posted, PostEnded
from kvferry.simulator.watch.checkers.base import Checker, Handlers
from kvferry.simulator.watch.checkers.ledger import Ledger

Key = tuple[PeerName, int]
"""Initiator and handle."""


class NoOverlappingWrites(Checker):
    """Compares each post with what is in flight to the same rank.

    A rank must know of its own writes, so a second one to the same block is a break at once, however long the
    first one takes. It cannot know of another engine's: there it is a break when the older write lands after
    the younger one was posted. What comes from several ranks of one engine are different parts of a block,
    whoever posts it.
    """

    promise: ClassVar[int] = 4

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._in_flight: dict[PeerName, dict[int, list[Key]]] = {}
        self._sources: dict[Key, PeerName] = {}
        """Whose memory each of them reads."""
        self._overtaken: dict[Key, Key] = {}
        """Older writes and a younger one of another engine to the same block."""
        super().__init__()

    def handlers(self) -> Handlers:
        """What is called for which kind of event."""
        return {
            Posted: self._posted,
            Landed: self._landed,
            PostEnded: self._ended,
            EngineCrashed: self._crashed,
        }

    def _posted(self, event: Posted) -> None:
        key = event.rank, event.handle
        self._sources[key] = event.source
        blocks = self._in_flight.setdefault(event.target, {})
        for block in event.target_blocks:
            others = blocks.setdefault(block, [])
            for other in others:
                source = self._sources[other]
                strangers = self._life(source) != self._life(event.source)
                if other[0] == event.rank and (strangers or source == event.source):
                    text = f"{event.rank} posted write {event.handle} into block {block} of {event.target}"
                    self.broken(event.at_seconds, f"{text} while its write {other[1]} there is in flight")
                elif strangers:
                    self._overtaken[other] = key
            others.append(key)

    def _landed(self, event: Landed) -> None:
        younger = self._overtaken.get((event.rank, event.handle))
        if younger is not None and self._ledger.is_alive(event.target):
            text = f"write {event.handle} of {event.rank} landed in {event.target} among the bytes"
            self.broken(event.at_seconds, f"{text} of the younger write {younger[1]} of {younger[0]}")

    def _ended(self, event: PostEnded) -> None:
        key = event.rank, event.handle
        write = self._ledger.writes.get(key)
        blocks = self._in_flight.get(event.target)
        if write is None or blocks is None:
            return
        for block in write.target_blocks:
            if key in blocks.get(block, ()):
                blocks[block].remove(key)
        self._overtaken.pop(key, None)
        self._sources.pop(key, None)

    def _crashed(self, event: EngineCrashed) -> None:
        for rank in event.ranks:
            self._in_flight.pop(rank, None)

    def _life(self, rank: PeerName) -> int:
        return id(self._ledger.life_of.get(rank))
