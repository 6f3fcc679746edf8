"""Counters of one agent, readable from any thread as one snapshot."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from operator import attrgetter


@dataclass(slots=True)
class Stats:
    """Written by the agent's thread only. All count from its start."""

    bytes_posted: int = 0
    """Bytes of slices that were posted to be written."""
    bytes_posted_early: int = 0
    """Those of them that were posted before their prefill had ended."""
    bytes_read: int = 0
    """Bytes of slices that were posted to be read."""
    posted_slices: int = 0
    """Slices written and read, together."""
    posted_descriptors: int = 0
    posts_refused: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    messages_dropped: int = 0
    """Messages to peers whose link was torn down before they could be sent."""
    peer_errors: int = 0
    """Messages that could not be read or were not possible."""
    peers_lost: int = 0
    hellos_refused: int = 0
    steps: int = 0
    stalls: int = 0
    """Steps that came more than a second late."""
    gauges: dict[str, int] = field(default_factory=dict)
    """States of transfers and receptions, as `producer_<state>` and `consumer_<state>`."""
    moved: tuple[int, int] = (0, 0)
    """`bytes_posted` and `bytes_posted_early` of one moment; the same object while they stand still."""

    def posted(self, count_bytes: int, descriptors: int, *, early: bool, read: bool = False) -> None:
        """A slice was posted, to be written or to be read."""
        if read:
            self.bytes_read += count_bytes
        else:
            self.bytes_posted += count_bytes
        self.posted_slices += 1
        self.posted_descriptors += descriptors
        if early:
            self.bytes_posted_early += count_bytes
        self.moved = self.bytes_posted, self.bytes_posted_early

    def snapshot(self) -> dict[str, int]:
        """A copy of all counters and gauges."""
        return dict(zip(_COUNTERS, _read_counters(self), strict=True)) | self.gauges


_COUNTERS = tuple(field.name for field in fields(Stats) if field.name not in {"gauges", "moved"})
_read_counters = attrgetter(*_COUNTERS)
