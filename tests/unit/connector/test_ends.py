"""How requests end under vLLM's own scheduler: the first token, many at once, and after a failure."""

from __future__ import annotations

import itertools

import pytest
from vllm.v1.engine import FinishReason

from kvferry.connector import compat
from kvferry.protocol.commands import (
    Abandon,
    AnnounceCommand,
    BlocksSafe,
    Expect,
    Finish,
    Receive,
    Received,
    ReceiveFailed,
    Released,
    Withdraw,
)
from tests.support.legs import DECODE, PREFILL, of

EOS, TOKEN = 2, 7


def add(engine, name, prompt, params, *, ignore_eos=True, **sampling):
    """As `Engine.add`, where the end of text may end the request."""
    request = engine.add(name, prompt, params, **sampling)
    if not ignore_eos:
        request.sampling_params.ignore_eos = False
        request.sampling_params.update_from_generation_config({}, EOS)
    return request


def sampling_only(engine, token):
    """Let the engine's model say nothing but this token."""
    sampled = engine._sampled
    engine._sampled = lambda name, planned: [token] if sampled(name, planned) else []


# --- the prefill leg -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "token", "sampling", "reason"),
    [
        ("length", TOKEN, {"max_tokens": 1}, FinishReason.LENGTH),
        ("end of text", EOS, {"max_tokens": 5, "ignore_eos": False}, FinishReason.STOP),
        ("stop token", TOKEN, {"max_tokens": 5, "stop_token_ids": [TOKEN]}, FinishReason.STOP),
        ("stop string", TOKEN, {"max_tokens": 1}, FinishReason.LENGTH),
    ],
)
def test_however_the_prefill_leg_ends_by_itself_its_kv_is_handed_over(
    engine_of, how, token, sampling, reason
):
    """P24: not only a request that reached its length. vLLM finds stop strings in its front end, which then
    aborts a request that has ended already."""
    engine = engine_of()
    sampling_only(engine, token)
    add(engine, "r", 40, PREFILL, **sampling)
    engine.step()
    if how == "stop string":
        engine.abort("r")
    assert engine.finish_reason("r") is reason
    assert engine.answer("r")["transfer_id"] == "transfer-one"
    engine.steps(2)
    commands = engine.agent.take()
    assert len(of(Finish, commands)) == 1
    assert of(Abandon, commands) == []
    assert engine.pool.get_num_free_blocks() == engine.blocks_free_at_start - 3, "held for its consumer"
    engine.agent.say(Released("transfer-one", "written"))
    engine.steps(1)
    assert engine.is_clean


# --- the decode leg --------------------------------------------------------------------------------


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_first_token_that_ends_the_text_ends_the_request_unless_it_is_ignored(engine_of, ignore_eos):
    """P25: the decode engine samples the first token itself, so vLLM's own rules judge it."""
    engine = engine_of()
    sampling_only(engine, EOS)
    add(engine, "r", 40, DECODE, max_tokens=4, ignore_eos=ignore_eos)
    engine.steps(2)
    engine.agent.say(Received("transfer-one", "r", 1000))
    engine.steps(8)
    tokens = [token for output in engine.outputs["r"] for token in output.new_token_ids]
    assert tokens == [EOS] * (4 if ignore_eos else 1)
    assert engine.finish_reason("r") is (FinishReason.LENGTH if ignore_eos else FinishReason.STOP)
    assert engine.is_clean


