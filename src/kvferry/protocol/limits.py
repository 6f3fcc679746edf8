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
    """Transfers per core. Beyond it a host's admission is refused and a peer's is answered `Failed`.
    Half of them may be such that only peers have spoken of, so that there is room for a host's."""
    consumers_max: int = 1024
    """Deliveries per transfer. Beyond it a registration is answered `Failed`."""
    blocks_max: int = 1 << 22
    """Blocks per registration and group; more is malformed."""
    registered_blocks_max: int = 1 << 23
    """Blocks of one consumer rank's open registrations together; never more than twice its cache has. Beyond
    it a registration is answered `Failed`."""
    held_seconds: float = 1800.0
    """A lease is renewed for so long at most after prefill ended; then it ends, whoever still renews it."""
    slice_bytes: int = 64 << 20
    """Bytes per slice, at least one block."""
    slice_runs: int = 16384
    """Descriptors per slice before merging, at least one block's. Blocks that follow each other on both sides
    count as one where they merge."""
    in_flight_per_peer: int = 4
    """Slices in flight towards one peer; further ones wait their turn."""
    message_bytes_max: int = 16 << 20
    """A message longer than this, all parts together, is malformed."""
    idle_seconds: float = 600.0
    """A link to a producer that carried nothing for so long, and that nothing waits for, is given up; one to
    a consumer after twice as long. The next transfer, or the peer's next message, opens it again."""
    links_max: int = 4096
    """Ranks that one rank is linked to. Beyond it the link that was idle longest is given up; when all are
    needed, a `Hello` is refused, and a transfer from one more producer fails."""
    hellos_max: int = 1024
    """Consumer ranks without a link whose `Hello` is remembered; beyond it the oldest must say it again."""
    parked_seconds: float = 30.0
    """What a rank says before its `Hello` is kept for so long, then dropped."""
    parked_peers_max: int = 64
    """Ranks of which such messages are kept; beyond it those of the oldest are dropped."""
    parked_messages_max: int = 256
    """Such messages of one rank; more are a protocol error."""
    parked_bytes_max: int = 1 << 20
    """Bytes of such messages of one rank; more are a protocol error."""

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
