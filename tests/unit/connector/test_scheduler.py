"""The scheduler side as a whole, under vLLM's own scheduler: cases that concern both kinds of request."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.v1.engine import FinishReason

from kvferry.host.events import PreemptAnswer
from kvferry.protocol.commands import (
    Abandon,
    AnnounceCommand,
    BlocksSafe,
    Expect,
    Finish,
    Preempt,
    Receive,
    Received,
    ReceiveFailed,
    Reclaim,
    Released,
    Withdraw,
)
from tests.support.legs import DECODE, PREFILL, of


def preempt(engine, name):
    """The engine takes a running request's blocks."""
    request = engine.scheduler.requests[name]
    engine.scheduler.running.remove(request)
    engine.scheduler._preempt_request(request, 0.0, drop_stale_output=True)


# --- what the engine must step for -----------------------------------------------------------------


def test_the_engine_steps_while_anything_is_to_be_said_or_heard(engine_of):
    """P59: an engine without requests to run still frees what others have let go of."""
    engine = engine_of()
    side = engine.side
    assert not side.needs_steps
    engine.add("r", 40, PREFILL)
    assert side.needs_steps, "its Expect is to be sent"
    engine.step()
    assert side.needs_steps, "its Finish is to be sent"
    engine.step()
    assert side.needs_steps, "its blocks are held"
    engine.agent.say(Released("transfer-one", "written"))
    engine.step()
    assert not side.needs_steps


def test_the_engine_steps_until_a_preemption_is_drained(engine_of):
    engine = engine_of(step_tokens=32, prefix_caching=False)
    engine.add("r", 60, PREFILL)
    engine.step()
    assert not engine.side.needs_steps
    engine.agent.drains = False
    preempt(engine, "r")
    engine.step()
    assert engine.side.needs_steps


def test_the_engine_steps_for_a_withdrawal_and_through_a_quarantine(engine_of):
    engine = engine_of()
    engine.add("r", 40, DECODE)
    assert engine.side.needs_steps, "its announcement is to be sent"
    engine.step()
    assert not engine.side.needs_steps
    engine.agent.say(ReceiveFailed("transfer-one", "r", "peer_silent", 0, fenced=False))
    engine.steps(4)
    quarantined = bool(engine.side.consumer.quarantined_blocks)
    assert engine.side.needs_steps is quarantined
    engine.agent.say(BlocksSafe("transfer-one", "r"))
    engine.steps(4)
    assert not engine.side.needs_steps
    assert engine.is_clean


# --- what is handed over ---------------------------------------------------------------------------


def test_a_request_that_is_aborted_while_it_decodes_hands_nothing_over(engine_of):
    """P24, P40: its prompt is computed, and still the abort is no normal end."""
    engine = engine_of()
    engine.add("r", 40, PREFILL, max_tokens=8)
    engine.steps(2)
    engine.abort("r")
    engine.steps(1)
    commands = engine.agent.take()
    assert of(Finish, commands) == []
    assert [command.reason for command in of(Abandon, commands)] == ["abandoned: prefill aborted"]
    engine.agent.say(Released("transfer-one", "abandoned"))
    engine.steps(1)
    assert engine.is_clean


def test_a_request_whose_blocks_are_taken_in_its_last_step_hands_nothing_over(engine_of):
    """P28: what was published is gone; a normal end does not bring it back."""
    engine = engine_of()
    request = engine.add("r", 40, PREFILL, max_tokens=8)
    engine.step()
    preempt(engine, "r")
    planned = engine.side.plan(_planned_preemption("r"))
    assert isinstance(planned.preempt, Preempt)
    request.status = type(request.status).FINISHED_LENGTH_CAPPED
    keep, answer = engine.side.finish(request)
    assert keep, "it was published, so each rank reports it"
    assert answer is None
    (abandon,) = of(Abandon, engine.side.producer._commands)
    assert abandon.reason.startswith("incomplete")


def test_the_engine_waits_for_a_preemptions_answer_and_not_for_its_drain(engine_of):
    """G12: blocks come back at once or after a while; in between the scheduler preempts nobody else."""
    engine = engine_of(ranks=2)
    engine.add("r", 40, PREFILL, max_tokens=8)
    engine.step()
    preempt(engine, "r")
    producer = engine.side.producer
    ticket = engine.side.plan(_planned_preemption("r")).preempt.ticket
    assert producer.has_pending_frees(), "no rank has answered"
    producer.answered(PreemptAnswer(0, ticket, drained=False))
    assert producer.has_pending_frees(), "one rank has not answered"
    producer.answered(PreemptAnswer(1, ticket, drained=True))
    assert not producer.has_pending_frees()
    assert producer.quarantined_blocks == 3
    producer.answered(PreemptAnswer(0, ticket, drained=True))
    assert producer.quarantined_blocks == 0


