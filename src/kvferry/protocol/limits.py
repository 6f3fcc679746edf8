"""Every time limit and maximum of the protocol, in one frozen value that is validated when it is made."""

from __future__ import annotations

import msgspec

from kvferry.errors import UsageError

ID_CHARACTERS_MAX = 4096
"""Of a transfer's or consumer's id: the notification of a write names both and must fit one payload."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Time limits in seconds and maxima. What happens at each is said beside it."""

    lease_seconds: float = 30.0
    """A producer keeps finished KV for so long after the consumer's last sign of life, then says `Failed`."""
    renew_seconds: float = 2.0
    """A consumer renews what it waits for this often, one message per peer."""
    write_seconds: float = 10.0
    """A registration or renewal permits the producer to post for so long after the mark that it repeats."""
    silence_seconds: float = 10.0
    """Transfers fail when their producer has said nothing for so long."""
    handshake_seconds: float = 10.0
    """A producer's directory must have answered by then, or the transfers that need it fail."""
    unknown_seconds: float = 30.0
    """How long one leg may be ahead of the other: `unknown` is tolerated, early registrations are kept."""
    orphan_seconds: float = 1.0
    """A rank may outlive its engine, and what it has posted may outlive it, by so long together."""
    starved_seconds: float = 10.0
    """An engine that computes nothing for so long while requests of its own wait for memory gives up what it
    holds for transfers that do not go on: first destinations whose prefill has not begun, then leases."""
    slice_seconds: float = 30.0
    """A posted slice that has not ended by then has its connection torn down, so that it must."""
    retry_seconds: float = 0.05
    """Pause before a refused post is tried again; doubles with each attempt."""
    retries_max: int = 5
    """Attempts per slice after the first; then the delivery fails."""
    tombstone_seconds: float = 120.0
    """How long an ended transfer is remembered, so that late messages get its true answer."""
    tombstones_max: int = 8192
    """Beyond it the oldest are forgotten first."""
    transfers_max: int = 16384
    """Transfers per core. Beyond it a host's admission is refused and a peer's is answered `Failed`."""
    consumers_max: int = 1024
    """Deliveries per transfer. Beyond it a registration is answered `Failed`."""
    blocks_max: int = 1 << 22
    """Blocks per registration and group; more is malformed."""
    slice_bytes: int = 32 << 20
    """Bytes per slice, at least one block."""
    slice_runs: int = 4096
    """Descriptors per slice before merging, at least one block's."""
    in_flight_per_peer: int = 4
    """Slices in flight towards one peer; further ones wait their turn."""
    message_bytes_max: int = 16 << 20
    """A message longer than this, all parts together, is malformed."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} must be greater than 0, not {getattr(self, name)!r}")
        if self.renew_seconds * 2 > self.write_seconds:
            raise UsageError(
                f"renew_seconds ({self.renew_seconds:g}) must be at most half of write_seconds "
                f"({self.write_seconds:g}), or a single late renewal stops the producer"
            )
        if self.renew_seconds * 2 > min(self.silence_seconds, self.lease_seconds):
            raise UsageError(
                f"renew_seconds ({self.renew_seconds:g}) must be at most half of silence_seconds "
                f"({self.silence_seconds:g}) and of lease_seconds ({self.lease_seconds:g})"
            )
