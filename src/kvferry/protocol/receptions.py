"""The consumer's tables: receptions, their parts (one per producer rank), sources and peers.

Plain state with the arithmetic that belongs to it. What changes it, and when, is in `consumer_host`,
`consumer_peer` and `fences`.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from kvferry.handoff import TransferMode
from kvferry.ids import ConsumerId, PeerName, TransferId
from kvferry.protocol.commands import Groups, Result, Source
from kvferry.protocol.limits import Limits
from kvferry.protocol.messages import Cancel, Fetched
from kvferry.protocol.outputs import BlockArray, Link, Output
from kvferry.protocol.ranges import Ranges
from kvferry.protocol.slices import Posted
from kvferry.protocol.states import PART_COMPLETE, PART_ENDED, PartState, ReceptionState
from kvferry.protocol.timers import Timers
from kvferry.protocol.turns import Turns

ReceptionKey = tuple[TransferId, ConsumerId]
FarewellKey = tuple[PeerName, TransferId, ConsumerId, int]
"""Producer rank, transfer, consumer and attempt."""
SOURCES_MAX = 1024
"""Producer engines whose links are remembered while nothing is received from them."""
MARKS_MAX = 4096
"""Producer ranks whose newest mark is remembered; beyond it the longest unheard one is forgotten."""


@dataclass(slots=True)
class Reading:
    """What was offered to be read, and how far reading is. `next_token` was never posted."""

    source_blocks: tuple[BlockArray, ...]
    target_blocks: tuple[BlockArray, ...]
    stop: int
    next_token: int
    starts: tuple[int, ...]
    """The first token of each group to read: the range's, or a later one of a window."""
    offered_at: float = 0.0
    """By our clock; a renewal that is younger finds the loan, or it has ended there."""
    in_flight: dict[int, Posted] = field(default_factory=dict)
    retries: deque[Posted] = field(default_factory=deque)
    retry_at: float = 0.0

    def next_range(self, slice_tokens: int, grain: int) -> Posted | None:
        """The next tokens to read, None when there are no more.

        `grain` is the block size in tokens in which both sides can be cut.
        """
        if self.retries:
            return self.retries.popleft()
        # Every slice but the last ends on a grain, whatever the first one started on.
        until = min(self.next_token - self.next_token % grain + slice_tokens, self.stop)
        if until <= self.next_token:
            return None
        posted = Posted(self.next_token, until, 0)
        self.next_token = until
        return posted


@dataclass(slots=True)
class Part:
    """One producer rank of a reception."""

    link: Link
    state: PartState = PartState.UNTOLD
    landed: Ranges = field(default_factory=Ranges)
    valid_until: int = 0
    granted_at: float | None = None
    """When the mark came in that our newest grant of permission repeats; None if we have granted nothing."""
    heard_at: float = 0.0
    """When the rank last said something of this reception; what else it says is no answer."""
    stands: str = "unknown"
    """How the transfer stands there, by its latest `Status`."""
    frontier: int = 0
    """Tokens that it has computed, by the same."""
    noted: tuple[str, int, int] | None = None
    """How far it was when the engine last wanted the destination back."""
    keep_until: float = -math.inf
    """Pull: the source blocks are kept until then, by our clock."""
    reading: Reading | None = None
    """Pull: what was offered."""

    @property
    def ended(self) -> bool:
        return self.state in PART_ENDED

    def good_until(self, start: int, stop: int) -> int:
        """Tokens before this came from this rank, whatever happens next, or were not to come from it."""
        if self.state in PART_COMPLETE or not self.link.writes:
            return stop
        return min(max(self.landed.reach(start), self.valid_until, start), stop)


@dataclass(slots=True)
class Reception:
    """One transfer for one consumer request. `parts` is None until the source is resolved."""

    transfer: TransferId
    consumer: ConsumerId
    source: Source
    attempt: int
    state: ReceptionState = ReceptionState.ANNOUNCED
    mode: TransferMode = "push"
    """Who moves the bytes; known when the destination is."""
    patient: bool = True
    """Whether the prefill leg may still be on its way."""
    recent: bool = False
    """Whether the producer may not have been told of the transfer yet."""
    parts: dict[PeerName, Part] | None = None
    start: int = 0
    stop: int = 0
    groups: Groups = ()
    block_count: tuple[int, ...] = ()
    reason: str = ""
    """Why it fails; sticky, the first one counts."""
    withdrawn: bool = False
    waiting_since: float = 0.0
    granted_before: dict[PeerName, float] = field(default_factory=dict)
    """`Part.granted_at` of ranks whose links were lost while this was announced; the grant may arrive yet."""

    @property
    def key(self) -> ReceptionKey:
        return (self.transfer, self.consumer)

    def is_waited_for(self, limits: Limits, now: float) -> bool:
        """Whether a producer that does not know of the transfer may be told of it yet."""
        return self.patient or (self.recent and now < self.waiting_since + limits.renew_seconds)

    def asked_of(self, part: Part) -> tuple[int, Groups]:
        """Where the range ends that a rank has for us, and our blocks of it."""
        return (self.stop, self.groups) if part.link.writes else (self.start, tuple(() for _ in self.groups))

    def open_parts(self) -> list[Part]:
        """Parts of which no end is known."""
        return [part for part in (self.parts or {}).values() if not part.ended]

    def good_until(self) -> int:
        """Tokens before this are in place from every producer rank."""
        return min(
            (p.good_until(self.start, self.stop) for p in (self.parts or {}).values()), default=self.start
        )


