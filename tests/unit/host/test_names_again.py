"""An engine that uses a request's name again: what was the earlier one's must not touch the later one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.handoff import DecodeParams, PrefillParams, SourceParams
from kvferry.host.events import Quarantined, Safe
from kvferry.host.facts import EngineFacts
from kvferry.host.orders import Scheduled, StepOrders
from kvferry.host.pins import Pins
from kvferry.host.scheduler_consumer import SchedulerConsumer
from kvferry.host.scheduler_producer import SchedulerProducer
from kvferry.host.wanted import whole_prompt
from kvferry.host.worker import FerryWorker
from kvferry.ids import ConsumerId, EngineId, TransferId
from kvferry.protocol.commands import Receive, ReceiveFailed, Source, Withdraw
from tests.support.scripted_agent import ScriptedAgent

FACTS = EngineFacts(EngineId("e"), tp=1, pp=1, produces=True, consumes=True, block_tokens=16, block_count=64)
SOURCE = SourceParams(engine=EngineId("p"), host="10.0.0.1", port=5600)


def request(name: str = "r", tokens: int = 40) -> Any:
    return SimpleNamespace(
        request_id=name,
        num_prompt_tokens=tokens,
        sampling_params=None,
        status=SimpleNamespace(name="FINISHED_ABORTED"),
    )


def receive(transfer: str, start: int = 0) -> Receive:
    source = Source(EngineId("p"), "10.0.0.1", 5600)
    return Receive(TransferId(transfer), ConsumerId("r"), source, start, 40, (((10, 3),),))


@pytest.fixture
def consumer() -> SchedulerConsumer:
    return SchedulerConsumer(FACTS, Pins(), waiting_blocks_share=0.5, quarantine_share=0.5)


def announced(consumer: SchedulerConsumer, transfer: str = "transfer-one") -> bool:
    params = DecodeParams(source=SOURCE, transfer=TransferId(transfer))
    return consumer.announce(request(), whole_prompt(request(), params, request().num_prompt_tokens))


def test_a_destination_that_is_opened_in_the_step_that_ends_its_name_is_not_withdrawn() -> None:
    """P64, P39, P54: an id that is aborted and sent again within one step: no garbage counts as received."""
    agent = ScriptedAgent()
    worker = FerryWorker(agent, rank=0, block_tokens=16)
    worker.begin(StepOrders(commands=[receive("transfer-two")]))
    agent.say(ReceiveFailed(TransferId("transfer-two"), ConsumerId("r"), "peer_lost", 0, fenced=True))
    worker.collect(["r"])
    assert worker.take_bad_blocks() == {10, 11, 12}
    worker.begin(StepOrders())
    [ended] = worker.take_events()
    assert not ended.cancelled


def test_a_withdrawn_destination_names_no_bad_blocks() -> None:
    """The counterpart: nobody reads what nobody waits for."""
    agent = ScriptedAgent()
    worker = FerryWorker(agent, rank=0, block_tokens=16)
    worker.begin(StepOrders(commands=[receive("transfer-two")]))
    worker.collect([])
    worker.begin(StepOrders())
    agent.say(ReceiveFailed(TransferId("transfer-two"), ConsumerId("r"), "cancelled", 0, fenced=True))
    worker.collect(["r"])
    assert worker.take_bad_blocks() == set()


def test_a_name_in_quarantine_is_computed_here(consumer: SchedulerConsumer) -> None:
    """P64, P39: the earlier one's blocks may still be written, and its end is still to come."""
    assert announced(consumer)
    assert consumer.wanted_tokens(request(), 0) == 40
    assert consumer.allocated(request(), ([1, 2, 3],), 40)
    consumer.quarantined(Quarantined(0, "r"))
    consumer.received(["r"])
    assert consumer.finish(request())
    assert not announced(consumer)
    assert consumer.wanted_tokens(request(), 0) == 0
    consumer.safe(Safe(0, "r"))
    assert announced(consumer)


def test_a_name_whose_destination_is_open_is_computed_here(consumer: SchedulerConsumer) -> None:
    assert announced(consumer)
    assert consumer.allocated(request(), ([1, 2, 3],), 40)
    assert consumer.finish(request())
    assert not announced(consumer)
    commands = consumer.take_commands()
    assert [type(command) for command in commands][-2:] == [Receive, Withdraw]
    consumer.received(["r"])
    assert announced(consumer)


def test_a_prefill_under_a_name_that_is_held_hands_nothing_over() -> None:
    """P39: the earlier one's blocks are pinned under the name."""
    producer = SchedulerProducer(FACTS, Pins())
    first = request(tokens=16)
    assert producer.expect(first, PrefillParams(transfer=TransferId("transfer-one")))
    producer.plan([Scheduled("r", 16, ([1],), replaced=True)], (), StepOrders())
    assert producer.finish(first)[0], "it was published"
    assert not producer.expect(request(), PrefillParams(transfer=TransferId("transfer-two")))
    producer.released(["r"])
    assert producer.expect(request(), PrefillParams(transfer=TransferId("transfer-two")))


def test_a_prefill_under_a_name_that_is_leaving_hands_nothing_over() -> None:
    producer = SchedulerProducer(FACTS, Pins())
    assert producer.expect(request(), PrefillParams(transfer=TransferId("transfer-one")))
    assert not producer.finish(request())[0], "nothing was published"
    assert not producer.expect(request(), PrefillParams(transfer=TransferId("transfer-two")))
    producer.rank_ended(0, "r")
    assert producer.expect(request(), PrefillParams(transfer=TransferId("transfer-two")))
