"""The agent's one thread of work: feeds the cores, runs the transport, keeps the timers.

`step()` does everything that is due and says how long it may be left alone; it never waits, so a simulator
calls it on virtual time. Order matters in it: what has arrived is read before deadlines are judged, and
permissions are checked against a fresh clock before each post.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvferry.agent.directory import Directory
from kvferry.agent.idle import Connections
from kvferry.agent.links import Identity, Links, Resolver
from kvferry.agent.mail import Mail
from kvferry.agent.mailbox import Gated, Mailbox
from kvferry.agent.parked import Parked
from kvferry.agent.peers import Peers
from kvferry.agent.posting import Posts
from kvferry.agent.stats import Stats
from kvferry.errors import PeerError, TransportError
from kvferry.ids import PeerName
from kvferry.layout.spec import CacheSpec
from kvferry.protocol.codec import Decoder, Encoder
from kvferry.protocol.commands import Command, Received, Result, Source
from kvferry.protocol.consumer import CONSUMER_COMMANDS, CONSUMER_MESSAGES, ConsumerCore
from kvferry.protocol.limits import Limits
from kvferry.protocol.messages import AnyMessage, Complaint, Hello, HelloRefused
from kvferry.protocol.outputs import Disconnect, Inquire, Output, PostSlice, Resolve, Send
from kvferry.protocol.producer import PRODUCER_MESSAGES, ProducerCore
from kvferry.transport.base import Transport

logger = logging.getLogger(__name__)

LOOK_SHARE = 0.05
"""What is waited for is looked at again after this share of the time it has taken so far: it is seen late
by no more, and what takes long is not looked at ten thousand times a second. Each look takes the
interpreter's lock, which the engine's thread needs, too."""
FLIGHT_SECONDS = 0.0001, 0.001
"""Shortest and longest pause while something is in flight: its end is what the other side waits for."""
EXPECT_SECONDS = 0.0002, 0.001
"""The same while a transfer is under way and a peer may have its next event, from when a peer was heard."""
EVENT_SECONDS = 0.0005
"""Pause while a device computes what is to be sent."""
RECENT_SECONDS = 0.005
"""Pause while peers have spoken within the last second."""
IDLE_SECONDS = 0.02
"""Pause otherwise; what it delays is the first message after a silence, never the end of a prefill."""
POSTING_SECONDS = 0.01
"""After so long in posts the loop turns to messages and commands before it posts on: where the poster's own
processor moves the bytes, there is no end of posts while there is something to write."""
STALL_SECONDS = 1.0
"""A step that comes later than this is worth a warning: something holds the processor or Python's lock."""
GAUGE_SECONDS = 0.25
"""How often the states of transfers are counted for the metrics."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a directory answered; comes through the mailbox."""

    source: Source
    answer: Directory | Exception


@dataclass(frozen=True, slots=True)
class Inquired:
    """What the engine of a peer answered whose connection had broken; comes through the mailbox."""

    peer: PeerName
    source: Source
    answer: Directory | Exception


class Close:
    """Through the mailbox: withdraw and fail everything, then drain."""


Incoming = Command | Gated | Resolved | Inquired | Close


