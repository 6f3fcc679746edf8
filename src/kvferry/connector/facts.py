"""What the connector needs to know of its engine, read once from vLLM's configuration."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

from kvferry.errors import UsageError
from kvferry.host.facts import EngineFacts
from kvferry.ids import EngineId


def read_facts(vllm_config: Any, kv_cache_config: Any) -> EngineFacts:
    """Read the facts, and refuse engines whose caches cannot be carried.

    Raises:
        UsageError: says which feature is in the way and what to do.
    """
    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    _refuse_unsupported(vllm_config)
    spec = only_spec(kv_cache_config)
    return EngineFacts(
        engine=EngineId(transfer.engine_id),
        tp=parallel.tensor_parallel_size,
        pp=parallel.pipeline_parallel_size,
        produces=transfer.is_kv_producer,
        consumes=transfer.is_kv_consumer,
        block_tokens=spec.block_size,
        block_count=kv_cache_config.num_blocks,
        ranks_end_with_engine=_ranks_end_with_engine(parallel),
    )


def check_both_directions(transfer: Any) -> None:
    """That an engine can keep turns and receive them: `bidirectional_kv_xfer` needs more than itself.

    Raises:
        UsageError: says what to set.
    """
    if not (transfer.is_kv_producer and transfer.is_kv_consumer):
        raise UsageError(
            "kv_connector_extra_config.bidirectional_kv_xfer needs kv_role kv_both, not "
            f"{transfer.kv_role}: KV flows from D to P, too"
        )
    if transfer.kv_load_failure_policy != "recompute":
        raise UsageError(
            "kv_connector_extra_config.bidirectional_kv_xfer needs kv_load_failure_policy recompute, not "
            f"{transfer.kv_load_failure_policy}: a turn that is kept no longer would fail the next one"
        )


def only_spec(kv_cache_config: Any) -> Any:
    """vLLM's description of the one cache group.

    Raises:
        UsageError: there are several groups, or it is not full attention.
    """
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(sorted({type(group.kv_cache_spec).__name__ for group in groups}))
        raise UsageError(
            f"this model's KV cache has {len(groups)} groups ({kinds}); FerryConnector carries caches of "
            "one group. Try --disable-hybrid-kv-cache-manager where the model allows it"
        )
    spec = groups[0].kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = next(iter(spec.kv_cache_specs.values()))
    if not isinstance(spec, FullAttentionSpec):
        raise UsageError(
            f"this model's KV cache is of kind {type(spec).__name__}; FerryConnector carries full "
            "attention and MLA"
        )
    return spec


def _refuse_unsupported(vllm_config: Any) -> None:
    parallel = vllm_config.parallel_config
    for field in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, field, 1) > 1:
            flag = "--" + field.replace("_", "-")
            raise UsageError(f"{flag} is {getattr(parallel, field)}; FerryConnector works with 1")
    if not getattr(vllm_config.model_config, "disable_cascade_attn", True):
        # Cascade attention takes a block's reference count for the number of requests that share it, and
        # FerryConnector holds references of its own.
        raise UsageError("cascade attention is enabled; FerryConnector needs --disable-cascade-attn")


def _ranks_end_with_engine(parallel: Any) -> bool:
    """Whether the engine has started its ranks itself: on Ray, and on other nodes, somebody else has."""
    return not getattr(parallel, "use_ray", False) and getattr(parallel, "nnodes_within_dp", 1) == 1
