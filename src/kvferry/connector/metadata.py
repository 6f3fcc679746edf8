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
