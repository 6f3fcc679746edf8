"""Write a small random Llama model with tokenizer and chat template, for tests and demos.

It says nothing sensible, but says it in a way that shows transfer errors: every answer is varied, depends on
all of its prompt, and near-ties of the best two tokens are far larger than the error of float32. The weights
follow from the seed alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kvferry.errors import UsageError

# What only the engines need; it comes with the extras.
ENGINE_PACKAGES = frozenset(("numpy", "safetensors", "tokenizers"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model's directory, its shape and its seed."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="where to write it; made when missing")
    parser.add_argument("--layers", type=int, default=4, help="number of layers (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=4, help="attention heads (default: %(default)s)")
    parser.add_argument(
        "--kv-heads", type=int, default=2, help="heads in the KV cache (default: %(default)s)"
    )
    parser.add_argument(
        "--max-positions", type=int, default=16384, help="longest context in tokens (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="what all weights follow from (default: %(default)s)"
    )


def run(namespace: argparse.Namespace) -> int:
    """Write the model and say where."""
    sizes = {name: getattr(namespace, name) for name in ("layers", "heads", "kv_heads", "max_positions")}
    write_tiny_model(namespace.directory, seed=namespace.seed, **sizes)
    print(f"Wrote a random model of {namespace.layers} layers to {namespace.directory}")
    return 0


def write_tiny_model(directory: Path, *, seed: int, **sizes: int) -> None:
    """Write the model; `sizes` are the fields of its `Shape` that differ from the defaults.

    Raises:
        UsageError: its packages are missing, it cannot be built, or the directory cannot be written.
    """
    try:
        from kvferry.cli.tinymodel import Shape, write_model  # noqa: PLC0415 - needs `ENGINE_PACKAGES`
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ENGINE_PACKAGES:
            raise
        raise UsageError(
            f"the tiny model needs the engines' packages ({error.name} is missing); install kvferry with "
            "its extra cpu or vllm"
        ) from error
    try:
        write_model(directory, Shape(**sizes), seed=seed)
    except OSError as error:
        raise UsageError(
            f"the model cannot be written to {directory}: {error.strerror or error}; choose a directory that "
            "can be written"
        ) from error
