"""The model directory of an emulated engine: a configuration, and no weights.

vLLM reads the shape of the KV cache from it. The tokenizer, where one is wanted, is the caller's to add.
"""

from __future__ import annotations

from typing import Any

from kvferry.emulator.presets import Shape

_LAYERS_WIDTH = 4


def model_config(
    shape: Shape, *, vocabulary: int, content_scale: int = 1, max_positions: int = 131072
) -> dict[str, Any]:
    """`config.json` of a model whose rank has the cache of `shape`, each head `content_scale` times smaller.

    Raises:
        UsageError: heads cannot be made so small.
    """
    head = shape.scaled_head_elements(content_scale)
    hidden = head * shape.query_heads
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": _LAYERS_WIDTH * hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.query_heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": head,
        "max_position_embeddings": max_positions,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return config | _latent(shape, content_scale) if shape.is_latent else config


def _latent(shape: Shape, content_scale: int) -> dict[str, Any]:
    """What makes vLLM see MLA: DeepSeek's fields, every layer dense, for nothing is computed."""
    rotated = shape.rotated_elements // content_scale
    return {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_key_value_heads": shape.query_heads,
        "head_dim": rotated,
        "q_lora_rank": None,
        "kv_lora_rank": shape.scaled_head_elements(content_scale) - rotated,
        "qk_nope_head_dim": 2 * rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": 2 * rotated,
        "first_k_dense_replace": shape.layers,
        "n_routed_experts": 2,
        "moe_layer_freq": 1,
    }
