"""The emulated engine's model directory, arguments and environment."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from kvferry.cli import main
from kvferry.cli.emulated import RANKS_EXECUTOR, EmulatedEngine, write_emulated_model
from kvferry.emulator.options import KEY, read_options
from kvferry.errors import UsageError


def option(command: tuple[str, ...], name: str) -> str:
    return command[command.index(name) + 1]


def test_the_directory_has_the_presets_shape_scaled_down_and_a_tokenizer(tmp_path: Path) -> None:
    write_emulated_model(tmp_path / "model", preset="qwen3-32b-h200-tp8", content_scale=4)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["num_key_value_heads"], config["head_dim"]) == (64, 1, 32)
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == config["vocab_size"]


def test_everything_that_is_ever_said_is_a_word(tmp_path: Path) -> None:
    write_emulated_model(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    assert all(tokenizer.decode([token]).strip() for token in range(size // 2, size))


def test_the_command_says_how_to_start_engines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["emulated-model", str(tmp_path / "m"), "--preset", "slow-link"]) == 0
    up = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert up[:4] == ["kvferry", "up", "--model", str(tmp_path / "m")]
    for name in ("--prefill-args", "--decode-args"):
        arguments = tuple(shlex.split(up[up.index(name) + 1]))
        assert read_options(json.loads(option(arguments, "--additional-config"))).preset == "slow-link"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--preset", "h300"], "preset 'h300'"),
        (["--content-scale", "3"], "content_scale 3"),
    ],
)
def test_what_cannot_be_emulated_is_refused(
    arguments: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["emulated-model", str(tmp_path / "m"), *arguments]) == 2
    assert named in capsys.readouterr().err


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        write_emulated_model(tmp_path / "file" / "model")


def test_an_engines_command_has_its_connector_options_and_sizes(tmp_path: Path) -> None:
    transfer = {"kv_connector": "FerryConnector", "kv_role": "kv_producer"}
    engine = EmulatedEngine(
        name="prefill-0",
        transfer=transfer,
        options={"verify": "full"},
        cache_bytes=123,
        step_tokens=2048,
        more_arguments=("--seed", "7"),
        environment={"VLLM_HOST_IP": "::1"},
    )
    server = engine.server(tmp_path, 8123, tmp_path / "log")
    assert server.command[0] == sys.executable
    assert server.command[-2:] == ("--seed", "7")
    assert json.loads(option(server.command, "--kv-transfer-config")) == transfer
    assert option(server.command, "--kv-cache-memory-bytes") == "123"
    assert option(server.command, "--max-num-batched-tokens") == "2048"
    assert "--no-enable-prefix-caching" in server.command
    config = json.loads(option(server.command, "--additional-config"))
    assert config[KEY]["verify"] == "full"
    assert server.environment["VLLM_HOST_IP"] == "::1"
    assert server.environment["HF_HUB_OFFLINE"] == "1"


def test_without_a_connector_there_is_no_transfer_configuration(tmp_path: Path) -> None:
    command = EmulatedEngine(name="alone", transfer=None, prefix_caching=True).command(tmp_path, 1)
    assert "--kv-transfer-config" not in command
    assert "--enable-prefix-caching" in command


@pytest.mark.parametrize("options", [{"verify": "some"}, {"nothing": 1}])
def test_options_that_make_no_sense_are_refused_before_a_process_starts(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="emulator"):
        EmulatedEngine(name="e", transfer=None, options=options)


def test_a_model_with_mla_is_one_to_vllm_too(tmp_path: Path) -> None:
    """A latent of 576 elements, four times smaller; whatever vLLM's platform does to the size of a step."""
    write_emulated_model(tmp_path, preset="deepseek-v2-lite-h200", content_scale=4)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DeepseekV2ForCausalLM"]
    assert (config["kv_lora_rank"], config["qk_rope_head_dim"]) == (128, 16)
    engine = EmulatedEngine(name="d", transfer=None, preset="deepseek-v2-lite-h200", step_tokens=512, ranks=2)
    command = engine.command(tmp_path, 1)
    assert option(command, "--tensor-parallel-size") == "2"
    assert option(command, "--distributed-executor-backend") == RANKS_EXECUTOR
    assert read_options(json.loads(option(command, "--additional-config"))).step_tokens == 512
