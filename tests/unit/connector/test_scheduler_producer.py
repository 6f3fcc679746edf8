"""Prefill requests under vLLM's own scheduler: what is published when, and when blocks come back."""

from __future__ import annotations

import pytest
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from kvferry.protocol.commands import Abandon, Advance, Drained, Expect, Finish, Preempt, Released
from tests.support.vllm_engine import BLOCK_TOKENS

PREFILL = {"do_remote_decode": True, "transfer_id": "transfer-one"}


def blocks_in(advances):
    """Block ids by index after these publications."""
    blocks = []
    for advance in advances:
        del blocks[advance.first_block :]
        blocks += [first + offset for first, count in advance.blocks[0] for offset in range(count)]
    return blocks


def advances_of(commands):
    return [command for command in commands if isinstance(command, Advance)]


def test_frontier_follows_the_chunks(engine_of):
    """Each chunk is published in its own step, before the request has ended."""
    engine = engine_of(step_tokens=64)
    engine.add("r", 150, PREFILL)
    frontiers = []
    for _ in range(3):
        engine.step()
        frontiers += [advance.frontier for advance in advances_of(engine.agent.take())]
    assert frontiers == [64, 128, 150]


def test_published_blocks_are_the_requests_own_in_order(engine_of):
    engine = engine_of(step_tokens=64)
    engine.add("r", 150, PREFILL)
    engine.step()
    engine.step()
    blocks = engine.blocks_of("r")
    commands = engine.agent.take()
    assert isinstance(commands[0], Expect)
    assert commands[0].tokens == 150
    assert blocks_in(advances_of(commands)) == blocks[: 128 // BLOCK_TOKENS]


def test_a_local_prefix_hit_is_published_with_the_step(engine_of):
    """The hit's blocks are published at the end of the step that uses them, as one frontier with the rest."""
    engine = engine_of(step_tokens=64)
    engine.add("warm", 64)
    engine.steps(2)
    engine.add("r", 100, PREFILL)
    assert engine.agent.take() == []
    planned = engine.step()
    assert planned.num_scheduled_tokens["r"] == 100 - 64
    (advance,) = advances_of(engine.agent.take())
    assert (advance.frontier, advance.first_block) == (100, 0)
    assert sum(count for _, count in advance.blocks[0]) == 7


def test_nothing_is_published_when_the_forward_pass_raised(engine_of):
    engine = engine_of()
    engine.add("r", 40, PREFILL)
    engine.fail_forward = True
    engine.step()
    assert advances_of(engine.agent.take()) == []


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [({}, FinishReason.LENGTH), ({"stop_token_ids": [7]}, FinishReason.STOP)],
)
def test_every_normal_end_hands_over(engine_of, sampling, reason):
    """P24: a stop is as good an end as the length."""
    engine = engine_of()
    engine.add("r", 40, PREFILL, max_tokens=1 if reason is FinishReason.LENGTH else 5, **sampling)
    engine.step()
    assert engine.finish_reason("r") is reason
    answer = engine.answer("r")
    assert answer["transfer_id"] == "transfer-one"
    assert answer["do_remote_prefill"] is True
    assert answer["remote_engine_id"] == "engine-under-test"
    assert answer["kvferry_incarnation"] == "first"
    engine.step()
    assert [type(command) for command in engine.agent.take()][-1] is Finish


def test_blocks_are_kept_until_the_release_and_then_freed_once(engine_of):
    """P44, P59: held over idle steps, given back after the release without other traffic."""
    engine = engine_of()
    engine.add("r", 40, PREFILL)
    engine.steps(3)
    assert engine.scheduler.has_requests()
    assert engine.pool.get_num_free_blocks() == engine.blocks_free_at_start - 3
    engine.agent.say(Released("transfer-one", "written"))
    engine.step()
    assert engine.is_clean
    assert not engine.scheduler.has_requests()
    engine.steps(2)
    assert engine.counters("kvferry_transfers") == {("push", "completed", "written"): 1}
    assert len(engine.stats.data["observations"]["kvferry_handover_seconds"]) == 1


