"""The producer's tables: sources (transfers), their deliveries (registrations), and ended ones.

Plain state with the arithmetic that belongs to it. What changes it, and when, is in `producer_host`,
`producer_peer` and `pump`.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from kvferry.ids import ConsumerId, PeerName, TransferId
from kvferry.protocol.commands import Result
from kvferry.protocol.limits import Limits
from kvferry.protocol.messages import AnyMessage
from kvferry.protocol.outputs import BlockArray, Output, PeerFacts
from kvferry.protocol.ranges import Ranges
from kvferry.protocol.slices import Posted
from kvferry.protocol.states import DELIVERY_ENDED, DeliveryEvent, DeliveryState, SourceState
from kvferry.protocol.timers import Timers
from kvferry.protocol.turns import Turns

RegistrationName = tuple[TransferId, ConsumerId, int]
"""Transfer, consumer and attempt: how messages name a registration of the rank that they come from."""
DeliveryKey = tuple[PeerName, ConsumerId, int]
"""Consumer rank, consumer and attempt."""
TimerKey = tuple[str, TransferId]
"""Kind (lease, unknown, tombstone or retry) and transfer."""
FORGOTTEN_PEERS_MAX = 4096
"""Consumer ranks of which it is known what was forgotten; beyond it the one of longest ago is."""


@dataclass(slots=True)
class Delivery:
    """One registration of one consumer rank. `next_token` is the first token that was never posted."""

    transfer: TransferId
    consumer: ConsumerId
    peer: PeerName
    attempt: int = 1
    state: DeliveryState = DeliveryState.ANNOUNCED
    sharers: int = 1
    start: int = 0
    stop: int = 0
    target_blocks: tuple[BlockArray, ...] = ()
    starts: tuple[int, ...] = ()
    """The first token of each group to write: `start`, or a later one of a window."""
    registration: int | None = None
    """Digest of what was registered: the same name with other blocks is no repetition."""
    permission_until: float = 0.0
    asked: float | None = None
    """Pull: the consumer's newest own mark."""
    asked_at: float = 0.0
    """When that came in; what we promise after it ends by the consumer's clock first."""
    loan: int | None = None
    """Pull: the number under which the source blocks are lent, in one sequence with slices."""
    behind: set[int] = field(default_factory=set)
    """Slices in flight into blocks of ours that another registration had before; they have to end first."""
    next_token: int = 0
    in_flight: dict[int, Posted] = field(default_factory=dict)
    landed: Ranges = field(default_factory=Ranges)
    retries: deque[Posted] = field(default_factory=deque)
    retry_at: float = 0.0
    stop_event: DeliveryEvent = DeliveryEvent.DRAINED_FAILED
    stop_reason: str = ""
    answer: AnyMessage | None = None
    """What the peer was told at the end; repeated when it asks again."""
    first_post_at: float | None = None

    @property
    def key(self) -> DeliveryKey:
        return (self.peer, self.consumer, self.attempt)

    @property
    def name(self) -> RegistrationName:
        return (self.transfer, self.consumer, self.attempt)

    @property
    def ended(self) -> bool:
        return self.state in DELIVERY_ENDED

    @property
    def good_until(self) -> int:
        """Tokens before this are in the consumer's memory."""
        return self.landed.reach(self.start)

    def next_range(self, frontier: int, slice_tokens: int, grain: int) -> Posted | None:
        """The next tokens to post, None when nothing can be posted now.

        `grain` is the block size in tokens in which both sides can be cut. The range that reaches `stop`
        is given out only when every other one has ended, since its notification says that all has.
        """
        limit = self.stop if frontier >= self.stop else frontier - frontier % grain
        if self.retries:
            return self._next_retry(limit)
        # Every slice but the last ends on a grain, whatever the first one started on.
        until = min(self.next_token - self.next_token % grain + slice_tokens, limit)
        if until == self.stop and self.in_flight:
            until = (self.stop - 1) // grain * grain
        if until <= self.next_token:
            return None
        posted = Posted(self.next_token, until, 0)
        self.next_token = until
        return posted

    def _next_retry(self, limit: int) -> Posted | None:
        """A failed slice to post again. A request that was preempted meanwhile must have computed it anew."""
        alone = not self.in_flight and len(self.retries) == 1
        for again in self.retries:
            if again.stop <= limit and (again.stop < self.stop or alone):
                self.retries.remove(again)
                return again
        return None


@dataclass(slots=True)
class SourceRow:
    """One transfer. `blocks[g][i]` holds tokens from `i * block_tokens[g]` on, for i below its length."""

    transfer: TransferId
    state: SourceState = SourceState.UNKNOWN
    tokens: int = 0
    consumers: int = 1
    frontier: int = 0
    blocks: list[BlockArray] = field(default_factory=list)
    paused: bool = False
    """Preempted: the blocks are not ours to read until the next `Advance`."""
    host_done: bool = False
    """The host has said `Finish` or `Abandon` and is owed one `Released`."""
    expired: bool = False
    abandon_reason: str = ""
    complete_at: float | None = None
    """When the frontier reached the prompt's end."""
    deliveries: dict[DeliveryKey, Delivery] = field(default_factory=dict)
    lease_until: float = 0.0
    held_until: float = math.inf
    """The lease ends then, whoever renews it."""
    past: dict[DeliveryKey, AnyMessage] = field(default_factory=dict)
    """What consumers were told in an earlier life of the id; it stays true, see `producer_peer`."""

    @property
    def in_flight(self) -> int:
        """Slices that read the source blocks now."""
        return sum(len(delivery.in_flight) for delivery in self.deliveries.values())

    def served(self) -> int:
        """Consumers of which every rank that shares this producer rank has ended its newest attempt."""
        newest: dict[tuple[ConsumerId, PeerName], Delivery] = {}
        for delivery in self.deliveries.values():
            place = (delivery.consumer, delivery.peer)
            if place not in newest or newest[place].attempt < delivery.attempt:
                newest[place] = delivery
        ended: dict[ConsumerId, int] = {}
        sharers: dict[ConsumerId, int] = {}
        for (consumer, _), delivery in newest.items():
            ended[consumer] = ended.get(consumer, 0) + delivery.ended
            sharers[consumer] = max(sharers.get(consumer, 1), delivery.sharers)
        return sum(1 for consumer, count in ended.items() if count >= sharers[consumer])

    def open_deliveries(self) -> list[Delivery]:
        """Deliveries that have not ended."""
        return [delivery for delivery in self.deliveries.values() if not delivery.ended]


