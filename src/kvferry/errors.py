"""The errors that kvferry raises.

KvferryError
  UsageError        our caller (an operator, a configuration, an HTTP client) asked for something impossible
    HandoffError    kv_transfer_params that cannot be honoured; names the field
  PeerError         a peer broke the protocol; answered and counted, never a crash
  TransportError    a transfer or message failed below the protocol; `retryable` says whether to try again
    PeerLostError   our connection to the peer has broken
    PeerGoneError   nobody listens where the peer's engine did: its processes are gone
  GeometryError     two caches cannot be joined; names the field, ours and theirs
  LeaseExpiredError the producer's promise to keep the blocks has ended
"""

from __future__ import annotations


class KvferryError(Exception):
    """Base of everything that kvferry raises on purpose."""


class UsageError(KvferryError):
    """The caller asked for something impossible; the message says what to do instead."""


class HandoffError(UsageError):
    """`kv_transfer_params` cannot be honoured.

    `field` names the key at fault, so that an HTTP answer can.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"kv_transfer_params.{field}: {problem}")
        self.field = field
        self.problem = problem


class PeerError(KvferryError):
    """A peer sent something that the protocol does not allow."""


class TransportError(KvferryError):
    """A transfer, a message or a connection failed below the protocol."""

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable


class PeerLostError(TransportError):
    """Our connection to the peer has broken. The peer may live, and what it has posted may still land."""


class PeerGoneError(TransportError):
    """Nobody listens at the address of the peer's engine any more."""


class GeometryError(KvferryError):
    """Two caches cannot be joined because `field` differs, or is impossible on both sides."""

    def __init__(self, field: str, ours: object, theirs: object, fix: str = "") -> None:
        text = (
            f"{field} differs: ours is {ours!r}, theirs is {theirs!r}"
            if ours != theirs
            else f"{field} is {ours!r} on both sides"
        )
        super().__init__(f"{text}; {fix}" if fix else text)
        self.field = field
        self.ours = ours
        self.theirs = theirs


class LeaseExpiredError(KvferryError):
    """The producer no longer promises to keep the source blocks."""