def test_abort_after_the_end_changes_nothing(engine_of):
    """P16: a client that leaves when prefill has just ended."""
    engine = engine_of()
    engine.add("r", 40, PREFILL)
    engine.step()
    engine.abort("r")
    engine.steps(2)
    assert not any(isinstance(command, Abandon) for command in engine.agent.take())
    engine.agent.say(Released("transfer-one", "lease_expired: nobody came"))
    engine.steps(2)
    assert engine.is_clean


def test_abort_between_chunks_abandons_and_keeps_the_blocks(engine_of):
    engine = engine_of(step_tokens=32)
    engine.add("r", 100, PREFILL)
    engine.step()
    engine.abort("r")
    engine.steps(2)
    (abandon,) = [command for command in engine.agent.take() if isinstance(command, Abandon)]
    assert abandon.reason.startswith("abandoned")
    assert engine.pool.get_num_free_blocks() < engine.blocks_free_at_start
    engine.agent.say(Released("transfer-one", "abandoned"))
    engine.steps(1)
    assert engine.is_clean


def test_abort_in_the_queue_abandons_and_keeps_nothing(engine_of):
    engine = engine_of(step_tokens=32, blocks=8)
    engine.add("first", 90, max_tokens=3)
    engine.step()
    engine.add("r", 40, PREFILL)
    engine.abort("r")
    assert "r" not in engine.scheduler.requests
    engine.steps(8)
    assert [type(command) for command in engine.agent.take()] == [Expect, Abandon]
    engine.agent.say(Released("transfer-one", "abandoned"))
    engine.steps(1)
    assert engine.counters("kvferry_transfers") == {("push", "failed", "abandoned"): 1}
    assert engine.is_clean


def test_a_transfer_id_in_use_is_refused_for_the_second_request_alone(engine_of):
    """P39: the first keeps its transfer, the second runs and hands nothing over; then the id is free."""
    engine = engine_of()
    engine.add("a", 40, PREFILL)
    engine.add("b", 24, PREFILL)
    engine.steps(2)
    assert engine.answer("a") is not None
    assert engine.answer("b") is None
    engine.agent.say(Released("transfer-one", "written"))
    engine.steps(1)
    assert engine.is_clean
    engine.add("c", 20, PREFILL)
    engine.steps(1)
    assert engine.answer("c") is not None


def test_legs_without_an_id_are_paired_by_the_request_id(engine_of):
    engine = engine_of()
    engine.add("cmpl-abc-0-0123abcd", 40, {"do_remote_decode": True})
    engine.step()
    assert engine.agent.take()[0].transfer == "x-request-id:cmpl-abc-0"
    assert engine.counters("kvferry_legacy_pairings") == {(): 1}
    assert engine.answer("cmpl-abc-0-0123abcd")["transfer_id"] == "x-request-id:cmpl-abc-0"


def test_a_probe_is_answered_and_holds_nothing(engine_of):
    engine = engine_of()
    engine.add("r", 40, {"do_remote_decode": True, "probe": True})
    engine.step()
    answer = engine.answer("r")
    assert (answer["remote_host"], answer["remote_port"]) == ("127.0.0.1", 5600)
    assert "transfer_id" not in answer
    assert engine.agent.take() == []
    assert engine.is_clean


def preempted_engine(engine_of, **shape):
    """A prefill of two chunks that has published its first one and is preempted by the engine."""
    engine = engine_of(step_tokens=32, **shape)
    engine.add("r", 60, PREFILL)
    engine.step()
    engine.flush()
    old = engine.blocks_of("r")
    engine.scheduler.running.remove(engine.scheduler.requests["r"])
    engine.scheduler._preempt_request(engine.scheduler.requests["r"], 0.0, drop_stale_output=True)
    return engine, old


def test_preempted_blocks_are_nobodys_until_drained(engine_of):
    """G08, P28: the engine's references are gone, the pins hold the blocks until each rank has drained."""
    engine, old = preempted_engine(engine_of)
    assert all(engine.pool.blocks[block].ref_cnt == 1 for block in old)
    assert engine.scheduler.connector.has_pending_block_frees()
    engine.step()
    assert engine.agent.drained == [("transfer-one",)]
    assert not engine.scheduler.connector.has_pending_block_frees()
    engine.steps(2)
    commands = engine.agent.take()
    assert isinstance(commands[-1], Finish)
    assert advances_of(commands)[-1].frontier == 60
    assert blocks_in(advances_of(commands)) == engine.blocks_of("r")
    engine.agent.say(Released("transfer-one", "written"))
    engine.steps(1)
    assert engine.is_clean


