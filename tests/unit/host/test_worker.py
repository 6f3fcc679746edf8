"""A rank's worker side over a scripted agent: what passes to the agent, and what is reported when."""

from __future__ import annotations

import pytest

from kvferry.host.events import Ended, PreemptAnswer, Quarantined
from kvferry.host.metrics import BYTES, BYTES_EARLY
from kvferry.host.orders import Sender, StepOrders
from kvferry.host.reports import NOTHING
from kvferry.host.worker import UNSAID_SECONDS_MAX, FerryWorker
from kvferry.layout.spans import from_spans, scaled_spans
from kvferry.protocol.commands import (
    Advance,
    AnnounceCommand,
    BlocksSafe,
    Drained,
    Expect,
    Finish,
    Preempt,
    Receive,
    Received,
    ReceiveFailed,
    Released,
    Source,
    Withdraw,
    absent,
)
from tests.support.scripted_agent import ScriptedAgent

BLOCK = 16
SOURCE = Source("engine", "127.0.0.1", 5600)
RECEIVE = Receive("t", "r", SOURCE, 32, 100, (((10, 2), (20, 3)),))


@pytest.fixture
def agent():
    return ScriptedAgent()


def worker_of(agent, **changes):
    return FerryWorker(agent, rank=0, block_tokens=BLOCK, **changes)


def prefill(worker, *advances, finish=False):
    worker.begin(StepOrders(senders=[Sender("t", "r")], commands=[Expect("t", 64)]))
    for advance in advances:
        step(worker, StepOrders(advances=[advance]))
    if finish:
        worker.begin(StepOrders(commands=[Finish("t")]))


def step(worker, metadata, finished=()):
    worker.preempt(metadata.preempt)
    worker.begin(metadata)
    worker.save(metadata, succeeded=True)
    return worker.collect(finished)


ADVANCE = Advance("t", 64, 0, (((3, 4),),))


def test_a_publication_waits_for_the_device_on_the_agents_thread(agent):
    """P41: the frontier counts only once the device has passed the point recorded behind the forward pass."""
    passed = []
    recorded = []

    def record():
        recorded.append(len(agent.commands))
        return lambda: bool(passed)

    worker = worker_of(agent, record=record)
    prefill(worker, ADVANCE)
    assert recorded == [1]
    assert agent.commands[1] == ADVANCE
    ready = agent.gates[1]
    assert not ready()
    passed.append(True)
    assert ready()


def test_a_synchronous_device_needs_no_gate(agent):
    prefill(worker_of(agent), ADVANCE)
    assert agent.commands[1] == ADVANCE
    assert agent.gates == {}


def test_a_step_without_publications_records_nothing(agent):
    recorded = []
    worker = worker_of(agent, record=lambda: recorded.append(1) or (lambda: True))
    step(worker, StepOrders())
    assert recorded == []


def test_kernel_blocks_are_what_the_agent_sees(agent):
    worker = worker_of(agent, ratios=(2,))
    prefill(worker, ADVANCE)
    assert agent.commands[1] == Advance("t", 64, 0, (((6, 8),),))
    worker.begin(StepOrders(commands=[RECEIVE]))
    # Of the last one only the half that has the prompt's last tokens; whoever writes counts by the tokens.
    assert agent.commands[2].groups == (((20, 4), (40, 5)),)


def test_kernel_blocks_behind_the_prompt_are_nobody_s_target(agent):
    """V14: engine blocks of 16 and 32 tokens in kernel blocks of 8, 16 and 8; of a window the last block."""
    worker = worker_of(agent, group_tokens=(16, 32, 32), ratios=(2, 2, 4))
    groups = ((1, 3),), ((5, 2),), ((9, 1),)
    worker.begin(StepOrders(commands=[Receive("t", "r", SOURCE, 0, 41, groups)]))
    assert agent.commands[0].groups == (((2, 6),), ((10, 3),), ((36, 2),))


