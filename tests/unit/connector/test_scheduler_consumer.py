"""Decode requests under vLLM's own scheduler: what is asked for, and how each end is lived through."""

from __future__ import annotations

import pytest
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from kvferry.connector import compat
from kvferry.protocol.commands import (
    AnnounceCommand,
    BlocksSafe,
    Receive,
    Received,
    ReceiveFailed,
    Released,
    Relinquish,
    Withdraw,
)
from tests.support.legs import DECODE as SOURCE
from tests.support.vllm_engine import BLOCK_TOKENS

starts_over = pytest.mark.skipif(
    not compat.can_fail_receives(), reason="this vLLM cannot throw one request's prefix away"
)


def received(name="r", transfer="transfer-one"):
    return Received(transfer, name, 1000)


def failed(name="r", *, valid_until, fenced=True, cancelled=False, reason="peer_silent"):
    return ReceiveFailed("transfer-one", name, reason, valid_until, fenced=fenced, cancelled=cancelled)


def ids(groups):
    return [first + offset for first, count in groups[0] for offset in range(count)]


def waiting_engine(engine_of, prompt=40, **shape):
    """An engine with one decode request whose registration has been sent."""
    engine = engine_of(**shape)
    engine.add("r", prompt, SOURCE, max_tokens=2)
    engine.step()
    return engine


def test_announced_and_registered_in_the_step_that_allocates(engine_of):
    engine = waiting_engine(engine_of)
    announce, receive = engine.agent.take()
    assert isinstance(announce, AnnounceCommand)
    assert isinstance(receive, Receive)
    assert (receive.start, receive.stop) == (0, 40)
    assert (receive.source.engine, receive.source.host, receive.source.port) == (
        "prefill-engine",
        "127.0.0.1",
        5601,
    )
    assert ids(receive.groups) == engine.blocks_of("r")[:3]


def test_received_kv_is_decoded_and_only_the_last_token_computed(engine_of):
    engine = waiting_engine(engine_of)
    engine.steps(2)
    assert engine.finish_reason("r") is None
    engine.agent.say(received())
    engine.step()
    planned = engine.step()
    assert planned.num_scheduled_tokens == {"r": 1}
    engine.steps(3)
    assert engine.finish_reason("r") is FinishReason.LENGTH
    assert engine.counters("kvferry_transfers") == {("push", "completed", "written"): 1}
    assert engine.counters("kvferry_transfer_bytes") == {("push",): 1000}
    assert engine.is_clean