def test_a_resumed_request_publishes_from_its_first_block(engine_of):
    engine, _ = preempted_engine(engine_of, prefix_caching=False)
    engine.agent.take()
    engine.step()
    engine.step()
    advances = advances_of(engine.agent.take())
    assert (advances[0].first_block, advances[0].frontier) == (0, 32)
    assert [advance.frontier for advance in advances] == [32, 60]


def test_an_undrained_preemption_goes_into_quarantine_and_the_engine_goes_on(engine_of):
    """G12: the step returns, the blocks stay pinned until the agent says that nothing reads them."""
    engine, old = preempted_engine(engine_of, prefix_caching=False)
    engine.agent.drains = False
    engine.step()
    assert not engine.scheduler.connector.has_pending_block_frees()
    assert engine.side.producer.quarantined_blocks == len(old)
    (preempt,) = [command for command in engine.agent.take() if isinstance(command, Preempt)]
    engine.step()
    assert not set(engine.blocks_of("r")) & set(old)
    assert all(engine.pool.blocks[block].ref_cnt == 1 for block in old)
    engine.agent.say(Drained(preempt.ticket))
    engine.step()
    assert engine.side.producer.quarantined_blocks == 0
    engine.agent.say(Released("transfer-one", "written"))
    engine.steps(2)
    assert engine.is_clean


def test_memory_pressure_waits_for_the_drain_instead_of_preempting_everyone(engine_of):
    """Preempting one request frees nothing at once; the scheduler must not go on to the next victim."""
    engine = engine_of(step_tokens=64, blocks=13, prefix_caching=False)
    engine.scheduler.scheduler_reserve_full_isl = False
    for name in ("a", "b", "c"):
        engine.add(name, 90, {"do_remote_decode": True, "transfer_id": f"transfer-{name}"})
    preempted = set()
    for _ in range(20):
        preempted |= set(engine.step().preempted_req_ids or ())
        for command in engine.agent.take():
            if isinstance(command, Finish):
                engine.agent.say(Released(command.transfer, "written"))
    assert {name for name in "abc" if engine.answer(name)} == {"a", "b", "c"}
    assert "a" not in preempted
    assert engine.is_clean


def test_ranks_release_together(engine_of):
    """Two ranks: the engine frees the blocks when both have reported, in any order, idle steps included."""
    engine = engine_of(ranks=2)
    engine.add("r", 40, PREFILL)
    engine.steps(2)
    engine.agents[1].say(Released("transfer-one", "written"))
    engine.steps(2)
    assert "r" in engine.scheduler.requests
    engine.agents[0].say(Released("transfer-one", "written"))
    engine.steps(1)
    assert engine.is_clean


def test_a_refused_expect_hands_nothing_over_and_leaks_nothing(engine_of):
    engine = engine_of()
    engine.agent.refuse = True
    engine.add("r", 40, PREFILL)
    engine.steps(3)
    assert engine.agent.take() == []
    assert engine.counters("kvferry_transfers") == {("push", "failed", "table_full"): 1}
    assert engine.is_clean


def test_two_steps_under_way_publish_in_order(engine_of):
    """Under asynchronous scheduling a step's metadata belongs to that step."""
    engine = engine_of(step_tokens=32, depth=2)
    engine.add("r", 100, PREFILL)
    engine.steps(6)
    assert [advance.frontier for advance in advances_of(engine.agent.take())] == [32, 64, 96, 100]
    engine.agent.say(Released("transfer-one", "written"))
    engine.steps(1)
    assert engine.is_clean


def test_a_normal_end_without_all_of_its_kv_is_no_hand_over(engine_of):
    """P28: without all of its blocks the transfer fails; there is no empty success."""
    engine = engine_of(step_tokens=32)
    request = engine.add("r", 100, PREFILL)
    engine.step()
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    keep, answer = engine.side.finish(request)
    assert keep
    assert answer is None
    command = engine.side.producer._commands[-1]
    assert isinstance(command, Abandon)
    assert command.reason.startswith("incomplete")