def _planned_preemption(name):
    """A step that does nothing but preempt."""
    cached = SimpleNamespace(req_ids=(), resumed_req_ids=(), new_block_ids=(), num_computed_tokens=())
    return SimpleNamespace(
        preempted_req_ids=(name,),
        scheduled_new_reqs=(),
        scheduled_cached_reqs=cached,
        num_scheduled_tokens={},
        total_num_scheduled_tokens=0,
    )


@pytest.mark.parametrize("params", [{}, None])
def test_empty_params_are_none(engine_of, params):
    """P31: a wrapper or a router that sends an empty object asks for nothing, and gets nothing back."""
    engine = engine_of()
    engine.add("r", 40, params)
    engine.steps(2)
    assert engine.agent.take() == []
    assert engine.answer("r") is None
    assert engine.counters("kvferry_refused_params") == {}
    assert engine.is_clean


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("cmpl-abc-0-01234567", "cmpl-abc-0-89abcdef"),
        ("cmpl-abc-0-01234567", "0_cmpl-abc-0-89abcdef"),
        ("chatcmpl-abc", "chatcmpl-abc-89abcdef"),
    ],
)
def test_legs_pair_though_each_engine_adds_its_own_suffix(engine_of, first, second):
    """P20, P21: producer and consumer speak of one transfer without a `transfer_id`."""
    producer, consumer = engine_of(), engine_of()
    producer.add(first, 40, {"do_remote_decode": True})
    consumer.add(second, 40, {key: value for key, value in DECODE.items() if key != "transfer_id"})
    producer.step()
    consumer.step()
    (receive,) = of(Receive, consumer.agent.take())
    assert producer.agent.take()[0].transfer == receive.transfer
    assert receive.consumer == second


# --- what is asked for -----------------------------------------------------------------------------


def test_the_incarnation_that_the_router_knows_is_the_one_that_is_asked(engine_of):
    """A21, V24: a restarted producer is another source, whatever its address."""
    engine = engine_of()
    for number in (1, 2):
        changes = {"transfer_id": f"transfer-{number}", "kvferry_incarnation": f"life-{number}"}
        engine.add(f"r{number}", 40, DECODE | changes | {"tp_size": 2, "pp_size": 3})
    engine.step()
    receives = of(Receive, engine.agent.take())
    assert [receive.source.incarnation for receive in receives] == ["life-1", "life-2"]
    assert receives[0].source != receives[1].source
    assert (receives[0].source.tp, receives[0].source.pp) == (2, 3)


def test_twenty_warm_repeats_receive_only_what_is_missing_and_leave_nothing(engine_of):
    """P57: with a warm prefix only the rest is registered; everything received is given back each time."""
    engine = engine_of()
    free = []
    for number in range(20):
        name = f"r{number}"
        transfer = f"transfer-{number:04}"
        engine.add(name, 100, DECODE | {"transfer_id": transfer}, max_tokens=2)
        engine.step()
        commands = engine.agent.take()
        for receive in of(Receive, commands):
            assert (receive.start, receive.stop) == (0 if number == 0 else 96, 100)
            engine.agent.say(Received(transfer, name, 1))
        assert len(of(Receive, commands)) == 1
        engine.steps(5)
        assert engine.finish_reason(name) is FinishReason.LENGTH
        assert engine.is_clean
        free.append(engine.pool.get_num_free_blocks())
    assert set(free) == {engine.blocks_free_at_start}


def test_local_blocks_do_not_count_against_the_cap_of_waiting_ones(engine_of):
    """P61: what is capped are blocks that wait for remote KV, not those that a prefix hit has here."""
    engine = engine_of(blocks=41, extra=(("waiting_blocks_share", 0.2),))
    engine.add("warm", 160)
    engine.steps(4)
    engine.add("first", list(range(100, 164)), DECODE | {"transfer_id": "transfer-first"})
    engine.step()
    engine.add("second", 180, DECODE | {"transfer_id": "transfer-second"})
    engine.step()
    opened = {receive.consumer: receive.start for receive in of(Receive, engine.agent.take())}
    assert opened == {"first": 0, "second": 160}


def test_kv_that_arrives_while_others_decode_is_used_in_the_next_step(engine_of):
    """V28: no prefill step is needed for a receipt to be noticed."""
    engine = engine_of()
    engine.add("decoding", 20, max_tokens=50)
    engine.steps(2)
    engine.add("r", 40, DECODE, max_tokens=2)
    engine.steps(3)
    engine.agent.say(Received("transfer-one", "r", 1))
    assert set(engine.step().num_scheduled_tokens) == {"decoding"}
    assert engine.step().num_scheduled_tokens == {"decoding": 1, "r": 1}


