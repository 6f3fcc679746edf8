"""The connector over the real agents: vLLM's schedulers, real bytes, no model and no network."""

from __future__ import annotations

import os
from random import Random

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from vllm.v1.engine import FinishReason

from kvferry.connector import compat
from tests.support.ferry_pair import Pair
from tests.support.vllm_engine import LATENT_SIZE, LAYERS, Shape, write_config

windows = pytest.mark.skipif(
    not compat.can_fail_receives(), reason="this vLLM cannot throw one request's prefix away"
)
PRODUCER = Shape(engine_id="p", role="kv_producer")
CONSUMER = Shape(engine_id="d", role="kv_consumer")


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory):
    return write_config(tmp_path_factory.mktemp("model"))


@pytest.fixture
def pair_of(model_directory):
    pairs = []

    def make(producer=PRODUCER, consumer=CONSUMER, seed=1):
        pairs.append(Pair(model_directory, seed=seed, producer=producer, consumer=consumer))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


def add(pair, name, prompt, *, first="both", max_tokens=4, mode="push"):
    """Both legs of one request; `first` says which one alone for now."""
    transfer = f"transfer-{name}"
    if first in ("both", "producer"):
        pair.producer.engine.add(name, prompt, {"do_remote_decode": True, "transfer_id": transfer})
    if first in ("both", "consumer"):
        params = pair.decode_params(transfer) | {"transfer_mode": mode}
        pair.consumer.engine.add(name, prompt, params, max_tokens=max_tokens)


@pytest.mark.parametrize("prompt", [1, 2, 15, 16, 17, 64, 150, 200])
def test_kv_arrives_whole_and_only_the_last_token_is_computed(pair_of, prompt):
    pair = pair_of()
    add(pair, "r", prompt)
    pair.run_until(lambda: pair.is_clean)
    assert pair.consumer.engine.finish_reason("r") is FinishReason.LENGTH
    assert pair.consumer.computed_tokens["r"] == 4
    # A prompt of one token leaves nothing to transfer: its only token is computed to sample from.
    done = {("push", "completed", "written"): 1} if prompt > 1 else {("push", "skipped", "prefix_hit"): 1}
    assert pair.consumer.engine.counters("kvferry_transfers") == done


@pytest.mark.parametrize("prompt", [2, 150])
def test_each_rank_gets_its_own_part(pair_of, prompt):
    """TP 2 to TP 2: rank to rank, and the request runs when both parts are here."""
    pair = pair_of(
        producer=Shape(engine_id="p", role="kv_producer", ranks=2),
        consumer=Shape(engine_id="d", role="kv_consumer", ranks=2),
    )
    add(pair, "r", prompt)
    pair.run_until(lambda: pair.is_clean)
    assert pair.consumer.computed_tokens["r"] == 4
    assert pair.consumer.engine.counters("kvferry_transfers") == {("push", "completed", "written"): 1}


UNEQUAL = [
    ({"ranks": 2}, {"ranks": 1}),
    ({"ranks": 1}, {"ranks": 2}),
    ({"ranks": 4}, {"ranks": 1}),
    ({"ranks": 2}, {"ranks": 4}),
    ({"stages": 2}, {"stages": 1}),
    ({"stages": 1}, {"stages": 2}),
    ({"ranks": 2, "stages": 2}, {"ranks": 1}),
    ({"block_tokens": 16}, {"block_tokens": 32}),
    ({"block_tokens": 32}, {"block_tokens": 16}),
    ({"block_tokens": 16, "ranks": 2}, {"block_tokens": 48}),
    ({"kernel_tokens": 8}, {"block_tokens": 32, "kernel_tokens": 16}),
]


@pytest.mark.parametrize("prompt", [2, 33, 150])
@pytest.mark.parametrize(("producer", "consumer"), UNEQUAL)
def test_engines_of_unequal_shape_hand_over(pair_of, producer, consumer, prompt):
    """V06 V07 V09 V11 V13: every byte of each head and layer is checked before it is used; two KV heads."""
    pair = pair_of(
        producer=Shape(engine_id="p", role="kv_producer", kv_heads=2, **producer),
        consumer=Shape(engine_id="d", role="kv_consumer", kv_heads=2, **consumer),
    )
    add(pair, "r", prompt)
    pair.run_until(lambda: pair.is_clean)
    assert pair.consumer.computed_tokens["r"] == 4
    for member in (pair.producer, pair.consumer):
        assert member.engine.counters("kvferry_transfers") == {("push", "completed", "written"): 1}


