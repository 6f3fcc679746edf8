"""Promise 5: what is called received is there, byte for byte, and decoding uses nothing else."""

from __future__ import annotations

from typing import ClassVar

from kvferry.ids import EngineId
from kvferry.protocol.commands import Received, ReceiveFailed
from kvferry.simulator.ground.events import (
    BlocksReturned,
    DecodeEnded,
    DecodeStarted,
    EngineCrashed,
    Reported,
)
from kvferry.simulator.watch.checkers.base import Checker, Handlers, Oracle
from kvferry.simulator.watch.checkers.ledger import Ledger


class ContentIsExact(Checker):
    """Compares memory with what a request's prompt must have there.

    On a rank when it reports a destination's end, on every rank when decoding starts, and again when it ends:
    nobody may have written into the prompt's blocks meanwhile.
    """

    promise: ClassVar[int] = 5

    def __init__(self, ledger: Ledger, oracle: Oracle) -> None:
        self._ledger = ledger
        self._oracle = oracle
        self._decoding: dict[tuple[EngineId, str], DecodeStarted] = {}
        self._passed: dict[tuple[EngineId, str], set[int]] = {}
        """Blocks that windows have moved on from since decoding started."""
        super().__init__()

    def handlers(self) -> Handlers:
        """What is called for which kind of event."""
        return {
            Reported: self._reported,
            DecodeStarted: self._started,
            DecodeEnded: self._ended,
            BlocksReturned: self._returned,
            EngineCrashed: self._crashed,
        }

    def _reported(self, event: Reported) -> None:
        result = event.result
        if not isinstance(result, Received | ReceiveFailed):
            return
        opening = self._ledger.settled
        prompt = self._oracle.prompt_of(result.transfer, result.consumer)
        if opening is None or prompt is None:
            # A result that nobody waits for is a break of promise 6.
            return
        stop = opening.stop
        if isinstance(result, ReceiveFailed):
            stop = result.valid_until
            if not opening.start <= stop <= opening.stop:
                text = f"{event.rank} calls {result.consumer} good until token {stop}"
                self.broken(event.at_seconds, f"{text}, outside of [{opening.start}, {opening.stop})")
                return
        for group, first, blocks in opening.needed(self._oracle.groups_of(event.rank), stop):
            found = self._oracle.mismatch(event.rank, prompt, group, first, stop, blocks)
            if found is not None:
                text = f"{event.rank} calls tokens [{first}, {stop}) of {result.consumer} good"
                self.broken(event.at_seconds, f"{text} ({type(result).__name__}): {found}")
                return

    def _started(self, event: DecodeStarted) -> None:
        self._decoding[event.engine, event.request] = event
        self._passed.pop((event.engine, event.request), None)
        self._compare(event, event.at_seconds, "starts decoding from")

    def _ended(self, event: DecodeEnded) -> None:
        started = self._decoding.pop((event.engine, event.request), None)
        if started is not None:
            self._compare(started, event.at_seconds, "has decoded from")

    def _returned(self, event: BlocksReturned) -> None:
        freed = set(event.blocks)
        for key, started in list(self._decoding.items()):
            if key[0] != event.engine:
                continue
            shapes = self._oracle.groups_of(started.ranks[0])
            for shape, table in zip(shapes, started.blocks, strict=True):
                if shape.window_tokens:
                    self._passed.setdefault(key, set()).update(freed.intersection(table))
                elif not freed.isdisjoint(table):
                    del self._decoding[key]
                    break

    def _crashed(self, event: EngineCrashed) -> None:
        for key in [key for key in self._decoding if key[0] == event.engine]:
            del self._decoding[key]

    def _compare(self, event: DecodeStarted, at_seconds: float, verb: str) -> None:
        passed = self._passed.get((event.engine, event.request), ())
        for rank in event.ranks:
            for group, shape in enumerate(self._oracle.groups_of(rank)):
                first = shape.first_token(event.tokens)
                blocks = event.blocks[group][first // shape.block_tokens :]
                while blocks and blocks[0] in passed:
                    first += shape.block_tokens - first % shape.block_tokens
                    blocks = blocks[1:]
                found = self._oracle.mismatch(rank, event.prompt, group, first, event.tokens, blocks)
                if found is not None:
                    text = f"{event.request} {verb} KV that is not its own on {rank}"
                    self.broken(at_seconds, f"{text}: {found}")
                    break
