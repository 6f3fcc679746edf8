"""Producer and consumer cores on a fake clock, with links, slices and blocks that a test controls.

The producer ranks belong to one engine, which computes one list of blocks per request; each consumer is an
engine of its own with one rank. Messages arrive at once and in order unless a test holds, drops, doubles or
reorders them; posted slices stay in flight until they are told to end, read their source only then, and
bring their notification along. Each producer rank has a clock of its own, far from the consumers'.

The pair checks the promises of the protocol whenever it sees something: a post, a landing, a result.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvferry.handoff import TransferMode
from kvferry.ids import ConsumerId, EngineId, PeerName, TransferId
from kvferry.protocol.commands import (
    Abandon,
    Advance,
    AnnounceCommand,
    BlocksSafe,
    Drained,
    Expect,
    Finish,
    Preempt,
    Receive,
    Received,
    ReceiveFailed,
    Reclaim,
    Released,
    Relinquish,
    Result,
    Source,
    Withdraw,
)
from kvferry.protocol.consumer import CONSUMER_MESSAGES, ConsumerCore
from kvferry.protocol.limits import Limits
from kvferry.protocol.messages import (
    AnyMessage,
    Cancel,
    Fetched,
    Landed,
    Offer,
    Register,
    Renew,
    Status,
    Written,
)
from kvferry.protocol.outputs import Disconnect, Inquire, Link, PeerFacts, PostSlice, Resolve, Send
from kvferry.protocol.producer import ProducerCore
from tests.support.blocks import Memory, Pool, Token, spans
from tests.support.loans import Loans

SOURCE = Source(EngineId("prefill"), "127.0.0.1", 5600)
Wire = tuple[PeerName, PeerName]
"""From, to."""
ReceptionName = tuple[PeerName, TransferId, ConsumerId]
CLOCK_SECONDS = 5000.0
"""By so much a producer rank's clock is ahead of the one before it; the first one's is of the consumers'."""


@dataclass(slots=True)
class Flight:
    """A posted slice that has not ended; a doomed one can only fail, for its connection is gone.

    The poster is the producer rank that writes, or the consumer rank that reads.
    """

    poster: PeerName
    piece: PostSlice
    posted_at: float
    doomed: bool = False

    @property
    def way(self) -> Wire:
        """Producer rank and consumer rank."""
        ends = (self.poster, self.piece.peer)
        return ends[::-1] if self.piece.read else ends

    @property
    def name(self) -> ReceptionName:
        """The reception that it is for."""
        return (self.way[1], self.piece.transfer, self.piece.consumer)


@dataclass(slots=True)
class Prefill:
    """What the producer engine knows of a request."""

    tokens: int
    blocks: list[int] = field(default_factory=list)
    frontier: int = 0
    blocks_told: int = 0
    running: bool = True
    """Its blocks may be written from: neither preempted nor released."""
    ended: bool = False
    outcomes: dict[PeerName, str] = field(default_factory=dict)


@dataclass(slots=True)
class Decode:
    """What a consumer engine knows of a request that waits for KV."""

    start: int
    stop: int
    blocks: list[int]
    attempt: int = 0
    """Of the consumer core; what is written for another one must not go into these blocks."""
    result: Received | ReceiveFailed | None = None
    safe: bool = False


@dataclass(slots=True)
class _Ticket:
    transfers: tuple[TransferId, ...]
    blocks: dict[TransferId, list[int]]
    waiting: set[PeerName]


