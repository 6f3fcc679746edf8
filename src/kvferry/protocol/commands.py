"""What the host (the vLLM connector, or the simulator) asks of a rank, and what a rank reports back.

Commands and results are frozen and already valid. They cross the mailboxes between the engine's main
thread and the agent's thread, and commands also travel from an engine's scheduler to its workers, so they
pickle cheaply.

Producer life: `Expect` -> `Advance`* -> `Finish` (or `Abandon`) -> result `Released`. After `Finish` or
`Abandon` exactly one `Released` follows; the source blocks are the rank's until then.

Consumer life: `Announce`? -> (`Receive` | `Withdraw`). After `Receive` exactly one of `Received` and
`ReceiveFailed` follows. When `ReceiveFailed.fenced` is False the destination blocks may still be written;
`BlocksSafe` follows later, exactly once. Whether the KV is written (push) or read (pull) is up to each
`Receive`; results are the same.
"""

from __future__ import annotations

import msgspec

from kvferry.handoff import TransferMode
from kvferry.ids import ConsumerId, EngineId, Incarnation, Span, TransferId

Groups = tuple[tuple[Span, ...], ...]
"""Spans of block ids, one tuple per cache group."""


def absent(count: int) -> tuple[Span, ...]:
    """So many blocks that are not there: each of their ids is negative, and stays so when it is scaled."""
    return ((-count, count),) if count > 0 else ()


class Source(msgspec.Struct, frozen=True):
    """Where a producer engine can be found: its directory on the side channel.

    `tp` and `pp` are its advertised sizes, 0 when unknown. `incarnation` is what the router knew when it
    dispatched. It is not compared: a transfer is found by its id, which only the incarnation that got its
    prefill leg knows, and that may be a newer one.
    """

    engine: EngineId
    host: str
    port: int
    tp: int = 0
    pp: int = 0
    incarnation: Incarnation | None = None


class Command(msgspec.Struct, frozen=True):
    """Base of what a host asks for."""


# --- producer side -------------------------------------------------------------------------------


class Expect(Command, frozen=True):
    """A prefill request has reached the engine. `tokens` is its prompt's length in tokens."""

    transfer: TransferId
    tokens: int
    consumers: int = 1


class Advance(Command, frozen=True):
    """KV of tokens `[0, frontier)` is computed and will not change while the blocks are held.

    `blocks` are the block ids of each group from block index `first_block` on: appended when
    `first_block` is the number of blocks already known, replacing what was known from there otherwise
    (a resumed request starts again at 0). Negative ids are blocks that are not there (see `absent`): of a
    group with a window those before the window of the prompt's last token.
    """

    transfer: TransferId
    frontier: int
    first_block: int
    blocks: Groups
    first_blocks: tuple[int, ...] = ()
    """Of each group, where groups have unlike block sizes; `first_block` is that of the first."""

    def first_of(self, group: int) -> int:
        """The index of a group's first block."""
        return self.first_blocks[group] if self.first_blocks else self.first_block


class Finish(Command, frozen=True):
    """Prefill ended normally; the blocks stay leased until `Released`.

    `keep_seconds`: how long the lease is while nobody has come; None for that of the limits.
    """

    transfer: TransferId
    keep_seconds: float | None = None


class Abandon(Command, frozen=True):
    """The request ended without (all of) its KV: abort, error. Consumers are told `Failed`."""

    transfer: TransferId
    reason: str


class Reclaim(Command, frozen=True):
    """The engine wants leased blocks back, unless a consumer has a destination for them already.

    `reason` starts with one of our codes. The transfer's `Released` follows as ever.
    """

    transfer: TransferId
    reason: str


class Preempt(Command, frozen=True):
    """The engine takes these transfers' blocks away: stop posting from them, then answer `Drained`."""

    transfers: tuple[TransferId, ...]
    ticket: int


# --- consumer side -------------------------------------------------------------------------------


class AnnounceCommand(Command, frozen=True):
    """A decode request waits for memory; its producer shall keep the KV."""

    transfer: TransferId
    consumer: ConsumerId
    source: Source


class Receive(Command, frozen=True):
    """Destination memory for tokens `[start, stop)` is allocated. `groups` cover exactly that range.

    `mode` says who moves the bytes: `push` has the producer write them, with `pull` we read them. Who is not
    `patient` knows that prefill has ended: a producer that does not know of it never will. Who is `recent`
    has heard of the transfer just now: its producer may not have been told yet.
    """

    transfer: TransferId
    consumer: ConsumerId
    source: Source
    start: int
    stop: int
    groups: Groups
    mode: TransferMode = "push"
    patient: bool = True
    recent: bool = False


class Withdraw(Command, frozen=True):
    """The request needs nothing (any more): full prefix hit, abort, rejection. Valid at every stage."""

    transfer: TransferId
    consumer: ConsumerId
    source: Source
    reason: str


class Relinquish(Command, frozen=True):
    """The engine wants the destination back if its producer has not begun to compute, or has stood still
    since the last such command.

    It then fails with the code `starved`; else nothing changes.
    """

    transfer: TransferId
    consumer: ConsumerId


# --- results -------------------------------------------------------------------------------------


class Result(msgspec.Struct, frozen=True):
    """Base of what a rank reports to its host."""


class Released(Result, frozen=True):
    """Producer: nobody reads the source blocks any more and nobody will. `outcome` names why."""

    transfer: TransferId
    outcome: str


class DeliveryEnded(Result, frozen=True):
    """Producer: one registration that something was posted for has ended. For metrics only.

    `write_seconds` from the first post to the end; `handover_seconds` from the prefill's end, None when it
    had not ended.
    """

    transfer: TransferId
    consumer: ConsumerId
    written: bool
    write_seconds: float
    handover_seconds: float | None


class Drained(Result, frozen=True):
    """Producer: answer to `Preempt`; no write reads the blocks of any of its transfers."""

    ticket: int


class Received(Result, frozen=True):
    """Consumer: every byte of `[start, stop)` is in place."""

    transfer: TransferId
    consumer: ConsumerId
    bytes: int


class ReceiveFailed(Result, frozen=True):
    """Consumer: the rest will not come. Tokens before `valid_until` are good.

    `fenced` says that no producer rank can write into the destination any more, so that it may be reused.
    `cancelled` says that it ended by our own `Withdraw`.
    """

    transfer: TransferId
    consumer: ConsumerId
    reason: str
    valid_until: int
    fenced: bool
    cancelled: bool = False


class BlocksSafe(Result, frozen=True):
    """Consumer: the destination of an earlier unfenced failure can no longer be written by anyone."""

    transfer: TransferId
    consumer: ConsumerId
