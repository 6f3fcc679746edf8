"""Names of the things that every part of kvferry talks about.

Ids are distinct types so that one cannot stand in for another; `EngineId` and `TransferId` travel over
the wire as plain strings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

EngineId = NewType("EngineId", str)
"""One vLLM instance: `kv_transfer_config.engine_id`, with vLLM's `_dp<rank>` under data parallelism."""

Incarnation = NewType("Incarnation", str)
"""Random, made at engine start. The same engine id with another incarnation is another peer."""

TransferId = NewType("TransferId", str)
"""One dispatch of one hand-over. Also the right to the KV: never log it whole, use `redacted`."""

ConsumerId = NewType("ConsumerId", str)
"""The consumer engine's own request id; children of n > 1 differ in it while sharing the TransferId."""

PeerName = NewType("PeerName", str)
"""One rank of one incarnation of one engine, as the transport addresses it (the NIXL agent name)."""

BlockId = int
"""Index of a block in one rank's KV cache."""

Span = tuple[int, int]
"""`(first, count)`: a run of consecutive block ids."""


@dataclass(frozen=True, slots=True, order=True)
class Rank:
    """Position of one worker in its engine."""

    pp: int
    tp: int


def peer_name(engine: EngineId, incarnation: Incarnation, rank: Rank) -> PeerName:
    """The transport's name of a rank; it contains the incarnation so that a restarted peer is a new one."""
    return PeerName(f"kvferry/{engine}/{incarnation}/pp{rank.pp}/tp{rank.tp}")


def redacted(transfer: TransferId) -> str:
    """A prefix of the id that is enough to find it in a log and not enough to claim its KV."""
    return f"{transfer[:6]}~"