def test_released_is_reported_once_and_not_before_the_engine_names_the_request(agent):
    """Early or double reports of `finished_sending` kill the engine."""
    worker = worker_of(agent)
    prefill(worker, ADVANCE, finish=True)
    agent.say(Released("t", "written"))
    assert worker.collect(()).finished.sending == set()
    assert worker.collect(("r", "another")).finished.sending == {"r"}
    assert worker.collect(("r",)).finished.sending == set()


def test_a_release_after_the_engine_has_named_the_request_is_reported_at_once(agent):
    worker = worker_of(agent)
    prefill(worker, ADVANCE, finish=True)
    assert worker.collect(("r",)).finished.sending == set()
    agent.say(Released("t", "lease_expired"))
    assert worker.collect(()).finished.sending == {"r"}


def test_a_request_that_was_never_published_is_not_reported(agent):
    """The engine has freed its blocks itself."""
    worker = worker_of(agent)
    prefill(worker, finish=True)
    agent.say(Released("t", "abandoned"))
    assert worker.collect(("r",)).finished.sending == set()
    assert [event.reason for event in worker.take_events()] == ["abandoned"]


@pytest.mark.parametrize("result", [Released("x", "written"), BlocksSafe("x", "y"), Drained(7)])
def test_results_of_strangers_are_ignored(agent, result):
    """P16: reports for unknown ids change nothing."""
    worker = worker_of(agent)
    agent._expected["x"] = 0
    agent.say(result)
    out = worker.collect(("r",))
    assert (out.finished.sending, out.finished.receiving, out.events) == (set(), set(), [])


@pytest.mark.parametrize(
    ("valid_until", "bad"),
    [
        (0, [10, 11, 20, 21, 22]),
        (32, [10, 11, 20, 21, 22]),
        (47, [10, 11, 20, 21, 22]),
        (48, [11, 20, 21, 22]),
        (70, [20, 21, 22]),
        (99, [22]),
        (100, [22]),
        (5000, [22]),
    ],
)
def test_bad_blocks_begin_with_the_first_that_is_not_wholly_good(agent, valid_until, bad):
    worker = worker_of(agent)
    worker.begin(StepOrders(commands=[RECEIVE]))
    agent.say(ReceiveFailed("t", "r", "peer_lost", valid_until, fenced=True))
    out = worker.collect(())
    assert out.finished.receiving == {"r"}
    assert out.finished.failed == set()
    assert worker.take_bad_blocks() == set(bad)
    assert worker.take_bad_blocks() == set()


def test_an_old_engine_waits_for_the_fence_and_then_keeps_the_good_prefix(agent):
    """0.29 cannot throw a single request's prefix away, so the report waits."""
    worker = worker_of(agent, can_start_over=False)
    worker.begin(StepOrders(commands=[RECEIVE]))
    agent.say(ReceiveFailed("t", "r", "peer_silent", 48, fenced=False))
    assert worker.collect(()).finished.receiving == set()
    assert worker.take_bad_blocks() == set()
    agent.say(BlocksSafe("t", "r"))
    out = worker.collect(())
    assert out.finished.receiving == {"r"}
    assert worker.take_bad_blocks() == {11, 20, 21, 22}


@pytest.mark.parametrize(
    ("fenced", "withdrawn", "lost"),
    [(True, False, 52), (False, False, 68), (True, True, 0)],
    ids=["keeps the good prefix", "starts over", "nobody waits any more"],
)
def test_lost_tokens_are_those_that_have_to_be_computed_here(agent, fenced, withdrawn, lost):
    worker = worker_of(agent)
    worker.begin(StepOrders(commands=[RECEIVE]))
    agent.say(ReceiveFailed("t", "r", "peer_lost", 48, fenced=fenced, cancelled=withdrawn))
    worker.collect(())
    [ended] = [event for event in worker.take_events() if isinstance(event, Ended)]
    assert ended.lost_tokens == lost


