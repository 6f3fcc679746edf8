"""Made-up simulated histories: for tests of what shows them, not of what makes them."""

from __future__ import annotations

from kvferry.ids import ConsumerId, EngineId, PeerName, TransferId
from kvferry.protocol import commands as cmd
from kvferry.protocol import messages as msg
from kvferry.protocol.codec import Encoder
from kvferry.simulator.ground import events as ev
from kvferry.transport.base import PostState

P, D = EngineId("P0"), EngineId("D0")
P_RANK, D_RANK = PeerName("kvferry/P0/p-one/pp0/tp0"), PeerName("kvferry/D0/d-one/pp0/tp0")
OURS, OTHER = TransferId("transfer-1"), TransferId("transfer-2")
CONSUMER = ConsumerId("decode-1")
_encoder = Encoder(1 << 16)


class History:
    """Builds a list of events, each a little later than the last."""

    def __init__(self, start_seconds: float = 2.0) -> None:
        self.at = start_seconds
        self.events: list[ev.Observed] = []
        self.messages = 0

    def later(self, milliseconds: float) -> History:
        """Let time go by."""
        self.at += milliseconds / 1e3
        return self

    def add(self, event: ev.Observed) -> None:
        """Add an event, at the time that it says."""
        self.events.append(event)

    def command(self, rank: PeerName, command: cmd.Command) -> None:
        self.add(ev.Commanded(self.at, rank, command))

    def report(self, rank: PeerName, result: cmd.Result) -> None:
        self.add(ev.Reported(self.at, rank, result))

    def send(self, rank: PeerName, target: PeerName, message: msg.AnyMessage) -> int:
        self.messages += 1
        for payload in _encoder.encode(message):
            self.add(ev.MessageSent(self.at, rank, target, self.messages, payload))
        return self.messages

    def arrive(self, rank: PeerName, target: PeerName, number: int, *, arrived: bool = True) -> None:
        self.add(ev.MessageEnded(self.at, rank, target, number, arrived))


def one_transfer(*, fails: bool = False) -> list[ev.Observed]:
    """A transfer of 12 tokens in two slices; with `fails` the second one breaks and D is told."""
    history = History()
    history.add(ev.EngineStarted(0.0, P, (P_RANK,), 24))
    history.add(ev.EngineStarted(0.0, D, (D_RANK,), 24))
    history.add(ev.LegSent(history.at, P, "prefill-1", OURS, None))
    history.later(2).add(ev.LegSent(history.at, D, "decode-1", OURS, CONSUMER))
    history.later(1).command(P_RANK, cmd.Expect(OURS, 12))
    status = msg.Status(transfers=(msg.TransferStatus(OURS, CONSUMER, "queued", 0),), mark=77.0)
    number = history.send(P_RANK, D_RANK, status)
    history.later(2).arrive(P_RANK, D_RANK, number)
    source = cmd.Source(P, "127.0.0.1", 1)
    receive = cmd.Receive(OURS, CONSUMER, source, 0, 12, (((5, 3),),))
    history.later(3).command(D_RANK, receive)
    register = msg.Register(
        transfer=OURS, consumer=CONSUMER, start=0, stop=12, groups=(((5, 3),),), write_seconds=10.0, mark=77.0
    )
    number = history.later(0.3).send(D_RANK, P_RANK, register)
    history.later(2).arrive(D_RANK, P_RANK, number)
    history.add(ev.FaultInjected(history.at, "message lost", "a message of another transfer", (OTHER,)))
    history.later(12).command(P_RANK, cmd.Advance(OURS, 8, 0, (((1, 2),),)))
    history.later(0.5).add(ev.Posted(history.at, P_RANK, D_RANK, 1, (1, 2), (5, 6)))
    history.later(4).add(ev.Landed(history.at, P_RANK, D_RANK, 1))
    history.later(3).add(ev.Landed(history.at, P_RANK, D_RANK, 1))
    history.later(1).add(ev.PostEnded(history.at, P_RANK, D_RANK, 1, PostState.DONE))
    history.later(9).command(P_RANK, cmd.Advance(OURS, 12, 2, (((3, 1),),)))
    history.command(P_RANK, cmd.Finish(OURS))
    history.later(0.5).add(ev.Posted(history.at, P_RANK, D_RANK, 2, (3,), (7,)))
    (_fail if fails else _succeed)(history)
    return history.events


