"""What a step carries between an engine's scheduler and its workers.

Downwards, `FerryMetadata`: commands for when the step begins, publications for when its forward pass has
ended, and what was preempted. Under asynchronous scheduling several steps are under way; each has its own.

Upwards, `WorkerReport`: what a rank saw end. The engine joins the ranks' reports of one step; the scheduler
side counts by sets of ranks, so that a repeated report changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvferry.ids import EngineId, Incarnation, TransferId
from kvferry.protocol.commands import Advance, Command, Preempt

RequestId = str
"""The engine's own id of a request."""

RankIndex = int
"""`pp * tp_size + tp`: a rank of this engine."""


@dataclass(frozen=True, slots=True)
class Sender:
    """A prefill request of this engine: the request behind an `Expect`."""

    transfer: TransferId
    request: RequestId


@dataclass
class FerryMetadata(KVConnectorMetadata):
    """One step's work for the workers."""

    senders: list[Sender] = field(default_factory=list)
    """New prefill requests; their `Expect` is among the commands."""
    commands: list[Command] = field(default_factory=list)
    """To be submitted before the forward pass, in order."""
    advances: list[Advance] = field(default_factory=list)
    """True once this step's forward pass has succeeded, and not before."""
    preempt: Preempt | None = None
    """Blocks that the engine has taken away from these transfers."""


class Ended(msgspec.Struct, frozen=True):
    """A transfer ended on a rank.

    `handover_seconds`: producer, from the end of prefill. `write_seconds`: consumer, from the registration.
    """

    rank: RankIndex
    request: RequestId
    reason: str
    bytes: int = 0
    handover_seconds: float | None = None
    write_seconds: float | None = None
    lost_tokens: int = 0
    """Of a failed receive: tokens that did not come and have to be computed here."""
    failed: bool = False
    cancelled: bool = False


class Quarantined(msgspec.Struct, frozen=True):
    """The destination blocks of a failed receive may still be written by a peer of this rank."""

    rank: RankIndex
    request: RequestId


class Safe(msgspec.Struct, frozen=True):
    """They can no longer be."""

    rank: RankIndex
    request: RequestId


class PreemptAnswer(msgspec.Struct, frozen=True):
    """Whether writes still read the blocks of a `Preempt`. A rank that answers False answers True later."""

    rank: RankIndex
    ticket: int
    drained: bool


Event = Ended | Quarantined | Safe | PreemptAnswer


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """The events of one step, of one rank or of several."""

    events: list[Event]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Both reports' events."""
        return WorkerReport(self.events + other.events)


@dataclass(frozen=True)
class Handshake(KVConnectorHandshakeMetadata):
    """What a rank tells the directory of its engine: how to reach it and what its cache looks like."""

    engine: EngineId
    incarnation: Incarnation
    pp: int
    tp: int
    metadata: bytes
    cache: bytes
