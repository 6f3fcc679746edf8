"""Engines whose caches cannot be carried are refused at start, by what is in the way."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

from kvferry.connector.facts import check_both_directions, only_spec, read_facts
from kvferry.errors import UsageError
from kvferry.host.facts import EngineFacts
from kvferry.ids import EngineId, Rank

SIZES = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
FULL = FullAttentionSpec(**SIZES)
WINDOW = SlidingWindowSpec(**SIZES, sliding_window=128)
STATE = MambaSpec(block_size=16, shapes=((2, 2),), dtypes=(torch.float32,))


def caches(*specs):
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=[]) for spec in specs]
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
        EngineId("e"), tp=2, pp=1, produces=True, consumes=False, block_tokens=16, block_count=64
    )
    assert facts.ranks == {0, 1}
    assert [facts.blocks(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]
    assert facts.index(Rank(1, 1)) == 3


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ((FULL, WINDOW), r"2 groups \(FullAttentionSpec, SlidingWindowSpec\).*--disable-hybrid"),
        ((FULL, STATE), r"2 groups \(FullAttentionSpec, MambaSpec\)"),
        ((WINDOW,), "kind SlidingWindowSpec"),
        ((STATE,), "kind MambaSpec"),
        ((), "0 groups"),
    ],
)
def test_other_caches_are_refused_by_name(specs, words):
    """V14, V15, V26: sliding windows and state models are refused with the setting, not carried wrongly."""
    with pytest.raises(UsageError, match=words):
        only_spec(caches(*specs))


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