RENEWALS = 40
"""Of a transfer that hangs."""


def hanging(*, renewals: int = RENEWALS, deadline_seconds: float = 1e9) -> list[ev.Observed]:
    """A transfer whose last slice never comes, though it is renewed every half second."""
    history = History()
    history.events = [event for event in one_transfer() if event.at_seconds < 2.05]
    history.at = history.events[-1].at_seconds
    history.add(ev.Healed(history.at, deadline_seconds))
    history.messages = 100
    for _ in range(renewals):
        renew = msg.Renew(transfers=((OURS, CONSUMER, 1),), write_seconds=10.0, mark=77.0)
        number = history.later(500).send(D_RANK, P_RANK, renew)
        history.later(2).arrive(D_RANK, P_RANK, number)
        answer = msg.Status(transfers=(msg.TransferStatus(OURS, CONSUMER, "writing", 8),), mark=77.0)
        number = history.send(P_RANK, D_RANK, answer)
        history.later(2).arrive(P_RANK, D_RANK, number)
    return history.events


def _succeed(history: History) -> None:
    history.later(4).add(ev.Landed(history.at, P_RANK, D_RANK, 2))
    history.later(1).add(ev.PostEnded(history.at, P_RANK, D_RANK, 2, PostState.DONE))
    written = msg.Written(transfer=OURS, consumer=CONSUMER, start=0, stop=12)
    number = history.send(P_RANK, D_RANK, written)
    history.later(2).arrive(P_RANK, D_RANK, number)
    history.later(1).report(P_RANK, cmd.Released(OURS, "served"))
    history.add(ev.RequestEnded(history.at, P, "prefill-1", OURS, None, "completed"))
    history.report(D_RANK, cmd.Received(OURS, CONSUMER, 96))
    history.later(5).add(ev.DecodeStarted(history.at, D, (D_RANK,), "decode-1", 1, 12, ((5, 6, 7),)))
    history.add(ev.RequestEnded(history.at, D, "decode-1", OURS, CONSUMER, "completed"))
    history.later(40).add(ev.DecodeEnded(history.at, D, "decode-1", preempted=False))


def _fail(history: History) -> None:
    history.add(ev.FaultInjected(history.at, "error on one rank", "post 2 breaks", (OURS,)))
    history.later(3).add(ev.PostEnded(history.at, P_RANK, D_RANK, 2, PostState.FAILED))
    failed = msg.Failed(transfer=OURS, consumer=CONSUMER, reason="write failed", valid_until=8)
    lost = history.send(P_RANK, D_RANK, failed)
    payload = _encoder.encode(failed)[0]
    history.later(1).add(ev.FabricFault(history.at, P_RANK, D_RANK, "lose", payload=payload))
    history.arrive(P_RANK, D_RANK, lost, arrived=False)
    renew = msg.Renew(transfers=((OURS, CONSUMER, 1),), write_seconds=10.0, mark=77.0)
    number = history.later(2000).send(D_RANK, P_RANK, renew)
    history.later(2).arrive(D_RANK, P_RANK, number)
    history.later(8000).report(D_RANK, cmd.ReceiveFailed(OURS, CONSUMER, "silent", 8, fenced=False))
    history.later(15000).report(D_RANK, cmd.BlocksSafe(OURS, CONSUMER))
    history.add(ev.RequestEnded(history.at, D, "decode-1", OURS, CONSUMER, "failed"))
    history.later(10).report(P_RANK, cmd.Released(OURS, "failed"))
    history.add(ev.RequestEnded(history.at, P, "prefill-1", OURS, None, "failed"))
