"""What the ranks of two engines say to each other.

A registration is named by transfer, consumer request and `attempt`. The consumer rank numbers its
receptions from 1 on and never uses a number twice, so that what is late belongs to the registration that it
was about and to no other, whatever ids a client or a router uses again.

A *mark* is a producer rank's own note of when it spoke (its `Status`). The consumer repeats the newest one
that it has with each grant of permission, and only its maker reads it: a permission ends `write_seconds`
after its mark was made, however late the grant arrives or is read. `asked` is the same the other way round:
a consumer rank's note of when it asked, which the producer repeats with each promise to keep what is read.

All are frozen and tagged; `codec` is the only place where they become bytes. New fields get defaults and
types never change, so that protocol version N reads N-1. Durations travel in seconds, never clock readings.
Block ids travel as spans `(first, count)`, one list per cache group.
"""

from __future__ import annotations

import msgspec

from kvferry.ids import ConsumerId, EngineId, Incarnation, Span, TransferId

PROTOCOL_VERSION = 1
PROTOCOL_VERSION_MIN = 1
"""Oldest version that we still talk to (N-1 once there are two)."""


class Message(msgspec.Struct, frozen=True, tag_field="t", kw_only=True, omit_defaults=True):
    """Base of every message."""


class Hello(Message, frozen=True, tag="hello"):
    """First on a new link: lets the other side write or read back without dialling.

    `metadata` is the transport's own description of the sender (how to connect to it and which memory it
    registered); `cache` is the encoded `layout.CacheSpec` of the sender's rank.
    """

    engine: EngineId
    incarnation: Incarnation
    pp: int
    tp: int
    version: int
    metadata: bytes
    cache: bytes
    version_min: int = 1


class HelloRefused(Message, frozen=True, tag="hello_refused"):
    """The answer to a Hello that cannot be honoured (version, geometry, no room).

    It is no fence: it names no registration, and a later one may have been taken before it is read.
    """

    reason: str


class Complaint(Message, frozen=True, tag="complaint"):
    """The answer to bytes that could not be read as a message. Never answered itself."""

    reason: str


# --- consumer -> producer rank -------------------------------------------------------------------


class Announce(Message, frozen=True, tag="announce"):
    """The request has reached me and waits for memory: keep the lease through my queue."""

    transfer: TransferId
    consumer: ConsumerId
    attempt: int = 1


class Register(Message, frozen=True, tag="register"):
    """The destination is allocated; you may post writes into it until `write_seconds` after `mark`.

    Without a mark nothing may be posted yet: a `Status` with one is asked for.

    `groups[g]` are the spans of the consumer's blocks of cache group g which cover tokens
    `[start, stop)`, or of layers with a window the last ones of these; `start` is a multiple of the
    consumer's block size. `sharers` is the number of ranks of
    the consumer engine that register this transfer and consumer with this producer rank. `block_bytes[g]`
    are the bytes that the consumer expects in each block from this rank: both sides have made a plan, and
    they must have made the same. A rank that has nothing to send gets an empty range.
    """

    transfer: TransferId
    consumer: ConsumerId
    start: int
    stop: int
    groups: tuple[tuple[Span, ...], ...]
    write_seconds: float
    mark: float | None = None
    sharers: int = 1
    attempt: int = 1
    block_bytes: tuple[int, ...] = ()


class Fetch(Message, frozen=True, tag="fetch"):
    """Pull: I want to read tokens `[start, stop)`; answer with `Offer` when you hold them.

    `asked` is the consumer rank's own mark; `start` and `sharers` are as for `Register`.
    """

    transfer: TransferId
    consumer: ConsumerId
    start: int
    stop: int
    asked: float
    sharers: int = 1
    attempt: int = 1


class Renew(Message, frozen=True, tag="renew"):
    """I still want these; the write permission starts anew. One per peer and interval."""

    transfers: tuple[tuple[TransferId, ConsumerId, int], ...]
    """Transfer, consumer and attempt of each."""
    write_seconds: float
    mark: float | None = None
    asked: float | None = None
    """The consumer rank's own mark, for those of them that it reads."""


class Cancel(Message, frozen=True, tag="cancel"):
    """Stop, and answer `Cancelled` when you are silent. Also sent by a consumer that needs nothing.

    From one that was offered something to read it is the fence: it reads nothing and will not.
    """

    transfer: TransferId
    consumer: ConsumerId
    reason: str
    sharers: int = 1
    attempt: int = 1


class Fetched(Message, frozen=True, tag="fetched"):
    """Pull: I have read everything, let go of it and answer `Cancelled`."""

    transfer: TransferId
    consumer: ConsumerId
    sharers: int = 1
    attempt: int = 1


# --- producer rank -> consumer -------------------------------------------------------------------


class Landed(Message, frozen=True, tag="landed"):
    """Tokens `[start, stop)` of the registration are in place. Travels with the WRITE that wrote them.

    It is progress, not the end: what a consumer keeps when the producer dies between two slices.
    """

    transfer: TransferId
    consumer: ConsumerId
    start: int
    stop: int
    attempt: int = 1


class Written(Message, frozen=True, tag="written"):
    """Every byte of the registration is in place. Travels with the last WRITE."""

    transfer: TransferId
    consumer: ConsumerId
    start: int
    stop: int
    attempt: int = 1


class Offer(Message, frozen=True, tag="offer"):
    """Pull: tokens `[start, stop)` are in these blocks, which are kept until `keep_seconds` after `asked`.

    `groups[g]` are the spans of the producer's blocks of cache group g which cover that range, or of layers
    with a window the last ones of these; `asked` is the newest that the consumer has sent.
    """

    transfer: TransferId
    consumer: ConsumerId
    start: int
    stop: int
    groups: tuple[tuple[Span, ...], ...]
    asked: float
    keep_seconds: float
    attempt: int = 1


class Failed(Message, frozen=True, tag="failed"):
    """No more will come, and no write is in flight; tokens before `valid_until` are good.

    Pull: read no more, and say `Cancel` when nothing is in flight.
    """

    transfer: TransferId
    consumer: ConsumerId
    reason: str
    valid_until: int
    attempt: int = 1


class Cancelled(Message, frozen=True, tag="cancelled"):
    """The fence: no write of this transfer is in flight to this consumer, and none will be posted."""

    transfer: TransferId
    consumer: ConsumerId
    attempt: int = 1


class TransferStatus(msgspec.Struct, frozen=True, array_like=True):
    """`state` is one of unknown, queued, computing, writing, held; `frontier` in tokens.

    `keep_seconds`: what was offered to be read is kept until so long after `Status.asked`.
    """

    transfer: TransferId
    consumer: ConsumerId
    state: str
    frontier: int
    attempt: int = 1
    keep_seconds: float = 0.0


class Status(Message, frozen=True, tag="status"):
    """The answer to `Renew`, `Announce`, and a `Register` that permits nothing (any more).

    So a slow producer is not taken for one that lost the request, and the consumer has a fresh `mark`.
    """

    transfers: tuple[TransferStatus, ...]
    mark: float | None = None
    asked: float | None = None
    """What the `Renew` said that this answers."""


AnyMessage = (
    Hello
    | HelloRefused
    | Complaint
    | Announce
    | Register
    | Fetch
    | Renew
    | Cancel
    | Fetched
    | Landed
    | Written
    | Offer
    | Failed
    | Cancelled
    | Status
)
