"""Pull over the real agents: vLLM's schedulers, real bytes that are checked before use, no network."""

from __future__ import annotations

import os
from random import Random

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from vllm.v1.engine import FinishReason

from kvferry.connector import compat
from tests.support.ferry_pair import FAST, Pair
from tests.support.vllm_engine import Shape, write_config

windows = pytest.mark.skipif(
    not compat.can_fail_receives(), reason="this vLLM cannot throw one request's prefix away"
)
TRANSFERS = "kvferry_transfers"


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory):
    return write_config(tmp_path_factory.mktemp("model"))


@pytest.fixture
def pair_of(model_directory):
    pairs = []

    def make(seed=1, producer=None, consumer=None):
        shapes = {
            "producer": Shape(engine_id="p", role="kv_producer", **(producer or {})),
            "consumer": Shape(engine_id="d", role="kv_consumer", **(consumer or {})),
        }
        pairs.append(Pair(model_directory, seed=seed, **shapes))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


def prefill(pair, name, prompt, mode="pull"):
    """Run a prefill leg to its end; its answer."""
    engine = pair.producer.engine
    engine.add(
        name, prompt, {"do_remote_decode": True, "transfer_id": f"transfer-{name}", "transfer_mode": mode}
    )
    pair.run_until(lambda: engine.finish_reason(name) is not None)
    return engine.answer(name)


def read_bytes(pair):
    return sum(agent.snapshot()["bytes_read"] for agent in pair.consumer.agents)


