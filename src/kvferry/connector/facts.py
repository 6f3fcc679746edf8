"""What the connector needs to know of its engine, read once from vLLM's configuration."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvferry.connector import compat
from kvferry.errors import UsageError
from kvferry.host.facts import CacheGroup, EngineFacts
from kvferry.ids import EngineId

_CARRIED = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec)
"""And none of what is derived from them: a kind that is named apart keeps something else, or elsewhere."""


def read_facts(vllm_config: Any, kv_cache_config: Any) -> EngineFacts:
    """Read the facts, and refuse engines whose caches cannot be carried.

    Raises:
        UsageError: says which feature is in the way and what to do.
    """
    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    _refuse_unsupported(vllm_config)
    groups = tuple(
        CacheGroup(group.spec.block_size, group.window_tokens) for group in carried_groups(kv_cache_config)
    )
    return EngineFacts(
        engine=EngineId(transfer.engine_id),
        tp=parallel.tensor_parallel_size,
        pp=parallel.pipeline_parallel_size,
        produces=transfer.is_kv_producer,
        consumes=transfer.is_kv_consumer,
        block_tokens=groups[0].block_tokens,
        block_count=kv_cache_config.num_blocks,
        groups=groups,
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


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """A cache group of vLLM: its layers on this rank, what vLLM says of one of them, and its window."""

    layers: tuple[str, ...]
    spec: Any
    window_tokens: int = 0


def carried_groups(kv_cache_config: Any) -> tuple[LayerGroup, ...]:
    """The engine's cache groups.

    Raises:
        UsageError: there is none, or one of them cannot be carried; names its kind.
    """
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        raise UsageError("this model has no KV cache; FerryConnector has nothing to carry")
    found = tuple(_carried(group) for group in groups)
    if (len(found) > 1 or found[0].window_tokens) and not compat.can_fail_receives():
        raise UsageError(
            "this model's KV cache has sliding windows, and this vLLM cannot start a request over of which a "
            "part has come; upgrade it to 0.31 or later, or start it with --disable-hybrid-kv-cache-manager"
        )
    return found


def _carried(group: Any) -> LayerGroup:
    specs = list(_layer_specs(group.kv_cache_spec))
    for spec in specs:
        if type(spec) not in _CARRIED:
            raise UsageError(_not_carried(type(spec).__name__))
    if not getattr(group, "enable_kv_transfer", True) or getattr(group, "host_resident", False):
        raise UsageError(_not_carried("HiSparse"))
    windows = {_window(spec) for spec in specs if isinstance(spec, SlidingWindowSpec)}
    if len(windows) > 1:
        raise UsageError(_not_carried("windows of unlike length in one group"))
    return LayerGroup(tuple(group.layer_names), specs[0], windows.pop() if windows else 0)


def _window(spec: Any) -> int:
    """What vLLM keeps, which under speculative decoding is more than what the layers look at."""
    return int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", 0))


def _layer_specs(spec: Any) -> Iterable[Any]:
    """vLLM's description of each layer of a group, where they have one each; else that of the group."""
    return spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else (spec,)


def _not_carried(kind: str) -> str:
    return (
        f"a part of this model's KV cache is of kind {kind}; FerryConnector carries full attention, MLA and "
        "sliding windows. What state-space layers keep cannot be moved exactly: prefill and decode such a "
        "model in one engine. For other kinds try --disable-hybrid-kv-cache-manager"
    )


def _refuse_unsupported(vllm_config: Any) -> None:
    parallel = vllm_config.parallel_config
    for field in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, field, 1) > 1:
            flag = "--" + field.replace("_", "-")
            raise UsageError(f"{flag} is {getattr(parallel, field)}; FerryConnector works with 1")
    if _rotates_latents_wrongly(vllm_config):
        raise UsageError(
            "vLLM's rotary embedding kernel for the CPU is wrong for MLA: a token's KV depends on how many "
            "were computed with it, and one engine alone contradicts itself. Give every engine "
            '--compilation-config \'{"custom_ops": ["-rotary_embedding"]}\'; vLLM then computes it otherwise'
        )
    if not getattr(vllm_config.model_config, "disable_cascade_attn", True):
        # Cascade attention takes a block's reference count for the number of requests that share it, and
        # FerryConnector holds references of its own.
        raise UsageError("cascade attention is enabled; FerryConnector needs --disable-cascade-attn")


def _rotates_latents_wrongly(vllm_config: Any) -> bool:
    """Whether keys and queries of MLA go through the kernel that takes one head for one token (to vLLM 0.32).

    It is not used where the operation is off by name, or all of them are, as vLLM has it when it compiles.
    """
    device = getattr(getattr(vllm_config, "device_config", None), "device_type", None)
    if device != "cpu" or not getattr(vllm_config.model_config, "use_mla", False):
        return False
    chosen = vllm_config.compilation_config.custom_ops
    off = "none" in chosen and "+rotary_embedding" not in chosen
    return not off and "-rotary_embedding" not in chosen


def _ranks_end_with_engine(parallel: Any) -> bool:
    """Whether the engine has started its ranks itself: on Ray, and on other nodes, somebody else has."""
    return not getattr(parallel, "use_ray", False) and getattr(parallel, "nnodes_within_dp", 1) == 1
