"""The engine's scheduler alone: what it plans for which requests, without ranks, agents or time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvferry.handoff import DecodeParams, PrefillParams, SourceParams
from kvferry.host.events import Ended
from kvferry.host.facts import EngineFacts
from kvferry.host.holding import Holding, HoldLimits
from kvferry.host.outcomes import Outcomes
from kvferry.host.pins import Pins
from kvferry.host.scheduler_consumer import SchedulerConsumer
from kvferry.host.scheduler_producer import SchedulerProducer
from kvferry.host.starvation import Starvation
from kvferry.ids import EngineId, TransferId
from kvferry.protocol.commands import Abandon, Advance, AnnounceCommand, Expect, Finish, Receive, Withdraw
from kvferry.simulator.engine.engine import Counter
from kvferry.simulator.engine.pool import BlockPool
from kvferry.simulator.engine.requests import Request, Status
from kvferry.simulator.engine.scheduler import Host, Pace, Scheduler
from kvferry.simulator.engine.steps import Joint, Step
from kvferry.simulator.engine.tables import Tables
from kvferry.simulator.ground.arena import GroupShape
from kvferry.simulator.ground.content import Contents

SOURCE = SourceParams(engine=EngineId("P"), host="127.0.0.1", port=1)


def _no_turns(facts: EngineFacts, pins: Pins) -> Any:
    """An engine that keeps nothing after a turn, and is given nothing that others keep."""
    limits = HoldLimits(1.0, 0, 1)
    return SimpleNamespace(
        holding=Holding(facts, pins, Counter(lambda *_, **__: None), limits, lambda: 0.0, lambda: "h"),
        arrived=lambda *_: None,
        wanted=lambda _: None,
        ended=lambda _: None,
    )


class Rig:
    """A scheduler with blocks of 4 tokens and one rank."""

    def __init__(self, blocks: int = 8, *, budget: int = 8, depth: int = 1, defers: bool = False) -> None:
        facts = EngineFacts(EngineId("E"), 1, 1, True, True, 4, blocks)
        self.pool = BlockPool(blocks, taken=lambda *_: None, returned=lambda *_: None, spoilt=lambda *_: None)
        pins = Pins()
        pins.bind(self.pool)
        self.counted: list[tuple[str, str]] = []
        counter = Counter(lambda name, outcome, reason, *, sent: self.counted.append((name, outcome)))
        outcomes = Outcomes(facts, counter)
        consumer = SchedulerConsumer(facts, pins, waiting_blocks_share=0.5, quarantine_share=0.25)
        self.ended: list[tuple[str, bool]] = []
        self.contents = Contents(1, 64)
        self.scheduler = Scheduler(
            Pace(budget, 8, depth, 0.01, 0.0, 0.0),
            Tables(self.pool, (GroupShape(4),), defers),
            Host(
                SchedulerProducer(facts, pins),
                consumer,
                outcomes,
                Starvation(10.0),
                lambda: 0.0,
                facts.received_stop,
                skip=lambda request, reason: counter.skip(outcomes, request, reason),
                count=lambda event: counter.end(outcomes, event),
                turns=_no_turns(facts, pins),
            ),
            lambda request: self.ended.append((request.name, request.status.ended)),
        )

    def prefill(self, name: str, tokens: int, **shared: int) -> Request:
        """Add a prefill leg."""
        transfer = TransferId(f"transfer-{name}")
        params = PrefillParams(transfer=transfer)
        request = Request(name, self.contents.add(tokens, **shared), 1, transfer, params)
        self.scheduler.add(request)
        return request

    def decode(self, name: str, tokens: int, outputs: int = 2) -> Request:
        """Add a decode leg."""
        transfer = TransferId(f"transfer-{name}")
        params = DecodeParams(source=SOURCE, transfer=transfer)
        request = Request(name, self.contents.add(tokens), outputs, transfer, params)
        self.scheduler.add(request)
        return request

    def step(self, joint: Joint | None = None) -> Step:
        """Plan a step and take it back at once."""
        step = self.scheduler.plan()
        self.scheduler.update(step, joint or Joint())
        return step


def work_of(step: Step) -> list[tuple[str, int, int]]:
    return [(work.request.name, work.start, work.stop) for work in step.work]


def test_a_long_prompt_is_computed_in_chunks_and_published_after_each() -> None:
    rig = Rig()
    request = rig.prefill("a", 18)
    steps = [rig.step() for _ in range(3)]
    assert [work_of(step) for step in steps] == [[("a", 0, 8)], [("a", 8, 16)], [("a", 16, 18)]]
    assert steps[0].orders.commands == [Expect(request.transfer, 18)]
    frontiers = [(one.frontier, one.first_block) for step in steps for one in step.orders.advances]
    assert frontiers == [(8, 0), (16, 2), (18, 4)]
    assert request.status is Status.FINISHED_LENGTH_CAPPED
    last = rig.step()
    assert last.orders.commands == [Finish(request.transfer)]
    assert last.finished == ["a"]


def test_blocks_of_a_published_request_are_kept_until_it_is_reported_sent() -> None:
    rig = Rig()
    request = rig.prefill("a", 8)
    rig.step()
    assert request.status.ended
    assert rig.pool.free_count == 6
    rig.step(Joint(sending=["a"], events=[Ended(0, "a", "written")]))
    assert rig.pool.free_count == 8
    assert rig.counted == [("a", "completed")]
    assert rig.scheduler.requests == {}
    assert not rig.scheduler.awake


def test_a_request_that_finds_no_block_preempts_the_youngest() -> None:
    rig = Rig(blocks=4, budget=64)
    old, young = rig.decode("old", 8, 6), rig.decode("young", 7, 6)
    for request in (old, young):
        # Their KV comes from nobody: they are computed here.
        rig.scheduler.host.consumer.allocated(request, (), 0)
    rig.step()
    assert {work.request.name for work in rig.step().work} == {"old"}
    assert young.status is Status.PREEMPTED
    assert young.computed == 0
    assert rig.ended[0] == ("young", False)
    while old.status is not Status.FINISHED_LENGTH_CAPPED:
        rig.step()
    [work] = rig.step().work
    assert work.request is young
    assert work.replaced
    assert (work.start, work.stop) == (0, 8)


def test_a_forced_preemption_of_a_prefill_starts_it_again_in_other_blocks() -> None:
    rig = Rig(budget=8)
    request = rig.prefill("a", 18)
    [first] = rig.step().orders.advances
    assert rig.scheduler.force_preemption(request)
    preempting = rig.step()
    assert preempting.orders.preempt is not None
    assert preempting.work == []
    again = rig.step()
    [advance] = again.orders.advances
    assert advance.first_block == 0
    # Its first blocks are pinned until the ranks have drained, so it gets others.
    assert advance.blocks != first.blocks


def test_a_decode_leg_waits_for_its_kv_and_computes_the_last_token_itself() -> None:
    rig = Rig()
    request = rig.decode("d", 10)
    step = rig.step()
    assert [type(command) for command in step.orders.commands] == [AnnounceCommand, Receive]
    receive = step.orders.commands[1]
    assert isinstance(receive, Receive)
    assert (receive.start, receive.stop) == (0, 10)
    assert request.status is Status.WAITING_FOR_REMOTE_KVS
    assert rig.step().work == []
    rig.step(Joint(receiving=["d"], events=[Ended(0, "d", "written")]))
    assert work_of(rig.step()) == [("d", 9, 10)]
    assert rig.counted == [("d", "completed")]


def test_after_a_fenced_failure_what_is_good_is_kept() -> None:
    rig = Rig(budget=64)
    request = rig.decode("d", 10)
    rig.step()
    failed = Ended(0, "d", "peer_lost", failed=True)
    rig.step(Joint(receiving=["d"], bad_blocks=set(request.blocks[0][1:]), events=[failed]))
    assert work_of(rig.step()) == [("d", 4, 10)]
    assert rig.counted == [("d", "failed")]


def test_after_an_unfenced_failure_it_starts_over() -> None:
    rig = Rig(budget=64)
    request = rig.decode("d", 10)
    rig.step()
    before = list(request.blocks)
    rig.scheduler.update(rig.scheduler.plan(), Joint(receiving=["d"], failed=["d"]))
    assert work_of(rig.step()) == [("d", 0, 10)]
    assert request.blocks != before


def test_a_prompt_that_is_here_already_needs_no_transfer() -> None:
    rig = Rig(budget=64)
    rig.prefill("a", 9, family=1, shared_tokens=8)
    rig.step()
    twin = rig.contents.add(9, family=1, shared_tokens=8)
    transfer = TransferId("transfer-d")
    params = DecodeParams(source=SOURCE, transfer=transfer)
    rig.scheduler.add(Request("d", twin, 1, transfer, params))
    step = rig.step()
    assert work_of(step) == [("d", 8, 9)]
    assert [type(command) for command in step.orders.commands if not isinstance(command, Finish)] == [
        AnnounceCommand,
        Withdraw,
    ]
    assert rig.counted == [("d", "skipped")]


def test_an_abort_of_a_receiving_request_keeps_its_blocks_until_the_ranks_have_reported() -> None:
    """P16: whoever may still be written into is not given to another."""
    rig = Rig()
    request = rig.decode("d", 10)
    rig.step()
    rig.scheduler.abort(request)
    assert rig.pool.free_count == 5
    assert isinstance(rig.step().orders.commands[0], Withdraw)
    rig.step(Joint(receiving=["d"]))
    assert rig.pool.free_count == 8


def test_an_aborted_prefill_is_abandoned() -> None:
    rig = Rig()
    request = rig.prefill("a", 18)
    rig.step()
    rig.scheduler.abort(request)
    [command] = rig.step().orders.commands
    assert isinstance(command, Abandon)


def test_with_steps_in_flight_a_consumer_gives_blocks_back_behind_them() -> None:
    """A load could otherwise fill blocks that a step in flight still writes."""
    rig = Rig(budget=64, depth=2, defers=True)
    request = rig.decode("d", 8, 4)
    rig.scheduler.host.consumer.allocated(request, (), 0)
    flying = rig.scheduler.plan()
    assert flying.work
    rig.scheduler.abort(request)
    assert rig.pool.free_count == 6
    rig.scheduler.update(flying, Joint())
    assert rig.pool.free_count == 8


def test_output_of_before_a_preemption_still_counts() -> None:
    """As in vLLM: a token that a step in flight brings is delivered, though its KV is gone."""
    rig = Rig(budget=64, depth=2)
    request = rig.prefill("a", 8)
    flying = rig.scheduler.plan()
    assert rig.scheduler.force_preemption(request)
    preempting = rig.scheduler.plan()
    assert request.status is Status.PREEMPTED
    assert preempting.work == []
    rig.scheduler.update(flying, Joint())
    assert request.status is Status.FINISHED_LENGTH_CAPPED
    assert [type(command) for command in rig.scheduler.plan().orders.commands] == [Abandon]
    assert not any(isinstance(command, Advance) for command in preempting.orders.commands)
