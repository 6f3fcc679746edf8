"""The engine's registered KV tensors as a `layout.CacheSpec`.

From 0.29 on vLLM registers one four-dimensional view per layer, `[block, head, token, content]`, whatever
the order in memory; content holds K and V together, and MLA has one head. All we take from a tensor is its
address, shape and strides. Where the attention kernel's blocks are smaller than the engine's, the views
count kernel blocks; then a block of the engine is `Caches.ratios` consecutive blocks of the description.
Cache groups lie over each other in memory: a block belongs to one of them at a time.

What the last two dimensions mean is the attention kernel's secret. On GPUs a token's K and V lie behind each
other, head by head; where the view has other heads than the model (K's and V's apart, with scales between), a
block is copied as one piece. The kernels of the CPU keep a block's keys transposed, before its values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

from kvferry.errors import UsageError
from kvferry.ids import Rank
from kvferry.layout.ranks import heads_of, splits
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


TokenOrder = Literal["tokens", "transposed_keys", "opaque"]
"""Within a block and head: token by token; all keys, value by value, and then all values; or nobody knows."""


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
class Table:
    """A cache group of the engine. `layers` are this rank's, those that share a tensor counted once.

    `stages` has the names of its layers on each pipeline stage, this one's among them; none with one stage.
    """

    layers: tuple[str, ...]
    block_tokens: int
    window_tokens: int = 0
    order: TokenOrder = "tokens"
    stages: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Caches:
    """A rank's cache, and how many blocks of its description make one of the engine's, by cache group."""

    spec: CacheSpec
    ratios: tuple[int, ...]


def describe_caches(
    tensors: Mapping[str, Tensor],
    *,
    model: Model,
    rank: Rank,
    tp: int,
    pp: int,
    tables: Sequence[Table],
    block_count: int,
) -> Caches:
    """Describe a rank's tensors, by layer name.

    Raises:
        UsageError: a tensor has an unexpected shape, or layers of a group differ in theirs; names the layer.
    """
    groups: list[GroupSpec] = []
    ratios: list[int] = []
    for number, table in enumerate(tables):
        views = {name: tensors[name] for name in table.layers}
        parts, ratio = _described(model, table, views, (rank.tp, tp), block_count)
        stages = table.stages if pp > 1 else ()
        groups += [msgspec.structs.replace(part, table=number, stages=stages) for part in parts]
        ratios.append(ratio)
    spec = CacheSpec(
        model=model.name,
        dtype=model.dtype,
        kv_dtype=model.kv_dtype,
        rank=rank,
        tp_size=tp,
        pp_size=pp,
        groups=tuple(groups),
        regions=_regions(tensors[name] for table in tables for name in table.layers),
        facts=dict(model.facts),
    )
    return Caches(spec, tuple(ratios))


def layers_of(tensors: Mapping[str, Tensor], groups: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """The layers of each cache group whose tensors no earlier layer of the group has.

    Of several groups each layer that has a tensor of its own must be in one.

    Raises:
        UsageError: there is no tensor, or nobody says which group a layer belongs to.
    """
    if not tensors:
        raise UsageError("the engine has registered no KV cache; FerryConnector has nothing to carry")
    found = [_distinct(tensors, tensors if len(groups) == 1 else group) for group in groups]
    known = {tensors[name].data_ptr() for group in found for name in group}
    for name, tensor in tensors.items():
        if tensor.data_ptr() not in known:
            raise UsageError(f"the KV cache of layer {name} is in none of the engine's {len(groups)} groups")
    return found


def _distinct(tensors: Mapping[str, Tensor], names: Iterable[str]) -> tuple[str, ...]:
    layers: dict[int, str] = {}
    for name in names:
        if name in tensors:
            layers.setdefault(tensors[name].data_ptr(), name)
    return tuple(layers.values())


def _described(
    model: Model, table: Table, layers: Mapping[str, Tensor], place: tuple[int, int], block_count: int
) -> tuple[list[GroupSpec], int]:
    """The entries of one cache group, and how many blocks of theirs make one of the engine's."""
    if not layers:
        return [_on_other_stages(model, table, place, block_count)], 1
    name, first = next(iter(layers.items()))
    for other, tensor in layers.items():
        _check(other, tensor, name, first)
    kernel_blocks, _, kernel_tokens, _ = first.shape
    ratio = kernel_blocks // block_count
    if kernel_blocks % block_count or kernel_tokens * ratio != table.block_tokens:
        raise UsageError(
            f"the KV cache of layer {name} has {kernel_blocks} blocks of {kernel_tokens} tokens; "
            f"expected {block_count} of {table.block_tokens} or an even division of them"
        )
    parts = _groups(model, table.order, layers, *place)
    kind = _kind(model, table)
    return [
        msgspec.structs.replace(
            part,
            kind=kind,
            window_tokens=table.window_tokens,
            engine_block_tokens=table.block_tokens if ratio > 1 else 0,
        )
        for part in parts
    ], ratio


def _kind(model: Model, table: Table) -> str:
    if model.is_mla:
        return "mla"
    return "sliding_window" if table.window_tokens else "full"


