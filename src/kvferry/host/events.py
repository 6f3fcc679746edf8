"""What a rank tells its engine's scheduler about transfers, step by step."""

from __future__ import annotations

import msgspec

from kvferry.handoff import TransferMode

RequestId = str
"""The engine's own id of a request."""

RankIndex = int
"""`pp * tp_size + tp`: a rank of this engine."""


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
    mode: TransferMode = "push"
    """How the KV was moved, or was to be."""
    sending: bool = False
    """Whether this rank was the producer. A prefill that gets its history is both, one after the other."""
    held: bool = False
    """Whether it was what this engine keeps after a turn; `request` is then the hold's name."""


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