LATENT = [
    ({"ranks": 2}, {"ranks": 1}),
    ({"ranks": 1}, {"ranks": 2}),
    ({"ranks": 2}, {"ranks": 2, "block_tokens": 32}),
    ({"ranks": 4, "block_tokens": 32}, {"ranks": 2}),
    ({"stages": 2, "ranks": 2}, {"block_tokens": 48}),
]


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize(("producer", "consumer"), LATENT)
def test_latents_come_from_one_of_the_ranks_that_have_them(pair_of, producer, consumer, mode):
    """V11: MLA; each byte is checked before it is used, and moves once for each rank that needs it."""
    pair = pair_of(
        producer=Shape(engine_id="p", role="kv_producer", latent=True, **producer),
        consumer=Shape(engine_id="d", role="kv_consumer", latent=True, **consumer),
    )
    add(pair, "r", 150, mode=mode)
    pair.run_until(lambda: pair.is_clean)
    assert pair.consumer.computed_tokens["r"] == 4
    ended = "written" if mode == "push" else "fetched"
    for member in (pair.producer, pair.consumer):
        assert member.engine.counters("kvferry_transfers") == {(mode, "completed", ended): 1}
    # The 149 tokens before the last one, in cells of 16 tokens.
    copy = 160 * LATENT_SIZE * 4 * len(LAYERS)
    agents = pair.producer.agents if mode == "push" else pair.consumer.agents
    key = "bytes_posted" if mode == "push" else "bytes_read"
    assert sum(agent.snapshot()[key] for agent in agents) == copy * pair.consumer.shape.ranks


@pytest.mark.parametrize(
    ("producer", "consumer"),
    [
        ({"cache_type": "fp8_e4m3"}, {}),
        ({"kv_heads": 4}, {"ranks": 2, "kv_heads": 2}),
        pytest.param({"window": 40}, {}, marks=windows),
        pytest.param({"window": 40}, {"window": 56}, marks=windows),
        pytest.param({"window": 40}, {"window": 40, "window_block_tokens": 32}, marks=windows),
    ],
    ids=["cache types", "another number of heads", "hybrid on one side", "windows", "blocks of windows"],
)
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_caches_that_do_not_fit_are_refused_before_anything_is_written(pair_of, producer, consumer, policy):
    """V04 V07 V13: never at the first transfer; requests are computed or fail long before any time is up."""
    pair = pair_of(
        producer=Shape(engine_id="p", role="kv_producer", **producer),
        consumer=Shape(engine_id="d", role="kv_consumer", policy=policy, **consumer),
    )
    add(pair, "r", 100)
    steps = 0
    while pair.consumer.engine.finish_reason("r") is None:
        pair.step()
        steps += 1
        assert steps < 500, "a request waits for a producer that will never write"
    end, computed = (FinishReason.LENGTH, 103) if policy == "recompute" else (FinishReason.ERROR, 0)
    assert pair.consumer.engine.finish_reason("r") is end
    assert pair.consumer.computed_tokens.get("r", 0) == computed
    pair.run_until(lambda: pair.is_clean)
    assert pair.consumer.engine.counters("kvferry_transfers") == {("push", "failed", "geometry"): 1}
    assert pair.consumer.engine.stats.data["gauges"]["kvferry_ready"] == 0
    assert all(agent.snapshot()["bytes_posted"] == 0 for agent in pair.producer.agents)


WINDOWED = [
    ({}, {}),
    ({"ranks": 2}, {"ranks": 1}),
    ({"ranks": 1}, {"ranks": 2}),
    ({"stages": 2}, {"stages": 1}),
    ({"stages": 1}, {"stages": 2, "ranks": 2}),
    ({"block_tokens": 16, "window_block_tokens": 32}, {"block_tokens": 32}),
    ({"block_tokens": 32}, {"block_tokens": 16}),
    ({"window_block_tokens": 32}, {"window_block_tokens": 16}),
    ({"window_block_tokens": 48}, {"window_block_tokens": 16}),
    ({"window_block_tokens": 32, "kernel_tokens": 16}, {"kernel_tokens": 8}),
]