def test_both_engines_speak_of_a_transfer_by_one_id_in_every_message(engine_of):
    """P09: their own request ids differ; lease, registration and withdrawal name the transfer alike."""
    producer, consumer = engine_of(), engine_of()
    params = {key: value for key, value in DECODE.items() if key != "transfer_id"}
    producer.add("cmpl-base-0-0000aaaa", 40, {"do_remote_decode": True})
    consumer.add("cmpl-base-0-0000bbbb", 40, params)
    producer.steps(2)
    consumer.steps(2)
    consumer.abort("cmpl-base-0-0000bbbb")
    consumer.steps(1)
    said = consumer.agent.take()
    assert [type(command) for command in said] == [AnnounceCommand, Receive, Withdraw]
    (expect,) = of(Expect, producer.agent.take())
    assert {command.transfer for command in said} == {expect.transfer}
    assert {command.consumer for command in said} == {"cmpl-base-0-0000bbbb"}


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_lease_that_ends_under_the_transfer_is_counted_on_both_sides(engine_of, policy):
    """P14: what came before the end is kept, the rest computed here or the request failed; no token of it
    leaves before that."""
    producer, consumer = engine_of(), engine_of(policy=policy)
    producer.add("r", 40, PREFILL)
    producer.steps(2)
    consumer.add("r", 40, DECODE, max_tokens=2)
    consumer.steps(2)
    producer.agent.say(Released("transfer-one", "lease_expired"))
    consumer.agent.say(ReceiveFailed("transfer-one", "r", "lease_expired", 32, fenced=True))
    producer.steps(1)
    consumer.step()
    assert not [token for output in consumer.outputs.get("r", ()) for token in output.new_token_ids]
    if policy == "recompute":
        assert consumer.step().num_scheduled_tokens == {"r": 40 - 32}
    consumer.steps(3)
    expected = FinishReason.LENGTH if policy == "recompute" else FinishReason.ERROR
    assert consumer.finish_reason("r") is expected
    for engine in (producer, consumer):
        assert engine.counters("kvferry_transfers") == {("push", "failed", "lease_expired"): 1}
        assert engine.is_clean


@pytest.mark.parametrize("stage", ["queue", "compute", "transfer"])
def test_a_prefill_leg_whose_client_leaves_stops_computing_at_once(engine_of, stage):
    """P63: not one more chunk of it is planned, a short request has the next step, and nothing is left."""
    engine = engine_of(step_tokens=32)
    if stage == "queue":
        engine.add("before", 60, max_tokens=2)
    engine.add("gone", 300 if stage == "compute" else 30, PREFILL)
    engine.steps(1)
    engine.abort("gone")
    engine.add("short", [5, 6, 7])
    planned = [engine.step().num_scheduled_tokens for _ in range(4)]
    assert not any("gone" in step for step in planned)
    assert "short" in planned[0] or (stage == "queue" and "short" in planned[1])
    engine.steps(2)
    assert engine.finish_reason("short") is FinishReason.LENGTH
    commands = engine.agent.take()
    ends = [type(command) for command in commands if isinstance(command, Finish | Abandon)]
    assert ends == [Finish if stage == "transfer" else Abandon]
    engine.agent.say(Released("transfer-one", "cancelled"))
    engine.steps(2)
    assert engine.is_clean


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("fenced", [True, False])
@pytest.mark.parametrize(("valid_until", "good"), [(0, 0), (15, 0), (16, 16), (40, 32), (59, 48), (60, 48)])
def test_what_a_failed_receive_left_behind_is_used_by_nobody(engine_of, valid_until, good, fenced, policy):
    """P54: the request itself goes on from the whole blocks that had arrived, or from nothing if they are in
    doubt; where it fails, the same prompt again finds no more than those in the prefix cache."""
    if not fenced and not compat.can_fail_receives():
        pytest.skip("this vLLM cannot throw one request's prefix away")
    engine = engine_of(policy=policy)
    left = 60 - (good if fenced else 0)
    engine.add("r", 60, DECODE, max_tokens=2)
    engine.steps(2)
    reason = "peer_lost: reset"
    engine.agent.say(ReceiveFailed("transfer-one", "r", reason, valid_until, fenced=fenced))
    engine.step()
    if policy == "recompute":
        assert engine.step().num_scheduled_tokens == {"r": left}
    else:
        assert engine.finish_reason("r") is FinishReason.ERROR
        engine.add("again", 60)
        assert engine.step().num_scheduled_tokens["again"] >= left
    if not fenced:
        engine.agent.say(BlocksSafe("transfer-one", "r"))
    engine.steps(4)
    assert engine.finish_reason("r" if policy == "recompute" else "again") is FinishReason.LENGTH
    assert engine.is_clean


def test_new_requests_never_get_blocks_that_a_consumer_still_reads(engine_of):
    """P44: from the end of prefill to the release the cache is filled again and again with other requests."""
    engine = engine_of(blocks=14)
    engine.add("r", 60, PREFILL)
    engine.step()
    (held,) = {tuple(engine.blocks_of("r"))}
    engine.steps(2)
    for number in range(12):
        engine.add(f"other-{number}", [7 * number + 3 * at + 1 for at in range(70)], max_tokens=4)
    seen = set()
    while any(name != "r" for name in engine.scheduler.requests):
        engine.step()
        for name in engine.scheduler.requests:
            if name != "r":
                seen.update(engine.blocks_of(name))
    assert len(seen) == 14 - 1 - len(held), "every block but the null block and the held ones was used"
    assert not seen & set(held)
    engine.agent.say(Released("transfer-one", "written"))
    engine.steps(1)
    assert engine.is_clean


