"""Write a small random Llama model with tokenizer and chat template, for tests and demos.

It says nothing sensible, but says it in a way that shows transfer errors: every answer is varied, depends on
all of its prompt, and near-ties of the best two tokens are far larger than the error of float32. The weights
follow from the seed alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path


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
    from kvferry.cli.tinymodel import Shape, write_model  # noqa: PLC0415 - needs numpy and tokenizers

    shape = Shape(
        layers=namespace.layers,
        heads=namespace.heads,
        kv_heads=namespace.kv_heads,
        max_positions=namespace.max_positions,
    )
    write_model(namespace.directory, shape, seed=namespace.seed)
    print(f"Wrote a random model of {shape.layers} layers to {namespace.directory}")
    return 0
