"""Named devices and models: what a step takes, and the shape of the KV cache of one rank.

Two kinds of figures stand here. *Published* ones come from a source that is named. *Derived* ones follow
from published ones by the arithmetic that is shown; what they assume is an efficiency. Nothing here was
measured by us on such a device, so a preset says how a run compares connectors, never what a deployment
will do.

Published, and used below:

- H200 SXM: 989 TFLOPS of dense bf16 (NVIDIA's data sheet gives 1,979 with sparsity), 4.8 TB/s of memory.
- H100 SXM: the same compute, 3.35 TB/s of memory (NVIDIA's data sheet).
- Qwen3-32B: 32.8e9 parameters (31.2e9 outside the embedding), 64 layers, 64 query and 8 KV heads of 128
  (its model card and config.json).
- Llama-3.1-8B: 8.03e9 parameters, 32 layers, 32 query and 8 KV heads of 128 (its config.json).
- DeepSeek-V2-Lite: 2.4e9 of 15.7e9 parameters active per token, 27 layers, 16 heads whose keys have 128 + 64
  elements and whose values have 128, and latents of 512 + 64 elements (its model card and config.json).
- The comparison of push and pull (vLLM 0.29.0, NIXL 1.4.1, Qwen3-32B, one prefill and one decode node of
  8 x H200 each, EFA, prefix caching off): 5.6 to 5.8 ms per output token at low load, and at 8 requests/s of
  16,000 tokens a median time to first token of about 540 ms with push and 1,744 ms with pull.

Assumed everywhere: half of the peak is reached in prefill, 80 % of the memory's bandwidth when reading KV.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvferry.emulator.cost import Costs
from kvferry.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A network between engines, as an upper bound on what the host's own memory does.

    Raises `UsageError` naming the field that makes no sense.
    """

    latency_seconds: float = 0.0
    bytes_per_second: float
    """Of the emulated device's bytes: those of the scaled-down cache count `scale` times."""

    def __post_init__(self) -> None:
        if self.latency_seconds < 0:
            raise UsageError(f"link.latency_seconds must be 0 or more, not {self.latency_seconds!r}")
        if self.bytes_per_second <= 0:
            raise UsageError(f"link.bytes_per_second must be greater than 0, not {self.bytes_per_second!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One rank's KV cache: bf16, keys and values of a head side by side, or MLA's latents."""

    layers: int
    kv_heads: int
    """Of this rank."""
    head_elements: int
    query_heads: int
    """Of this rank; only vLLM's view of the model needs it."""
    rotated_elements: int = 0
    """MLA: so many of a latent's `head_elements` are the rotated key. 0: keys and values of their own."""

    @property
    def is_latent(self) -> bool:
        """Whether a token has one latent instead of a key and a value."""
        return self.rotated_elements > 0

    def content_bytes(self, scale: int = 1) -> int:
        """Bytes of one token of one head of one layer: K and V, or the latent."""
        return 2 * (1 if self.is_latent else 2) * self.head_elements // scale

    def scaled_head_elements(self, scale: int) -> int:
        """Elements per head when bytes are scaled down so that a small machine's memory suffices.

        Raises:
            UsageError: the head cannot be divided so.
        """
        least = 8
        if scale < 1 or self.head_elements % scale or self.head_elements // scale < least:
            raise UsageError(
                f"content_scale {scale} does not divide heads of {self.head_elements} elements into at "
                f"least {least}; use 1, 2, 4 or 8"
            )
        return self.head_elements // scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A device, a model and a network."""

    name: str
    about: str
    costs: Costs
    shape: Shape
    link: Link | None = None


# One rank of eight: 8 query heads and 1 KV head, so a block of 16 tokens is a page of 8 KiB per layer.
_QWEN3_32B_TP8 = Shape(layers=64, kv_heads=1, head_elements=128, query_heads=8)

# 62.4 GFLOP per token and 2.1 MFLOP per pair of tokens; eight H200 at half of their peak do 3.96 PFLOPS:
# 63,500 tokens/s and 0.53 ns per pair, which makes 330 ms of a prompt of 16,384 tokens. One prefill engine
# sustains 3 such prompts per second. The decode step is what remains of the published 5.7 ms per token after
# overhead and reading the KV of one sequence. 32 KiB of KV per token at 3.84 TB/s are 8.5 ns.
_QWEN3_COSTS = Costs(
    prefill_tokens_per_second=63_500.0,
    attention_seconds_per_pair=5.3e-10,
    decode_seconds=5.4e-3,
    decode_seconds_per_sequence=2e-5,
    decode_seconds_per_context_token=8.5e-9,
    step_seconds=2e-4,
)
# The published time to first token at 8 requests/s of 16,000 tokens shows a prefill engine that keeps up with
# 131,000 tokens/s, more than the peak above allows in bf16, so it was not such an engine alone. At 110 ms per
# prompt one engine is at 88 % of its capacity there and a queue of random arrivals waits about 400 ms, which
# fits the 540 ms. Assumed: both terms shrink alike.
_UNSATURATED = 110 / 330

_LLAMA_8B = Shape(layers=32, kv_heads=8, head_elements=128, query_heads=32)
# 15 GFLOP per token and 0.52 MFLOP per pair at 495 TFLOPS. A decode step reads 16 GB of weights at 80 % of
# 3.35 TB/s in 6.0 ms; 128 KiB of KV per token are 49 ns.
_LLAMA_COSTS = Costs(
    prefill_tokens_per_second=33_000.0,
    attention_seconds_per_pair=1.05e-9,
    decode_seconds=6.0e-3,
    decode_seconds_per_sequence=2e-5,
    decode_seconds_per_context_token=4.9e-8,
    step_seconds=2e-4,
)

# 2.4e9 active parameters make 4.8 GFLOP per token, and 27 layers of 16 heads 0.28 MFLOP per pair, at 495
# TFLOPS. A decode step of one sequence reads 4.8 GB of weights at 80 % of 4.8 TB/s in 1.25 ms; that more
# sequences wake more experts is left out. 31 KB of KV per token are 8.1 ns.
_DEEPSEEK_LITE = Shape(layers=27, kv_heads=1, head_elements=576, query_heads=16, rotated_elements=64)
_DEEPSEEK_LITE_COSTS = Costs(
    prefill_tokens_per_second=103_000.0,
    attention_seconds_per_pair=5.6e-10,
    decode_seconds=1.25e-3,
    decode_seconds_per_sequence=2e-5,
    decode_seconds_per_context_token=8.1e-9,
    step_seconds=2e-4,
)


def _faster(costs: Costs, factor: float) -> Costs:
    return replace(
        costs,
        prefill_tokens_per_second=round(costs.prefill_tokens_per_second / factor),
        attention_seconds_per_pair=costs.attention_seconds_per_pair * factor,
    )


_ALL = (
    Preset(
        name="qwen3-32b-h200-tp8",
        about="one rank of Qwen3-32B on 8 x H200, tensor parallel; 330 ms of prefill per 16k tokens",
        costs=_QWEN3_COSTS,
        shape=_QWEN3_32B_TP8,
    ),
    Preset(
        name="qwen3-32b-unsaturated",
        about="the same with 110 ms of prefill per 16k tokens, so that 8 requests/s of them leave no queue "
        "that grows",
        costs=_faster(_QWEN3_COSTS, _UNSATURATED),
        shape=_QWEN3_32B_TP8,
    ),
    Preset(
        name="llama-3.1-8b-h100",
        about="Llama-3.1-8B on one H100",
        costs=_LLAMA_COSTS,
        shape=_LLAMA_8B,
    ),
    Preset(
        name="deepseek-v2-lite-h200",
        about="DeepSeek-V2-Lite, a model with MLA, on one H200; derived, and not measured",
        costs=_DEEPSEEK_LITE_COSTS,
        shape=_DEEPSEEK_LITE,
    ),
    Preset(
        name="slow-link",
        about="qwen3-32b-unsaturated between hosts with 25 Gbit/s and 50 us per rank",
        costs=_faster(_QWEN3_COSTS, _UNSATURATED),
        shape=_QWEN3_32B_TP8,
        link=Link(latency_seconds=5e-5, bytes_per_second=25e9 / 8),
    ),
)

PRESETS: Mapping[str, Preset] = {preset.name: preset for preset in _ALL}
DEFAULT = "qwen3-32b-unsaturated"


def preset_of(name: str) -> Preset:
    """The preset of that name.

    Raises:
        UsageError: there is none; names those that exist.
    """
    preset = PRESETS.get(name)
    if preset is None:
        raise UsageError(f"preset {name!r} is unknown; choose one of {', '.join(PRESETS)}")
    return preset
