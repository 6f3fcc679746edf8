"""What a picture of one transfer's life shows: who takes part, and what happened on whose lane.

Lanes are the router, each engine's host and ranks, and the network. A rank's lane outlives a restart of its
engine.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvferry.ids import EngineId, PeerName, TransferId
from kvferry.protocol import commands as cmd
from kvferry.protocol import messages as msg
from kvferry.simulator.ground import events as ev

ROUTER = "router"
NETWORK = "network"


class Kind(enum.Enum):
    """What a thing in the picture is; it decides the colour."""

    REQUEST = "request on the engine"
    COMMAND = "command of the host"
    RESULT = "result for the host"
    LEASE = "source blocks held"
    PERMISSION = "write permission, as told"
    REGISTRATION = "registration open"
    QUARANTINE = "failed, blocks in quarantine"
    POST = "slice under way"
    BROKEN_POST = "slice that failed"
    ASKS = "message to the producer"
    ANSWERS = "message to the consumer"
    LEFT_OUT = "left out"
    DEADLINE = "deadline"
    FAULT = "fault"
    VIOLATION = "violation"


@dataclass(frozen=True, slots=True)
class Lane:
    """One row of the picture."""

    name: str
    title: str


@dataclass(frozen=True, slots=True)
class Mark:
    """An instant on a lane, or one that goes through all: then `lane` is None."""

    lane: str | None
    at_seconds: float
    kind: Kind
    label: str
    note: str
    ours: bool = True
    """Whether it has to do with the transfer itself."""


@dataclass(slots=True)
class Stretch:
    """A time on a lane; `ticks` are instants in it, pieces of a slice that landed."""

    lane: str
    start_seconds: float
    stop_seconds: float | None
    """None until it ends: it may never."""
    kind: Kind
    label: str
    note: str
    ticks: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Arrow:
    """Something sent from one lane to another; without a stop it never arrived."""

    source: str
    target: str
    start_seconds: float
    kind: Kind
    label: str
    note: str
    stop_seconds: float | None = None
    lost_seconds: float | None = None

    @property
    def ends_seconds(self) -> float | None:
        """When it arrived, or was lost; None as long as it travels."""
        return self.lost_seconds if self.stop_seconds is None else self.stop_seconds


@dataclass(slots=True)
class Story:
    """All that the picture of one transfer shows."""

    transfer: TransferId
    lanes: list[Lane]
    marks: list[Mark] = field(default_factory=list)
    stretches: list[Stretch] = field(default_factory=list)
    arrows: list[Arrow] = field(default_factory=list)

    def instants(self) -> list[float]:
        """When something happens to the transfer, in order; what happens elsewhere is left out."""
        times = [mark.at_seconds for mark in self.marks if mark.ours]
        for stretch in self.stretches:
            times += [stretch.start_seconds, *stretch.ticks]
            if stretch.stop_seconds is not None and stretch.kind is not Kind.PERMISSION:
                times.append(stretch.stop_seconds)
        for arrow in self.arrows:
            ends = (arrow.start_seconds, arrow.stop_seconds, arrow.lost_seconds)
            times += [at for at in ends if at is not None]
        return sorted(set(times))


def transfers_of(event: ev.Observed) -> tuple[TransferId, ...]:
    """The transfers that an event names."""
    match event:
        case ev.Commanded(command=cmd.Preempt() as command):
            return command.transfers
        case ev.Commanded(command=inner) | ev.Reported(result=inner):
            transfer: TransferId | None = getattr(inner, "transfer", None)
            return () if transfer is None else (transfer,)
        case ev.RequestEnded() | ev.LegSent():
            return (event.transfer,)
        case ev.FaultInjected():
            return event.transfers
        case _:
            return ()


def speaks_of(message: msg.AnyMessage, transfer: TransferId) -> bool:
    """Whether a message names a transfer."""
    match message:
        case msg.Renew():
            return any(named[0] == transfer for named in message.transfers)
        case msg.Status():
            return any(status.transfer == transfer for status in message.transfers)
        case _:
            return getattr(message, "transfer", None) == transfer


class Cast:
    """Who takes part: the engines on either side, and the lane of each rank."""

    def __init__(self, events: Sequence[ev.Observed], transfer: TransferId) -> None:
        self.engine_of: dict[PeerName, EngineId] = {}
        self.lane_of: dict[PeerName, str] = {}
        width: Counter[EngineId] = Counter()
        for event in events:
            if isinstance(event, ev.EngineStarted):
                width[event.engine] = max(width[event.engine], len(event.ranks))
                for index, rank in enumerate(event.ranks):
                    self.engine_of[rank] = event.engine
                    self.lane_of[rank] = f"{event.engine}/{index}"
        sides = [side for event in events if (side := self._side(event, transfer)) is not None]
        self.producers = list(dict.fromkeys(engine for engine, produces in sides if produces))
        self.consumers = list(dict.fromkeys(engine for engine, produces in sides if not produces))
        self.engines = {*self.producers, *self.consumers}
        self.lanes = list(self._lanes(width))

    def _side(self, event: ev.Observed, transfer: TransferId) -> tuple[EngineId, bool] | None:
        if transfer not in transfers_of(event):
            return None
        match event:
            case ev.LegSent() | ev.RequestEnded():
                return event.engine, event.consumer is None
            case ev.Commanded(command=cmd.Expect() | cmd.Advance() | cmd.Finish() | cmd.Abandon()):
                return self.engine_of[event.rank], True
            case ev.Commanded(command=cmd.AnnounceCommand() | cmd.Receive() | cmd.Withdraw()):
                return self.engine_of[event.rank], False
            case _:
                return None

    def _lanes(self, width: Counter[EngineId]) -> Iterator[Lane]:
        yield Lane(ROUTER, "router")
        for engine in self.producers:
            yield Lane(engine, f"{engine} host")
            for index in range(width[engine]):
                yield Lane(f"{engine}/{index}", f"{engine} rank {index}")
        yield Lane(NETWORK, "network")
        for engine in self.consumers:
            # One that is both was drawn above.
            if engine in self.producers:
                continue
            for index in range(width[engine]):
                yield Lane(f"{engine}/{index}", f"{engine} rank {index}")
            yield Lane(engine, f"{engine} host")

    def plays(self, *ranks: PeerName) -> bool:
        """Whether the engines of all these ranks take part."""
        return all(self.engine_of.get(rank) in self.engines for rank in ranks)