@windows
@pytest.mark.parametrize("prompt", [2, 33, 40, 55, 56, 57, 72, 150])
@pytest.mark.parametrize(("producer", "consumer"), WINDOWED)
def test_layers_with_a_window_hand_theirs_over(pair_of, producer, consumer, prompt):
    """V13 V14: each token that a layer looks at is checked; one of the two layers has a window."""
    common = {"kv_heads": 2, "window": 40}
    pair = pair_of(
        producer=Shape(engine_id="p", role="kv_producer", **common, **producer),
        consumer=Shape(engine_id="d", role="kv_consumer", **common, **consumer),
    )
    add(pair, "r", prompt)
    pair.run_until(lambda: pair.is_clean)
    assert pair.consumer.computed_tokens["r"] == 4
    for member in (pair.producer, pair.consumer):
        assert member.engine.counters("kvferry_transfers") == {("push", "completed", "written"): 1}


@windows
def test_of_a_long_prompt_only_the_window_has_moved(pair_of):
    """V14: blocks of 16 tokens, two layers in two groups, a window of 40 of 600 tokens."""
    pair = pair_of(
        producer=Shape(engine_id="p", role="kv_producer", window=40, blocks=128),
        consumer=Shape(engine_id="d", role="kv_consumer", window=40, blocks=128),
    )
    add(pair, "r", 600)
    pair.run_until(lambda: pair.is_clean)
    layer_bytes = pair.consumer.block_bytes // 2
    moved = {("push",): layer_bytes * (38 + 3)}
    assert pair.consumer.engine.counters("kvferry_transfer_bytes") == moved
    assert pair.producer.agents[0].snapshot()["bytes_posted"] == layer_bytes * (38 + 3)


@windows
def test_a_vanished_producer_of_windows_is_recomputed_from_the_start(pair_of):
    """V01: half of the chunks are here and none is used."""
    shape = {"window": 40, "step_tokens": 64}
    pair = pair_of(
        producer=Shape(engine_id="p", role="kv_producer", **shape),
        consumer=Shape(engine_id="d", role="kv_consumer", **shape),
    )
    add(pair, "r", 250, first="consumer")
    pair.consumer.engine.step()
    add(pair, "r", 250, first="producer")
    pair.producer.engine.step()
    pair.producer.engine.step()
    (peer,), (ours,) = pair.producer.peers, pair.consumer.peers
    pair.fabric.hold(peer, ours)
    pair.run_until(lambda: pair.consumer.engine.finish_reason("r") is not None)
    assert pair.consumer.engine.finish_reason("r") is FinishReason.LENGTH
    assert pair.consumer.computed_tokens["r"] == 253
    pair.fabric.release(peer, ours)
    pair.run_until(lambda: pair.is_clean)


@pytest.mark.parametrize("first", ["producer", "consumer"])
def test_either_leg_may_be_first(pair_of, first):
    pair = pair_of()
    add(pair, "r", 100, first=first)
    side = pair.producer if first == "producer" else pair.consumer
    for _ in range(5):
        side.engine.step()
    add(pair, "r", 100, first="consumer" if first == "producer" else "producer")
    pair.run_until(lambda: pair.is_clean)
    assert pair.consumer.computed_tokens["r"] == 4


def test_chunks_leave_before_prefill_ends(pair_of):
    """The design's centre: at least half of the bytes of a prompt of four chunks are posted early."""
    pair = pair_of(producer=Shape(engine_id="p", role="kv_producer", step_tokens=64))
    add(pair, "r", 250, first="consumer")
    for _ in range(3):
        pair.consumer.engine.step()
    add(pair, "r", 250, first="producer")
    pair.run_until(lambda: pair.is_clean)
    snapshot = pair.producer.agents[0].snapshot()
    assert snapshot["bytes_posted_early"] * 2 >= snapshot["bytes_posted"] > 0


def test_a_prefix_that_is_here_already_is_not_moved(pair_of):
    pair = pair_of()
    pair.consumer.engine.add("warm", 64)
    pair.run_until(lambda: pair.is_clean)
    add(pair, "r", 150)
    pair.run_until(lambda: pair.is_clean)
    moved = {("push",): pair.consumer.block_bytes * 6}
    assert pair.consumer.engine.counters("kvferry_transfer_bytes") == moved


