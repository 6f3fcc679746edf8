"""Tiny models of other kinds than `kvferry tiny-model` writes: sliding windows, and MLA."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from kvferry.cli.tinymodel import HEAD_ELEMENTS, SCORE_DEVIATION, Matrix, Shape, write_model

LATENT, ROTATED = 512, 64
"""Elements of the latent and of the rotated key: the only sizes that vLLM's kernel for the CPU has."""


def write_windowed_model(directory: Path, window_tokens: int) -> None:
    """Every other layer looks at its newest tokens only."""
    shape = Shape()
    write_model(directory, shape)
    kinds = ["sliding_attention" if layer % 2 else "full_attention" for layer in range(shape.layers)]
    _configure(directory, layer_types=kinds, sliding_window=window_tokens)


def write_latent_model(directory: Path, *, seed: int = 0) -> None:
    """The same with DeepSeek's attention, and no experts."""
    shape = Shape(layers=3)
    write_model(directory, shape)
    _configure(
        directory,
        architectures=["DeepseekV2ForCausalLM"],
        model_type="deepseek_v2",
        num_key_value_heads=shape.heads,
        q_lora_rank=None,
        kv_lora_rank=LATENT,
        qk_nope_head_dim=HEAD_ELEMENTS,
        qk_rope_head_dim=ROTATED,
        v_head_dim=HEAD_ELEMENTS,
        head_dim=ROTATED,
        first_k_dense_replace=shape.layers,
        n_routed_experts=4,
        moe_layer_freq=1,
    )
    file = directory / "model.safetensors"
    weights = {
        name: matrix
        for name, matrix in load_file(file).items()
        if not name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
    }
    generator = np.random.default_rng(seed)
    for layer in range(shape.layers):
        weights |= _latent_attention(f"model.layers.{layer}.self_attn.", shape, generator)
    save_file(weights, file, metadata={"format": "pt"})


def _latent_attention(prefix: str, shape: Shape, generator: np.random.Generator) -> dict[str, Matrix]:
    def matrix(rows: int, columns: int, gain: float) -> Matrix:
        values: Matrix = generator.standard_normal((rows, columns)).astype(np.float32)
        return values * np.float32(gain / columns**0.5)

    gain = SCORE_DEVIATION**0.5
    # Of each head first what makes its keys, then what makes its values.
    heads = [
        part
        for _ in range(shape.heads)
        for part in (matrix(HEAD_ELEMENTS, LATENT, gain), matrix(HEAD_ELEMENTS, LATENT, 1.0))
    ]
    latent = [matrix(LATENT, shape.hidden, 1.0), matrix(ROTATED, shape.hidden, gain)]
    return {
        prefix + "q_proj.weight": matrix(shape.heads * (HEAD_ELEMENTS + ROTATED), shape.hidden, gain),
        prefix + "kv_a_proj_with_mqa.weight": np.concatenate(latent),
        prefix + "kv_a_layernorm.weight": np.ones(LATENT, np.float32),
        prefix + "kv_b_proj.weight": np.concatenate(heads),
    }


def _configure(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes, indent=2) + "\n")
