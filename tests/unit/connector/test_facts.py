"""Engines whose caches cannot be carried are refused at start, by what is in the way."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvferry.connector import compat
from kvferry.connector.facts import carried_groups, check_both_directions, read_facts
from kvferry.errors import UsageError
from kvferry.host.facts import CacheGroup, EngineFacts
from kvferry.ids import EngineId, Rank

SIZES = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
FULL = FullAttentionSpec(**SIZES)
WINDOW = SlidingWindowSpec(**SIZES, sliding_window=128)
CHUNKS = ChunkedLocalAttentionSpec(**SIZES, attention_chunk_size=128)
STATE = MambaSpec(block_size=16, shapes=((2, 2),), dtypes=(torch.float32,))


starts_over = pytest.mark.skipif(
    not compat.can_fail_receives(), reason="this vLLM cannot throw one request's prefix away"
)


def caches(*specs):
    groups = [
        SimpleNamespace(kv_cache_spec=spec, layer_names=[f"layers.{number}"])
        for number, spec in enumerate(specs)
    ]
    return SimpleNamespace(kv_cache_groups=groups, num_blocks=64)


def config(**parallel):
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=1, **parallel),
        kv_transfer_config=SimpleNamespace(engine_id="e", is_kv_producer=True, is_kv_consumer=False),
        model_config=SimpleNamespace(disable_cascade_attn=True),
    )


def test_one_group_of_full_attention_is_carried():
    facts = read_facts(config(), caches(FULL))
    assert facts == EngineFacts(
        EngineId("e"),
        tp=2,
        pp=1,
        produces=True,
        consumes=False,
        block_tokens=16,
        block_count=64,
        groups=(CacheGroup(16),),
    )
    assert facts.ranks == {0, 1}
    assert [facts.blocks(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]
    assert facts.index(Rank(1, 1)) == 3
    assert facts.keeps_good_prefixes
    assert facts.received_stop(100) == 100


@starts_over
@pytest.mark.parametrize("specs", [(FULL, WINDOW), (WINDOW,), (FULL, FULL)])
def test_several_groups_and_windows_are_carried(specs):
    """V14: no hybrid allocator has to be turned off."""
    facts = read_facts(config(), caches(*specs))
    windows = tuple(CacheGroup(16, 128 if spec is WINDOW else 0) for spec in specs)
    assert facts.tables == windows
    assert not facts.keeps_good_prefixes
    assert facts.received_stop(100) == (99 if WINDOW in specs else 100)


@pytest.mark.parametrize("specs", [(FULL, WINDOW), (WINDOW,)])
def test_a_vllm_that_cannot_start_over_carries_no_windows(monkeypatch, specs):
    monkeypatch.setattr(compat, "can_fail_receives", lambda: False)
    with pytest.raises(UsageError, match=r"0\.31 or later.*--disable-hybrid"):
        carried_groups(caches(*specs))
    assert carried_groups(caches(FULL))[0].window_tokens == 0


def test_groups_that_have_a_description_per_layer_are_looked_into():
    mla = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.float32)
    together = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"layers.0": mla, "layers.1": mla})
    (group,) = carried_groups(caches(together))
    assert group.spec is mla
    mixed = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"layers.0": FULL, "layers.1": CHUNKS})
    with pytest.raises(UsageError, match="ChunkedLocalAttentionSpec"):
        carried_groups(caches(mixed))


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ((FULL, STATE), "kind MambaSpec; .*state-space .* one engine"),
        ((STATE,), "kind MambaSpec"),
        ((FULL, CHUNKS), "kind ChunkedLocalAttentionSpec.*--disable-hybrid"),
        ((), "no KV cache"),
    ],
)
def test_other_caches_are_refused_by_name(specs, words):
    """V14, V15, V26: states, and kinds that nobody knows, are refused with what to do, and not carried."""
    with pytest.raises(UsageError, match=words):
        read_facts(config(), caches(*specs))


@pytest.mark.parametrize("sign", [{"enable_kv_transfer": False}, {"host_resident": True}])
def test_groups_that_vllm_keeps_for_itself_are_refused(sign):
    given = caches(FULL)
    vars(given.kv_cache_groups[0]).update(sign)
    with pytest.raises(UsageError, match="HiSparse"):
        carried_groups(given)


@pytest.mark.parametrize("field", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_context_parallelism_is_refused_by_its_flag(field):
    with pytest.raises(UsageError, match="--" + field.replace("_", "-") + " is 2"):
        read_facts(config(**{field: 2}), caches(FULL))


def test_cascade_attention_is_refused():
    """It takes reference counts for sharers, and we hold references of our own."""
    given = config()
    given.model_config.disable_cascade_attn = False
    with pytest.raises(UsageError, match="--disable-cascade-attn"):
        read_facts(given, caches(FULL))


@pytest.mark.parametrize(
    ("device", "mla", "operations", "refused"),
    [
        ("cpu", True, ["all"], True),
        ("cpu", True, ["none", "+rotary_embedding"], True),
        ("cpu", True, ["-rotary_embedding", "all"], False),
        ("cpu", True, ["none"], False),
        ("cpu", False, ["all"], False),
        ("cuda", True, ["all"], False),
    ],
)
def test_mla_with_wrong_positions_is_refused_with_the_argument_that_helps(device, mla, operations, refused):
    """On the CPU vLLM's kernel rotates other elements than MLA's: its KV is wrong, and nothing says so."""
    given = config()
    given.device_config = SimpleNamespace(device_type=device)
    given.model_config.use_mla = mla
    given.compilation_config = SimpleNamespace(custom_ops=operations)
    if refused:
        with pytest.raises(UsageError, match=r'--compilation-config .*"-rotary_embedding"'):
            read_facts(given, caches(FULL))
    else:
        assert read_facts(given, caches(FULL)).tp == 2


@pytest.mark.parametrize(
    ("parallel", "watched"),
    [
        ({}, True),
        ({"use_ray": False, "nnodes_within_dp": 1}, True),
        ({"use_ray": True}, False),
        ({"nnodes_within_dp": 2}, False),
    ],
)
def test_whether_ranks_end_with_their_engine(parallel, watched):
    """P46: a rank watches its parent process. A Ray actor's is not the engine, nor is one's elsewhere."""
    assert read_facts(config(**parallel), caches(FULL)).ranks_end_with_engine is watched


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_role": "kv_producer", "is_kv_consumer": False}, "needs kv_role kv_both, not kv_producer"),
        ({"kv_role": "kv_consumer", "is_kv_producer": False}, "needs kv_role kv_both, not kv_consumer"),
        ({"kv_load_failure_policy": "fail"}, "needs kv_load_failure_policy recompute, not fail"),
    ],
)
def test_kv_that_flows_back_needs_both_roles_and_recomputation(changes, words):
    """P14: a turn that ended before its time must cost a prefill and no error."""
    fit = {
        "kv_role": "kv_both",
        "is_kv_producer": True,
        "is_kv_consumer": True,
        "kv_load_failure_policy": "recompute",
    }
    check_both_directions(SimpleNamespace(**fit))
    with pytest.raises(UsageError, match=words):
        check_both_directions(SimpleNamespace(**(fit | changes)))