def test_preempted_prefill_is_delivered_right(pair_of):
    """Two prefills in too small a cache: one is preempted after chunks of it have left."""
    pair = pair_of(
        producer=Shape(engine_id="p", role="kv_producer", step_tokens=64, blocks=14, prefix_caching=False)
    )
    pair.producer.engine.scheduler.scheduler_reserve_full_isl = False
    for name, length in (("a", 120), ("b", 130), ("c", 140)):
        add(pair, name, [ord(name) + position for position in range(length)])
    pair.run_until(lambda: pair.is_clean)
    for name in "abc":
        assert pair.consumer.engine.finish_reason(name) is FinishReason.LENGTH


def test_a_vanished_producer_is_recomputed(pair_of):
    """Nothing arrives any more after half of the chunks; the request is computed here, in a bounded time."""
    pair = pair_of(producer=Shape(engine_id="p", role="kv_producer", step_tokens=64))
    add(pair, "r", 250, first="consumer")
    pair.consumer.engine.step()
    add(pair, "r", 250, first="producer")
    pair.producer.engine.step()
    pair.producer.engine.step()
    (peer,), (ours,) = pair.producer.peers, pair.consumer.peers
    pair.fabric.hold(peer, ours)
    pair.run_until(lambda: pair.consumer.engine.finish_reason("r") is not None)
    assert pair.consumer.engine.finish_reason("r") is FinishReason.LENGTH
    assert pair.consumer.computed_tokens["r"] > 4
    pair.fabric.release(peer, ours)
    pair.run_until(lambda: pair.is_clean)


def test_the_oracle_sees_one_damaged_block(pair_of):
    """All other tests here rest on this."""
    pair = pair_of()
    (caches,) = pair.producer.caches

    def damage(block):
        for cache in caches.values():
            cache[block].neg_()

    pair.producer.engine.workers[0].damage_block(1, damage)
    add(pair, "r", 60)
    with pytest.raises(AssertionError, match="KV of token 16 of 59 is wrong"):
        pair.run_until(lambda: pair.is_clean)


MIXED = [
    *((seed, depth, 0) for seed in range(3) for depth in (1, 2)),
    *(pytest.param(seed, depth, 40, marks=windows) for seed in range(2) for depth in (1, 2)),
    # The same with other numbers.
    *(pytest.param(seed, depth, 0, marks=pytest.mark.long) for seed in range(3, 6) for depth in (1, 2)),
    *(pytest.param(2, depth, 40, marks=[windows, pytest.mark.long]) for depth in (1, 2)),
]


@pytest.mark.parametrize(("seed", "depth", "window"), MIXED)
def test_mixed_requests_with_disconnects_leave_nothing_behind(pair_of, seed, depth, window):
    """P02, P44, P60, P61: small caches, shared prefixes, aborts at every stage; all KV used is checked."""
    random = Random(seed)
    shape = {"step_tokens": 64, "depth": depth, "window": window}
    pair = pair_of(
        producer=Shape(engine_id="p", role="kv_producer", blocks=22 + window // 4, **shape),
        consumer=Shape(engine_id="d", role="kv_consumer", blocks=26 + window // 4, **shape),
        seed=seed,
    )
    for member in (pair.producer, pair.consumer):
        # Admits prompts that may not fit, so that both engines preempt.
        member.engine.scheduler.scheduler_reserve_full_isl = False
    stems = [[random.randrange(200) for _ in range(100)] for _ in range(3)]
    waiting = [f"r{number}" for number in range(60)]
    alive = []
    while waiting or alive:
        while waiting and len(alive) < 8:
            name = waiting.pop()
            prompt = random.choice(stems)[: random.randrange(100)] + [
                random.randrange(200) for _ in range(random.randrange(1, 120))
            ]
            add(pair, name, prompt, max_tokens=random.randrange(1, 12))
            alive.append(name)
        if random.random() < 0.2:
            side = random.choice([pair.producer, pair.consumer])
            side.engine.abort(random.choice(alive))

        for _ in range(random.randrange(1, 6)):
            pair.step()
        alive = [name for name in alive if name in pair.consumer.engine.scheduler.requests]
    pair.run_until(lambda: pair.is_clean)
    for member in (pair.producer, pair.consumer):
        assert sum(member.engine.counters("kvferry_transfers").values()) == 60
