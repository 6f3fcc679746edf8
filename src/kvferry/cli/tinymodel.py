"""The tiny model's tokenizer, weights and files. See `kvferry.cli.tiny_model` for what it is for."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvferry.errors import UsageError

HEAD_ELEMENTS = 64
SPECIAL_TOKENS = ("<|pad|>", "<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
CONSONANTS = "bdfghjklmnprstvz"
VOWELS = "aeiou"
WORDS = 600
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

# How strongly a head prefers some tokens to others: attention scores have about this deviation, so that of
# thousands of tokens a few dozen matter to each head, wherever they are. With even attention the prompt would
# average out and the output repeat itself; with a sharper one whole blocks would never be looked at.
SCORE_DEVIATION = 2.2
# What each part adds to the residual stream, against an embedding of 1: the context must outweigh the last
# token, or the output is a walk in a small circle.
EMBEDDING_SCALE = 0.5
ATTENTION_SCALE = 2.0
MLP_SCALE = 3.0
LOGIT_DEVIATION = 4.0

Matrix = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of the model. Raises `UsageError` for one that cannot be built."""

    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    max_positions: int = 16384

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "kv_heads", "max_positions"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} must be at least 1")
        if self.heads % self.kv_heads:
            raise UsageError(f"--heads {self.heads} must be a multiple of --kv-heads {self.kv_heads}")

    @property
    def hidden(self) -> int:
        """Elements of the residual stream."""
        return self.heads * HEAD_ELEMENTS


def write_model(directory: Path, shape: Shape, *, seed: int = 0) -> None:
    """Write config, tokenizer and weights; files of an earlier model in `directory` are replaced.

    Raises:
        OSError: the directory cannot be made or written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    vocabulary = tokenizer.get_vocab_size()
    # First what says in an OSError that the directory cannot be written: the two libraries raise their own.
    _write_json(directory / "tokenizer_config.json", tokenizer_config(shape.max_positions))
    _write_json(directory / "config.json", _model_config(shape, vocabulary))
    tokenizer.save(str(directory / "tokenizer.json"))
    save_file(
        build_weights(shape, vocabulary, spoken_from=vocabulary - WORDS, seed=seed),
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )


def build_tokenizer() -> Tokenizer:
    """Byte-level pairs: any text can be encoded, and `WORDS` made-up words are one token each.

    Ids are: the special tokens, the 256 bytes, syllables, syllables after a blank, words after a blank.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    syllables = [consonant + vowel for consonant, vowel in itertools.product(CONSONANTS, VOWELS)]
    spaced = ["Ġ" + syllable for syllable in syllables]
    # A prime stride walks over all pairs of syllables before it meets one twice.
    pairs = [(i * 1009) % len(syllables) ** 2 for i in range(WORDS)]
    words = [(spaced[pair // len(syllables)], syllables[pair % len(syllables)]) for pair in pairs]
    merges = (
        [(syllable[0], syllable[1]) for syllable in syllables]
        + [("Ġ", syllable) for syllable in syllables]
        + words
    )
    tokens = [*SPECIAL_TOKENS, *alphabet, *syllables, *spaced, *(first + second for first, second in words)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


def build_weights(shape: Shape, vocabulary: int, *, spoken_from: int, seed: int) -> dict[str, Matrix]:
    """Random weights in the names of a Llama checkpoint; only tokens from `spoken_from` on are ever said."""
    generator = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, gain: float) -> Matrix:
        values: Matrix = generator.standard_normal((rows, columns)).astype(np.float32)
        return values * np.float32(gain / columns**0.5)

    hidden, key_value = shape.hidden, shape.kv_heads * HEAD_ELEMENTS
    query_gain = SCORE_DEVIATION**0.5
    weights: dict[str, Matrix] = {
        "model.embed_tokens.weight": matrix(vocabulary, hidden, EMBEDDING_SCALE * hidden**0.5),
        "model.norm.weight": np.ones(hidden, np.float32),
        "lm_head.weight": matrix(vocabulary, hidden, LOGIT_DEVIATION),
    }
    # A logit of 0 is never the best of hundreds: no answer ends early, and none has half a character.
    weights["lm_head.weight"][:spoken_from] = 0
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": np.ones(hidden, np.float32),
            prefix + "post_attention_layernorm.weight": np.ones(hidden, np.float32),
            prefix + "self_attn.q_proj.weight": matrix(hidden, hidden, query_gain),
            prefix + "self_attn.k_proj.weight": matrix(key_value, hidden, query_gain),
            prefix + "self_attn.v_proj.weight": matrix(key_value, hidden, 1.0),
            prefix + "self_attn.o_proj.weight": matrix(hidden, hidden, ATTENTION_SCALE),
            prefix + "mlp.gate_proj.weight": matrix(2 * hidden, hidden, 1.0),
            prefix + "mlp.up_proj.weight": matrix(2 * hidden, hidden, 1.0),
            prefix + "mlp.down_proj.weight": matrix(hidden, 2 * hidden, MLP_SCALE),
        }
    return weights


def _model_config(shape: Shape, vocabulary: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": 2 * shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": HEAD_ELEMENTS,
        "max_position_embeddings": shape.max_positions,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "pad_token_id": SPECIAL_TOKENS.index("<|pad|>"),
        "bos_token_id": SPECIAL_TOKENS.index("<|begin|>"),
        "eos_token_id": SPECIAL_TOKENS.index("<|end|>"),
    }


def tokenizer_config(max_positions: int) -> dict[str, object]:
    """`tokenizer_config.json` of a model with contexts of so many tokens."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_positions,
        "pad_token": "<|pad|>",
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
