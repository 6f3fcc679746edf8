"""Conversations over real agents: what a decode engine keeps after a turn is the next prefill's history.

vLLM's schedulers, real bytes that are checked before use on either engine, no network.
"""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from vllm.v1.engine import FinishReason

from tests.support.ferry_pair import Pair
from tests.support.vllm_engine import Shape, write_config

TRANSFERS, HOLDS, HISTORIES = "kvferry_transfers", "kvferry_holds", "kvferry_histories"
SAMPLED = 7
FOREVER = 600.0


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory):
    return write_config(tmp_path_factory.mktemp("model"))


@pytest.fixture
def pair_of(model_directory):
    pairs = []

    def make(producer=None, consumer=None, seconds=FOREVER, share=0.5, threshold=0):
        extra = (
            ("bidirectional_kv_xfer", True),
            ("decoder_kv_blocks_ttl", seconds),
            ("held_blocks_share", share),
            ("kv_recompute_threshold", threshold),
        )
        shapes = {
            "producer": Shape(**({"engine_id": "p", "extra": extra} | (producer or {}))),
            "consumer": Shape(**({"engine_id": "d", "extra": extra} | (consumer or {}))),
        }
        pairs.append(Pair(model_directory, **shapes))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


def send(pair, name, prompt, history=None, mode="push", max_tokens=20):
    """Both legs of one turn."""
    transfer = {"transfer_id": f"transfer-{name}", "transfer_mode": mode}
    pair.producer.engine.add(name, prompt, (history or {}) | {"do_remote_decode": True} | transfer)
    decode = pair.decode_params(f"transfer-{name}") | transfer
    pair.consumer.engine.add(name, prompt, decode, max_tokens=max_tokens)


def answered(pair, name):
    """Run until a turn has its answer: what D keeps of it."""
    ended = [pair.consumer.engine.finish_reason, pair.producer.engine.finish_reason]
    pair.run_until(lambda: all(reason(name) is not None for reason in ended))
    assert pair.consumer.engine.finish_reason(name) is FinishReason.LENGTH
    return pair.consumer.engine.answer(name)


def drop_holds(pair):
    """Nothing that is kept is wanted any more: step both engines until they are as at their start."""
    pair.consumer.engine.scheduler.connector.reset_cache()
    steps_to_clean(pair)


def steps_to_clean(pair):
    def one_more():
        for member in (pair.producer, pair.consumer):
            member.engine.step()
            member.engine.flush()
        return pair.is_clean

    pair.run_until(one_more)


