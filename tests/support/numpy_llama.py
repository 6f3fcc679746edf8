"""A Llama in numpy: slow, plain, and independent of every engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

Array = npt.NDArray[np.float32]


class NumpyLlama:
    """Reads a checkpoint directory."""

    def __init__(self, directory: Path) -> None:
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        self._weights: dict[str, Array] = load_file(directory / "model.safetensors")

    def logits(self, tokens: list[int]) -> Array:
        """The logits of every position, shape `[tokens, vocabulary]`."""
        return self._head(self._states(tokens))

    def greedy(self, tokens: list[int], count: int) -> list[int]:
        """The next `count` tokens."""
        tokens = list(tokens)
        for _ in range(count):
            tokens.append(int(self._head(self._states(tokens)[-1:]).argmax()))
        return tokens[-count:]

    def _states(self, tokens: list[int]) -> Array:
        hidden: Array = self._weights["model.embed_tokens.weight"][tokens]
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            hidden = hidden + self._attention(prefix, self._norm(hidden))
            hidden = hidden + self._mlp(prefix, self._norm(hidden))
        return hidden

    def _head(self, hidden: Array) -> Array:
        return self._project("lm_head", self._norm(hidden))

    def _norm(self, hidden: Array) -> Array:
        # The tiny model's norm weights are 1.
        mean = np.mean(hidden**2, axis=-1, keepdims=True)
        normed: Array = hidden / np.sqrt(mean + self.config["rms_norm_eps"])
        return normed

    def _project(self, name: str, hidden: Array) -> Array:
        return hidden @ self._weights[name + ".weight"].T

    def _heads(self, name: str, hidden: Array) -> Array:
        """`[heads, tokens, elements]`."""
        return self._project(name, hidden).reshape(len(hidden), -1, self.config["head_dim"]).swapaxes(0, 1)

    def _rotated(self, heads: Array) -> Array:
        half = self.config["head_dim"] // 2
        frequencies = self.config["rope_theta"] ** (-np.arange(half) / half)
        angles = np.arange(heads.shape[1])[:, None] * frequencies
        first, second = heads[..., :half], heads[..., half:]
        sine, cosine = np.sin(angles), np.cos(angles)
        rotated = np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
        single: Array = rotated.astype(np.float32)
        return single

    def _attention(self, prefix: str, hidden: Array) -> Array:
        group = self.config["num_attention_heads"] // self.config["num_key_value_heads"]
        query = self._rotated(self._heads(prefix + "self_attn.q_proj", hidden))
        key = np.repeat(self._rotated(self._heads(prefix + "self_attn.k_proj", hidden)), group, axis=0)
        value = np.repeat(self._heads(prefix + "self_attn.v_proj", hidden), group, axis=0)
        scores = query @ key.swapaxes(1, 2) / self.config["head_dim"] ** 0.5
        scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = (shares / shares.sum(axis=-1, keepdims=True)) @ value
        return self._project(prefix + "self_attn.o_proj", mixed.swapaxes(0, 1).reshape(len(hidden), -1))

    def _mlp(self, prefix: str, hidden: Array) -> Array:
        gate = self._project(prefix + "mlp.gate_proj", hidden)
        gated = gate / (1 + np.exp(-gate)) * self._project(prefix + "mlp.up_proj", hidden)
        return self._project(prefix + "mlp.down_proj", gated)