@dataclass(slots=True)
class SourceLinks:
    """What is known of a producer engine: its links, or None while it is being resolved."""

    source: Source
    links: tuple[Link, ...] | None = None
    waiting: set[ReceptionKey] = field(default_factory=set)


@dataclass(slots=True)
class Peer:
    """A producer rank that receptions wait for."""

    last_heard: float
    receptions: set[ReceptionKey] = field(default_factory=set)
    broken: bool = False
    """Our connection to it has broken, and it is not known whether it lives."""
    asked: bool = False
    """Somebody is finding out, or it is dead and its orphans are waited for."""
    reason: str = ""
    """How it was proven dead."""
    asked_at: float = -math.inf


@dataclass(frozen=True, slots=True)
class Mark:
    """A producer rank's note of when it spoke, and when that came in by our clock."""

    value: float
    heard_at: float


@dataclass(frozen=True, slots=True)
class Farewell:
    """What a reader said when it was silent, until it is answered or nobody waits for it any more."""

    message: Cancel | Fetched
    until: float


@dataclass(slots=True)
class ConsumerState:
    """Everything that a consumer core knows. `retry_bound_seconds` is the transport's."""

    limits: Limits
    retry_bound_seconds: float
    block_tokens: tuple[int, ...]
    windows: tuple[int, ...] = ()
    """Of each group in tokens, as in `PeerFacts`."""
    whole_tokens: tuple[int, ...] = ()
    """Our engine's block size of each group, which may be several of ours."""
    rows: dict[ReceptionKey, Reception] = field(default_factory=dict)
    sources: OrderedDict[Source, SourceLinks] = field(default_factory=OrderedDict)
    peers: dict[PeerName, Peer] = field(default_factory=dict)
    marks: OrderedDict[PeerName, Mark] = field(default_factory=OrderedDict)
    attempts: int = 0
    """Receptions so far; the newest one's number."""
    peer_timers: Timers[tuple[str, PeerName]] = field(default_factory=Timers)
    lapse_timers: Timers[ReceptionKey] = field(default_factory=Timers)
    turns: dict[PeerName, Turns[ReceptionKey]] = field(default_factory=dict)
    reads: dict[int, tuple[ReceptionKey, PeerName]] = field(default_factory=dict)
    """READs in flight by their number."""
    read_count: int = 0
    read_timers: Timers[int] = field(default_factory=Timers)
    retry_timers: Timers[tuple[ReceptionKey, PeerName]] = field(default_factory=Timers)
    farewells: OrderedDict[FarewellKey, Farewell] = field(default_factory=OrderedDict)
    farewell_timers: Timers[FarewellKey] = field(default_factory=Timers)
    outputs: deque[Output] = field(default_factory=deque)
    results: deque[Result] = field(default_factory=deque)
    counts: dict[str, int] = field(default_factory=dict)

    def window_of(self, group: int) -> int:
        """The window of a group in tokens; 0: there is none."""
        return self.windows[group] if self.windows else 0

    def open_row(self, transfer: TransferId, consumer: ConsumerId, source: Source) -> Reception:
        """A new reception under its own number."""
        self.attempts += 1
        row = Reception(transfer, consumer, source, self.attempts)
        self.rows[row.key] = row
        return row

    def take_mark(self, name: PeerName, value: float, now: float) -> None:
        """Remember a producer rank's mark unless a newer one is known."""
        known = self.marks.get(name)
        if known is None or value > known.value:
            self.marks[name] = Mark(value, now)
            self.marks.move_to_end(name)
            if len(self.marks) > MARKS_MAX:
                self.marks.popitem(last=False)

    def usable_mark(self, name: PeerName, now: float) -> Mark | None:
        """The peer's newest mark, while most of a permission that repeats it lies ahead."""
        mark = self.marks.get(name)
        if mark is None or now - mark.heard_at > self.limits.write_seconds / 2:
            return None
        return mark

    def count(self, what: str) -> None:
        """Move a counter that says how often something unusual happened."""
        self.counts[what] = self.counts.get(what, 0) + 1
