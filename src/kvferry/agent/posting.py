"""Slices in flight: turned into descriptors, posted, polled to their end at once, and released.

Whoever posts a WRITE polls it to the end: the other side hears nothing before. So does who posts a READ, and
there is no other side to hear of it. Where the poster's own processor moves the bytes, a post has ended when
it returns; looked at then, it lets the next slice follow without a pause, and the last one take all that is
left. Belongs to the agent's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kvferry.agent.stats import Stats
from kvferry.errors import GeometryError, PeerLostError, TransportError
from kvferry.ids import PeerName
from kvferry.layout.descriptors import expand
from kvferry.layout.plan import CopyPlan
from kvferry.layout.runs import NO_RUNS, Runs
from kvferry.protocol.outputs import PostSlice
from kvferry.protocol.reasons import PEER_LOST, because
from kvferry.transport.base import Handle, PostState, Transport


class SliceSink(Protocol):
    """Who wants to know how slices end: the producer core of WRITEs, a consumer core's reader of READs."""

    def handle_slice_done(self, number: int, now: float) -> None:
        """Every byte is in place."""
        ...

    def handle_slice_failed(self, number: int, reason: str, now: float, *, retryable: bool) -> None:
        """It is not in flight and not all in place."""
        ...


@dataclass(frozen=True, slots=True)
class _Flight:
    handle: Handle
    peer: PeerName
    since: float


@dataclass(slots=True)
class Posts:
    """Every slice that was posted for one sink and has not ended."""

    transport: Transport
    sink: SliceSink
    stats: Stats
    encode: Callable[[object], bytes]
    _flights: dict[int, _Flight] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._flights)

    def peers(self) -> set[PeerName]:
        """Peers that something is in flight to."""
        return {flight.peer for flight in self._flights.values()}

    @property
    def since(self) -> float:
        """When the one that is in flight for longest was posted; there must be one."""
        return next(iter(self._flights.values())).since

    def post(self, piece: PostSlice, plan: CopyPlan, clock: Callable[[], float]) -> PeerLostError | None:
        """Post a slice; tells the sink if it is refused or ends at once; returns the error of a lost peer."""
        since = clock()
        try:
            runs = slice_runs(piece, plan)
            if not len(runs):
                # Nothing that the source holds is needed of these tokens: all its layers have windows.
                self._tell(piece)
                self.sink.handle_slice_done(piece.slice, clock())
                return None
            handle = self._start(piece, runs)
        except PeerLostError as error:
            self.sink.handle_slice_failed(piece.slice, because(PEER_LOST, error), clock(), retryable=False)
            return error
        except TransportError as error:
            self.stats.posts_refused += 1
            self.sink.handle_slice_failed(piece.slice, str(error), clock(), retryable=error.retryable)
            return None
        except GeometryError as error:
            self.sink.handle_slice_failed(piece.slice, str(error), clock(), retryable=False)
            return None
        self._flights[piece.slice] = _Flight(handle, piece.peer, since)
        self.stats.posted(runs.bytes, len(runs), early=piece.early, read=piece.read)
        return self._look(piece.slice, clock)

    def _tell(self, piece: PostSlice) -> None:
        if piece.notify is not None:
            self.transport.send(piece.peer, self.encode(piece.notify))

    def _start(self, piece: PostSlice, runs: Runs) -> Handle:
        notify = None if piece.notify is None else self.encode(piece.notify)
        post = self.transport.read if piece.read else self.transport.write
        return post(piece.peer, runs, notify)

    def poll(self, clock: Callable[[], float]) -> list[tuple[PeerName, str]]:
        """Poll every slice; returns the peers that turned out to be gone."""
        lost: list[tuple[PeerName, str]] = []
        for number, flight in list(self._flights.items()):
            error = self._look(number, clock)
            if error is not None:
                lost.append((flight.peer, str(error)))
        return lost

    def _look(self, number: int, clock: Callable[[], float]) -> PeerLostError | None:
        """Poll one slice, and tell the sink if it has ended; returns the error if its peer is gone."""
        flight = self._flights[number]
        state = self.transport.poll(flight.handle)
        if state is PostState.IN_FLIGHT:
            return None
        error = self.transport.failure(flight.handle) if state is PostState.FAILED else None
        self.transport.release(flight.handle)
        del self._flights[number]
        if state is PostState.DONE:
            self.sink.handle_slice_done(number, clock())
            return None
        text = str(error or "the transfer failed")
        if isinstance(error, PeerLostError):
            self.sink.handle_slice_failed(number, because(PEER_LOST, text), clock(), retryable=False)
            return error
        retryable = error is not None and error.retryable
        self.sink.handle_slice_failed(number, text, clock(), retryable=retryable)
        return None


def slice_runs(piece: PostSlice, plan: CopyPlan) -> Runs:
    """The runs of a slice, of all its cache groups.

    Raises:
        GeometryError: a block is outside its cache, or the blocks do not cover the tokens.
    """
    parts = [
        expand(
            plan,
            group,
            np.frombuffer(source, np.int64),
            np.frombuffer(target, np.int64),
            piece.group_start(group),
            piece.stop,
        )
        for group, (source, target) in enumerate(zip(piece.source_blocks, piece.target_blocks, strict=True))
        if source
    ]
    if len(parts) <= 1:
        return parts[0] if parts else NO_RUNS
    return Runs(
        np.concatenate([part.source for part in parts]),
        np.concatenate([part.target for part in parts]),
        np.concatenate([part.length for part in parts]),
    )