class Pair:
    """See the module's text. Names are `p0`, `p1`, ... and `d0`, `d1`, ..."""

    def __init__(
        self,
        *,
        producers: int = 1,
        consumers: int = 1,
        limits: Limits | None = None,
        block_tokens: int = 4,
        slice_tokens: int = 8,
        blocks: int = 64,
        retry_bound_seconds: float = 3.0,
        bounded: bool = False,
        checked: bool = True,
    ) -> None:
        """`bounded` ends slices after the transport's retry bound; a message may be read however late."""
        self.limits = limits or Limits()
        self.block_tokens, self.slice_tokens = block_tokens, slice_tokens
        self.retry_bound_seconds, self.bounded, self.checked = retry_bound_seconds, bounded, checked
        self.now = 100.0
        self.producers = {
            PeerName(f"p{i}"): ProducerCore(self.limits, (block_tokens,)) for i in range(producers)
        }
        self.consumers = {
            PeerName(f"d{i}"): ConsumerCore(self.limits, retry_bound_seconds, (block_tokens,))
            for i in range(consumers)
        }
        self.wires: dict[Wire, deque[AnyMessage]] = {}
        for producer in self.producers:
            for consumer in self.consumers:
                self.wires[producer, consumer] = deque()
                self.wires[consumer, producer] = deque()
        self.held: set[Wire] = set()
        """Wires whose messages wait for `deliver`."""
        self.cut: set[Wire] = set()
        """Wires whose messages vanish."""
        self.torn: set[Wire] = set()
        """(producer, consumer) whose connection the consumer has torn down, until it resolves again."""
        self.unlinked: set[Wire] = set()
        """(consumer, producer) where the consumer's own connection has broken, until it links again."""
        self.dead = False
        """The producer engine's processes have ended."""
        self.resolve_held = False
        self.resolves: deque[tuple[PeerName, Source]] = deque()
        self.inquire_held = False
        self.inquiries: deque[tuple[PeerName, PeerName]] = deque()
        """Who wants to know of whom whether it lives."""
        self.inquired: list[tuple[float, PeerName, PeerName]] = []
        """Every such question that there ever was, and when."""
        self.flights: dict[tuple[PeerName, int], Flight] = {}
        self.posts: list[PostSlice] = []
        """Everything that was ever posted."""
        self.pool = Pool(blocks)
        self.pools = {name: Pool(blocks) for name in self.consumers}
        self.prefills: dict[TransferId, Prefill] = {}
        self.decodes: dict[ReceptionName, Decode] = {}
        self.tickets: dict[int, _Ticket] = {}
        self.drained: list[int] = []
        self.source_memory = {name: Memory(block_tokens) for name in self.producers}
        self.target_memory = {wire: Memory(block_tokens) for wire in self._ways()}
        self.results: list[tuple[PeerName, Result]] = []
        self.sent: list[tuple[PeerName, PeerName, AnyMessage]] = []
        self.marks: dict[PeerName, set[float]] = {name: set() for name in self.producers}
        """Marks that each producer rank has made."""
        self.permits: dict[tuple[PeerName, ReceptionName, int], float] = {}
        """Until when a producer rank may post for an attempt, by its own clock."""
        self.loans = Loans()
        self.trace: Callable[[str], None] = lambda line: None
        self.describe: Callable[[object], str] = repr
        self._ticket = 0

    def clock(self, name: PeerName) -> float:
        """What time it is for one rank."""
        return self.now + self._ahead(name)

    def _ahead(self, name: PeerName) -> float:
        return CLOCK_SECONDS * (1 + list(self.producers).index(name)) if name in self.producers else 0.0

    def _ways(self) -> list[Wire]:
        return [(producer, consumer) for producer in self.producers for consumer in self.consumers]

    def _cores(self) -> list[tuple[PeerName, ProducerCore | ConsumerCore]]:
        producers = {} if self.dead else self.producers
        return [*producers.items(), *self.consumers.items()]

    # --- the producer engine ----------------------------------------------------------------------

    def expect(self, transfer: str, tokens: int, consumers: int = 1) -> None:
        """A prefill request has reached the engine."""
        name = TransferId(transfer)
        self.prefills[name] = Prefill(tokens)
        self._command_producers(Expect(name, tokens, consumers))

    def compute(self, transfer: str, frontier: int) -> None:
        """A forward pass has computed the prompt up to `frontier`; a preempted request starts again."""
        name = TransferId(transfer)
        prefill = self.prefills[name]
        prefill.running = True
        wanted = -(-frontier // self.block_tokens)
        prefill.blocks += self.pool.take(wanted - len(prefill.blocks), name)
        first, prefill.blocks_told = prefill.blocks_told, wanted
        for memory in self.source_memory.values():
            memory.compute(name, prefill.blocks, prefill.frontier, frontier)
        prefill.frontier = frontier
        self._command_producers(Advance(name, frontier, first, (spans(prefill.blocks[first:wanted]),)))

    def finish(self, transfer: str, keep_seconds: float | None = None) -> None:
        """Prefill ended normally."""
        self.prefills[TransferId(transfer)].ended = True
        self._command_producers(Finish(TransferId(transfer), keep_seconds))

    def abandon(self, transfer: str, reason: str = "abandoned: client left") -> None:
        """Prefill broke off."""
        self.prefills[TransferId(transfer)].ended = True
        self._command_producers(Abandon(TransferId(transfer), reason))

    def preempt(self, *transfers: str) -> int:
        """The engine takes the blocks away; it reuses them once every rank has answered the ticket."""
        self._ticket += 1
        names = tuple(TransferId(transfer) for transfer in transfers)
        ticket = _Ticket(names, {}, set(self.producers))
        for name in names:
            prefill = self.prefills[name]
            ticket.blocks[name], prefill.blocks = prefill.blocks, []
            prefill.frontier = prefill.blocks_told = 0
            prefill.running = False
        self.tickets[self._ticket] = ticket
        self._command_producers(Preempt(names, self._ticket))
        return self._ticket

    def reclaim(self, transfer: str, reason: str = "starved: others wait for the memory") -> None:
        """The engine wants leased blocks back."""
        self._command_producers(Reclaim(TransferId(transfer), reason))

    def _command_producers(self, command: Expect | Advance | Finish | Abandon | Preempt | Reclaim) -> None:
        for name, core in self.producers.items() if not self.dead else ():
            core.handle_command(command, self.clock(name))
            self._drain_producer(name)
        self.run()

    # --- the consumer engines ---------------------------------------------------------------------

    def announce(self, transfer: str, consumer: str = "c0", at: str = "d0") -> None:
        """A decode request waits for memory."""
        command = AnnounceCommand(TransferId(transfer), ConsumerId(consumer), SOURCE)
        self.consumers[PeerName(at)].handle_command(command, self.now)
        self.run()

    def receive(
        self,
        transfer: str,
        stop: int,
        start: int = 0,
        consumer: str = "c0",
        at: str = "d0",
        mode: TransferMode = "push",
        *,
        patient: bool = True,
        recent: bool = False,
    ) -> Decode:
        """Allocate memory for tokens `[start, stop)` and wait for them."""
        name = (PeerName(at), TransferId(transfer), ConsumerId(consumer))
        count = -(-stop // self.block_tokens) - start // self.block_tokens if stop > start else 0
        blocks = self.pools[name[0]].take(count, name)
        self._spoil(name[0], blocks)
        decode = self.decodes[name] = Decode(start, stop, blocks)
        command = Receive(name[1], name[2], SOURCE, start, stop, (spans(blocks),), mode, patient, recent)
        self.consumers[name[0]].handle_command(command, self.now)
        row = self.consumers[name[0]].state.rows.get(name[1:])
        decode.attempt = 0 if row is None else row.attempt
        self.run()
        return decode

    def withdraw(
        self, transfer: str, consumer: str = "c0", at: str = "d0", reason: str = "client left"
    ) -> None:
        """The request needs nothing (any more)."""
        command = Withdraw(TransferId(transfer), ConsumerId(consumer), SOURCE, reason)
        self.consumers[PeerName(at)].handle_command(command, self.now)
        self.run()

    def relinquish(self, transfer: str, consumer: str = "c0", at: str = "d0") -> None:
        """The engine wants a destination back."""
        command = Relinquish(TransferId(transfer), ConsumerId(consumer))
        self.consumers[PeerName(at)].handle_command(command, self.now)
        self.run()

    def resolve(self) -> None:
        """Answer the oldest `Resolve`: links to every producer rank."""
        if self.dead:
            self.unresolve("the directory does not answer")
            return
        name, source = self.resolves.popleft()
        for producer, core in self.producers.items():
            self.torn.discard((producer, name))
            self.unlinked.discard((name, producer))
            core.handle_link(name, PeerFacts((self.block_tokens,), self.slice_tokens))
        links = tuple(
            Link(producer, 1, (100,), block_tokens=(self.block_tokens,), slice_tokens=self.slice_tokens)
            for producer in self.producers
        )
        self.consumers[name].handle_resolved(source, links, self.now)
        self.run()

    def unresolve(self, reason: str) -> None:
        """Answer the oldest `Resolve`: no way there."""
        name, source = self.resolves.popleft()
        self.consumers[name].handle_unresolved(source, reason, self.now)
        self.run()

    def inquire(self, evidence: bool = True) -> None:
        """Answer the oldest `Inquire` with the truth, or with that it could not be found out."""
        name, producer = self.inquiries.popleft()
        core = self.consumers[name]
        if not evidence:
            self.trace(f"{name} does not find out whether {producer} lives")
            core.handle_no_evidence(producer)
        elif self.dead:
            self.trace(f"{name} finds that {producer} is dead")
            core.handle_peer_dead(producer, "peer_lost: nobody listens there", self.now)
        else:
            self.trace(f"{name} finds that {producer} lives, and links again")
            self.torn.discard((producer, name))
            self.unlinked.discard((name, producer))
            self.producers[producer].handle_link(name, PeerFacts((self.block_tokens,), self.slice_tokens))
            core.handle_peer_alive(producer, self.now)
        self.run()

    # --- the network -------------------------------------------------------------------------------

    def run(self) -> None:
        """Carry out what the cores ask for, and deliver what is not held, until nothing is left."""
        busy = True
        while busy:
            for name in self.producers:
                self._drain_producer(name)
            for name in self.consumers:
                self._drain_consumer(name)
            open_wires = [wire for wire, messages in self.wires.items() if messages and wire not in self.held]
            for wire in open_wires:
                self._hand_over(wire, self.wires[wire].popleft())
            resolving = bool(self.resolves) and not self.resolve_held
            if resolving:
                self.resolve()
            inquiring = bool(self.inquiries) and not self.inquire_held
            if inquiring:
                self.inquire()
            busy = bool(open_wires) or resolving or inquiring
        if self.checked:
            for _, core in self._cores():
                core.check_invariants()

    def deliver(self, wire: Wire, at: int = 0) -> None:
        """Deliver one held message, the oldest unless told otherwise."""
        message = self.wires[wire][at]
        del self.wires[wire][at]
        self._hand_over(wire, message)
        self.run()

    def double(self, wire: Wire, at: int = 0) -> None:
        """A held message will arrive twice."""
        self.wires[wire].append(self.wires[wire][at])

    def drop(self, wire: Wire, at: int = 0) -> None:
        """A held message is lost."""
        del self.wires[wire][at]

    def lose(self, producer: str, consumer: str, reason: str = "peer_lost: remote disconnect") -> None:
        """The connection breaks, and both sides' transports notice."""
        wire = (PeerName(producer), PeerName(consumer))
        self._tear(wire)
        self.producers[wire[0]].handle_peer_lost(wire[1], reason, self.clock(wire[0]))
        self.consumers[wire[1]].handle_link_broken(wire[0], reason, self.now)
        self.run()

    def break_link(self, producer: str, consumer: str, reason: str = "peer_lost: reset") -> None:
        """The consumer's connection breaks; the producer notices nothing, and what it writes lands."""
        way = (PeerName(producer), PeerName(consumer))
        self.unlinked.add((way[1], way[0]))
        self.trace(f"{consumer}'s connection to {producer} breaks")
        for flight in self.flights.values():
            if flight.piece.read and flight.way == way:
                flight.doomed = True
        self.consumers[way[1]].handle_link_broken(way[0], reason, self.now)
        self.run()

    def kill(self) -> None:
        """The producer engine's processes end, and the consumers' connections break."""
        self.dead = True
        self.trace("the producer engine dies")
        self.flights = {key: flight for key, flight in self.flights.items() if flight.piece.read}
        for wire in self._ways():
            self._tear(wire)
        for producer, consumer in self._ways():
            self.consumers[consumer].handle_link_broken(producer, "peer_lost: reset", self.now)
        self.run()

    def _tear(self, wire: Wire) -> None:
        # Messages that were sent before may be read after it, for all that anybody knows.
        self.torn.add(wire)
        for flight in self.flights.values():
            if flight.way == wire:
                flight.doomed = True

    def _send(self, sender: PeerName, output: Send) -> None:
        wire = (sender, output.peer)
        way = wire if sender in self.producers else (output.peer, sender)
        self.sent.append((sender, output.peer, output.message))
        lost = wire in self.cut | self.unlinked or way in self.torn or self.dead
        if isinstance(output.message, Status) and output.message.mark is not None:
            assert output.message.mark <= self.clock(sender), "a mark of the future"
            self.marks[sender].add(output.message.mark)
        if isinstance(output.message, Fetched | Cancel) and sender in self.consumers:
            self._check_farewell(sender, output.peer, output.message)
        self.trace(f"{sender} -> {output.peer}: {self.describe(output.message)}{' (lost)' if lost else ''}")
        if not lost:
            self.wires[wire].append(output.message)

    def _hand_over(self, wire: Wire, message: AnyMessage) -> None:
        sender, receiver = wire
        if receiver in self.consumers:
            assert type(message) in CONSUMER_MESSAGES
            if isinstance(message, Offer | Status):
                self.loans.heard(sender, receiver, message)
            self.consumers[receiver].handle_message(sender, message, self.now)
            return
        if self.dead:
            return
        core = self.producers[receiver]
        # A peer whose connection the producer tore down is linked again when it speaks.
        core.handle_link(sender, PeerFacts((self.block_tokens,), self.slice_tokens))
        self._note_permit(receiver, sender, message)
        core.handle_message(sender, message, self.clock(receiver))

    def _note_permit(self, producer: PeerName, consumer: PeerName, message: AnyMessage) -> None:
        """Promise 3.3.2: a grant reaches from the mark that it repeats, whenever it is read."""
        if isinstance(message, Register):
            names = [(message.transfer, message.consumer, message.attempt)]
        elif isinstance(message, Renew):
            names = list(message.transfers)
        else:
            return
        if message.mark is None:
            return
        assert message.mark in self.marks[producer], "repeated a mark that its reader has not made"
        until = message.mark + message.write_seconds
        for transfer, name, attempt in names:
            key = (producer, (consumer, transfer, name), attempt)
            self.permits[key] = max(self.permits.get(key, -math.inf), until)

    # --- slices --------------------------------------------------------------------------------------

    def complete(self, *numbers: int, producer: str = "p0") -> None:
        """End slices well: their bytes land, their notifications arrive. By default all in flight."""
        keys = [(PeerName(producer), number) for number in numbers]
        for key in keys or list(self.flights):
            self.end_slice(key)
        self.run()

    def complete_all(self) -> None:
        """Complete slices until nothing more is posted."""
        while self.flights:
            self.complete()

    def fail(
        self, number: int, producer: str = "p0", *, reason: str = "post refused", retry: bool = False
    ) -> None:
        """A slice ends in an error."""
        self.end_slice((PeerName(producer), number), reason, retry=retry)
        self.run()

    def end_slice(
        self, key: tuple[PeerName, int], failure: str | None = None, *, retry: bool = False
    ) -> None:
        """End a slice without carrying out what follows."""
        flight = self.flights.pop(key)
        core = self.consumers[flight.poster].reader if flight.piece.read else self.producers[flight.poster]
        if failure is None and not flight.doomed:
            self._land(flight)
            if flight.piece.notify is not None:
                self._send(flight.poster, Send(flight.piece.peer, flight.piece.notify))
            core.handle_slice_done(flight.piece.slice, self.clock(flight.poster))
            return
        reason, now = failure or "remote disconnect", self.clock(flight.poster)
        core.handle_slice_failed(flight.piece.slice, reason, now, retryable=retry and not flight.doomed)
        if isinstance(core, ProducerCore) and flight.doomed and flight.way in self.torn:
            core.handle_peer_lost(flight.piece.peer, reason, now)

    def _post(self, producer: PeerName, piece: PostSlice) -> None:
        flight = Flight(producer, piece, self.now)
        self._check_post(flight)
        self.posts.append(piece)
        if (producer, piece.peer) in self.torn:
            self.trace(f"{producer} cannot post {self.describe(piece)}")
            core, now = self.producers[producer], self.clock(producer)
            core.handle_slice_failed(piece.slice, "remote disconnect", now, retryable=False)
            core.handle_peer_lost(piece.peer, "remote disconnect", now)
            return
        self.trace(f"{producer} posts {self.describe(piece)}")
        self.flights[producer, piece.slice] = flight

    def _check_post(self, flight: Flight) -> None:
        piece = flight.piece
        name = (piece.peer, piece.transfer, piece.consumer)
        prefill, decode = self.prefills[piece.transfer], self.decodes[name]
        source, target = set(piece.source_blocks[0]), set(piece.target_blocks[0])
        assert prefill.running, "promise 1: posted from blocks that were taken away"
        assert piece.stop <= prefill.frontier, "promise 5: posted before it was computed"
        held = prefill.blocks[piece.start // self.block_tokens : -(-piece.stop // self.block_tokens)]
        assert list(piece.source_blocks[0]) == held, "promise 1: posted from other blocks than its own"
        assert isinstance(piece.notify, Landed | Written)
        attempt = piece.notify.attempt
        until = self.permits.get((flight.poster, name, attempt), -math.inf)
        assert self.clock(flight.poster) < until, "promise 3.3.2: posted without a permission in force"
        assert attempt == decode.attempt, "promise 2: posted for an earlier reception under the same ids"
        assert source, "a slice has blocks"
        owners = {self.pools[piece.peer].owner.get(block) for block in target}
        assert owners == {name}, "promise 2: posted into blocks that were given back"
        assert target <= set(decode.blocks)
        for other in self.flights.values():
            if other.way == flight.way and not other.doomed:
                assert not target & set(other.piece.target_blocks[0]), "promise 4: two writes to one place"

    def _post_read(self, consumer: PeerName, piece: PostSlice) -> None:
        flight = Flight(consumer, piece, self.now)
        self._check_read(flight)
        self.posts.append(piece)
        way = (piece.peer, consumer)
        if way in self.torn or way[::-1] in self.unlinked:
            self.trace(f"{consumer} cannot post {self.describe(piece)}")
            core = self.consumers[consumer].reader
            core.handle_slice_failed(piece.slice, "remote disconnect", self.now, retryable=False)
            return
        self.trace(f"{consumer} posts {self.describe(piece)}")
        self.flights[consumer, piece.slice] = flight

    def _check_read(self, flight: Flight) -> None:
        piece, decode = flight.piece, self.decodes[flight.name]
        target = set(piece.target_blocks[0])
        assert target, "a slice has blocks"
        assert self.loans.runs(flight.way[0], (*flight.name, decode.attempt), self.now), (
            "promise 1: read without a promise that the source is kept"
        )
        owners = {self.pools[flight.poster].owner.get(block) for block in target}
        assert owners == {flight.name}, "promise 2: read into blocks that were given back"
        first = piece.start // self.block_tokens - decode.start // self.block_tokens
        assert list(piece.target_blocks[0]) == decode.blocks[first : first + len(target)], (
            "promise 5: read into other blocks than those of its tokens"
        )
        for other in self.flights.values():
            if other.way == flight.way:
                assert not target & set(other.piece.target_blocks[0]), "promise 4: two READs into one place"

    def _check_farewell(self, consumer: PeerName, producer: PeerName, message: Fetched | Cancel) -> None:
        """A reader that says it is silent is, and `Fetched` means every byte."""
        name = (consumer, message.transfer, message.consumer)
        decode = self.decodes.get(name)
        if decode is None or decode.attempt != message.attempt:
            return
        for flight in self.flights.values():
            reads = flight.piece.read and flight.way[0] == producer and flight.name == name
            assert not reads, "promise 3: told to be silent with a READ in flight"
        if isinstance(message, Fetched) and decode.result is None:
            self._check_bytes(name, decode, decode.stop, (producer,))
        self.loans.returned(producer, (*name, message.attempt))

    def _land(self, flight: Flight) -> None:
        piece, size, owner = flight.piece, self.block_tokens, flight.name
        source, target = self.source_memory[flight.way[0]], self.target_memory[flight.way]
        for from_block, to_block in zip(piece.source_blocks[0], piece.target_blocks[0], strict=True):
            assert self.pools[flight.way[1]].owner.get(to_block) == owner, (
                "promise 2: landed on another's blocks"
            )
            for at in range(size):
                target.write(to_block, at, source.read(from_block, at))

    # --- time ------------------------------------------------------------------------------------------

    def advance(self, seconds: float) -> None:
        """Let time pass, stopping at everything that is due on the way."""
        self.advance_to(self.now + seconds)

    def advance_to(self, until: float) -> None:
        """Let time pass until a moment."""
        while (when := min(self.due(), default=math.inf)) <= until:
            self.now = max(self.now, when)
            self._expire()
            for name, core in self._cores():
                # Its deadline by its own clock and by ours may differ in the last digit.
                due = core.next_due()
                clock = self.clock(name)
                if due is not None and due - self._ahead(name) <= self.now:
                    clock = max(clock, due)
                core.handle_timeout(clock)
            self.run()
        self.now = until
        self.run()

    def due(self) -> Iterable[float]:
        """When anything is due, in no order."""
        for name, core in self._cores():
            if (due := core.next_due()) is not None:
                yield due - self._ahead(name)
        if self.bounded:
            yield from (flight.posted_at + self.retry_bound_seconds for flight in self.flights.values())

    def _expire(self) -> None:
        if not self.bounded:
            return
        for key, flight in list(self.flights.items()):
            if self.now >= flight.posted_at + self.retry_bound_seconds:
                self.end_slice(key, "timed out", retry=False)

    # --- what the cores ask for ----------------------------------------------------------------------

    def _drain_producer(self, name: PeerName) -> None:
        core = self.producers[name]
        busy = not self.dead
        while busy:
            busy = False
            while (output := core.poll_output()) is not None:
                busy = True
                if isinstance(output, Send):
                    self._send(name, output)
                elif isinstance(output, Disconnect):
                    self.trace(f"{name} disconnects {output.peer}: {output.reason}")
                    core.handle_peer_lost(output.peer, output.reason, self.clock(name))
                    for key, flight in list(self.flights.items()):
                        if (flight.poster, flight.piece.peer) == (name, output.peer):
                            self.end_slice(key, "disconnected")
            while (result := core.poll_result()) is not None:
                busy = True
                self._producer_result(name, result)
            while (piece := core.next_slice(self.clock(name))) is not None:
                busy = True
                self._post(name, piece)

    def _drain_consumer(self, name: PeerName) -> None:
        core = self.consumers[name]
        busy = True
        while busy:
            self._carry_out(name, core)
            while (result := core.poll_result()) is not None:
                self._consumer_result(name, result)
            piece = core.reader.next_slice(self.now)
            busy = piece is not None
            if piece is not None:
                self._post_read(name, piece)

    def _carry_out(self, name: PeerName, core: ConsumerCore) -> None:
        while (output := core.poll_output()) is not None:
            if isinstance(output, Send):
                self._send(name, output)
            elif isinstance(output, Resolve):
                self.trace(f"{name} looks for {output.source.engine}")
                self.resolves.append((name, output.source))
            elif isinstance(output, Inquire):
                self.trace(f"{name} asks whether {output.peer} lives")
                self.inquiries.append((name, output.peer))
                self.inquired.append((self.now, name, output.peer))
            elif isinstance(output, Disconnect):
                self.trace(f"{name} disconnects {output.peer}: {output.reason}")
                self._tear((output.peer, name))
                core.handle_disconnected(output.peer, output.reason, self.now)
                for key, flight in list(self.flights.items()):
                    if (flight.poster, flight.piece.peer) == (name, output.peer):
                        self.end_slice(key, "disconnected")

    def _producer_result(self, name: PeerName, result: Result) -> None:
        self.results.append((name, result))
        self.trace(f"{name} reports {self.describe(result)}")
        if isinstance(result, Released):
            self._release(name, result)
        elif isinstance(result, Drained):
            ticket = self.tickets[result.ticket]
            assert name in ticket.waiting, "a preemption is answered once"
            ticket.waiting.discard(name)
            if not ticket.waiting:
                self.drained.append(result.ticket)
                for transfer, blocks in ticket.blocks.items():
                    self._free_source(transfer, blocks)

    def _release(self, name: PeerName, result: Released) -> None:
        prefill = self.prefills[result.transfer]
        assert prefill.ended, "released before its host had finished with it"
        assert name not in prefill.outcomes, "promise 6: released once"
        prefill.outcomes[name] = result.outcome
        if len(prefill.outcomes) == len(self.producers):
            prefill.running = False
            blocks, prefill.blocks = prefill.blocks, []
            self._free_source(result.transfer, blocks)

    def _free_source(self, transfer: TransferId, blocks: list[int]) -> None:
        for flight in self.flights.values():
            if not flight.piece.read:
                assert not set(blocks) & set(flight.piece.source_blocks[0]), "promise 3: freed under a write"
        assert not self.loans.running(blocks, self.now), "promise 3: freed under a reader's promise"
        self.pool.give_back(blocks, transfer)
        for memory in self.source_memory.values():
            memory.spoil(blocks)

    def _consumer_result(self, name: PeerName, result: Result) -> None:
        self.results.append((name, result))
        self.trace(f"{name} reports {self.describe(result)}")
        assert isinstance(result, Received | ReceiveFailed | BlocksSafe)
        key = (name, result.transfer, result.consumer)
        decode = self.decodes[key]
        if isinstance(result, BlocksSafe):
            assert isinstance(decode.result, ReceiveFailed)
            assert not decode.result.fenced, "safe before it was in doubt"
            assert not decode.safe, "promise 6: safe once"
        else:
            assert decode.result is None, "promise 6: a reception ends once"
            decode.result = result
            good = decode.stop if isinstance(result, Received) else result.valid_until
            self._check_bytes(key, decode, good, self.producers)
        if not isinstance(result, ReceiveFailed) or result.fenced:
            decode.safe = True
            self._free_target(key, decode)

    def _check_bytes(
        self, key: ReceptionName, decode: Decode, good: int, producers: Iterable[PeerName]
    ) -> None:
        name, transfer, _ = key
        first = decode.start // self.block_tokens
        assert decode.start <= good <= decode.stop
        for producer in producers:
            memory = self.target_memory[producer, name]
            for position in range(decode.start, good):
                block = decode.blocks[position // self.block_tokens - first]
                token = memory.read(block, position % self.block_tokens)
                assert token == Token(transfer, position), "promise 5: what is called good is not"

    def _free_target(self, key: ReceptionName, decode: Decode) -> None:
        for flight in self.flights.values():
            if flight.way[1] == key[0] and (flight.piece.read or not flight.doomed):
                overlap = set(decode.blocks) & set(flight.piece.target_blocks[0])
                assert not overlap, "promise 2: freed under a write"
        self.pools[key[0]].give_back(decode.blocks, key)
        self._spoil(key[0], decode.blocks)

    def _spoil(self, consumer: PeerName, blocks: list[int]) -> None:
        for producer in self.producers:
            self.target_memory[producer, consumer].spoil(blocks)

    # --- looking in -------------------------------------------------------------------------------------

    def messages(self, sender: str, kind: type[AnyMessage]) -> list[AnyMessage]:
        """Every message of a kind that somebody has sent."""
        return [message for who, _, message in self.sent if who == sender and isinstance(message, kind)]

    def assert_clean(self) -> None:
        """Promise 7: everything has ended, every block is free, every table is empty."""
        assert not self.flights
        for pool in self.pools.values():
            assert pool.free_count == pool.count
        for producer in () if self.dead else self.producers.values():
            assert self.pool.free_count == self.pool.count
            assert not producer.state.rows
            assert not producer.state.slices
            assert not producer.state.tickets
            assert not producer.state.loans
        for consumer in self.consumers.values():
            assert not consumer.state.rows
            assert not consumer.state.peers
            assert not consumer.state.reads
            assert not consumer.state.turns