def test_a_failure_is_reported_once(agent):
    worker = worker_of(agent)
    worker.begin(StepOrders(commands=[RECEIVE]))
    agent.say(ReceiveFailed("t", "r", "peer_lost", 48, fenced=True))
    assert worker.collect(()).finished.receiving == {"r"}
    agent._results = [
        ReceiveFailed("t", "r", "peer_lost", 48, fenced=True),
        Received("t", "r", 5),
        BlocksSafe("t", "r"),
    ]
    out = worker.collect(())
    assert (out.finished.receiving, out.finished.failed) == (set(), set())


def test_an_undrained_preemption_is_answered_twice(agent):
    """G12: at once with False, and with True when the agent says so."""
    worker = worker_of(agent)
    prefill(worker, ADVANCE)
    agent.drains = False
    step(worker, StepOrders(preempt=Preempt(("t",), 5)))
    assert worker.take_events() == [PreemptAnswer(0, 5, drained=False)]
    agent.say(Drained(5))
    worker.collect(())
    assert worker.take_events() == [PreemptAnswer(0, 5, drained=True)]


def test_the_step_that_preempts_drains_before_it_submits(agent):
    worker = worker_of(agent)
    prefill(worker, ADVANCE)
    seen = []
    agent.drain = lambda transfers, timeout_seconds: seen.append(len(agent.commands)) or True
    count = len(agent.commands)
    step(worker, StepOrders(preempt=Preempt(("t",), 1), commands=[Finish("t")]))
    assert seen == [count]


def test_hand_over_and_write_times_are_measured(agent):
    clock = iter([0.0, 1.0, 2.0, 2.0, 2.5, 4.0, 7.0, 9.0]).__next__
    worker = worker_of(agent, clock=clock)
    worker.begin(StepOrders(senders=[Sender("t", "p")], commands=[Expect("t", 64)]))
    worker.begin(StepOrders(commands=[Finish("t"), RECEIVE]))
    agent.say(Released("t", "written"), Received("t", "r", 640))
    events = {event.request: event for event in worker.collect(("p",)).events}
    assert events["p"] == Ended(0, "p", "written", handover_seconds=1.0, sending=True)
    assert events["r"] == Ended(0, "r", "written", bytes=640, write_seconds=1.0)


def test_statistics_are_what_has_been_added(agent):
    worker = worker_of(agent, moved=agent.moved)
    agent.posted = 100, 60
    worker.collect(("ended",))
    assert worker.take_moved() == {BYTES: 100, BYTES_EARLY: 60}
    assert worker.take_moved() == {}
    agent.posted = 150, 60
    assert worker.take_moved() == {BYTES: 50}


def test_bytes_are_told_with_other_news_or_after_a_while(agent):
    """A report in every step that has posted a slice would cost the engine more than the slice does."""
    now = 0.0
    worker = worker_of(agent, clock=lambda: now, moved=agent.moved)
    told = []
    for number in range(101):
        now = number * UNSAID_SECONDS_MAX / 50
        agent.posted = number + 1, 0
        worker.collect(())
        told.append(worker.take_moved())
    assert [number for number, moved in enumerate(told) if moved] == [0, 50, 100]
    assert sum(moved.get(BYTES, 0) for moved in told) == 101
    prefill(worker, ADVANCE)
    agent.posted = 1000, 0
    worker.collect(())
    assert worker.take_moved() == {}
    agent.say(Released("t", "written"))
    worker.collect(())
    assert worker.take_moved() == {BYTES: 1000 - 101}


def test_the_test_hook_damages_the_block_of_that_index_before_it_is_published(agent):
    damaged = []
    worker = worker_of(agent)
    worker.damage_block(5, lambda block: damaged.append((block, len(agent.commands))))
    prefill(worker, ADVANCE, Advance("t", 120, 4, (((9, 1), (30, 3)),)))
    assert damaged == [(30, 2)]


