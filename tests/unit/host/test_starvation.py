"""When an engine that is stuck gives something up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.handoff import DecodeParams, PrefillParams, SourceParams
from kvferry.host.facts import EngineFacts
from kvferry.host.orders import Scheduled, StepOrders
from kvferry.host.pins import Pins
from kvferry.host.scheduler_consumer import SchedulerConsumer
from kvferry.host.scheduler_producer import SchedulerProducer
from kvferry.host.starvation import Starvation
from kvferry.host.wanted import whole_prompt
from kvferry.ids import EngineId, TransferId
from kvferry.protocol.commands import Reclaim

FACTS = EngineFacts(EngineId("e"), tp=1, pp=1, produces=True, consumes=True, block_tokens=16, block_count=64)


def request(name: str) -> Any:
    status = SimpleNamespace(name="FINISHED_LENGTH_CAPPED")
    return SimpleNamespace(request_id=name, num_prompt_tokens=16, sampling_params=None, status=status)


def test_only_an_engine_that_stays_stuck_gives_up_and_once_per_limit() -> None:
    starvation = Starvation(10.0)
    due = [(second, starvation.is_due(float(second), stuck=True)) for second in range(25)]
    assert [second for second, is_due in due if is_due] == [10, 20]


@pytest.mark.parametrize("free_at", [1, 9])
def test_one_step_of_work_starts_the_wait_anew(free_at: int) -> None:
    starvation = Starvation(10.0)
    found = [second for second in range(25) if starvation.is_due(float(second), stuck=second != free_at)]
    assert found[0] == free_at + 11


def test_an_engine_that_has_computed_something_starts_the_wait_anew() -> None:
    starvation = Starvation(10.0)
    assert not starvation.is_due(0.0, stuck=True)
    starvation.is_over()
    assert not starvation.is_due(10.0, stuck=True)
    assert starvation.is_due(20.0, stuck=True)


def test_a_request_that_is_computed_here_wants_to_run_as_one_does_that_waits_for_memory() -> None:
    """G07, P27: one whose KV has come, or has failed, may stand first in the queue and lack blocks."""
    consumer = SchedulerConsumer(FACTS, Pins(), waiting_blocks_share=0.5, quarantine_share=0.5)
    source = SourceParams(engine=EngineId("p"), host="10.0.0.1", port=5600)
    assert not consumer.wants_to_run
    params = DecodeParams(source=source, transfer=TransferId("t"))
    consumer.announce(request("r"), whole_prompt(request("r"), params, request("r").num_prompt_tokens))
    assert consumer.wants_to_run
    consumer.allocated(request("r"), ([1],), 16)
    assert not consumer.wants_to_run, "it waits for its producer"
    consumer.received(["r"])
    assert consumer.wants_to_run
    consumer.finish(request("r"))
    assert not consumer.wants_to_run


def test_leases_are_taken_back_in_turn_and_the_longest_held_first() -> None:
    """G07: one that is being written is not given up, so that the next one's turn must come."""
    producer = SchedulerProducer(FACTS, Pins())
    assert not producer.reclaim()
    for block, name in enumerate(("one", "two")):
        assert producer.expect(request(name), PrefillParams(transfer=TransferId(name)))
        producer.plan([Scheduled(name, 16, ([block],), replaced=True)], (), StepOrders())
        producer.finish(request(name))
    assert [producer.reclaim() for _ in range(3)] == [True, True, True]
    orders = StepOrders()
    producer.plan([], (), orders)
    taken = [command.transfer for command in orders.commands if isinstance(command, Reclaim)]
    assert taken == ["one", "two", "one"]
