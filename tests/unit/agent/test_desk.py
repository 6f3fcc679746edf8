"""The desk without any thread: what it admits, what it delivers, and what it says when the agent stops."""

from __future__ import annotations

from kvferry.agent.desk import INBOX_SHARE, Desk
from kvferry.agent.loop import Close
from kvferry.agent.mailbox import Gated
from kvferry.ids import ConsumerId, EngineId, TransferId
from kvferry.protocol.commands import (
    AnnounceCommand,
    Drained,
    Expect,
    Finish,
    Preempt,
    Receive,
    ReceiveFailed,
    Released,
    Source,
    Withdraw,
)
from kvferry.protocol.limits import Limits
from tests.support.ranks import World, source_of

T1 = TransferId("transfer-1")
C1 = ConsumerId("consumer-1")
SOURCE = Source(EngineId("P"), "127.0.0.1", 1)
RECEIVE = Receive(T1, C1, SOURCE, 0, 4, (((0, 1),),))


def full_desk() -> Desk:
    desk = Desk(Limits(transfers_max=1))
    for number in range(INBOX_SHARE):
        assert desk.submit(Expect(TransferId(f"early-{number}"), 4))
    return desk


def test_a_full_inbox_refuses_what_asks_for_admission_and_nothing_else():
    desk = full_desk()
    for refused in (Expect(T1, 4), AnnounceCommand(T1, C1, SOURCE), RECEIVE):
        assert not desk.submit(refused)
    assert len(desk.inbox) == INBOX_SHARE
    for taken in (Finish(T1), Withdraw(T1, C1, SOURCE, "cancelled")):
        assert desk.submit(taken)
    assert desk.inbox.drain()[-2:] == [Finish(T1), Withdraw(T1, C1, SOURCE, "cancelled")]
    assert desk.submit(RECEIVE), "there is room again"


def test_a_command_with_a_gate_goes_in_as_such():
    desk = Desk(Limits())
    assert desk.submit(Finish(T1), lambda: False)
    [item] = desk.inbox.drain()
    assert isinstance(item, Gated)
    assert item.command == Finish(T1)


def test_results_come_in_order_and_once():
    desk = Desk(Limits())
    for outcome in ("written", "cancelled"):
        desk.deliver(Released(T1, outcome))
    assert desk.results_waiting == 2
    assert desk.results() == [Released(T1, "written"), Released(T1, "cancelled")]
    assert desk.results_waiting == 0
    assert desk.results() == []


def test_the_answer_to_ask_drain_goes_to_whoever_asked_and_to_nobody_after_the_end():
    desk = Desk(Limits())
    told: list[str] = []
    number = desk.ask_drain((T1,), lambda: told.append("drained"))
    assert desk.inbox.drain() == [Preempt((T1,), number)]
    assert desk.drains_waiting == 1
    desk.deliver(Drained(number))
    assert told == ["drained"]
    desk.end_drain(number)
    desk.deliver(Drained(number))
    assert told == ["drained"]
    assert desk.drains_waiting == 0
    assert desk.results() == [], "our own tickets are not the host's"


def test_the_answer_to_a_ticket_of_the_host_is_a_result():
    desk = Desk(Limits())
    desk.deliver(Drained(7))
    assert desk.results() == [Drained(7)]


def test_a_closed_desk_admits_nothing_and_has_the_agent_close():
    desk = Desk(Limits())
    desk.close()
    assert not desk.alive
    assert not desk.submit(RECEIVE)
    assert isinstance(desk.inbox.drain()[0], Close)


def test_when_the_agent_stops_everything_that_waits_fails_without_a_fence():
    """A12: what nothing is proven about is never called safe, and what was not taken yet fails as well."""
    world = World()
    [producer] = world.engine("P", 1)
    [consumer] = world.engine("D", 2)
    source = source_of(producer, 1)
    consumer.do(Receive(T1, C1, source, 0, 16, (((3, 1),),)))
    world.run(0.01)
    desk = Desk(Limits())
    untaken = Receive(TransferId("transfer-2"), C1, source, 0, 16, (((4, 1),),))
    assert desk.submit(untaken)
    desk.fail_everything(consumer.loop, RuntimeError("no memory"))
    failed = [result for result in desk.results() if isinstance(result, ReceiveFailed)]
    assert [(one.transfer, one.fenced, one.valid_until) for one in failed] == [
        (T1, False, 0),
        ("transfer-2", False, 0),
    ]
    assert all("no memory" in one.reason for one in failed)
    assert isinstance(desk.failure, RuntimeError)
    assert not desk.alive
