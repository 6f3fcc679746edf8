"""What is kept of each request, and what follows from it. Times are seconds since the load's start.

Latency counts from the moment at which a request was due, not from when it was sent: a load generator or a
server that falls behind cannot hide it.
"""

from __future__ import annotations

from itertools import pairwise

import msgspec


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One request from due time to end; `error` is None when it was answered in full."""

    request: str
    """The `X-Request-Id` under which it was sent."""
    due: float
    sent: float | None = None
    chunks: tuple[float, ...] = ()
    """When each stream chunk with tokens arrived; the first one is the first token's."""
    end: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """Counted by the server in `usage`: chunks merge under load, so they cannot be counted instead."""
    answer: int | None = None
    """A checksum of the token ids that came back, or of the text where the server gives no ids."""
    error: str | None = None

    @property
    def succeeded(self) -> bool:
        """Whether it was answered in full."""
        return self.error is None

    @property
    def ttft_seconds(self) -> float | None:
        """From due to the first token."""
        return self.chunks[0] - self.due if self.chunks else None

    @property
    def e2e_seconds(self) -> float | None:
        """From due to the end of the answer."""
        return None if self.end is None else self.end - self.due

    @property
    def tpot_seconds(self) -> float | None:
        """Mean time per token after the first."""
        if self.end is None or not self.chunks or self.completion_tokens < 2:
            return None
        return (self.end - self.chunks[0]) / (self.completion_tokens - 1)

    @property
    def gaps_seconds(self) -> list[float]:
        """Times between chunks, which is what a reader of the stream waits for."""
        return [later - earlier for earlier, later in pairwise(self.chunks)]

    @property
    def lag_seconds(self) -> float | None:
        """How much later than due it was sent."""
        return None if self.sent is None else self.sent - self.due


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """A finished load."""

    started_ns: int
    """Wall clock (`time.time_ns`) of second 0, by which other programs' times can be joined."""
    seconds: float
    records: tuple[Record, ...]

    @property
    def failures(self) -> list[Record]:
        """Requests that were not answered in full."""
        return [record for record in self.records if not record.succeeded]
