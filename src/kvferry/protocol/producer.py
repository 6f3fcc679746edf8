"""The producer core: what one rank knows of the transfers that it hands out, and what it does about them.

Sans I/O. Feed it `handle_*` and `command`, each with `now` (monotonic seconds of this process, never going
back); then drain, in this order, `poll_output`, `poll_result`, and `next_slice` until each gives None;
call `handle_timeout` when `next_due` has come. Belongs to one thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from kvferry.errors import PeerError
from kvferry.ids import PeerName
from kvferry.protocol import loans, producer_host, producer_peer, pump, readers, settle
from kvferry.protocol.commands import (
    Abandon,
    Advance,
    Command,
    Expect,
    Finish,
    Preempt,
    Reclaim,
    Result,
)
from kvferry.protocol.limits import ID_CHARACTERS_MAX, Limits
from kvferry.protocol.messages import Announce, AnyMessage, Cancel, Fetch, Fetched, Register, Renew
from kvferry.protocol.outputs import Output, PeerFacts, PostSlice
from kvferry.protocol.reasons import CLOSED, LEASE_EXPIRED, UNKNOWN
from kvferry.protocol.sources import Lane, ProducerState, SourceRow
from kvferry.protocol.states import DeliveryState, SourceState
from kvferry.protocol.turns import Turns

_COMMANDS: dict[type[Command], Callable[[ProducerState, Any, float], None]] = {
    Expect: producer_host.expect,
    Advance: producer_host.advance,
    Finish: producer_host.finish,
    Abandon: producer_host.abandon,
    Preempt: producer_host.preempt,
    Reclaim: producer_host.reclaim,
}
_MESSAGES: dict[type[AnyMessage], Callable[[ProducerState, PeerName, Any, float], None]] = {
    Announce: producer_peer.announce,
    Register: producer_peer.register,
    Renew: producer_peer.renew,
    Cancel: producer_peer.cancel,
    Fetch: readers.fetch,
    Fetched: readers.fetched,
}
PRODUCER_COMMANDS = frozenset(_COMMANDS)
PRODUCER_MESSAGES = frozenset(_MESSAGES)


def _check_ids(message: Any) -> None:
    if isinstance(message, Renew):
        ids = [name for transfer, consumer, _ in message.transfers for name in (transfer, consumer)]
    else:
        ids = [message.transfer, message.consumer]
    if any(len(name) > ID_CHARACTERS_MAX for name in ids):
        raise PeerError(f"an id of more than {ID_CHARACTERS_MAX} characters")


class ProducerCore:
    """One rank's producer side.

    `block_tokens[g]` is our own block size of cache group g in tokens, `whole_tokens[g]` that of our engine,
    of which ours may be parts; none where they are the same.
    """

    def __init__(
        self, limits: Limits, block_tokens: tuple[int, ...], whole_tokens: tuple[int, ...] = ()
    ) -> None:
        self.state = ProducerState(limits, block_tokens, whole_tokens or block_tokens)

    # --- in ------------------------------------------------------------------------------------

    def handle_command(self, command: Command, now: float) -> None:
        """Take one of `PRODUCER_COMMANDS` from the host."""
        _COMMANDS[type(command)](self.state, command, now)

    def handle_message(self, peer: PeerName, message: AnyMessage, now: float) -> None:
        """Take one of `PRODUCER_MESSAGES` from a linked peer.

        Raises:
            PeerError: the peer is not linked, or the message is impossible in its transfer's state.
        """
        if peer not in self.state.lanes:
            raise PeerError(f"{type(message).__name__} before Hello")
        _check_ids(message)
        _MESSAGES[type(message)](self.state, peer, message, now)

    def handle_link(self, peer: PeerName, facts: PeerFacts) -> None:
        """A consumer rank can be written to."""
        if peer not in self.state.lanes:
            # What was in flight when the peer was lost may not have been reported yet.
            in_flight = sum(1 for _, key in self.state.slices.values() if key[0] == peer)
            self.state.lanes[peer] = Lane(facts, Turns(in_flight=in_flight))

    def handle_peer_lost(self, peer: PeerName, reason: str, now: float) -> None:
        """The connection to a peer is gone. Slices in flight to it are still reported, each once."""
        producer_peer.peer_lost(self.state, peer, reason, now)

    def handle_slice_done(self, number: int, now: float) -> None:
        """Every byte of a posted slice is in place."""
        pump.slice_ended(self.state, number, now, None, retry=False)

    def handle_slice_failed(self, number: int, reason: str, now: float, *, retryable: bool) -> None:
        """A slice could not be posted, or ended in an error; it is not in flight any more."""
        pump.slice_ended(self.state, number, now, reason, retry=retryable)

    def handle_timeout(self, now: float) -> None:
        """Draw the consequences of every deadline at or before `now`."""
        state = self.state
        for number in state.slice_timers.pop_due(now):
            pump.slice_overdue(state, number)
        for kind, transfer in state.timers.pop_due(now):
            if kind == "tombstone":
                settle.forget(state, transfer)
                continue
            row = state.rows.get(transfer)
            if row is None:
                # Ended by another deadline that was due at the same time.
                continue
            if kind == "retry":
                pump.retry(state, row, now)
                continue
            row.expired = True
            settle.fail_open(state, row, LEASE_EXPIRED if kind == "lease" else UNKNOWN)
            settle.settle(state, row, now)

    def handle_close(self, now: float) -> None:
        """The rank shuts down: post nothing more, admit nothing more, tell every consumer."""
        self.state.closing = True
        for row in list(self.state.rows.values()):
            settle.fail_open(self.state, row, CLOSED)
            settle.settle(self.state, row, now)

    # --- out -----------------------------------------------------------------------------------

    def next_due(self) -> float | None:
        """When `handle_timeout` must be called next."""
        due = (self.state.timers.next_due(), self.state.slice_timers.next_due())
        return min((when for when in due if when is not None), default=None)

    def poll_output(self) -> Output | None:
        """The next thing to do for the host of this core."""
        return self.state.outputs.popleft() if self.state.outputs else None

    def poll_result(self) -> Result | None:
        """The next thing to tell the engine."""
        return self.state.results.popleft() if self.state.results else None

    def next_slice(self, now: float) -> PostSlice | None:
        """The next slice to post; answered by exactly one `handle_slice_done` or `handle_slice_failed`."""
        return pump.next_slice(self.state, now)

    # --- looking in ----------------------------------------------------------------------------

    @property
    def expecting(self) -> bool:
        """Whether something may become postable or arrive soon, so that polling fast is worth it."""
        return bool(self.state.rows)

    def knows(self, transfer: object) -> bool:
        """Whether the transfer has not ended here."""
        return transfer in self.state.rows

    def peers(self) -> set[PeerName]:
        """Peers that a delivery or a slice has to do with that has not ended."""
        named = {key[0] for _, key in self.state.slices.values()}
        for row in self.state.rows.values():
            named.update(delivery.peer for delivery in row.open_deliveries())
        return named

    def in_flight(self) -> int:
        """Slices that have been given out and have not ended."""
        return len(self.state.slices)

    def lent(self) -> int:
        """Loans whose readers have not come back."""
        return len(self.state.loans)

    def states(self) -> dict[str, int]:
        """How many transfers are in which state."""
        found: dict[str, int] = {}
        for row in self.state.rows.values():
            found[row.state.value] = found.get(row.state.value, 0) + 1
        return found

    def check_invariants(self) -> None:
        """Assert what must hold between any two calls."""
        state = self.state
        in_flight = 0
        lanes: dict[PeerName, int] = {}
        registered: dict[PeerName, int] = {}
        for transfer, row in state.rows.items():
            assert row.transfer == transfer
            assert row.state is not SourceState.ENDED
            assert (transfer in state.early) is (row.state is SourceState.UNKNOWN)
            if row.state is SourceState.UNKNOWN:
                assert ("unknown", transfer) in state.timers, "nobody is waited for without an end"
            if row.state is SourceState.HELD and not row.expired:
                assert ("lease", transfer) in state.timers, "a lease has an end"
            _check_loans(state, row)
            for key, delivery in row.deliveries.items():
                assert delivery.key == key
                assert not (delivery.ended and delivery.in_flight), "an ended delivery is silent"
                assert not (delivery.state is DeliveryState.STOPPING and not delivery.in_flight)
                ranges = sorted((p.start, p.stop) for p in delivery.in_flight.values())
                for before, after in itertools.pairwise(ranges):
                    assert before[1] <= after[0], "no two writes to the same bytes are in flight"
                in_flight += len(delivery.in_flight)
                if blocks := sum(len(group) for group in delivery.target_blocks):
                    assert not delivery.ended, "what has ended holds no destination"
                    registered[key[0]] = registered.get(key[0], 0) + blocks
                lanes[key[0]] = lanes.get(key[0], 0) + len(delivery.in_flight)
                for number in delivery.in_flight:
                    assert state.slices[number] == (transfer, key)
        assert state.early <= state.rows.keys()
        assert in_flight == len(state.slices)
        assert registered == state.registered, "blocks of open registrations are counted"
        for peer, lane in state.lanes.items():
            assert lane.turns.in_flight == lanes.get(peer, 0)
            assert lane.turns.in_flight <= state.limits.in_flight_per_peer
        for waiting in state.tickets.values():
            assert waiting, "an empty ticket is answered at once"
            held = state.slices.keys() | state.loans
            assert waiting <= held, "a ticket waits only for what is in flight or lent"


def _check_loans(state: ProducerState, row: SourceRow) -> None:
    for delivery in row.deliveries.values():
        assert (delivery.loan in state.loans) is (delivery.state in loans.LOANS)
        if delivery.state is DeliveryState.LENT:
            assert row.state is SourceState.HELD, "only what does not change is lent"
        if delivery.state in loans.LOANS:
            assert ("lease", row.transfer) in state.timers, "a loan has an end"
