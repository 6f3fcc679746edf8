"""Tiny models of other kinds than `kvferry tiny-model` writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvferry.cli.tinymodel import Shape, write_model


def write_windowed_model(directory: Path, window_tokens: int) -> None:
    """Every other layer looks at its newest tokens only."""
    shape = Shape()
    write_model(directory, shape)
    kinds = ["sliding_attention" if layer % 2 else "full_attention" for layer in range(shape.layers)]
    _configure(directory, layer_types=kinds, sliding_window=window_tokens)


def _configure(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes, indent=2) + "\n")