@dataclass(slots=True)
class Tombstone:
    """What is remembered of an ended transfer, so that a late message gets its true answer."""

    outcome: str
    answers: dict[DeliveryKey, AnyMessage]
    registrations: dict[DeliveryKey, int | None]
    released: bool
    """Whether the host has had its `Released`."""
    only_denials: bool = False
    """The transfer has not been here: some registrations of it were refused, and stay so."""


@dataclass(slots=True)
class Lane:
    """What is known of one peer, and whose turn it is among the deliveries to it."""

    facts: PeerFacts
    turns: Turns[RegistrationName] = field(default_factory=Turns)

    def blocks_max(self, limits: Limits) -> int:
        """Blocks that the peer's open registrations may have together.

        A rank that gave a destination up may have it registered again before it is known here: hence twice.
        """
        return min(
            limits.registered_blocks_max, 2 * sum(self.facts.block_counts) or limits.registered_blocks_max
        )


@dataclass(slots=True)
class ProducerState:
    """Everything that a producer core knows."""

    limits: Limits
    block_tokens: tuple[int, ...]
    whole_tokens: tuple[int, ...]
    """Our engine's block size of each group, which may be several of ours."""
    rows: dict[TransferId, SourceRow] = field(default_factory=dict)
    closing: bool = False
    """Nothing is admitted any more; who asks is told so."""
    early: set[TransferId] = field(default_factory=set)
    """Transfers that only peers have spoken of."""
    tombstones: OrderedDict[TransferId, Tombstone] = field(default_factory=OrderedDict)
    lanes: dict[PeerName, Lane] = field(default_factory=dict)
    registered: dict[PeerName, int] = field(default_factory=dict)
    """Blocks of each peer's open registrations."""
    slices: dict[int, tuple[TransferId, DeliveryKey]] = field(default_factory=dict)
    hindered: dict[int, list[tuple[TransferId, DeliveryKey]]] = field(default_factory=dict)
    """Deliveries that wait for a slice of another one, by its number."""
    loans: set[int] = field(default_factory=set)
    """Numbers under which source blocks are lent to readers."""
    tickets: dict[int, set[int]] = field(default_factory=dict)
    """Preemptions that wait, with the slices and loans that still read the blocks which they took away."""
    timers: Timers[TimerKey] = field(default_factory=Timers)
    slice_timers: Timers[int] = field(default_factory=Timers)
    outputs: deque[Output] = field(default_factory=deque)
    results: deque[Result] = field(default_factory=deque)
    forgotten: OrderedDict[PeerName, int] = field(default_factory=OrderedDict)
    """Of each consumer rank the newest attempt of which an answer was forgotten. A rank counts its attempts
    up, so what is not newer, and not known, may have been told its end."""
    slice_count: int = 0
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def is_full_for_peers(self) -> bool:
        """Whether a peer may not be the first to speak of one more transfer."""
        limit = self.limits.transfers_max
        return len(self.rows) >= limit or len(self.early) >= -(-limit // 2)

    def forget(self, key: DeliveryKey) -> None:
        """An answer is remembered no longer."""
        peer, _, attempt = key
        self.forgotten[peer] = max(self.forgotten.get(peer, attempt), attempt)
        self.forgotten.move_to_end(peer)
        while len(self.forgotten) > FORGOTTEN_PEERS_MAX:
            self.forgotten.popitem(last=False)

    def may_be_forgotten(self, transfer: TransferId, key: DeliveryKey) -> bool:
        """Whether a registration may have been answered before, and is not known here."""
        peer, _, attempt = key
        if peer not in self.forgotten or attempt > self.forgotten[peer]:
            return False
        row, tombstone = self.rows.get(transfer), self.tombstones.get(transfer)
        if row is not None:
            return key not in row.deliveries and key not in row.past
        return tombstone is None or (tombstone.only_denials and key not in tombstone.answers)

    def hold_blocks(self, delivery: Delivery, groups: tuple[BlockArray, ...]) -> None:
        """A registration counts towards its peer's blocks until `free_blocks`."""
        delivery.target_blocks = groups
        if count := sum(len(blocks) for blocks in groups):
            self.registered[delivery.peer] = self.registered.get(delivery.peer, 0) + count

    def free_blocks(self, delivery: Delivery) -> None:
        """An ended delivery's destination is nobody's business here any more."""
        left = self.registered.get(delivery.peer, 0) - sum(len(blocks) for blocks in delivery.target_blocks)
        delivery.target_blocks = ()
        if left > 0:
            self.registered[delivery.peer] = left
        else:
            self.registered.pop(delivery.peer, None)

    def count(self, what: str) -> None:
        """Move a counter that says how often something unusual happened."""
        self.counts[what] = self.counts.get(what, 0) + 1