SIDES = [
    ({}, {}),
    ({"prefix_caching": False}, {}),
    ({"prefix_caching": False}, {"prefix_caching": False}),
    ({"prefix_caching": False, "ranks": 2}, {"ranks": 1, "kv_heads": 4}),
    ({"block_tokens": 32, "prefix_caching": False}, {"block_tokens": 16}),
    ({"depth": 2}, {"depth": 2}),
]


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize(("producer", "consumer"), SIDES)
def test_each_turn_computes_only_what_is_new(pair_of, mode, producer, consumer):
    """Four turns, a new one each time from the user: P computes it, and of the history at most one block."""
    if "ranks" in producer:
        producer = producer | {"kv_heads": 4}
    pair = pair_of(producer, consumer)
    prompt, history = list(range(150)), None
    new = 150
    for turn in range(4):
        name = f"turn-{turn}"
        send(pair, name, prompt, history, mode)
        history = answered(pair, name)
        assert history["remote_num_tokens"] == len(prompt) + 19
        assert pair.producer.computed_tokens[name] <= new + pair.producer.shape.block_tokens
        prompt = prompt + [SAMPLED] * 20 + list(range(turn, turn + 37))
        new = 37
    outcome = ("pull", "completed", "fetched") if mode == "pull" else ("push", "completed", "written")
    histories = pair.producer.engine.counters(HISTORIES)
    assert histories == {("asked",): 3}
    assert pair.producer.engine.counters(TRANSFERS)[outcome] == 4 + 3, "what it handed over, and histories"
    assert pair.consumer.engine.counters(HOLDS) == {("used",): 3}
    drop_holds(pair)


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_only_the_common_beginning_of_a_history_is_used(pair_of, mode):
    """V01: a template wrote the answer otherwise than it was sampled; KV of other tokens is never used."""
    pair = pair_of({"prefix_caching": False})
    send(pair, "one", list(range(100)), max_tokens=50)
    history = answered(pair, "one")
    prompt = list(range(100)) + [9] * 50
    send(pair, "two", prompt, history, mode)
    answered(pair, "two")
    # The prompt of the first turn is the longest told beginning that is equal; in whole blocks.
    assert pair.producer.computed_tokens["two"] == 150 - 96
    send(pair, "three", [5] * 150, pair.consumer.engine.answer("two"), mode)
    answered(pair, "three")
    assert pair.producer.computed_tokens["three"] == 150
    assert pair.producer.engine.counters(HISTORIES) == {("asked",): 1, ("other_tokens",): 1}
    pair.run_until(lambda: pair.consumer.engine.step() and len(pair.consumer.engine.side.holding) == 1)
    drop_holds(pair)


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_a_turn_that_comes_too_late_is_prefilled(pair_of, mode):
    """P14: the time of what was kept is over; nobody reads it, and nothing waits for it."""
    pair = pair_of({"prefix_caching": False}, seconds=0.2)
    send(pair, "one", 100)
    history = answered(pair, "one")
    pair.run_until(lambda: pair.consumer.engine.step() and not len(pair.consumer.engine.side.holding))
    assert pair.consumer.engine.counters(HOLDS) == {("expired",): 1}
    send(pair, "two", list(range(100)) + [SAMPLED] * 20, history, mode)
    answered(pair, "two")
    assert pair.producer.computed_tokens["two"] == 120
    failed = [labels for labels in pair.producer.engine.counters(TRANSFERS) if labels[1] == "failed"]
    assert failed == [(mode, "failed", "lease_expired")]
    drop_holds(pair)


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_a_decode_engine_that_died_is_not_waited_for(pair_of, mode):
    """P04: what it kept is gone; the prompt is computed, and decoded elsewhere."""
    pair = pair_of({"prefix_caching": False})
    send(pair, "one", 100)
    history = answered(pair, "one")
    for worker in pair.consumer.engine.workers:
        worker.close(5.0)
    params = {"do_remote_decode": True, "transfer_id": "transfer-two", "transfer_mode": mode}
    pair.producer.engine.add("two", list(range(100)) + [SAMPLED] * 20, history | params)
    pair.run_until(lambda: pair.producer.engine.finish_reason("two") is not None)
    assert pair.producer.computed_tokens["two"] == 120


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("steps", range(7))
def test_clients_that_leave_at_any_step_leave_nothing(pair_of, mode, steps):
    """P02: the second turn is given up while its history is announced, on its way, or here."""
    pair = pair_of({"prefix_caching": False})
    send(pair, "one", 100)
    history = answered(pair, "one")
    send(pair, "two", list(range(100)) + [SAMPLED] * 20, history, mode)
    for _ in range(steps):
        pair.step()
    pair.producer.engine.abort("two")
    pair.consumer.engine.abort("two")
    drop_holds(pair)


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_what_is_kept_is_given_back_before_anybody_waits(pair_of, share):
    """P63: a small cache full of holds, all to be kept for minutes: requests run as if there were none."""
    pair = pair_of(consumer={"blocks": 24}, share=share)
    for number in range(8):
        send(pair, f"r{number}", [number] * 120, max_tokens=40)
        answered(pair, f"r{number}")
    holds = pair.consumer.engine.counters(HOLDS)
    assert holds == ({("no_room",): 8} if share == 0.1 else {("reclaimed",): 6})
    for number in range(3):
        send(pair, f"long{number}", [100 + number] * 100, max_tokens=70)
    pair.run_until(lambda: all(pair.consumer.engine.finish_reason(f"long{n}") for n in range(3)))
    drop_holds(pair)


def test_a_short_history_is_computed(pair_of):
    """P knows all but a few tokens itself: what D keeps is told to be of no use at once."""
    pair = pair_of(threshold=64)
    send(pair, "one", 100)
    history = answered(pair, "one")
    send(pair, "two", list(range(100)) + [SAMPLED] * 20 + [1] * 10, history)
    answered(pair, "two")
    assert pair.producer.engine.counters(HISTORIES) == {("computed",): 1}
    assert pair.consumer.engine.counters(HOLDS) == {("unused",): 1}
    drop_holds(pair)


def test_a_router_asks_what_is_kept_of_a_streamed_turn(pair_of):
    """vLLM's streams end without params, so the decode leg's transfer is asked about, by one more request."""
    pair = pair_of()
    send(pair, "one", 100)
    kept = answered(pair, "one")
    probe = {"do_remote_decode": True, "probe": True}
    for name, of, told in (
        ("known", "transfer-one", kept["remote_transfer_id"]),
        ("unknown", "transfer-x", None),
    ):
        pair.consumer.engine.add(name, 1, probe | {"held_of": of})
        pair.run_until(lambda name=name: pair.consumer.engine.finish_reason(name) is not None)
        answer = pair.consumer.engine.answer(name)
        assert answer["holds"] is True
        assert answer.get("remote_transfer_id") == told
    drop_holds(pair)


def test_an_idle_engine_is_not_stepped_for_what_it_keeps(pair_of):
    """What is kept for minutes costs no step, and its end is heard with the next one that has a reason."""
    pair = pair_of(seconds=0.2)
    send(pair, "one", 100)
    answered(pair, "one")
    engine = pair.consumer.engine
    pair.run_until(lambda: not engine.scheduler.has_requests())
    assert len(engine.side.holding) == 1
    assert engine.side.needs_steps is False
    pair.run_until(lambda: engine.step() and engine.pool.get_num_free_blocks() == engine.blocks_free_at_start)
