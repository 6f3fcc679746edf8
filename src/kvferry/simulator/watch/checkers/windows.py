"""Promise 5, where caches have windows or do not fit: what is needed is written, and not a byte else."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvferry.ids import PeerName
from kvferry.protocol.commands import BlocksSafe, Receive, Received, ReceiveFailed
from kvferry.simulator.ground.events import Commanded, EngineCrashed, Posted, Reported
from kvferry.simulator.watch.checkers.base import Checker, Handlers, Oracle
from kvferry.simulator.watch.checkers.ledger import Ledger, Opening

Words = npt.NDArray[np.uint32]


class OnlyTheWindowTravels(Checker):
    """Keeps what lay in a destination's blocks when it was opened, and compares what nobody needs at its end.

    Of a window that is all but the engine's whole blocks of it. Of any group it is what lies behind the
    prompt, but for the rest of the last cell: the largest piece that both sides' blocks are made of. Only
    caches with windows are looked at.
    """

    promise: ClassVar[int] = 5

    def __init__(self, ledger: Ledger, oracle: Oracle) -> None:
        self._ledger, self._oracle = ledger, oracle
        self._before: dict[Opening, list[Words]] = {}
        self._sources: dict[Opening, PeerName] = {}
        super().__init__()

    def handlers(self) -> Handlers:
        """What is called for which kind of event."""
        return {
            Commanded: self._commanded,
            Posted: self._posted,
            Reported: self._reported,
            EngineCrashed: self._crashed,
        }

    def _commanded(self, event: Commanded) -> None:
        command = event.command
        if not isinstance(command, Receive):
            return
        if any(shape.window_tokens for shape in self._oracle.groups_of(event.rank)):
            opening = self._ledger.openings[event.rank, command.transfer, command.consumer][-1]
            self._before[opening] = [
                self._oracle.content(event.rank, group, blocks) for group, blocks in enumerate(opening.groups)
            ]

    def _posted(self, event: Posted) -> None:
        opening = self._ledger.writes[event.rank, event.handle].opening
        if opening is not None and opening in self._before:
            self._sources[opening] = event.source

    def _reported(self, event: Reported) -> None:
        opening = self._ledger.settled
        if not isinstance(event.result, Received | ReceiveFailed | BlocksSafe) or opening is None:
            return
        if not opening.closed:
            return
        before, source = self._before.pop(opening, None), self._sources.pop(opening, None)
        if before is None or source is None:
            return
        for group, words in enumerate(before):
            for token in self._strays(opening, group, source, words):
                text = f"{source} has written token {token} of group {group} of {opening.consumer} on"
                self.broken(event.at_seconds, f"{text} {event.rank}, which nobody needs")
                return

    def _strays(self, opening: Opening, group: int, source: PeerName, before: Words) -> list[int]:
        """Tokens that were written and are not needed."""
        shape, theirs = self._oracle.groups_of(opening.rank)[group], self._oracle.groups_of(source)[group]
        blocks = opening.groups[group]
        first = (shape.blocks(opening.stop) - len(blocks)) * shape.block_tokens
        cell = math.gcd(shape.block_tokens, theirs.block_tokens)
        start = max(opening.start, shape.skipped(opening.stop) * shape.block_tokens)
        stop = -(-opening.stop // cell) * cell
        changed = (self._oracle.content(opening.rank, group, blocks) != before).any(axis=(1, 2))
        found: list[int] = (np.flatnonzero(changed) + first).tolist()
        return [token for token in found if not start <= token < stop]

    def _crashed(self, event: EngineCrashed) -> None:
        for opening in [one for one in self._before if one.rank in event.ranks]:
            del self._before[opening]


class MisfitsAreRefused(Checker):
    """Nothing is moved between engines whose caches cannot be joined."""

    promise: ClassVar[int] = 5

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        super().__init__()

    def handlers(self) -> Handlers:
        """What is called for which kind of event."""
        return {Posted: self._posted}

    def _posted(self, event: Posted) -> None:
        if not self._oracle.fits(event.source, event.target):
            text = f"{event.rank} moves KV from {event.source} to {event.target}"
            self.broken(event.at_seconds, f"{text}, whose caches do not fit")
