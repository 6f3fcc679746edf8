"""The tiny model: its files, its tokenizer, and weights that follow from the seed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from kvferry.cli import main
from kvferry.cli.tinymodel import (
    HEAD_ELEMENTS,
    SPECIAL_TOKENS,
    WORDS,
    Shape,
    build_tokenizer,
    build_weights,
    write_model,
)
from kvferry.errors import UsageError
from tests.support.numpy_llama import NumpyLlama

SMALL = Shape(layers=1, heads=2, kv_heads=1, max_positions=256)


def test_the_command_writes_a_model_of_the_shape_that_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "deep" / "model"
    arguments = ["--layers", "2", "--heads", "4", "--kv-heads", "2", "--max-positions", "512", "--seed", "3"]
    assert main.main(["tiny-model", str(directory), *arguments]) == 0
    assert str(directory) in capsys.readouterr().out
    config = json.loads((directory / "config.json").read_text())
    assert config["num_hidden_layers"] == 2
    assert config["num_attention_heads"] == 4
    assert config["num_key_value_heads"] == 2
    assert config["max_position_embeddings"] == 512
    assert config["dtype"] == "float32"
    weights = load_file(directory / "model.safetensors")
    assert weights["model.embed_tokens.weight"].shape == (config["vocab_size"], config["hidden_size"])
    assert weights["model.layers.1.self_attn.k_proj.weight"].shape == (
        2 * HEAD_ELEMENTS,
        config["hidden_size"],
    )
    assert {weight.dtype for weight in weights.values()} == {np.dtype(np.float32)}
    assert "model.layers.2.mlp.up_proj.weight" not in weights


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "--layers must be at least 1"),
        ({"max_positions": 0}, "--max-positions must be at least 1"),
        ({"heads": 4, "kv_heads": 3}, "--heads 4 must be a multiple of --kv-heads 3"),
    ],
)
def test_an_impossible_shape_names_its_option(changes: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Shape(**changes)


def test_the_seed_decides_every_weight(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_model(tmp_path / name, SMALL, seed=seed)
    first, second, third = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b", "c"))
    assert first == second != third


def test_only_words_are_ever_said() -> None:
    weights = build_weights(SMALL, 1000, spoken_from=400, seed=0)
    head = weights["lm_head.weight"]
    assert not head[:400].any()
    assert head[400:].any(axis=1).all()


def test_any_text_survives_the_tokenizer() -> None:
    tokenizer = build_tokenizer()
    for text in ("", " kalo fedo", "Ship ahoy: ÄÖ 船 🚢\n\t0x1F", "ka" * 100):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == text


def test_each_word_is_one_token_and_unlike_the_others() -> None:
    tokenizer = build_tokenizer()
    vocabulary = tokenizer.get_vocab_size()
    words = [tokenizer.decode([token]) for token in range(vocabulary - WORDS, vocabulary)]
    assert len(set(words)) == WORDS
    for token, word in enumerate(words, vocabulary - WORDS):
        assert tokenizer.encode(word, add_special_tokens=False).ids == [token]


def test_special_tokens_come_first_and_are_one_token_each(tmp_path: Path) -> None:
    write_model(tmp_path, SMALL)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("".join(SPECIAL_TOKENS)).ids == list(range(len(SPECIAL_TOKENS)))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["eos_token_id"] == SPECIAL_TOKENS.index("<|end|>")


def test_the_chat_template_marks_roles_and_asks_for_the_answer(tmp_path: Path) -> None:
    jinja2 = pytest.importorskip("jinja2")
    write_model(tmp_path, SMALL)
    template = json.loads((tmp_path / "tokenizer_config.json").read_text())["chat_template"]
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    text = jinja2.Template(template).render(messages=messages, add_generation_prompt=True)
    assert text == "<|system|>be brief<|end|><|user|>hi<|end|><|assistant|>"


# --- what keeps it from being written ------------------------------------------------------------


@pytest.mark.parametrize("directory", ["/proc/x", "/proc/self"])
def test_a_directory_that_cannot_be_written_is_named(
    directory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether it cannot be made or is there already."""
    assert main.main(["tiny-model", directory]) == 2
    assert f"kvferry: the model cannot be written to {directory}: " in capsys.readouterr().err


@pytest.mark.parametrize("package", ["numpy", "safetensors", "tokenizers"])
@pytest.mark.parametrize("command", [["tiny-model", "x"], ["demo"]])
def test_missing_packages_name_the_extras(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    package: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    _hide(monkeypatch, package)
    assert main.main(command) == 2
    message = capsys.readouterr().err
    assert f"({package} is missing)" in message.replace(".numpy", "")
    assert "needs the engines' packages" in message
    assert "install kvferry with its extra cpu or vllm" in message
    assert list(tmp_path.iterdir()) == []


def test_another_missing_module_is_a_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _hide(monkeypatch, "kvferry.cli.tinymodel")
    with pytest.raises(ModuleNotFoundError):
        main.main(["tiny-model", str(tmp_path)])


def _hide(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for module in [name, *(loaded for loaded in sys.modules if loaded.startswith(f"{name}."))]:
        monkeypatch.setitem(sys.modules, module, None)
    if name != "kvferry.cli.tinymodel":
        monkeypatch.delitem(sys.modules, "kvferry.cli.tinymodel")


# --- what the model says, by an implementation of its own ----------------------------------------

PROMPTS = 6
PROMPT_TOKENS = 300
ANSWER_TOKENS = 12


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> NumpyLlama:
    directory = tmp_path_factory.mktemp("tiny")
    write_model(directory, Shape(), seed=0)
    return NumpyLlama(directory)


def prompts(count: int, tokens: int) -> list[list[int]]:
    generator = np.random.default_rng(5)
    return [generator.integers(len(SPECIAL_TOKENS), 1000, tokens).tolist() for _ in range(count)]


def test_answers_are_varied(llama: NumpyLlama) -> None:
    answers = [llama.greedy(prompt, ANSWER_TOKENS) for prompt in prompts(PROMPTS, 40)]
    assert min(len(set(answer)) for answer in answers) >= ANSWER_TOKENS // 2
    assert len({tuple(answer) for answer in answers}) == PROMPTS


def test_the_best_tokens_are_far_apart_beside_the_error_of_float32(llama: NumpyLlama) -> None:
    """Engines differ by up to 3e-5 in the gap, by chunks and batches; nearly all gaps are far above it."""
    logits = np.concatenate([llama.logits(prompt) for prompt in prompts(PROMPTS, PROMPT_TOKENS)])
    best = np.sort(logits, axis=-1)[:, -2:]
    gaps = best[:, 1] - best[:, 0]
    assert np.quantile(gaps, 0.01) > 5e-3
    assert np.median(gaps) > 0.5


@pytest.mark.parametrize("block", [0, 1])
def test_damage_to_any_block_of_the_prompt_changes_the_answer(llama: NumpyLlama, block: int) -> None:
    for prompt in prompts(2, PROMPT_TOKENS):
        damaged = prompt.copy()
        damaged[block * 128 : (block + 1) * 128] = reversed(prompt[block * 128 : (block + 1) * 128])
        assert llama.greedy(prompt, 3) != llama.greedy(damaged, 3)
