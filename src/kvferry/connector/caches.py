"""The engine's registered KV tensors as a `layout.CacheSpec`.

From 0.29 on vLLM registers one four-dimensional view per layer, `[block, head, token, content]`, whatever
the order in memory; content holds K and V together, and MLA has one head. All we take from a tensor is its
address, shape and strides. Where the attention kernel's blocks are smaller than the engine's, the views
count kernel blocks; then a block of the engine is `Caches.ratio` consecutive blocks of the description.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kvferry.errors import UsageError
from kvferry.ids import Rank
from kvferry.layout.runs import Region
from kvferry.layout.spec import CacheSpec, GroupSpec, Plane


class Tensor(Protocol):
    """What we read of a torch tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements per dimension."""
        ...

    @property
    def device(self) -> Any:
        """torch's device."""
        ...

    def stride(self) -> tuple[int, ...]:
        """Elements per dimension's step."""
        ...

    def element_size(self) -> int:
        """Bytes per element."""
        ...

    def data_ptr(self) -> int:
        """Address of the first element."""
        ...

    def untyped_storage(self) -> Any:
        """torch's storage: its address and bytes."""
        ...


@dataclass(frozen=True, slots=True)
class Model:
    """What the description states of the model and the engine, besides its memory."""

    name: str
    dtype: str
    kv_dtype: str
    kv_heads: int
    is_mla: bool
    facts: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Caches:
    """A rank's cache: its description, and how many of its blocks make one of the engine's."""

    spec: CacheSpec
    ratio: int


def describe_caches(
    tensors: Mapping[str, Tensor],
    *,
    model: Model,
    rank: Rank,
    tp: int,
    pp: int,
    block_tokens: int,
    block_count: int,
) -> Caches:
    """Describe a rank's tensors, by layer name; layers that share a tensor count once.

    Raises:
        UsageError: a tensor has an unexpected shape, or the layers' shapes differ; names the layer.
    """
    layers = _distinct(tensors)
    name, first = next(iter(layers.items()))
    for other, tensor in layers.items():
        _check(other, tensor, name, first)
    kernel_blocks, heads, kernel_tokens, content = first.shape
    if kernel_blocks % block_count or kernel_tokens * (kernel_blocks // block_count) != block_tokens:
        raise UsageError(
            f"the KV cache of layer {name} has {kernel_blocks} blocks of {kernel_tokens} tokens; "
            f"expected {block_count} of {block_tokens} or an even division of them"
        )
    size = first.element_size()
    strides = [step * size for step in first.stride()]
    head_first, heads_total = _heads(model, heads, rank.tp, tp)
    group = GroupSpec(
        kind="mla" if model.is_mla else "full",
        block_tokens=kernel_tokens,
        block_count=kernel_blocks,
        planes=tuple(Plane(layer, tensor.data_ptr(), _device(tensor)) for layer, tensor in layers.items()),
        block_stride=strides[0],
        head_stride=strides[1],
        token_stride=strides[2],
        content_bytes=content * size,
        head_first=head_first,
        head_count=heads,
        heads_total=heads_total,
    )
    spec = CacheSpec(
        model=model.name,
        dtype=model.dtype,
        kv_dtype=model.kv_dtype,
        rank=rank,
        tp_size=tp,
        pp_size=pp,
        groups=(group,),
        regions=_regions(layers),
        facts=dict(model.facts),
    )
    return Caches(spec, kernel_blocks // block_count)


def _distinct(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    layers: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            layers[name] = tensor
    if not layers:
        raise UsageError("the engine has registered no KV cache; FerryConnector has nothing to carry")
    return layers


def _check(name: str, tensor: Tensor, first_name: str, first: Tensor) -> None:
    if len(tensor.shape) != 4:
        raise UsageError(
            f"the KV cache of layer {name} has shape {tuple(tensor.shape)}; "
            "expected [block, head, token, content]"
        )
    if tensor.stride()[3] != 1:
        raise UsageError(f"the KV cache of layer {name} is not contiguous in its last dimension")
    ours = (tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size())
    if ours != (tuple(first.shape), tuple(first.stride()), first.element_size()):
        raise UsageError(
            f"the KV caches of layers {first_name} and {name} differ in shape, strides or dtype; "
            "FerryConnector carries caches whose layers are alike"
        )


def _heads(model: Model, heads: int, tp_rank: int, tp: int) -> tuple[int, int]:
    """First KV head of this rank and the model's number of them; more ranks than heads share them."""
    if model.is_mla:
        return 0, heads
    if model.kv_heads >= tp:
        return tp_rank * heads, heads * tp
    return tp_rank * model.kv_heads // tp, model.kv_heads * heads


def _device(tensor: Tensor) -> int:
    return tensor.device.index or 0


def _regions(layers: Mapping[str, Tensor]) -> tuple[Region, ...]:
    """One region per storage: vLLM's layers usually share one."""
    regions: dict[int, Region] = {}
    for tensor in layers.values():
        storage = tensor.untyped_storage()
        kind = "DRAM" if tensor.device.type == "cpu" else "VRAM"
        regions[storage.data_ptr()] = Region(storage.data_ptr(), storage.nbytes(), _device(tensor), kind)
    return tuple(regions.values())
