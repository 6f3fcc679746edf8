"""What vLLM carries between an engine's scheduler and its workers, as vLLM's own base classes want it.

Downwards, `FerryMetadata`: one step's orders. Upwards, `WorkerReport`: what a rank saw end. The engine joins
the ranks' reports of one step; the scheduler side counts by sets of ranks, so that a repeated report changes
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvferry.host.events import Event
from kvferry.host.orders import StepOrders
from kvferry.ids import EngineId, Incarnation


@dataclass
class FerryMetadata(StepOrders, KVConnectorMetadata):
    """One step's orders for the workers."""

    @property
    def is_empty(self) -> bool:
        """Whether the ranks have nothing to do for it."""
        return not (self.senders or self.commands or self.advances or self.preempt)


class _NoOrders(FerryMetadata):
    """Of most steps. Between processes it travels as a name."""

    def __reduce__(self) -> str:
        return "NO_ORDERS"


NO_ORDERS = _NoOrders()
"""What a step without orders carries: one value for all of them, which nobody changes."""


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
    ends_with_engine: bool = True