def test_blocks_that_a_step_under_way_still_writes_are_nobodys_target(engine_of):
    """P60: a request ends while the step behind it is under way; its blocks wait for that step's end."""
    engine = engine_of(depth=2, blocks=8, prefix_caching=False)
    engine.add("ends", 60, max_tokens=9, stop_token_ids=[7])
    engine.step()
    engine.step()
    assert "ends" not in engine.scheduler.requests
    assert "ends" in engine._planned[-1][0].num_scheduled_tokens, "its next step is under way"
    engine.add("r", 80, DECODE)
    engine.step()
    assert of(Receive, engine.agent.take()) == []
    engine.step()
    assert len(of(Receive, engine.agent.take())) == 1


@pytest.mark.parametrize("when", ["queued", "receiving", "received", "decoding"])
def test_a_client_that_leaves_at_any_stage_leaves_nothing(engine_of, when):
    """P63, P52: wherever the cancel meets the request, its blocks come back once, and the producer hears."""
    engine = engine_of()
    engine.add("r", 40, DECODE, max_tokens=9)
    if when != "queued":
        engine.steps(2)
    if when in ("received", "decoding"):
        engine.agent.say(Received("transfer-one", "r", 1))
        engine.steps(1 if when == "received" else 3)
    engine.abort("r")
    engine.steps(2)
    said = [type(command) for command in engine.agent.take()]
    assert (
        said
        == {
            "queued": [AnnounceCommand, Withdraw],
            "receiving": [AnnounceCommand, Receive, Withdraw],
            "received": [AnnounceCommand, Receive],
            "decoding": [AnnounceCommand, Receive],
        }[when]
    )
    if when == "receiving":
        engine.agent.say(ReceiveFailed("transfer-one", "r", "cancelled", 0, fenced=True, cancelled=True))
        engine.steps(1)
    assert engine.is_clean


@pytest.mark.parametrize("reason", ["peer_lost: x", "peer_silent", "handshake: refused", "geometry: dtype"])
def test_a_fallback_is_counted_with_its_reason(engine_of, reason):
    """V19: a prompt that is computed here after all shows in the metrics, and why."""
    engine = engine_of()
    engine.add("r", 40, DECODE)
    engine.step()
    engine.agent.say(ReceiveFailed("transfer-one", "r", reason, 0, fenced=True))
    engine.steps(4)
    assert engine.finish_reason("r") is FinishReason.LENGTH
    assert engine.counters("kvferry_transfers") == {("push", "failed", reason.partition(":")[0]): 1}


def test_a_probe_is_no_transfer(engine_of):
    """A probe's id, should it carry one, stays free for a transfer."""
    engine = engine_of()
    engine.add("probe", 20, PREFILL | {"probe": True})
    engine.add("r", 40, PREFILL)
    engine.steps(2)
    assert engine.answer("r")["transfer_id"] == "transfer-one"
    assert engine.counters("kvferry_refused_params") == {}
    engine.agent.say(Released("transfer-one", "written"))
    engine.steps(1)
    assert engine.is_clean


def test_gauges_are_said_when_they_change(engine_of):
    """An idle engine has nothing to say, step after step."""
    side = engine_of().side
    assert side.take_stats() is not None
    assert side.take_stats() is None


def test_publishing_again_closes_the_directory_before(engine_of):
    engine = engine_of()
    opened = []

    def open_directory(settings, handshakes):
        opened.append(SimpleNamespace(port=1, closed=0))
        opened[-1].close = lambda one=opened[-1]: setattr(one, "closed", one.closed + 1)
        return opened[-1]

    engine.side._open_directory = open_directory
    handshakes = [SimpleNamespace(incarnation="first")]
    engine.side.publish(handshakes)
    engine.side.publish(handshakes)
    assert [one.closed for one in opened] == [1, 0]
    engine.side.close()
    engine.side.close()
    assert [one.closed for one in opened] == [1, 1]


def test_a_released_transfer_is_reclaimed_and_nothing_else(engine_of):
    """P17, P49: whoever dispatched it says that nobody will come; that request hands nothing over."""
    engine = engine_of()
    for name in ("one", "two"):
        engine.add(name, 40, PREFILL | {"transfer_id": f"transfer-{name}"})
    engine.steps(3)
    engine.agent.take()
    engine.add("say", 8, PREFILL | {"transfer_id": "transfer-two", "release": True})
    engine.steps(2)
    commands = engine.agent.take()
    assert [command.transfer for command in of(Reclaim, commands)] == ["transfer-two"]
    assert of(Expect, commands) == []
    engine.add("again", 8, PREFILL | {"transfer_id": "transfer-unknown", "release": True})
    engine.steps(2)
    assert engine.agent.take() == []
    for name in ("one", "two"):
        engine.agent.say(Released(f"transfer-{name}", "cancelled"))
    engine.steps(3)
    assert engine.is_clean