class Loop:
    """Everything that the agent's thread owns. Made and used on that thread."""

    def __init__(
        self,
        identity: Identity,
        cache: CacheSpec,
        transport: Transport,
        limits: Limits,
        resolver: Resolver,
        inbox: Mailbox[Incoming],
        outbox: Callable[[Result], None],
        stats: Stats,
        clock: Callable[[], float],
        before_post: Callable[[], None] | None = None,
    ) -> None:
        """`before_post` is called before each post, and raises when nothing may be posted any more."""
        encoder = Encoder(transport.notification_bytes_max)
        self.producer = ProducerCore(limits, cache.block_tokens, cache.whole_tokens)
        self.consumer = ConsumerCore(
            limits, transport.retry_bound_seconds, cache.block_tokens, cache.windows, cache.whole_tokens
        )
        self.stats = stats
        self._mail = Mail(transport, encoder, stats)
        self._decoder = Decoder(limits.message_bytes_max)
        self._peers = Peers(
            Links(identity, cache, limits, transport, Connections(limits.idle_seconds, clock)),
            self._mail,
            self._decoder,
            self.producer,
            self.consumer,
            stats,
            clock,
            Parked(limits, lambda message: sum(map(len, encoder.encode(message)))),
        )
        encode = partial(_single, encoder)
        self._writes = Posts(transport, self.producer, stats, encode)
        self._reads = Posts(transport, self.consumer.reader, stats, encode)
        self._transport, self._resolver, self._clock = transport, resolver, clock
        self._inbox, self._outbox = inbox, outbox
        self._before_post = before_post
        self._gated: deque[Gated] = deque()
        self._closing = False
        self._heard_at = clock()
        self._gauged_at = 0.0
        self._due_at = clock()
        self._posts_on = False
        """Whether there may be more to post than the last step has posted."""
        self._read_last = False
        """Whether it was the READs' turn last."""

    @property
    def quiet(self) -> bool:
        """Whether nothing is in flight either way, nobody reads from us, and nothing waits to be sent."""
        return not (self._writes or self._reads or self.producer.lent() or self._mail.waiting or self._gated)

    @property
    def closing(self) -> bool:
        """Whether `Close` has been taken."""
        return self._closing

    def step(self) -> float:
        """Do everything that is due; returns how many seconds may pass unless something arrives."""
        self.stats.steps += 1
        self._notice_stall()
        self._take_commands()
        # What commands say leaves before messages are read: a registration that follows the message which
        # ended it would be taken for a new one.
        self._carry_out()
        self._receive()
        self._peers.lose(self._writes.poll(self._clock))
        self._peers.lose(self._reads.poll(self._clock))
        self._peers.lose(self._mail.retry())
        now = self._clock()
        self.producer.handle_timeout(now)
        self.consumer.handle_timeout(now)
        self._carry_out()
        self._post()
        self._carry_out()
        self._peers.leave(lambda: self._writes.peers() | self._reads.peers())
        self._peers.rest()
        self.report()
        pause = self._pause()
        self._due_at = self._clock() + pause
        return pause

    def _notice_stall(self) -> None:
        late_seconds = self._clock() - self._due_at
        if late_seconds >= STALL_SECONDS:
            # Peers may have taken us for silent meanwhile; whoever looks for the reason finds it here.
            self.stats.stalls += 1
            logger.warning("the transfer thread was kept from running for %.1f s", late_seconds)

    # --- in --------------------------------------------------------------------------------------

    def _take_commands(self) -> None:
        for item in self._inbox.drain():
            if isinstance(item, Resolved):
                self._peers.open(item.source, item.answer)
            elif isinstance(item, Inquired):
                self._peers.judge(item.peer, item.source, item.answer)
            elif isinstance(item, Close):
                self._closing = True
                self.producer.handle_close(self._clock())
                self.consumer.handle_close(self._clock())
            elif isinstance(item, Gated):
                self._gated.append(item)
            elif type(item) in CONSUMER_COMMANDS:
                self.consumer.handle_command(item, self._clock())
            elif self._gated:
                # Order within the producer side stays: it must not see a finish before the frontier.
                self._gated.append(Gated(item, _now))
            else:
                self.producer.handle_command(item, self._clock())
        while self._gated and self._gated[0].ready():
            self.producer.handle_command(self._gated.popleft().command, self._clock())

    def _receive(self) -> None:
        for notification in self._transport.receive():
            self.stats.messages_received += 1
            self._heard_at = self._clock()
            # A part of a message is a sign of life, too.
            self._peers.links.connections.used(notification.peer, self._heard_at)
            try:
                message = self._decoder.decode(notification.peer, notification.payload)
            except PeerError as error:
                self._complain(notification.peer, str(error))
                continue
            if message is not None:
                self._handle_or_complain(notification.peer, message)

    def _handle_or_complain(self, peer: PeerName, message: AnyMessage) -> None:
        try:
            self._handle(peer, message)
        except PeerError as error:
            self._complain(peer, str(error))

    def _handle(self, peer: PeerName, message: AnyMessage) -> None:
        now = self._clock()
        self.consumer.handle_heard(peer, now)
        self._peers.heard(peer, now)
        if isinstance(message, Hello):
            for earlier in self._peers.welcome(peer, message):
                self._handle_or_complain(peer, earlier)
        elif isinstance(message, HelloRefused):
            self._peers.refused(peer, message)
        elif isinstance(message, Complaint):
            self.stats.peer_errors += 1
            logger.warning("%s could not use our message: %s", peer, message.reason)
        elif type(message) in CONSUMER_MESSAGES:
            self.consumer.handle_message(peer, message, now)
        elif type(message) in PRODUCER_MESSAGES:
            self._handle_as_producer(peer, message, now)

    def _handle_as_producer(self, peer: PeerName, message: AnyMessage, now: float) -> None:
        if self._peers.ready(peer, message):
            self.producer.handle_message(peer, message, now)

    def _complain(self, peer: PeerName, reason: str) -> None:
        self.stats.peer_errors += 1
        logger.warning("message of %s ignored: %s", peer, reason)
        if self._peers.is_linked(peer):
            self._peers.send(peer, Complaint(reason=reason[:300]))

    # --- out -------------------------------------------------------------------------------------

    def _carry_out(self) -> None:
        for core in (self.producer, self.consumer):
            while (output := core.poll_output()) is not None:
                self._do(output)

    def _do(self, output: Output) -> None:
        if isinstance(output, Send):
            self._peers.send(output.peer, output.message)
        elif isinstance(output, Disconnect):
            self._peers.disconnect(output.peer, output.reason)
        elif isinstance(output, Resolve):
            source = output.source
            self._look_up(source, lambda answer: Resolved(source, answer), patient=True)
        elif isinstance(output, Inquire):
            peer, of = output.peer, output.source
            self._look_up(of, lambda answer: Inquired(peer, of, answer), patient=False)

    def _look_up(
        self, source: Source, item: Callable[[Directory | Exception], Incoming], *, patient: bool
    ) -> None:
        self._resolver.resolve(
            source.host,
            source.port,
            source.engine,
            lambda answer: self._inbox.put(item(answer)),
            patient=patient,
        )

    def _post(self) -> None:
        until = self._clock() + POSTING_SECONDS
        self._posts_on = False
        while not self._closing and (piece := self._next_slice()) is not None:
            self._post_one(piece)
            if self._clock() >= until:
                self._posts_on = True
                return

    def _next_slice(self) -> PostSlice | None:
        """The next WRITE or READ. They take turns, or an engine of both roles would read only when idle."""
        for _ in range(2):
            self._read_last = not self._read_last
            source = self.consumer.reader if self._read_last else self.producer
            piece = source.next_slice(self._clock())
            if piece is not None:
                return piece
        return None

    def _post_one(self, piece: PostSlice) -> None:
        if self._before_post is not None:
            self._before_post()
        posts = self._reads if piece.read else self._writes
        lost = posts.post(piece, self._peers.plan_for(piece.peer, read=piece.read), self._clock)
        if lost is not None:
            self._peers.lose([(piece.peer, str(lost))])

    def report(self) -> None:
        """Hand over what the cores have to tell the engine."""
        for core in (self.producer, self.consumer):
            while (result := core.poll_result()) is not None:
                if isinstance(result, Received):
                    self.stats.bytes_received += result.bytes
                self._outbox(result)
        if self._clock() < self._gauged_at + GAUGE_SECONDS:
            return
        self._gauged_at = self._clock()
        gauges = {f"producer_{name}": count for name, count in self.producer.states().items()}
        gauges |= {f"consumer_{name}": count for name, count in self.consumer.states().items()}
        self.stats.gauges = gauges

    def _pause(self) -> float:
        now = self._clock()
        if self._posts_on:
            return 0.0
        if self._writes or self._reads:
            since = min(posts.since for posts in (self._writes, self._reads) if posts)
            pause = _looking(now - since, FLIGHT_SECONDS)
        elif self._mail.waiting or self.producer.expecting or self.consumer.expecting:
            pause = _looking(now - self._heard_at, EXPECT_SECONDS)
        else:
            pause = RECENT_SECONDS if now - self._heard_at < 1.0 else IDLE_SECONDS
        if self._gated:
            pause = min(pause, EVENT_SECONDS)
        for due in (self.producer.next_due(), self.consumer.next_due()):
            if due is not None:
                pause = min(pause, max(due - now, 0.0))
        return pause


def _now() -> bool:
    return True


def _looking(taken_seconds: float, bounds: tuple[float, float]) -> float:
    """When to look again at something that has taken so long."""
    shortest, longest = bounds
    return min(max(LOOK_SHARE * taken_seconds, shortest), longest)


def _single(encoder: Encoder, message: object) -> bytes:
    """The notification of a write: always one payload, since it names one transfer."""
    payloads = encoder.encode(message)  # type: ignore[arg-type]
    if len(payloads) > 1:
        raise TransportError("the notification of a write is longer than one payload; its ids are too long")
    return payloads[0]
