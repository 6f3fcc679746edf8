"""Links coming up and going down, and what each change means for the two cores.

Belongs to the agent's thread.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.agent.directory import Directory
from kvferry.agent.links import Links, describe
from kvferry.agent.mail import Mail
from kvferry.agent.stats import Stats
from kvferry.errors import KvferryError, PeerError
from kvferry.ids import PeerName
from kvferry.layout.plan import CopyPlan
from kvferry.protocol.codec import Decoder
from kvferry.protocol.commands import Source
from kvferry.protocol.consumer import ConsumerCore
from kvferry.protocol.messages import AnyMessage, Hello, HelloRefused
from kvferry.protocol.producer import ProducerCore
from kvferry.protocol.reasons import PEER_LOST, because

logger = logging.getLogger(__name__)

PARKED_PEERS_MAX = 64
"""Peers whose messages are kept while their Hello is missing; beyond it the oldest are dropped."""
REPLACED_MAX = 4096
"""Incarnations that are remembered as replaced, so that their late Hellos do not replace their successors."""
PARKED_MESSAGES_MAX = 256
"""Messages kept per such peer; more are a `PeerError`."""


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
    _parked: OrderedDict[PeerName, list[AnyMessage]] = field(default_factory=OrderedDict)
    _leaving: set[PeerName] = field(default_factory=set)
    _replaced: OrderedDict[PeerName, None] = field(default_factory=OrderedDict)

    def is_linked(self, peer: PeerName) -> bool:
        """Whether we can write to a peer."""
        return self.links.is_linked(peer)

    def plan_for(self, peer: PeerName) -> CopyPlan:
        """How our blocks map to those of a linked peer."""
        return self.links.plan_for(peer)

    def send(self, peer: PeerName, message: AnyMessage) -> None:
        """Send a message; a peer that turns out to be gone is dropped."""
        reason = self.mail.send(peer, message)
        if reason is not None:
            self.lose([(peer, reason)])

    # --- coming up -------------------------------------------------------------------------------

    def ready(self, peer: PeerName, message: AnyMessage) -> bool:
        """Whether a consumer's message can be handled now; else it is kept for its sender's Hello.

        Raises:
            PeerError: too many are kept already.
        """
        if self.is_linked(peer):
            return True
        hello = self.links.remembered_hello(peer)
        if hello is not None:
            self.welcome(peer, hello)
            return self.is_linked(peer)
        parked = self._parked.setdefault(peer, [])
        if len(parked) >= PARKED_MESSAGES_MAX:
            raise PeerError(f"{type(message).__name__} before Hello")
        parked.append(message)
        while len(self._parked) > PARKED_PEERS_MAX:
            self._parked.popitem(last=False)
        return False

    def welcome(self, peer: PeerName, hello: Hello) -> None:
        """A consumer rank introduces itself."""
        parked = self._parked.pop(peer, [])
        if peer in self._replaced:
            self.stats.hellos_refused += 1
            self._refuse(peer, "handshake: replaced by a newer incarnation of this engine id")
            return
        try:
            facts = self.links.welcome(peer, hello)
        except KvferryError as error:
            self.stats.hellos_refused += 1
            logger.warning("%s refused: %s", peer, error)
            self._refuse(peer, describe(error))
            return
        self.producer.handle_link(peer, facts)
        for older in self.links.older_incarnations(peer):
            self._replace(older)
        for message in parked:
            self.producer.handle_message(peer, message, self.clock())

    def _refuse(self, peer: PeerName, reason: str) -> None:
        silent = not self.is_linked(peer) and not self.producer.writes_to(peer)
        self.send(peer, HelloRefused(reason=reason, silent=silent))

    def open(self, source: Source, answer: Directory | Exception) -> None:
        """A producer's directory was read, or could not be."""
        now = self.clock()
        if isinstance(answer, Exception):
            self._unresolved(source, answer)
            return
        try:
            links = self.links.open(source, answer)
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
        """A producer rank will not write to us; only a silent one is as good as gone."""
        self.stats.hellos_refused += 1
        if refusal.silent:
            self._drop(peer, refusal.reason)
        else:
            self.disconnect(peer, refusal.reason)

    def lose(self, lost: list[tuple[PeerName, str]]) -> None:
        """The transport says that these peers are gone."""
        for peer, reason in lost:
            self.stats.peers_lost += 1
            self._drop(peer, because(PEER_LOST, reason))

    def _drop(self, peer: PeerName, reason: str) -> None:
        # The connection is torn down first, so that both cores may rely on it.
        logger.warning("%s is lost: %s", peer, reason)
        self._tear_down(peer)
        self.producer.handle_peer_lost(peer, reason, self.clock())
        self.consumer.handle_peer_lost(peer, reason, self.clock())

    def disconnect(self, peer: PeerName, reason: str) -> None:
        """Tear a connection down whose peer may live: only what it can no longer do counts as over."""
        logger.warning("disconnecting %s: %s", peer, reason)
        self._tear_down(peer)
        self.producer.handle_peer_lost(peer, reason, self.clock())
        self.consumer.handle_disconnected(peer, reason, self.clock())

    def _tear_down(self, peer: PeerName) -> None:
        self.links.disconnect(peer)
        self.mail.forget(peer)
        self.decoder.forget(peer)

    def _replace(self, older: PeerName) -> None:
        """A restarted engine has said Hello: nothing is owed to what it was before."""
        reason = "replaced by a newer incarnation"
        self.producer.handle_peer_lost(older, reason, self.clock())
        self.consumer.handle_disconnected(older, reason, self.clock())
        self._leaving.add(older)
        self._replaced[older] = None
        while len(self._replaced) > REPLACED_MAX:
            self._replaced.popitem(last=False)

    def leave(self, busy: Callable[[], set[PeerName]]) -> None:
        """Forget replaced peers that nothing is in flight to any more."""
        if not self._leaving:
            return
        for peer in self._leaving - busy():
            self._leaving.discard(peer)
            self.links.forget(peer)
            self.mail.forget(peer)