# --- many at once ----------------------------------------------------------------------------------


def test_a_hundred_aborted_requests_of_a_producer_that_never_answers(engine_of):
    """P07: after the quarantine the pool is as at the start; late completions free nothing again."""
    engine = engine_of(blocks=320, extra=(("waiting_blocks_share", 1.0),))
    names = [f"r{number}" for number in range(100)]
    for number, name in enumerate(names):
        prompt = [number + 3 * at for at in range(40)]
        engine.add(name, prompt, DECODE | {"transfer_id": f"transfer-{name}"})
    engine.steps(3)
    opened = of(Receive, engine.agent.take())
    assert len(opened) == 100
    for name in names:
        engine.abort(name)
    engine.steps(2)
    held = sum(count for receive in opened for spans in receive.groups for _, count in spans)
    assert engine.pool.get_num_free_blocks() == engine.blocks_free_at_start - held
    for receive in opened:
        reason = "peer_silent: nothing heard for 10 s"
        engine.agent.say(
            ReceiveFailed(receive.transfer, receive.consumer, reason, 0, fenced=False, cancelled=True)
        )
    engine.steps(2)
    assert engine.pool.get_num_free_blocks() == engine.blocks_free_at_start - held
    engine.agent.say(*(BlocksSafe(receive.transfer, receive.consumer) for receive in opened))
    engine.steps(2)
    assert engine.is_clean
    engine.agent._results = [Received(receive.transfer, receive.consumer, 1) for receive in opened]
    engine.steps(2)
    assert engine.is_clean
    assert engine.counters("kvferry_transfers") == {("push", "cancelled", "peer_silent"): 100}


@pytest.mark.parametrize("first", ["a", "b"])
@pytest.mark.parametrize("apart", [0, 3])
def test_two_loads_that_need_more_than_there_is_both_finish(engine_of, first, apart):
    """P61: a pool of 7; one needs 4 blocks and 1 more while it decodes, the other 3 and 1 more. Loads cannot
    be preempted, and still nobody waits for ever, whichever arrives first."""
    engine = engine_of(blocks=8, prefix_caching=False, extra=(("waiting_blocks_share", 1.0),))
    engine.scheduler.scheduler_reserve_full_isl = False
    second = "b" if first == "a" else "a"
    for name, prompt in (("a", 64), ("b", 48)):
        tokens = [ord(name) + at for at in range(prompt)]
        engine.add(name, tokens, DECODE | {"transfer_id": f"transfer-{name}"}, max_tokens=6)
    engine.steps(2)
    assert engine.pool.get_num_free_blocks() == 0
    assert len(of(Receive, engine.agent.take())) == 2
    engine.agent.say(Received(f"transfer-{first}", first, 1))
    engine.steps(apart)
    engine.agent.say(Received(f"transfer-{second}", second, 1))
    engine.steps(60)
    assert [engine.finish_reason(name) for name in "ab"] == [FinishReason.LENGTH] * 2
    assert engine.agent.take() == [], "what was preempted is computed here"
    assert engine.is_clean


def test_many_loads_through_a_small_pool_all_finish(engine_of):
    """P61: twelve loads of different sizes, of which two fit at a time, answered in changing order."""
    engine = engine_of(blocks=10, prefix_caching=False)
    engine.scheduler.scheduler_reserve_full_isl = False
    sizes = itertools.cycle((20, 100, 47, 64))
    for number in range(12):
        params = DECODE | {"transfer_id": f"transfer-{number:04}"}
        engine.add(f"r{number}", [number + at for at in range(next(sizes))], params, max_tokens=5)
    waiting: list[Receive] = []
    for turn in range(400):
        engine.step()
        waiting += of(Receive, engine.agent.take())
        if waiting and turn % 3 == 0:
            receive = waiting.pop(turn % len(waiting))
            engine.agent.say(Received(receive.transfer, receive.consumer, 1))
    engine.flush()
    assert [engine.finish_reason(f"r{number}") for number in range(12)] == [FinishReason.LENGTH] * 12
    assert engine.is_clean