@pytest.mark.parametrize("prompt", [1, 2, 17, 150])
def test_a_decode_leg_reads_what_the_prefill_legs_answer_names(pair_of, prompt):
    """P55, P56: only the last token is computed, only blocks that are needed are read, nothing is written."""
    pair = pair_of()
    pair.consumer.engine.add("r", prompt, prefill(pair, "r", prompt), max_tokens=4)
    pair.run_until(lambda: pair.is_clean)
    assert pair.consumer.engine.finish_reason("r") is FinishReason.LENGTH
    assert pair.consumer.computed_tokens["r"] == 4
    block_bytes = pair.consumer.block_bytes
    assert read_bytes(pair) == (-(-prompt // 16) * block_bytes if prompt > 1 else 0)
    assert pair.producer.agents[0].snapshot()["bytes_posted"] == 0
    done = (
        [("pull", "completed", "fetched")] * 2
        if prompt > 1
        else [("pull", "skipped", "prefix_hit"), ("pull", "cancelled", "cancelled")]
    )
    counted = [member.engine.counters(TRANSFERS) for member in (pair.consumer, pair.producer)]
    assert counted == [{one: 1} for one in done]


SHAPES = [
    ({"ranks": 2}, {"ranks": 2}),
    ({"ranks": 4}, {"ranks": 1}),
    ({"ranks": 1}, {"ranks": 2}),
    ({"stages": 2}, {"stages": 1}),
    ({"block_tokens": 16, "ranks": 2}, {"block_tokens": 48}),
    pytest.param({"window": 40}, {"window": 40}, marks=windows),
    pytest.param({"window": 40, "block_tokens": 32}, {"window": 40, "ranks": 2}, marks=windows),
]


@pytest.mark.parametrize(("producer", "consumer"), SHAPES)
def test_engines_of_unequal_shape(pair_of, producer, consumer):
    pair = pair_of(producer={"kv_heads": 2, **producer}, consumer={"kv_heads": 2, **consumer})
    pair.consumer.engine.add("r", 150, prefill(pair, "r", 150), max_tokens=4)
    pair.run_until(lambda: pair.is_clean)
    assert pair.consumer.computed_tokens["r"] == 4
    assert pair.producer.engine.counters(TRANSFERS) == {("pull", "completed", "fetched"): 1}


def test_what_the_consumer_has_is_not_read(pair_of):
    pair = pair_of()
    pair.consumer.engine.add("warm", 64)
    pair.run_until(lambda: pair.is_clean)
    pair.consumer.engine.add("r", 150, prefill(pair, "r", 150), max_tokens=4)
    pair.run_until(lambda: pair.is_clean)
    assert read_bytes(pair) == 6 * pair.consumer.block_bytes


def test_a_reference_whose_lease_has_ended_is_refused_and_not_read(pair_of):
    """P14, V01: its blocks belong to others by then; the request is computed at once, without a wait."""
    pair = pair_of()
    answer = prefill(pair, "r", 100)
    pair.run_until(lambda: pair.is_clean)
    assert pair.producer.engine.counters(TRANSFERS) == {("pull", "failed", "lease_expired"): 1}
    pair.producer.engine.add("other", list(range(100, 190)))
    pair.consumer.engine.add("r", 100, answer, max_tokens=4)
    pair.run_until(lambda: pair.is_clean)
    assert pair.consumer.computed_tokens["r"] == 103
    assert read_bytes(pair) == 0


@pytest.mark.parametrize("forged", ["transfer", "blocks"])
def test_a_forged_reference_reads_nothing_of_others(pair_of, forged):
    """V01: a transfer id that nobody minted gets nothing, and block ids of another are not looked at."""
    pair = pair_of()
    mine, theirs = prefill(pair, "mine", 100), prefill(pair, "theirs", list(range(100, 190)))
    if forged == "transfer":
        params = theirs | {"transfer_id": "transfer-guessed"}
    else:
        params = mine | {"remote_block_ids": [pair.producer.engine.blocks_of("theirs")]}
    pair.consumer.engine.add("r", 100, params, max_tokens=4)
    pair.run_until(lambda: pair.consumer.engine.finish_reason("r") is not None)
    assert pair.consumer.computed_tokens["r"] == (103 if forged == "transfer" else 4)
    pair.consumer.engine.add("rightful", list(range(100, 190)), theirs, max_tokens=4)
    pair.run_until(lambda: pair.is_clean)
    assert pair.consumer.computed_tokens["rightful"] == 4


def test_a_producer_that_vanishes_under_a_reader_is_recomputed(pair_of):
    pair = pair_of()
    answer = prefill(pair, "r", 250)
    (peer,), (ours,) = pair.producer.peers, pair.consumer.peers
    pair.consumer.engine.add("r", 250, answer, max_tokens=4)
    pair.fabric.hold(peer, ours)
    pair.run_until(lambda: pair.consumer.engine.finish_reason("r") is not None)
    assert pair.consumer.computed_tokens["r"] > 4
    pair.fabric.release(peer, ours)
    pair.run_until(lambda: pair.is_clean, seconds_max=20 * FAST.lease_seconds)


class Mixed:
    """60 requests, 8 at a time: each in a mode of its own, its legs at once or one after the other."""

    def __init__(self, pair, random):
        self.pair, self.random = pair, random
        self.prefill, self.decode = pair.producer.engine, pair.consumer.engine
        self.waiting = [f"r{number}" for number in range(60)]
        self.prefilling: dict[str, list[int]] = {}
        """Prompts of prefill legs whose decode leg follows their answer."""
        self.decoding: list[str] = []
        self.stems = [[random.randrange(200) for _ in range(100)] for _ in range(3)]

    def run(self):
        while self.waiting or self.prefilling or self.decoding:
            while self.waiting and len(self.prefilling) + len(self.decoding) < 8:
                self.start(self.waiting.pop())
            if self.random.random() < 0.2:
                self.disconnect()
            for _ in range(self.random.randrange(1, 6)):
                self.pair.step()
            self.go_on()
        self.pair.run_until(lambda: self.pair.is_clean)

    def start(self, name):
        random, transfer = self.random, {"transfer_id": f"transfer-{name}"}
        transfer["transfer_mode"] = random.choice(["push", "pull"])
        prompt = random.choice(self.stems)[: random.randrange(100)]
        prompt = prompt + [random.randrange(200) for _ in range(random.randrange(1, 120))]
        self.prefill.add(name, prompt, {"do_remote_decode": True} | transfer)
        if random.random() < 0.5:
            self.prefilling[name] = prompt
        else:
            self.receive(name, prompt, self.pair.decode_params(f"transfer-{name}") | transfer)

    def receive(self, name, prompt, params):
        self.decode.add(name, prompt, params, max_tokens=self.random.randrange(1, 12))
        self.decoding.append(name)

    def disconnect(self):
        if self.random.random() < 0.5:
            names = [*self.prefilling, *self.decoding]
            name = self.random.choice(names) if names else None
            self.prefill.abort(name)
            self.prefilling.pop(name, None)
        elif self.decoding:
            self.decode.abort(self.random.choice(self.decoding))

    def go_on(self):
        for name in [name for name in self.prefilling if self.prefill.finish_reason(name) is not None]:
            self.receive(name, self.prefilling.pop(name), self.prefill.answer(name))
        self.decoding = [name for name in self.decoding if name in self.decode.scheduler.requests]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(2))
def test_modes_change_from_request_to_request_with_disconnects(pair_of, seed, depth):
    """P02, P17, P63: small caches, shared prefixes, aborts at every stage; all KV that is used is checked."""
    pair = pair_of(
        seed=seed,
        producer={"step_tokens": 64, "blocks": 30, "depth": depth},
        consumer={"step_tokens": 64, "blocks": 26, "depth": depth},
    )
    for member in (pair.producer, pair.consumer):
        # Admits prompts that may not fit, so that both engines preempt.
        member.engine.scheduler.scheduler_reserve_full_isl = False
    Mixed(pair, Random(seed)).run()
    assert sum(pair.producer.engine.counters(TRANSFERS).values()) == 60
    for member in (pair.producer, pair.consumer):
        assert {mode for mode, *_ in member.engine.counters(TRANSFERS)} == {"push", "pull"}
