"""Messages out: order, patience with a busy transport, and bounds."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.agent import mail as mail_module
from kvferry.agent.mail import Mail
from kvferry.agent.stats import Stats
from kvferry.errors import PeerLostError, TransportError
from kvferry.ids import ConsumerId, PeerName, TransferId
from kvferry.protocol.codec import Decoder, Encoder
from kvferry.protocol.messages import Announce, AnyMessage

P, D = PeerName("p"), PeerName("d")
BUSY = TransportError("busy", retryable=True)


@dataclass
class Network:
    """Takes payloads, or raises what the test has planned for the next calls."""

    errors: list[TransportError | None] = field(default_factory=list)
    always: TransportError | None = None
    taken: list[tuple[PeerName, bytes]] = field(default_factory=list)

    def send(self, peer: PeerName, payload: bytes) -> None:
        error = self.errors.pop(0) if self.errors else self.always
        if error is not None:
            raise error
        self.taken.append((peer, payload))

    def consumers(self, peer: PeerName = P) -> list[str]:
        """Who the messages that a peer got are about, in order."""
        decoder = Decoder(1 << 20)
        messages = (decoder.decode(to, payload) for to, payload in self.taken if to == peer)
        return [message.consumer for message in messages if isinstance(message, Announce)]


def message(consumer: str) -> AnyMessage:
    return Announce(transfer=TransferId("transfer-one"), consumer=ConsumerId(consumer))


def mail_over(network: Network, payload_bytes: int = 4096) -> tuple[Mail, Stats]:
    stats = Stats()
    return Mail(network, Encoder(payload_bytes), stats), stats  # type: ignore[arg-type]


def test_a_busy_transport_loses_nothing_and_keeps_the_order() -> None:
    """A22: a message leaves the queue only after it was accepted."""
    network = Network(always=BUSY)
    mail, stats = mail_over(network)
    for name in "abc":
        assert mail.send(P, message(name)) is None
    assert mail.waiting
    assert network.taken == []
    network.always = None
    network.errors = [None, BUSY]
    assert mail.retry() == []
    assert network.consumers() == ["a"]
    assert mail.retry() == []
    assert network.consumers() == ["a", "b", "c"]
    assert not mail.waiting
    assert (stats.messages_sent, stats.messages_dropped) == (3, 0)


def test_what_waits_goes_before_what_is_new() -> None:
    network = Network(errors=[BUSY])
    mail, _ = mail_over(network)
    mail.send(P, message("first"))
    mail.send(P, message("second"))
    assert network.consumers() == ["first", "second"]


def test_a_message_in_parts_is_taken_up_where_it_was_refused() -> None:
    """A16, A22: no part is sent twice or left out."""
    network = Network(errors=[None, None, BUSY])
    mail, _ = mail_over(network, payload_bytes=32)
    mail.send(P, message("x" * 100))
    assert len(network.taken) == 2
    mail.retry()
    assert network.consumers() == ["x" * 100]
    assert len(set(network.taken)) == len(network.taken)


def test_a_busy_peer_holds_no_other_up() -> None:
    network = Network(errors=[BUSY])
    mail, _ = mail_over(network)
    mail.send(P, message("waits"))
    mail.send(D, message("goes"))
    assert network.consumers(D) == ["goes"]
    assert network.consumers(P) == []


def test_a_peer_that_is_gone_is_told_of_once_and_nothing_waits_for_it() -> None:
    network = Network(always=BUSY)
    mail, _ = mail_over(network)
    mail.send(P, message("a"))
    mail.send(D, message("b"))
    network.errors = [PeerLostError("p is gone"), None]
    assert mail.retry() == [(P, "p is gone")]
    assert not mail.waiting
    assert network.consumers(D) == ["b"]


def test_without_a_connection_messages_are_dropped_and_counted() -> None:
    """A07: whoever tore it down has told the cores; that something was lost shows in the metrics."""
    network = Network(always=TransportError("not connected"))
    mail, stats = mail_over(network)
    assert mail.send(P, message("a")) is None
    assert not mail.waiting
    assert stats.messages_dropped == 1


def test_a_peer_that_takes_nothing_counts_as_lost_beyond_the_bound(monkeypatch) -> None:
    """Everything has a limit: the queue of a peer that never takes anything ends."""
    monkeypatch.setattr(mail_module, "UNSENT_MAX", 3)
    network = Network(always=BUSY)
    mail, _ = mail_over(network)
    assert [mail.send(P, message(name)) for name in "abc"] == [None] * 3
    reason = mail.send(P, message("d"))
    assert reason is not None
    assert reason.startswith("4 messages could not be sent")
    assert not mail.waiting


def test_forgetting_drops_what_waits() -> None:
    network = Network(errors=[BUSY])
    mail, _ = mail_over(network)
    mail.send(P, message("a"))
    mail.forget(P)
    mail.forget(D)
    assert mail.retry() == []
    assert network.taken == []
