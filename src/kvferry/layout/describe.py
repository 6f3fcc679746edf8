"""Descriptions of caches that lie in one piece of memory, from the name of their stride order.

For tests, the simulator and the emulator; real caches are described from their tensors.
"""

from __future__ import annotations

from kvferry.errors import UsageError
from kvferry.layout.runs import Region
from kvferry.layout.spec import GroupSpec, Plane

STRIDE_ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""vLLM's stride orders, outermost dimension first: L layer, B block, H head, N token, C content."""


def describe(
    order: str,
    *,
    layers: int,
    blocks: int,
    heads: int,
    block_tokens: int,
    content_bytes: int,
    address: int,
    kind: str = "full",
    head_first: int = 0,
    heads_total: int | None = None,
    layer_name: str = "model.layers.{}.self_attn.attn",
    device: int = 0,
    memory: str = "DRAM",
) -> tuple[GroupSpec, Region]:
    """A densely packed group at `address` and the region that holds exactly it.

    `order` is any order of L, B, H and N before C. `heads_total` is `head_first + heads` unless given. The
    group is checked when a `CacheSpec` is made of it.

    Raises:
        UsageError: `order` is not an order of the five dimensions that ends in C.
    """
    if sorted(order) != sorted("LBHNC") or not order.endswith("C"):
        raise UsageError(f"order: must be an order of L, B, H, N that ends in C, not {order!r}")
    counts = {"L": layers, "B": blocks, "H": heads, "N": block_tokens, "C": content_bytes}
    strides: dict[str, int] = {}
    size = 1
    for axis in reversed(order):
        strides[axis] = size
        size *= counts[axis]
    group = GroupSpec(
        kind=kind,
        block_tokens=block_tokens,
        block_count=blocks,
        planes=tuple(
            Plane(layer_name.format(layer), address + layer * strides["L"], device) for layer in range(layers)
        ),
        block_stride=strides["B"],
        head_stride=strides["H"],
        token_stride=strides["N"],
        content_bytes=content_bytes,
        head_first=head_first,
        head_count=heads,
        heads_total=head_first + heads if heads_total is None else heads_total,
    )
    return group, Region(address, size, device, memory)
