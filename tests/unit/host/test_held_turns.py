"""What an engine keeps after a turn, on a rank: a transfer that no request of the engine waits for."""

from __future__ import annotations

import pytest

from kvferry.host.orders import Sender, StepOrders
from kvferry.host.worker import FerryWorker
from kvferry.ids import TransferId
from kvferry.protocol import reasons
from kvferry.protocol.commands import Advance, Command, Expect, Finish, Released
from tests.support.scripted_agent import ScriptedAgent

HELD = TransferId("held-0001")


def orders() -> StepOrders:
    commands: list[Command] = [
        Expect(HELD, 33),
        Advance(HELD, 33, 0, (((4, 3),),)),
        Finish(HELD, keep_seconds=60.0),
    ]
    return StepOrders(senders=[Sender(HELD, "held 1", held=True)], commands=commands)


@pytest.mark.parametrize(("ratio", "blocks"), [(1, (4, 3)), (4, (16, 12))])
def test_a_turn_is_published_when_its_step_begins(ratio: int, blocks: tuple[int, int]) -> None:
    """It has been computed: no forward pass follows that its end could wait for."""
    agent = ScriptedAgent()
    worker = FerryWorker(agent, rank=0, block_tokens=16, ratios=(ratio,))
    worker.begin(orders())
    assert agent.take() == [
        Expect(HELD, 33),
        Advance(HELD, 33, 0, ((blocks,),)),
        Finish(HELD, keep_seconds=60.0),
    ]


def test_its_end_is_told_as_an_event_and_never_as_a_requests_end() -> None:
    """The engine has forgotten the request: a report of its name would kill the engine."""
    agent = ScriptedAgent()
    worker = FerryWorker(agent, rank=1, block_tokens=16)
    worker.begin(orders())
    assert not worker.collect([]).finished.sending
    agent.say(Released(HELD, reasons.FETCHED))
    assert not worker.collect([]).finished.sending
    [ended] = worker.take_events()
    assert (ended.held, ended.sending, ended.request, ended.rank) == (True, True, "held 1", 1)
    assert ended.handover_seconds is None, "how long a client thinks is no hand-over"
    assert worker.open_count == 0


def test_a_full_agent_keeps_nothing() -> None:
    agent = ScriptedAgent()
    agent.refuse = True
    worker = FerryWorker(agent, rank=0, block_tokens=16)
    worker.begin(orders())
    assert not agent.take()
    worker.collect([])
    [ended] = worker.take_events()
    assert (ended.held, reasons.code_of(ended.reason)) == (True, reasons.TABLE_FULL)
