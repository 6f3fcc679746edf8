"""Pull under vLLM's own scheduler: what each side asks its agents for, what it answers, what it counts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.config import KVTransferConfig
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine import FinishReason

from kvferry.connector import admission
from kvferry.handoff import DecodeParams, parse_request
from kvferry.protocol.commands import AnnounceCommand, Receive, Received, ReceiveFailed, Released, Withdraw
from tests.support.legs import DECODE, PREFILL, of

PULLED = DECODE | {"transfer_mode": "pull"}
HELD = {"remote_num_tokens": 40, "remote_request_id": "cmpl-a-0-0123abcd", "remote_block_ids": [[1, 2, 3]]}
"""What a decode leg says besides once prefill has ended."""


def receive_of(engine, params, prompt=40):
    engine.add("r", prompt, params, max_tokens=2)
    engine.step()
    (receive,) = of(Receive, engine.agent.take())
    return receive


@pytest.mark.parametrize("default", ["push", "pull"])
@pytest.mark.parametrize("asked", [None, "push", "pull"])
def test_each_request_decides_who_moves_the_bytes(engine_of, default, asked):
    engine = engine_of(extra=(("transfer_mode", default),))
    receive = receive_of(engine, DECODE | ({} if asked is None else {"transfer_mode": asked}))
    assert receive.mode == (asked or default)
    assert receive.patient
    engine.agent.say(Received("transfer-one", "r", 1000))
    engine.steps(4)
    end = "written" if receive.mode == "push" else "fetched"
    assert engine.counters("kvferry_transfers") == {(receive.mode, "completed", end): 1}
    assert engine.counters("kvferry_transfer_bytes") == {(receive.mode,): 1000}
    assert engine.is_clean


@pytest.mark.parametrize("prefill_ended", [False, True])
def test_who_comes_after_prefill_does_not_wait_for_a_leg_that_never_comes(engine_of, prefill_ended):
    """V01: a producer that does not know the transfer then never will; nothing is read of block ids."""
    params = PULLED | HELD if prefill_ended else PULLED
    engine, forged = engine_of(), engine_of()
    receive = receive_of(engine, params)
    assert receive.patient is not prefill_ended
    other = receive_of(forged, params | {"remote_block_ids": [[61, 62, 63]]})
    assert (other.groups, other.start, other.stop) == (receive.groups, 0, 40)


def test_a_refused_reference_is_computed_here(engine_of):
    """P14, V01: a lease that has ended, a forged id, another life of the producer: all the same to us."""
    engine = engine_of()
    receive_of(engine, PULLED | HELD)
    engine.agent.say(ReceiveFailed("transfer-one", "r", "unknown_transfer", 0, fenced=True))
    engine.step()
    assert engine.step().num_scheduled_tokens == {"r": 40}
    engine.steps(3)
    assert engine.finish_reason("r") is FinishReason.LENGTH
    assert engine.counters("kvferry_transfers") == {("pull", "failed", "unknown_transfer"): 1}
    assert engine.counters("kvferry_lost_tokens") == {(): 40}
    assert engine.is_clean


def test_nothing_is_read_where_everything_is_here(engine_of):
    engine = engine_of()
    engine.add("warm", 49)
    engine.steps(2)
    engine.add("r", 49, PULLED | HELD)
    assert engine.step().num_scheduled_tokens == {"r": 1}
    assert [type(command) for command in engine.agent.take()] == [AnnounceCommand, Withdraw]
    engine.steps(2)
    assert engine.counters("kvferry_transfers") == {("pull", "skipped", "prefix_hit"): 1}
    assert engine.is_clean


def test_who_leaves_before_it_has_memory_is_counted_in_its_mode(engine_of):
    """P17."""
    engine = engine_of(blocks=8)
    engine.add("first", 100, max_tokens=8)
    engine.steps(2)
    engine.add("r", 60, PULLED)
    engine.step()
    engine.abort("r")
    engine.steps(10)
    assert engine.counters("kvferry_transfers") == {("pull", "skipped", "not_admitted"): 1}
    assert engine.is_clean


# --- the producer ------------------------------------------------------------------------------------


@pytest.mark.parametrize("default", ["push", "pull"])
@pytest.mark.parametrize("asked", [None, "push", "pull"])
def test_the_answer_of_a_prefill_leg_is_the_decode_leg(engine_of, default, asked):
    """P09: it tells the mode that the request has, and that prefill has ended."""
    engine = engine_of(extra=(("transfer_mode", default),))
    engine.add("r", 40, PREFILL | ({} if asked is None else {"transfer_mode": asked}))
    engine.steps(3)
    decode = parse_request(engine.answer("r"))
    assert isinstance(decode, DecodeParams)
    assert decode.transfer == "transfer-one"
    assert decode.mode == (asked or default)
    assert decode.prefilled_tokens == 40


def test_a_probe_learns_the_default_and_is_no_end_of_a_prefill(engine_of):
    engine = engine_of(extra=(("transfer_mode", "pull"),))
    engine.add("probe", 20, PREFILL | {"probe": True})
    engine.steps(2)
    answer = engine.answer("probe")
    assert answer["transfer_mode"] == "pull"
    assert not {"transfer_id", "remote_num_tokens"} & answer.keys()


@pytest.mark.parametrize(
    ("outcome", "counted"),
    [
        ("fetched", ("pull", "completed", "fetched")),
        # The consumer has decided otherwise.
        ("written", ("push", "completed", "written")),
        ("lease_expired", ("pull", "failed", "lease_expired")),
        ("cancelled", ("pull", "cancelled", "cancelled")),
    ],
)
def test_blocks_are_kept_until_the_reader_is_done_and_that_is_counted(engine_of, outcome, counted):
    engine = engine_of()
    engine.add("r", 40, PREFILL | {"transfer_mode": "pull"})
    engine.steps(4)
    assert engine.pool.get_num_free_blocks() == engine.blocks_free_at_start - 3
    engine.agent.say(Released("transfer-one", outcome))
    engine.steps(2)
    assert engine.counters("kvferry_transfers") == {counted: 1}
    assert engine.is_clean


# --- what is not allowed ------------------------------------------------------------------------------


@pytest.mark.parametrize("leg", [PREFILL, DECODE])
def test_a_mode_that_is_not_allowed_is_that_requests_error(engine_of, leg):
    """The front end refuses it; where it cannot, the request runs here and the next one is as ever."""
    engine = engine_of(extra=(("allowed_modes", ["push"]),))
    engine.add("r", 40, leg | {"transfer_mode": "pull"})
    engine.add("next", 40, leg | {"transfer_id": "transfer-next"})
    engine.steps(2)
    assert {command.transfer for command in engine.agent.take()} == {"transfer-next"}
    assert engine.counters("kvferry_refused_params") == {("transfer_mode",): 1}
    assert engine.finish_reason("r") is not None


def test_the_front_end_refuses_it_with_the_field_and_the_fix():
    transfer = KVTransferConfig(
        kv_connector="FerryConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"allowed_modes": ["pull"], "side_channel_port": 7000},
    )
    config = SimpleNamespace(kv_transfer_config=transfer)
    with pytest.raises(VLLMValidationError, match="allowed_modes; use 'pull'") as caught:
        admission.check_request(config, params_of(PREFILL | {"transfer_mode": "push"}))
    assert caught.value.parameter == "transfer_mode"
    admission.check_request(config, params_of(PREFILL))


def params_of(given):
    return SimpleNamespace(extra_args={"kv_transfer_params": given})