def test_a_step_without_news_brings_the_one_empty_report_and_asks_for_no_time(agent):
    def clock():
        raise AssertionError("a step without news has no use for the time")

    worker = worker_of(agent, clock=clock, moved=agent.moved)
    assert step(worker, StepOrders()) is NOTHING
    assert worker.take_bad_blocks() == set()
    assert worker.take_events() == []
    assert worker.take_moved() == {}
    assert agent.commands == []
    worker.take_bad_blocks().add(7)
    worker.take_events().append("not ours")
    assert step(worker, StepOrders()) is NOTHING
    assert (worker.take_bad_blocks(), worker.take_events()) == (set(), [])


def test_an_answer_to_a_preemption_is_news_by_itself(agent):
    worker = worker_of(agent)
    prefill(worker, ADVANCE)
    report = step(worker, StepOrders(preempt=Preempt(("t",), 3)))
    assert report is not NOTHING
    assert worker.take_events() == [PreemptAnswer(0, 3, drained=True)]
    assert step(worker, StepOrders()) is NOTHING


def test_a_refused_receive_is_news_by_itself(agent):
    agent.refuse = True
    worker = worker_of(agent)
    assert step(worker, StepOrders(commands=[RECEIVE])).finished.receiving == {"r"}


def test_closing_closes_the_agent(agent):
    worker_of(agent).close(1.0)
    assert agent.closed == 1


def test_blocks_of_a_request_that_nobody_waits_for_are_not_named(agent):
    """They go back to the engine's pool with this report, where they may be another request's."""
    worker = worker_of(agent)
    worker.begin(StepOrders(commands=[RECEIVE]))
    worker.begin(StepOrders())
    worker.collect(("r",))
    agent.say(ReceiveFailed("t", "r", "cancelled", 32, fenced=True, cancelled=True))
    assert worker.collect(()).finished.receiving == {"r"}
    assert worker.take_bad_blocks() == set()


def test_a_request_whose_forward_pass_raised_is_reported_all_the_same(agent):
    """The scheduler side keeps its blocks since it planned the publication; nobody else gives them back."""
    worker = worker_of(agent)
    worker.begin(StepOrders(senders=[Sender("t", "r")], commands=[Expect("t", 64)]))
    worker.save(StepOrders(advances=[ADVANCE]), succeeded=False)
    assert ADVANCE not in agent.commands
    agent.say(Released("t", "abandoned"))
    assert worker.collect(("r",)).finished.sending == {"r"}


def test_kernel_blocks_are_counted_from_the_same_token(agent):
    worker = worker_of(agent, ratios=(4,))
    prefill(worker, ADVANCE, Advance("t", 96, 4, (((9, 2),),)))
    assert agent.commands[2] == Advance("t", 96, 16, (((36, 8),),))


def test_bad_blocks_of_whole_blocks_are_never_none(agent):
    """A failure that claims that everything is good is none that can be believed: the last block is bad."""
    worker = worker_of(agent)
    worker.begin(StepOrders(commands=[Receive("t", "r", SOURCE, 32, 96, (((10, 4),),))]))
    agent.say(ReceiveFailed("t", "r", "peer_lost", 96, fenced=True))
    worker.collect(())
    assert worker.take_bad_blocks() == {13}


def test_a_second_failure_of_a_quarantined_destination_is_no_second_end(agent):
    """Promise 8: exactly one outcome, and one quarantine."""
    worker = worker_of(agent)
    worker.begin(StepOrders(commands=[RECEIVE]))
    unfenced = ReceiveFailed("t", "r", "peer_silent", 48, fenced=False)
    agent.say(unfenced)
    assert worker.collect(()).finished.failed == {"r"}
    assert len(worker.take_events()) == 2
    agent._results = [unfenced]
    out = worker.collect(())
    assert (out.finished.failed, out.finished.receiving, out.events) == (set(), set(), [])


