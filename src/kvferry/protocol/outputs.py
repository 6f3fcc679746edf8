"""What a core asks of the agent that hosts it, besides the results that it has for the engine."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import msgspec

from kvferry.ids import ConsumerId, PeerName, TransferId
from kvferry.protocol.commands import Source
from kvferry.protocol.messages import AnyMessage

if TYPE_CHECKING:
    BlockArray = array[int]
else:
    BlockArray = array  # Not subscriptable before Python 3.12.
"""Block ids as signed 64-bit integers (typecode `q`)."""


class Output(msgspec.Struct, frozen=True):
    """Base of what a core asks for."""


class Send(Output, frozen=True):
    """Send a message. A failure comes back as a broken link, or not at all: messages are repeated."""

    peer: PeerName
    message: AnyMessage


class Disconnect(Output, frozen=True):
    """Tear our end of the connection down: what we have in flight on it must end."""

    peer: PeerName
    reason: str


class Resolve(Output, frozen=True):
    """Find the ranks of a producer engine and open links to them; answered by `handle_resolved`."""

    source: Source


class Inquire(Output, frozen=True):
    """Our connection to a producer rank has broken: find out whether the rank lives.

    Answered by `handle_peer_dead`, `handle_peer_alive` or `handle_no_evidence`.
    """

    peer: PeerName
    source: Source


class PostSlice(Output, frozen=True):
    """Write tokens `[start, stop)`, and `notify` travels with them; or read them. One array per cache group.

    `source_blocks[g]` and `target_blocks[g]` cover the range in their own engine's block size, from
    `starts[g]` on where that is later: of a window only its own tokens travel. `early` says that prefill had
    not ended when it was posted.
    """

    slice: int
    peer: PeerName
    transfer: TransferId
    consumer: ConsumerId
    start: int
    stop: int
    source_blocks: tuple[BlockArray, ...]
    target_blocks: tuple[BlockArray, ...]
    notify: AnyMessage | None
    early: bool
    read: bool = False
    starts: tuple[int, ...] = ()

    def group_start(self, group: int) -> int:
        """The first token of a group that is written."""
        return max(self.start, self.starts[group]) if self.starts else self.start


class Link(msgspec.Struct, frozen=True):
    """A producer rank that a consumer rank registers with.

    `sharers` ranks of the consumer's engine register with it; `block_bytes[g]` are the bytes that it writes
    into one block of ours of cache group g. One that `writes` nothing has a replica of what another rank
    sends; it is given an empty range, which tells it that it need not.
    """

    peer: PeerName
    sharers: int
    block_bytes: tuple[int, ...]
    ends_with_engine: bool = True
    """Whether its engine's end proves that it ends too, within `Limits.orphan_seconds`."""
    block_tokens: tuple[int, ...] = ()
    """Its block size of each cache group in tokens."""
    slice_tokens: int = 1
    """The most tokens of one slice that we read from it."""
    joined_tokens: int = 0
    """The same where its blocks follow each other on both sides, as in `PeerFacts`."""
    writes: bool = True


class PeerFacts(msgspec.Struct, frozen=True):
    """What a producer core must know of a consumer rank before it can write to it.

    `block_tokens[g]` is the peer's block size of group g in tokens; `slice_tokens` the most tokens of one
    slice towards it, a multiple of both sides' block sizes.
    """

    block_tokens: tuple[int, ...]
    slice_tokens: int
    block_counts: tuple[int, ...] = ()
    """Blocks of each group of the peer's cache; a registration cannot have more."""
    block_bytes: tuple[int, ...] = ()
    """Bytes that we write into one block of the peer's, by group, as our plan has it."""
    windows: tuple[int, ...] = ()
    """Of a group with a window its length in tokens: whoever computes token `stop` next needs the window that
    ends with it, and of a registration up to `stop` nothing before. 0, or unstated: every token."""
    joined_tokens: int = 0
    """The most tokens of a slice whose blocks follow each other on both sides, so that they take few
    descriptors; no more than `slice_tokens` where that saves none."""
    whole_tokens: tuple[int, ...] = ()
    """The peer engine's block size of each group, which may be several of its rank's; unstated: it is one.
    Of a window the blocks that its engine takes for whole are to be whole."""

    def whole_of(self, group: int) -> int:
        """The peer engine's block size of a group in tokens."""
        return (self.whole_tokens or self.block_tokens)[group]

    def window_of(self, group: int) -> int:
        """The window of a group in tokens; 0: there is none."""
        return self.windows[group] if self.windows else 0
