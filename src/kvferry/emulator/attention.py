"""Attention layers without a kernel: they tell vLLM what KV cache the emulated model has.

vLLM learns block sizes, memory orders and cache shapes from the layers and their backend, as on a GPU; on the
CPU its own attention offers one memory order and no block smaller than 32 tokens.
"""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

LAYER_NAME = "model.layers.{index}.self_attn.attn"


class EmulatedBackend(AttentionBackend):
    """Offers every memory order that the options name, and any block size."""

    offered: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def get_name() -> str:
        """What logs and compatibility checks call it."""
        return "EMULATED"

    @staticmethod
    def get_impl_cls() -> type[Any]:
        """There is none.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("the emulated attention computes nothing")

    @staticmethod
    def get_builder_cls() -> type[Any]:
        """There is none.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("the emulated attention needs no metadata")

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Any block size is one block of the kernel's."""
        return [MultipleOf(1)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """The offered memory orders, the preferred one first."""
        return tuple(KVCacheLayout[name] for name in cls.offered)


class EmulatedLayer(AttentionLayerBase):
    """One layer's KV cache."""

    def __init__(self, spec: FullAttentionSpec) -> None:
        self._spec = spec
        self.kv_cache: Any = None

    def get_attn_backend(self) -> type[AttentionBackend]:
        """The one backend."""
        return EmulatedBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> FullAttentionSpec:
        """What the layer keeps per block."""
        return self._spec


def add_layers(vllm_config: Any, offered: tuple[str, ...]) -> None:
    """Put the model's layers where vLLM looks for them."""
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    EmulatedBackend.offered = offered
    spec = (MLAAttentionSpec if model.use_mla else FullAttentionSpec)(
        block_size=cache.block_size,
        num_kv_heads=1 if model.use_mla else model.get_num_kv_heads(parallel),
        head_size=model.get_head_size(),
        dtype=model.dtype,
    )
    context = vllm_config.compilation_config.static_forward_context
    start, end = model.get_layers_start_end_indices(parallel)
    for index in range(start, end):
        context[LAYER_NAME.format(index=index)] = EmulatedLayer(spec)