@pytest.mark.parametrize("cached", [16, 32, 48])
def test_only_what_is_not_cached_is_asked_for(engine_of, cached):
    """P01: aligned by token, not by counting blocks from an end."""
    engine = engine_of()
    engine.add("warm", cached)
    engine.steps(2)
    engine.add("r", 70, SOURCE)
    engine.step()
    receive = engine.agent.take()[1]
    assert (receive.start, receive.stop) == (cached, 70)
    assert ids(receive.groups) == engine.blocks_of("r")[cached // BLOCK_TOKENS : 5]


def test_a_full_hit_withdraws_and_runs_at_once(engine_of):
    """P22: with all but the last token here, nothing is asked for and the producer is told so at once."""
    engine = engine_of()
    engine.add("warm", 49)
    engine.steps(2)
    engine.add("r", 49, SOURCE)
    planned = engine.step()
    assert planned.num_scheduled_tokens == {"r": 1}
    assert [type(command) for command in engine.agent.take()] == [AnnounceCommand, Withdraw]
    engine.steps(2)
    assert engine.counters("kvferry_transfers") == {("push", "skipped", "prefix_hit"): 1}
    assert engine.is_clean


def test_prompt_logprobs_are_computed_here(engine_of):
    """V20: the prompt's forward pass is needed, so the KV is not."""
    engine = engine_of()
    engine.add("r", 40, SOURCE, prompt_logprobs=1)
    planned = engine.step()
    assert planned.num_scheduled_tokens == {"r": 40}
    assert [type(command) for command in engine.agent.take()] == [AnnounceCommand, Withdraw]


def test_blocks_beyond_the_prompt_are_nobodys_target(engine_of):
    """V17: blocks for tokens to come (look-ahead) are not registered."""
    engine = engine_of()
    request = engine.add("r", 32, SOURCE)
    consumer = engine.side.consumer
    assert consumer.wanted_tokens(request, 0) == 32
    consumer.allocated(request, ([10, 11, 12, 13],), 32)
    receive = consumer.take_commands()[-1]
    assert ids(receive.groups) == [10, 11]


def test_abort_in_the_queue_withdraws(engine_of):
    """P17: a request that never got memory tells the producer that it needs nothing."""
    engine = engine_of(blocks=8)
    engine.add("first", 100, max_tokens=8)
    engine.steps(2)
    engine.add("r", 60, SOURCE)
    engine.step()
    engine.abort("r")
    engine.steps(1)
    assert [type(command) for command in engine.agent.take()] == [AnnounceCommand, Withdraw]
    engine.steps(10)
    assert engine.counters("kvferry_transfers") == {("push", "skipped", "not_admitted"): 1}
    assert engine.is_clean


@pytest.mark.parametrize("fence", [received(), failed(valid_until=0, cancelled=True)])
def test_abort_while_waiting_keeps_the_blocks_until_the_fence(engine_of, fence):
    """P02, P52: whatever the order, the blocks come back once, and not before the fence."""
    engine = waiting_engine(engine_of)
    engine.abort("r")
    engine.steps(3)
    assert isinstance(engine.agent.take()[-1], Withdraw)
    assert engine.pool.get_num_free_blocks() == engine.blocks_free_at_start - 3
    assert engine.scheduler.has_requests()
    engine.agent.say(fence)
    engine.steps(1)
    assert engine.is_clean
    engine.steps(2)


def test_abort_while_waiting_with_a_silent_producer_waits_for_safety(engine_of):
    engine = waiting_engine(engine_of)
    engine.abort("r")
    engine.steps(1)
    engine.agent.say(failed(valid_until=0, fenced=False, cancelled=True))
    engine.steps(3)
    assert engine.pool.get_num_free_blocks() == engine.blocks_free_at_start - 3
    engine.agent.say(BlocksSafe("transfer-one", "r"))
    engine.steps(1)
    assert engine.counters("kvferry_transfers") == {("push", "cancelled", "peer_silent"): 1}
    assert engine.is_clean


def test_completion_before_the_abort_is_reported_once(engine_of):
    engine = waiting_engine(engine_of)
    engine.agent.say(received())
    engine.step()
    engine.abort("r")
    engine.steps(3)
    assert engine.is_clean


def test_a_fenced_failure_recomputes_from_the_first_bad_block(engine_of):
    """Tokens before `valid_until` are kept as far as whole blocks go; the rest is computed in place."""
    engine = waiting_engine(engine_of, prompt=70)
    blocks = engine.blocks_of("r")
    engine.agent.say(failed(valid_until=40))
    engine.step()
    planned = engine.step()
    assert planned.num_scheduled_tokens == {"r": 70 - 32}
    assert engine.blocks_of("r")[:5] == blocks[:5]
    engine.steps(4)
    assert engine.finish_reason("r") is FinishReason.LENGTH
    assert engine.is_clean


def test_failed_kv_never_enters_the_prefix_cache(engine_of):
    """P54: after a failure with nothing good, the same prompt finds nothing cached."""
    engine = waiting_engine(engine_of, prompt=40)
    engine.agent.say(failed(valid_until=0))
    engine.step()
    engine.abort("r")
    engine.steps(2)
    planned_tokens = []
    engine.add("again", 40)
    planned_tokens.append(engine.step().num_scheduled_tokens)
    assert planned_tokens == [{"again": 40}]
    engine.steps(2)
    assert engine.is_clean


def test_a_fenced_failure_fails_the_request_under_the_other_policy(engine_of):
    """V03: `kv_load_failure_policy=fail` ends the request with an error, once, and its blocks come back."""
    engine = waiting_engine(engine_of, policy="fail")
    engine.agent.say(failed(valid_until=16))
    engine.step()
    assert engine.finish_reason("r") is FinishReason.ERROR
    engine.steps(2)
    assert engine.is_clean


@starts_over
def test_an_unfenced_failure_starts_over_in_other_blocks(engine_of):
    """The old blocks are pinned until nobody can write into them; the request does not wait for that."""
    engine = waiting_engine(engine_of, prompt=70)
    old = engine.blocks_of("r")[:5]
    engine.agent.say(failed(valid_until=40, fenced=False))
    engine.step()
    assert engine.side.consumer.quarantined_blocks == 5
    planned = engine.step()
    assert planned.num_scheduled_tokens == {"r": 64}
    assert not set(engine.blocks_of("r")) & set(old)
    engine.steps(4)
    assert engine.finish_reason("r") is FinishReason.LENGTH
    assert engine.pool.get_num_free_blocks() == engine.blocks_free_at_start - 5
    assert engine.scheduler.has_requests()
    engine.agent.say(BlocksSafe("transfer-one", "r"))
    engine.steps(1)
    assert engine.is_clean


@starts_over
def test_an_unfenced_failure_behind_a_local_prefix_leaves_its_sharers_alone(engine_of):
    """Another request that uses the same cached prefix is not recomputed."""
    engine = engine_of()
    engine.add("sharer", 40, max_tokens=30)
    engine.steps(2)
    engine.add("r", 70, SOURCE)
    engine.step()
    assert engine.agent.take()[-1].start == 32
    before = engine.scheduler.requests["sharer"].num_computed_tokens
    engine.agent.say(failed(valid_until=40, fenced=False))
    engine.step()
    assert engine.scheduler.requests["sharer"].num_computed_tokens > before
    engine.agent.say(BlocksSafe("transfer-one", "r"))
    engine.steps(40)
    assert engine.is_clean


@starts_over
def test_an_unfenced_failure_fails_under_the_other_policy_and_stays_pinned(engine_of):
    engine = waiting_engine(engine_of, policy="fail")
    engine.agent.say(failed(valid_until=0, fenced=False))
    engine.step()
    assert engine.finish_reason("r") is FinishReason.ERROR
    assert engine.pool.get_num_free_blocks() == engine.blocks_free_at_start - 3
    engine.agent.say(BlocksSafe("transfer-one", "r"))
    engine.steps(2)
    assert engine.is_clean


@pytest.mark.skipif(compat.can_fail_receives(), reason="this vLLM starts over at once")
def test_an_unfenced_failure_waits_for_the_fence_on_an_older_engine(engine_of):
    """0.29: the request waits, at most as long as the permission runs, and keeps what is good."""
    engine = waiting_engine(engine_of, prompt=70)
    engine.agent.say(failed(valid_until=40, fenced=False))
    engine.steps(3)
    assert engine.scheduler.requests["r"].status is RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.agent.say(BlocksSafe("transfer-one", "r"))
    engine.step()
    planned = engine.step()
    assert planned.num_scheduled_tokens == {"r": 70 - 32}
    engine.steps(4)
    assert engine.is_clean


def test_after_a_preemption_the_request_is_local(engine_of):
    """P27: no second registration, the tokens are recomputed, the producer hears nothing."""
    engine = waiting_engine(engine_of)
    engine.agent.say(received())
    engine.steps(2)
    engine.agent.take()
    request = engine.scheduler.requests["r"]
    engine.scheduler.running.remove(request)
    engine.scheduler._preempt_request(request, 0.0)
    engine.steps(4)
    assert engine.agent.take() == []
    assert engine.finish_reason("r") is FinishReason.LENGTH
    assert engine.is_clean


def test_received_kv_waits_for_memory(engine_of):
    """P29: KV is here, the next block is not; the state is kept and nothing is transferred again."""
    engine = engine_of(blocks=7, prefix_caching=False)
    engine.add("long", 32, max_tokens=12)
    engine.steps(1)
    engine.add("r", 48, SOURCE, max_tokens=3)
    engine.step()
    assert isinstance(engine.agent.take()[-1], Receive)
    engine.agent.say(received())
    engine.steps(30)
    assert engine.agent.take() == []
    assert engine.finish_reason("r") is FinishReason.LENGTH
    assert engine.finish_reason("long") is FinishReason.LENGTH
    assert engine.is_clean


def test_blocks_that_wait_are_capped_and_one_is_always_admitted(engine_of):
    """P61, and design.md 3.2: two engines must not starve each other."""
    engine = engine_of(blocks=21, extra=(("waiting_blocks_share", 0.3),))
    for name in ("a", "b"):
        engine.add(name, 100, SOURCE | {"transfer_id": f"transfer-{name}"})
    engine.step()
    opened = [command.consumer for command in engine.agent.take() if isinstance(command, Receive)]
    assert opened == ["a"]
    engine.step()
    assert engine.agent.take() == []
    engine.agent.say(received("a", "transfer-a"))
    engine.steps(2)
    assert [command.consumer for command in engine.agent.take() if isinstance(command, Receive)] == ["b"]
    engine.agent.say(received("b", "transfer-b"))
    engine.steps(4)
    assert engine.is_clean


def test_an_engine_that_is_stuck_gives_destinations_back_whose_prefill_has_not_begun(engine_of):
    """P61, G07: the memory of one request waits for a producer that waits for the memory of others."""
    engine = engine_of(blocks=21, extra=(("waiting_blocks_share", 0.3), ("starved_seconds", 5.0)))
    now = [100.0]
    engine.side._clock = lambda: now[0]
    for name in ("a", "b"):
        engine.add(name, 100, SOURCE | {"transfer_id": f"transfer-{name}"})
    engine.step()
    engine.agent.take()
    for _ in range(5):
        engine.step()
        now[0] += 1.0
    assert engine.agent.take() == [], "it may still be a matter of time"
    engine.step()
    [given_up] = engine.agent.take()
    assert given_up == Relinquish("transfer-a", "a")
    engine.agent.say(ReceiveFailed("transfer-a", "a", "starved", 0, fenced=True))
    engine.steps(3)
    assert [command.consumer for command in engine.agent.take() if isinstance(command, Receive)] == ["b"]


def test_an_engine_that_is_stuck_takes_leases_back_when_it_has_no_destination_to_give(engine_of):
    """G07: its own request waits for what it has handed out; the longest held lease goes first."""
    engine = engine_of(blocks=21, extra=(("starved_seconds", 5.0),))
    now = [100.0]
    engine.side._clock = lambda: now[0]
    for first, name in ((1, "one"), (2, "two")):
        engine.add(
            name, range(first, first + 150), {"do_remote_decode": True, "transfer_id": f"lease-{name}"}
        )
        engine.steps(3)
    assert engine.side.producer.held_count == 2
    engine.add("r", 40, SOURCE)
    engine.step()
    engine.agent.take()
    found = []
    for _ in range(11):
        now[0] += 1.0
        engine.step()
        found += [(now[0] - 100.0, command.transfer) for command in engine.agent.take()]
    assert found == [(5.0, "lease-one"), (10.0, "lease-two")]
    engine.agent.say(Released("lease-one", "starved"))
    engine.steps(2)
    [command] = engine.agent.take()
    assert isinstance(command, Receive)


def test_an_engine_that_computes_is_not_stuck(engine_of):
    """The memory comes back when what runs has ended."""
    engine = engine_of(blocks=21, extra=(("waiting_blocks_share", 0.3), ("starved_seconds", 5.0)))
    now = [100.0]
    engine.side._clock = lambda: now[0]
    engine.add("local", 20, None, max_tokens=64)
    for name in ("a", "b"):
        engine.add(name, 100, SOURCE | {"transfer_id": f"transfer-{name}"})
    for _ in range(20):
        engine.step()
        now[0] += 1.0
    assert not [command for command in engine.agent.take() if isinstance(command, Relinquish)]


def test_a_step_that_computes_starts_the_wait_of_a_stuck_engine_anew(engine_of):
    engine = engine_of(blocks=21, extra=(("waiting_blocks_share", 0.3), ("starved_seconds", 5.0)))
    now = [100.0]
    engine.side._clock = lambda: now[0]
    for name in ("a", "b"):
        engine.add(name, 100, SOURCE | {"transfer_id": f"transfer-{name}"})
    for _ in range(4):
        engine.step()
        now[0] += 1.0
    engine.add("local", 20, None)
    engine.step()
    engine.agent.take()
    for _ in range(5):
        engine.step()
        now[0] += 1.0
    assert engine.agent.take() == []
    engine.step()
    assert engine.agent.take() == [Relinquish("transfer-a", "a")]


@starts_over
def test_quarantine_past_its_share_admits_no_more(engine_of):
    engine = waiting_engine(engine_of, prompt=70, extra=(("quarantine_share", 0.05),))
    engine.agent.say(failed(valid_until=0, fenced=False))
    engine.steps(4)
    assert not engine.side.consumer.ready
    engine.agent.take()
    engine.add("next", 50, SOURCE | {"transfer_id": "transfer-next"})
    engine.steps(2)
    assert [type(command) for command in engine.agent.take()] == [AnnounceCommand]
    engine.agent.say(BlocksSafe("transfer-one", "r"))
    engine.steps(2)
    assert isinstance(engine.agent.take()[-1], Receive)


def test_ranks_receive_together(engine_of):
    """The request runs when both ranks have their part; a failure of one is a failure, from the worse end."""
    engine = waiting_engine(engine_of, prompt=70, ranks=2)
    engine.agents[0].say(received())
    engine.steps(2)
    assert engine.scheduler.requests["r"].status is RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.agents[1].say(failed(valid_until=20))
    engine.step()
    planned = engine.step()
    assert planned.num_scheduled_tokens == {"r": 70 - 16}
    engine.steps(4)
    assert engine.counters("kvferry_transfers") == {("push", "failed", "peer_silent"): 1}
    assert engine.is_clean


@starts_over
def test_one_unfenced_rank_quarantines_for_all(engine_of):
    engine = waiting_engine(engine_of, prompt=70, ranks=2)
    engine.agents[0].say(failed(valid_until=0, fenced=False))
    engine.steps(2)
    engine.agents[1].say(failed(valid_until=32, fenced=False))
    engine.steps(4)
    assert engine.finish_reason("r") is FinishReason.LENGTH
    assert engine.side.consumer.quarantined_blocks == 5
    engine.agents[0].say(BlocksSafe("transfer-one", "r"))
    engine.steps(1)
    assert engine.side.consumer.quarantined_blocks == 5
    engine.agents[1].say(BlocksSafe("transfer-one", "r"))
    engine.steps(4)
    assert engine.side.consumer.quarantined_blocks == 0
    assert engine.is_clean


def test_a_refused_registration_recomputes(engine_of):
    engine = engine_of()
    engine.agent.refuse = True
    engine.add("r", 40, SOURCE)
    engine.steps(4)
    assert engine.finish_reason("r") is FinishReason.LENGTH
    assert engine.is_clean


def test_children_of_one_prompt_each_register_for_themselves(engine_of):
    """P19: n > 1 shares the transfer and differs in the consumer."""
    engine = engine_of()
    for child in ("0_r", "1_r"):
        engine.add(child, 40, SOURCE | {"consumers": 2})
    engine.step()
    receives = [command for command in engine.agent.take() if isinstance(command, Receive)]
    assert [(receive.transfer, receive.consumer) for receive in receives] == [
        ("transfer-one", "0_r"),
        ("transfer-one", "1_r"),
    ]
    engine.agent.say(received("0_r"), received("1_r"))
    engine.steps(3)
    assert engine.is_clean


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"do_remote_prefill": "yes"}, "do_remote_prefill"),
        (SOURCE | {"remote_port": 10**9}, "remote_port"),
        (SOURCE | {"remote_port": -1}, "remote_port"),
        (SOURCE | {"tp_size": 10**9}, "tp_size"),
        (SOURCE | {"pp_size": 0}, "pp_size"),
        (SOURCE | {"remote_host": None}, "remote_host"),
        (SOURCE | {"remote_engine_id": ["x"]}, "remote_engine_id"),
        (SOURCE | {"transfer_id": "no"}, "transfer_id"),
        (SOURCE | {"transfer_mode": "shove"}, "transfer_mode"),
        (SOURCE | {"do_remote_decode": True}, "do_remote_decode"),
        (["not", "an", "object"], "params"),
    ],
)
def test_malformed_params_run_locally_and_are_counted(engine_of, params, field):
    """S01, V01: nothing is contacted, the request and the engine live; the front end refuses them before."""
    engine = engine_of()
    # vLLM's own code reads the params as a dictionary when a request is added.
    request = engine.add("other", 10)
    request.kv_transfer_params = params
    engine.side.arrived(request)
    engine.steps(3)
    assert engine.agent.take() == []
    assert engine.finish_reason("other") is FinishReason.LENGTH
    assert engine.counters("kvferry_refused_params") == {(field,): 1}
    assert engine.is_clean


def test_a_leg_for_the_other_role_runs_locally(engine_of):
    engine = engine_of(role="kv_producer")
    engine.add("r", 40, SOURCE)
    engine.steps(2)
    assert engine.agent.take() == []
    assert engine.finish_reason("r") is FinishReason.LENGTH
    assert engine.is_clean


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_an_engine_that_names_a_producer_which_does_not_fit_is_not_ready(engine_of, policy):
    """V13: healthy servers of which every request fails would be no help; the request ends in a few steps."""
    engine = waiting_engine(engine_of, policy=policy)
    engine.agent.say(failed(valid_until=0, reason="geometry: dtype differs"))
    engine.steps(4)
    reason = FinishReason.LENGTH if policy == "recompute" else FinishReason.ERROR
    assert engine.finish_reason("r") is reason
    assert engine.stats.data["gauges"]["kvferry_ready"] == 0
    engine.add("next", 40, SOURCE | {"transfer_id": "transfer-two"})
    engine.step()
    engine.agent.say(received("next", "transfer-two"))
    engine.steps(4)
    assert engine.stats.data["gauges"]["kvferry_ready"] == 1
