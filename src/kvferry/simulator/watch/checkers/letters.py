"""What ranks say to each other, decoded once for all checkers."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.ids import ConsumerId, PeerName, TransferId
from kvferry.protocol.codec import is_part
from kvferry.protocol.messages import AnyMessage, Complaint, Hello, HelloRefused, Renew, Status
from kvferry.simulator.ground.events import MessageEnded, MessageSent
from kvferry.simulator.watch.checkers.base import Checker, Handlers
from kvferry.simulator.watch.trace import MessageReader

Named = tuple[TransferId, ConsumerId, int]
"""Transfer, consumer and attempt that a message speaks of."""


class Letters(Checker):
    """The post office: it sees each event before the checkers that read messages, and judges nothing."""

    def __init__(self) -> None:
        self.message: AnyMessage | None = None
        """The message of the event just seen; None when it is not readable, not whole yet, or was lost."""
        self._reader, self._arrivals = MessageReader(), MessageReader()
        self._sent: dict[tuple[PeerName, int], AnyMessage] = {}
        self._parts: dict[tuple[PeerName, int], bytes] = {}
        """A message in parts has arrived with the last of them, which need not be the last one sent."""
        super().__init__()

    def handlers(self) -> Handlers:
        """What is called for which kind of event."""
        return {MessageSent: self._on_its_way, MessageEnded: self._ended}

    def _on_its_way(self, event: MessageSent) -> None:
        self.message = self._reader.read(event.rank, event.target, event.payload)
        if is_part(event.payload):
            self._parts[event.rank, event.number] = event.payload
        elif self.message is not None:
            self._sent[event.rank, event.number] = self.message

    def _ended(self, event: MessageEnded) -> None:
        # Kept, since another copy may arrive.
        key = event.rank, event.number
        if not event.arrived:
            self.message = None
        elif key in self._parts:
            self.message = self._arrivals.read(event.rank, event.target, self._parts[key])
        else:
            self.message = self._sent.get(key)


def named(message: AnyMessage) -> Iterator[Named]:
    """What a message speaks of; nothing for greetings and complaints."""
    if isinstance(message, Renew):
        yield from message.transfers
    elif isinstance(message, Status):
        for entry in message.transfers:
            yield entry.transfer, entry.consumer, entry.attempt
    elif not isinstance(message, Hello | HelloRefused | Complaint):
        yield message.transfer, message.consumer, message.attempt
