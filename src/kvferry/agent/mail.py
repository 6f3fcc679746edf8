"""Messages out: encoded, in order per peer, tried again when the transport has no room for them now."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvferry.agent.stats import Stats
from kvferry.errors import PeerLostError, TransportError
from kvferry.ids import PeerName
from kvferry.protocol.codec import Encoder
from kvferry.protocol.messages import AnyMessage
from kvferry.transport.base import Transport

UNSENT_MAX = 4096
"""Payloads that wait for one peer; beyond it the peer counts as lost."""


@dataclass(slots=True)
class Mail:
    """Outgoing messages of one agent. Belongs to its thread."""

    transport: Transport
    encoder: Encoder
    stats: Stats
    _unsent: dict[PeerName, deque[bytes]] = field(default_factory=dict)

    @property
    def waiting(self) -> bool:
        """Whether something has to be tried again."""
        return bool(self._unsent)

    def send(self, peer: PeerName, message: AnyMessage) -> str | None:
        """Send or keep for later; returns why the peer is lost, if it is."""
        queue = self._unsent.setdefault(peer, deque())
        queue.extend(self.encoder.encode(message))
        self.stats.messages_sent += 1
        return self._flush(peer, queue)

    def retry(self) -> list[tuple[PeerName, str]]:
        """Try again what was refused; returns the peers that are lost."""
        outcomes = [(peer, self._flush(peer, queue)) for peer, queue in list(self._unsent.items())]
        return [(peer, reason) for peer, reason in outcomes if reason is not None]

    def forget(self, peer: PeerName) -> None:
        """Drop what waits for a peer."""
        self._unsent.pop(peer, None)

    def _flush(self, peer: PeerName, queue: deque[bytes]) -> str | None:
        try:
            while queue:
                self.transport.send(peer, queue[0])
                queue.popleft()
        except PeerLostError as error:
            self.forget(peer)
            return str(error)
        except TransportError as error:
            if not error.retryable:
                # Not connected (any more): whoever tore the link down has told the cores already.
                self.stats.messages_dropped += len(queue)
                self.forget(peer)
            elif len(queue) > UNSENT_MAX:
                self.forget(peer)
                return f"{len(queue)} messages could not be sent: {error}"
            return None
        self.forget(peer)
        return None