@pytest.mark.parametrize("how", ["command", "finished"])
@pytest.mark.parametrize("fenced", [True, False])
def test_nobody_recomputes_for_a_request_that_has_gone(agent, how, fenced):
    """P52: no bad blocks, no new start; its blocks come back behind the fence and not before."""
    worker = worker_of(agent)
    worker.begin(StepOrders(commands=[RECEIVE]))
    withdrawal = [Withdraw("t", "r", SOURCE, "cancelled")] if how == "command" else []
    worker.begin(StepOrders(commands=withdrawal))
    agent.say(ReceiveFailed("t", "r", "cancelled", 32, fenced=fenced))
    out = worker.collect(("r",) if how == "finished" else ())
    assert (out.finished.receiving, out.finished.failed) == ({"r"} if fenced else set(), set())
    assert worker.take_bad_blocks() == set()
    agent.say(BlocksSafe("t", "r"))
    assert worker.collect(()).finished.receiving == (set() if fenced else {"r"})
    assert worker.take_bad_blocks() == set()


def test_a_destination_that_is_refused_takes_its_announcement_back(agent):
    """Promise 7: the announcement may have been taken; nobody else would ever end it, nor the lease."""
    worker = worker_of(agent)
    worker.begin(StepOrders(commands=[AnnounceCommand("t", "r", SOURCE)]))
    agent.refuse = True
    worker.begin(StepOrders(commands=[RECEIVE]))
    assert agent.take() == [
        AnnounceCommand("t", "r", SOURCE),
        Withdraw("t", "r", SOURCE, "table_full"),
    ]
    out = worker.collect(())
    assert out.finished.receiving == {"r"}
    assert worker.take_bad_blocks() == {10, 11, 20, 21, 22}
    assert worker.open_count == 0


def test_safety_of_what_has_not_failed_says_nothing(agent):
    worker = worker_of(agent)
    worker.begin(StepOrders(commands=[RECEIVE]))
    agent.say(BlocksSafe("t", "r"))
    assert worker.collect(()).finished.receiving == set()
    agent.say(Received("t", "r", 1))
    assert worker.collect(()).finished.receiving == {"r"}


def test_each_cache_group_has_kernel_blocks_of_its_own_size(agent):
    """V14: blocks that are not there stay so."""
    worker = worker_of(agent, ratios=(2, 1))
    spans = ((3, 4),), (*absent(2), (9, 2))
    prefill(worker, Advance("t", 64, 0, spans, (0, 0)), Advance("t", 80, 4, (((7, 1),), ((11, 1),)), (4, 4)))
    assert agent.commands[1] == Advance("t", 64, 0, (((6, 8),), ((-2, 2), (9, 2))), (0, 0))
    assert agent.commands[2] == Advance("t", 80, 8, (((14, 2),), ((11, 1),)), (8, 4))
    assert list(from_spans(scaled_spans(spans[1], 4))) == [*range(-8, 0), *range(36, 44)]


@pytest.mark.parametrize("fenced", [True, False])
def test_where_no_good_prefix_can_be_named_the_request_starts_over(agent, fenced):
    """V01: several cache groups, or a window: nothing of it is used, however much has come."""
    worker = worker_of(agent, keeps_good_prefixes=False)
    worker.begin(StepOrders(commands=[RECEIVE]))
    agent.say(ReceiveFailed("t", "r", "peer_lost", 48, fenced=fenced))
    out = worker.collect(())
    assert (out.finished.receiving, out.finished.failed) == ({"r"}, {"r"})
    assert worker.take_bad_blocks() == set()
    events = worker.take_events()
    assert [type(event) for event in events] == [Ended] if fenced else [Ended, Quarantined]
    assert events[0].lost_tokens == 68
    assert len(worker._consumer) == (0 if fenced else 1)


def test_nobody_starts_over_what_was_withdrawn(agent):
    worker = worker_of(agent, keeps_good_prefixes=False)
    worker.begin(StepOrders(commands=[RECEIVE]))
    worker.begin(StepOrders())
    worker.collect(("r",))
    agent.say(ReceiveFailed("t", "r", "cancelled", 32, fenced=True, cancelled=True))
    out = worker.collect(())
    assert (out.finished.receiving, out.finished.failed) == ({"r"}, set())
