"""Write the model directory of an emulated engine, and say how to start engines with it.

An emulated engine is the real vLLM with real KV memory; only the time that a GPU would compute is emulated.
The directory holds a configuration and a tokenizer, no weights. See docs/emulator.md.

  kvferry emulated-model ./emulated --preset qwen3-32b-unsaturated
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvferry.cli.processes import ServerSpec
from kvferry.emulator.model import model_config
from kvferry.emulator.options import KEY, TESTING_VARIABLE, read_options
from kvferry.emulator.presets import DEFAULT, PRESETS, preset_of
from kvferry.errors import UsageError

CLASSES = {
    "--worker-cls": "kvferry.emulator.worker.EmulatedWorker",
    "--distributed-executor-backend": "kvferry.emulator.executor.EmulatedExecutor",
    "--scheduler-cls": "kvferry.emulator.scheduler.EmulatedScheduler",
}
RANKS_EXECUTOR = "kvferry.emulator.executor.EmulatedRanksExecutor"
SERVED_NAME = "emulated"
CONTENT_SCALE_DEFAULT = 4
CACHE_BYTES_DEFAULT = 2 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The directory and what is emulated."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="where to write it; made when missing")
    parser.add_argument(
        "--preset",
        default=DEFAULT,
        metavar="NAME",
        help=f"the device and the model, one of {', '.join(PRESETS)} (default: %(default)s)",
    )
    parser.add_argument(
        "--content-scale",
        type=int,
        default=CONTENT_SCALE_DEFAULT,
        metavar="N",
        help="make each KV head so many times smaller, so that this machine's memory suffices "
        "(default: %(default)s)",
    )


def run(namespace: argparse.Namespace) -> int:
    """Write the directory and say how to use it."""
    directory = namespace.directory
    engine = EmulatedEngine(
        name="prefill-0", transfer=None, preset=namespace.preset, content_scale=namespace.content_scale
    )
    write_emulated_model(directory, preset=engine.preset, content_scale=engine.content_scale)
    arguments = shlex.join(engine.arguments)
    print(f"Wrote the model of {engine.preset} to {directory}. Arguments of vLLM for it:")
    print(f"  {arguments}")
    print("A prefill and a decode engine, and the router:")
    print(
        f"  kvferry up --model {shlex.quote(str(directory))} --prefill-args {shlex.quote(arguments)} "
        f"--decode-args {shlex.quote(arguments)}"
    )
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedEngine:
    """One engine to start on this machine. Raises `UsageError` for options that make no sense."""

    name: str
    """Also its engine id."""
    transfer: Mapping[str, Any] | None
    """`--kv-transfer-config`."""
    preset: str = DEFAULT
    content_scale: int = CONTENT_SCALE_DEFAULT
    """How many times smaller each head is than the preset's, so that this machine's memory suffices."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """More keys for the emulator; see `kvferry.emulator.options`."""
    cache_bytes: int = CACHE_BYTES_DEFAULT
    block_tokens: int = 16
    step_tokens: int = 8192
    """Most tokens that one step computes: the chunk of a chunked prefill."""
    context_tokens_max: int = 32768
    ranks: int = 1
    """Tensor-parallel ones, of a preset with MLA."""
    prefix_caching: bool = False
    more_arguments: tuple[str, ...] = ()
    """For vLLM; they win."""
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        read_options(self.additional_config, {TESTING_VARIABLE: "1"})

    @property
    def additional_config(self) -> dict[str, Any]:
        """`--additional-config`."""
        keys: dict[str, Any] = {"preset": self.preset, "content_scale": self.content_scale}
        if preset_of(self.preset).shape.is_latent:
            keys["step_tokens"] = self.step_tokens
        return {KEY: {**keys, **self.options}}

    @property
    def arguments(self) -> tuple[str, ...]:
        """What makes vLLM emulate, whatever its model directory, address and connector."""
        return (
            *self._classes,
            "--additional-config",
            json.dumps(self.additional_config),
            "--enforce-eager",
            "--kv-cache-memory-bytes",
            str(self.cache_bytes),
            "--block-size",
            str(self.block_tokens),
            "--max-num-batched-tokens",
            str(self.step_tokens),
            "--max-model-len",
            str(self.context_tokens_max),
            "--enable-prefix-caching" if self.prefix_caching else "--no-enable-prefix-caching",
        )

    @property
    def _classes(self) -> list[str]:
        if self.ranks == 1:
            return [word for pair in CLASSES.items() for word in pair]
        named = CLASSES | {"--distributed-executor-backend": RANKS_EXECUTOR}
        sizes = {"--tensor-parallel-size": str(self.ranks)}
        return [word for pair in (named | sizes).items() for word in pair]

    def server(self, model: Path, port: int, log: Path) -> ServerSpec:
        """The server process, for a model directory that `write_emulated_model` has made."""
        return ServerSpec(
            name=self.name,
            command=self.command(model, port),
            host="127.0.0.1",
            port=port,
            log=log,
            environment=self.full_environment,
        )

    def command(self, model: Path, port: int) -> tuple[str, ...]:
        """The command line of vLLM's server."""
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(model), "--served-model-name", SERVED_NAME]
        command += ["--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log"]
        command += self.arguments
        if self.transfer is not None:
            command += ["--kv-transfer-config", json.dumps(dict(self.transfer))]
        return (*command, *self.more_arguments)

    @property
    def full_environment(self) -> dict[str, str]:
        """What the process needs besides the caller's own environment."""
        return {
            "HF_HUB_OFFLINE": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            # Nothing is computed here; a pool of threads would only take cores.
            "OMP_NUM_THREADS": "1",
            # Several ranks would be bound to a NUMA node each.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            **self.environment,
        }


def write_emulated_model(
    directory: Path, *, preset: str = DEFAULT, content_scale: int = CONTENT_SCALE_DEFAULT
) -> None:
    """Write the model directory of an emulated engine: configuration and tokenizer, no weights.

    Raises:
        UsageError: there is no such preset or scale, the tokenizer's packages are missing, or the directory
            cannot be written.
    """
    shape = preset_of(preset).shape
    try:
        from kvferry.cli.tinymodel import build_tokenizer, tokenizer_config  # noqa: PLC0415 - an extra's
    except ModuleNotFoundError as error:
        raise UsageError(
            f"an emulated engine needs the engines' packages ({error.name} is missing); install kvferry "
            "with its extra cpu or vllm"
        ) from error
    tokenizer = build_tokenizer()
    config = model_config(shape, vocabulary=tokenizer.get_vocab_size(), content_scale=content_scale)
    files = {
        "config.json": config,
        "tokenizer_config.json": tokenizer_config(config["max_position_embeddings"]),
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"the model cannot be written to {directory}: {error.strerror or error}; choose a directory that "
            "can be written"
        ) from error
    tokenizer.save(str(directory / "tokenizer.json"))
