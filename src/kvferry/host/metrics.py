"""The names of what the host counts, and the face of whoever keeps the counts."""

from __future__ import annotations

from typing import Protocol

TRANSFERS = "kvferry_transfers"
BYTES = "kvferry_transfer_bytes"
BYTES_EARLY = "kvferry_bytes_before_prefill_end"
LOST_TOKENS = "kvferry_lost_tokens"
HANDOVER = "kvferry_handover_seconds"
WRITE = "kvferry_transfer_write_seconds"
HOLDS = "kvferry_holds"
HISTORIES = "kvferry_histories"


class Counts(Protocol):
    """Counters and observations by name."""

    def count(self, name: str, amount: int = 1, labels: tuple[str, ...] = ()) -> None:
        """Add to a counter."""
        ...

    def observe(self, name: str, value: float) -> None:
        """Add an observation to a histogram."""
        ...