def _on_other_stages(model: Model, table: Table, place: tuple[int, int], block_count: int) -> GroupSpec:
    """A cache group of which this pipeline stage has no layer; its blocks are blocks of nothing."""
    tp_rank, tp = place
    heads = 1 if model.is_mla else model.kv_heads
    held = heads_of(tp_rank, tp, heads) if splits(tp, heads) else range(heads)
    return GroupSpec(
        kind=_kind(model, table),
        block_tokens=table.block_tokens,
        block_count=block_count,
        planes=(),
        block_stride=table.block_tokens * len(held),
        head_stride=table.block_tokens,
        token_stride=1,
        content_bytes=1,
        head_first=held.start,
        head_count=len(held),
        heads_total=heads,
        window_tokens=table.window_tokens,
    )


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


def _groups(
    model: Model, order: TokenOrder, layers: Mapping[str, Tensor], tp_rank: int, tp: int
) -> list[GroupSpec]:
    """The entries of a cache group whose layers are alike."""
    held = 1 if model.is_mla else max(model.kv_heads // tp, 1)
    group = _as_viewed(model, layers, tp_rank, tp)
    if group.head_count != held:
        return [_as_pages(group, tp_rank, tp)]
    if order == "opaque":
        return [_as_tiles(group)]
    if order == "transposed_keys":
        return _keys_and_values(group, next(iter(layers.values())).element_size())
    return [group]


def _as_viewed(model: Model, layers: Mapping[str, Tensor], tp_rank: int, tp: int) -> GroupSpec:
    """Token by token, as the views' dimensions say."""
    first = next(iter(layers.values()))
    blocks, heads, tokens, content = first.shape
    size = first.element_size()
    strides = [step * size for step in first.stride()]
    head_first, heads_total = 0, heads
    if not model.is_mla:
        held = heads_of(tp_rank, tp, model.kv_heads) if splits(tp, model.kv_heads) else range(heads)
        head_first, heads_total = held.start, max(model.kv_heads, held.start + heads)
    return GroupSpec(
        kind="full",
        block_tokens=tokens,
        block_count=blocks,
        planes=tuple(Plane(layer, tensor.data_ptr(), _device(tensor)) for layer, tensor in layers.items()),
        block_stride=strides[0],
        head_stride=strides[1],
        token_stride=strides[2],
        content_bytes=content * size,
        head_first=head_first,
        head_count=heads,
        heads_total=heads_total,
    )


def _as_tiles(group: GroupSpec) -> GroupSpec:
    """A head's tokens of a block are one piece.

    Raises:
        UsageError: they do not lie together.
    """
    if group.token_stride != group.content_bytes:
        raise UsageError(
            "this attention backend orders a block's tokens in its own way and not head by head; "
            "FerryConnector cannot carry its cache"
        )
    return msgspec.structs.replace(group, tile_tokens=group.block_tokens)


def _as_pages(group: GroupSpec, tp_rank: int, tp: int) -> GroupSpec:
    """A block of a layer is one piece: what it is made of is not the model's heads.

    Raises:
        UsageError: it does not lie together.
    """
    token_bytes = group.head_count * group.content_bytes
    inner = sorted([(group.head_stride, group.head_count), (group.token_stride, group.block_tokens)])
    if inner[0][0] != group.content_bytes or inner[1][0] != inner[0][0] * inner[0][1]:
        raise UsageError(
            f"the KV cache has {group.head_count} heads per rank, which are not the model's, and its blocks "
            "do not lie together; set cache_layout to BLHNC or LBHNC"
        )
    return msgspec.structs.replace(
        group,
        head_first=tp_rank,
        head_count=1,
        heads_total=tp,
        content_bytes=token_bytes,
        head_stride=token_bytes * group.block_tokens,
        token_stride=token_bytes,
        tile_tokens=group.block_tokens,
    )


def _keys_and_values(group: GroupSpec, value_bytes: int) -> list[GroupSpec]:
    """Each block and head: its keys, value by value for all tokens, and behind them its values by token."""
    _as_tiles(group)
    half, whole = group.content_bytes // 2, group.content_bytes
    keys = msgspec.structs.replace(
        group,
        content_bytes=value_bytes,
        token_stride=value_bytes,
        rows=half // value_bytes,
        row_stride=value_bytes * group.block_tokens,
        element_bytes=whole,
    )
    behind = half * group.block_tokens
    planes = [
        Plane(plane.name, plane.address + behind, plane.device, content_first=half) for plane in group.planes
    ]
    values = msgspec.structs.replace(
        group, planes=tuple(planes), content_bytes=half, token_stride=half, element_bytes=whole
    )
    return [keys, values]


def _device(tensor: Tensor) -> int:
    return tensor.device.index or 0


def _regions(tensors: Iterable[Tensor]) -> tuple[Region, ...]:
    """One region per storage: vLLM's layers usually share one."""
    regions: dict[int, Region] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        kind = "DRAM" if tensor.device.type == "cpu" else "VRAM"
        regions[storage.data_ptr()] = Region(storage.data_ptr(), storage.nbytes(), _device(tensor), kind)
    return tuple(regions.values())
