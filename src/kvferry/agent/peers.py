"""Links coming up and going down, and what each change means for the two cores.

Belongs to the agent's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.agent.directory import Directory
from kvferry.agent.links import Links, describe
from kvferry.agent.mail import Mail
from kvferry.agent.parked import Parked
from kvferry.agent.stats import Stats
from kvferry.errors import KvferryError, PeerGoneError
from kvferry.ids import PeerName
from kvferry.layout.plan import CopyPlan
from kvferry.protocol.codec import Decoder
from kvferry.protocol.commands import Source
from kvferry.protocol.consumer import ConsumerCore
from kvferry.protocol.messages import AnyMessage, Hello, HelloRefused
from kvferry.protocol.producer import ProducerCore
from kvferry.protocol.reasons import PEER_LOST, because

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Peers:
    """Every change of a link of one agent."""

    links: Links
    mail: Mail
    decoder: Decoder
    producer: ProducerCore
    consumer: ConsumerCore
    stats: Stats
    clock: Callable[[], float]
    parked: Parked
    _leaving: set[PeerName] = field(default_factory=set)
    _rivals: dict[PeerName, float] = field(default_factory=dict)
    """Linked incarnations of one rank, while there are several, and when each last spoke."""

    def is_linked(self, peer: PeerName) -> bool:
        """Whether we can write to a peer."""
        return self.links.is_linked(peer)

    def plan_for(self, peer: PeerName, *, read: bool = False) -> CopyPlan:
        """How our blocks map to those of a linked peer; or its blocks to ours, to be read."""
        return self.links.reading_plan(peer) if read else self.links.plan_for(peer)

    def send(self, peer: PeerName, message: AnyMessage) -> None:
        """Send a message; a peer that turns out to be gone is dropped."""
        self.links.connections.used(peer, self.clock())
        reason = self.mail.send(peer, message)
        if reason is not None:
            self.lose([(peer, reason)])

    # --- coming up -------------------------------------------------------------------------------

    def ready(self, peer: PeerName, message: AnyMessage) -> bool:
        """Whether a consumer's message can be handled now; else it is kept for its sender's Hello.

        Raises:
            PeerError: too much is kept already.
        """
        if self.is_linked(peer):
            return True
        hello = self.links.remembered_hello(peer)
        if hello is not None:
            self.welcome(peer, hello)
            return self.is_linked(peer)
        self.parked.keep(peer, message, self.clock())
        return False

    def welcome(self, peer: PeerName, hello: Hello) -> list[AnyMessage]:
        """A consumer rank introduces itself; what it had said before, and can be handled now."""
        parked = self.parked.take(peer)
        has_room = peer in self.links.connections or self._make_room()
        try:
            facts = self.links.welcome(peer, hello, has_room=has_room)
        except KvferryError as error:
            self.stats.hellos_refused += 1
            logger.warning("%s refused: %s", peer, error)
            self.send(peer, HelloRefused(reason=describe(error)))
            return []
        self.producer.handle_link(peer, facts)
        # A retired one that says Hello again is the living one after all.
        self._leaving.discard(peer)
        now = self.clock()
        for other in self.links.other_incarnations(peer):
            # One of them is dead, and which one said Hello last does not tell: what a dead one has sent may
            # be read after its successor's. The dead one is the one that falls silent.
            self._rivals.setdefault(other, now)
            self._rivals[peer] = now
        return parked

    def heard(self, peer: PeerName, now: float) -> None:
        """A peer has said something; an incarnation of it that has not for long has been replaced by it."""
        if peer not in self._rivals:
            return
        self._rivals[peer] = now
        others = self.links.other_incarnations(peer)
        for other in others:
            if now - self._rivals.setdefault(other, now) >= self.links.limits.silence_seconds:
                self._retire(other, now)
        if not others:
            del self._rivals[peer]

    def open(self, source: Source, answer: Directory | Exception) -> None:
        """A producer's directory was read, or could not be."""
        now = self.clock()
        if isinstance(answer, Exception):
            self._unresolved(source, answer)
            return
        try:
            links = self.links.open(source, answer, self._make_room)
        except KvferryError as error:
            self._unresolved(source, error)
            return
        # Said at every opening, since an earlier one may have been lost; it does no harm twice.
        for link in links:
            self.send(link.peer, self.links.hello())
        self.consumer.handle_resolved(source, links, now)

    def _unresolved(self, source: Source, error: Exception) -> None:
        logger.warning("no link to %s at %s:%d: %s", source.engine, source.host, source.port, error)
        self.consumer.handle_unresolved(source, describe(error), self.clock())

    # --- going down ------------------------------------------------------------------------------

    def refused(self, peer: PeerName, refusal: HelloRefused) -> None:
        """A rank will not talk to us. What we said while that was under way may have been welcomed."""
        self.stats.hellos_refused += 1
        self.disconnect(peer, refusal.reason)

    def lose(self, lost: list[tuple[PeerName, str]]) -> None:
        """The transport says that our connections to these peers have broken; the peers may live."""
        for peer, text in lost:
            self.stats.peers_lost += 1
            reason = because(PEER_LOST, text)
            logger.warning("the connection to %s has broken: %s", peer, text)
            # It is torn down first, so that both cores may rely on it.
            self._tear_down(peer)
            self.producer.handle_peer_lost(peer, reason, self.clock())
            self.consumer.handle_link_broken(peer, reason, self.clock())

    def judge(self, peer: PeerName, source: Source, answer: Directory | Exception) -> None:
        """The engine of a peer with a broken connection was asked whether the peer is still a rank of it."""
        now = self.clock()
        if isinstance(answer, Directory):
            self._judge_by(peer, source, answer, now)
        elif isinstance(answer, PeerGoneError):
            logger.warning("%s is dead: %s", peer, answer)
            self.consumer.handle_peer_dead(peer, because(PEER_LOST, answer), now)
        else:
            logger.warning("it is not known whether %s lives: %s", peer, answer)
            self.consumer.handle_no_evidence(peer)

    def _judge_by(self, peer: PeerName, source: Source, directory: Directory, now: float) -> None:
        if all(entry.peer != peer for entry in directory.ranks):
            logger.warning("%s is dead: its engine is another incarnation now", peer)
            self.consumer.handle_peer_dead(peer, because(PEER_LOST, "its engine has started anew"), now)
            return
        try:
            self.links.open(source, directory, self._make_room)
        except KvferryError as error:
            logger.warning("%s lives, and cannot be linked again: %s", peer, error)
            self.consumer.handle_no_evidence(peer)
            return
        broken = self.mail.send(peer, self.links.hello())
        if broken is not None:
            # It lives, and we have no link to ask it for its fences: find out again.
            self.lose([(peer, broken)])
            self.consumer.handle_no_evidence(peer)
            return
        self.consumer.handle_peer_alive(peer, now)

    def disconnect(self, peer: PeerName, reason: str) -> None:
        """Tear a connection down whose peer may live: only what it can no longer do counts as over."""
        logger.warning("disconnecting %s: %s", peer, reason)
        self._tear_down(peer)
        self.producer.handle_peer_lost(peer, reason, self.clock())
        self.consumer.handle_disconnected(peer, reason, self.clock())

    def _tear_down(self, peer: PeerName) -> None:
        self._let_go(peer)
        self.decoder.forget(peer)

    def _let_go(self, peer: PeerName) -> None:
        self.links.disconnect(peer)
        self._rivals.pop(peer, None)
        self.mail.forget(peer)

    def rest(self) -> None:
        """Give up links that were idle for long, and what strangers have said too long ago."""
        now = self.clock()
        self.parked.expire(now)
        # Consumers forget a link first: who speaks first on a new one is the consumer, with its Hello.
        idle = list(self.links.connections.idle(now, self.links.is_linked))
        if idle:
            needed = _needed(self.producer, self.consumer)
            for peer in idle:
                if peer not in needed:
                    self._give_up(peer, "it was idle")

    def _make_room(self) -> bool:
        """See to it that one more peer may be connected to; False when all that are linked are needed."""
        connections = self.links.connections
        while len(connections) >= self.links.limits.links_max:
            peer = connections.longest_idle(_needed(self.producer, self.consumer))
            if peer is None:
                return False
            self._give_up(peer, "others need its place")
        return True

    def _give_up(self, peer: PeerName, reason: str) -> None:
        logger.info("the link to %s is given up: %s", peer, reason)
        # What has come of a message is kept: it may be the peer's next Hello.
        self._let_go(peer)
        self.producer.handle_peer_lost(peer, reason, self.clock())
        self.consumer.handle_disconnected(peer, reason, self.clock())

    def _retire(self, peer: PeerName, now: float) -> None:
        """Another incarnation of it speaks, and this one does not any more: nothing is owed to it."""
        reason = "silent while another incarnation of it speaks"
        logger.warning("%s is forgotten: %s", peer, reason)
        self.producer.handle_peer_lost(peer, because(PEER_LOST, reason), now)
        self.consumer.handle_disconnected(peer, reason, now)
        self.links.retire(peer)
        self._rivals.pop(peer, None)
        self._leaving.add(peer)

    def leave(self, busy: Callable[[], set[PeerName]]) -> None:
        """Forget retired peers that nothing is in flight to any more."""
        if not self._leaving:
            return
        for peer in self._leaving - busy():
            self._leaving.discard(peer)
            self.links.forget(peer)
            self.mail.forget(peer)


def _needed(producer: ProducerCore, consumer: ConsumerCore) -> set[PeerName]:
    """Peers that a transfer has to do with."""
    return producer.peers() | consumer.peers()
