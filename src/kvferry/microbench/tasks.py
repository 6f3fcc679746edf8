"""What the two processes tell each other over their pipe. Moments are of the clock that they share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvferry.ids import BlockId, TransferId
from kvferry.microbench.cells import Shape
from kvferry.protocol.commands import Source

Targets = tuple[tuple[BlockId, ...], ...]
"""The target blocks of each transfer."""


@dataclass(frozen=True, slots=True)
class SetUp:
    """The first task: make a memory with a rank of each shape over it."""

    memory_bytes: int
    shapes: tuple[Shape, ...]
    extra: dict[str, Any]
    """`kv_connector_extra_config`, as an engine would be given it."""
    seconds_max: float
    """For each later task."""


@dataclass(frozen=True, slots=True)
class IsUp:
    """The answer: the raw agent's metadata, and each cache as the directory would describe it."""

    raw_metadata: bytes
    caches: dict[Shape, bytes]


@dataclass(frozen=True, slots=True)
class Receive:
    """Register destinations for these transfers, say `Ready`, and wait for them after `Go`."""

    shape: Shape
    source: Source
    transfers: tuple[TransferId, ...]
    targets: Targets
    seed: int


@dataclass(frozen=True, slots=True)
class Listen:
    """Say `Ready`, and after `Go` wait for as many notifications as there are transfers."""

    shape: Shape
    targets: Targets
    seed: int


@dataclass(frozen=True, slots=True)
class Outwait:
    """Let one-block transfers wait, and time the loop's steps; then receive them."""

    shape: Shape
    source: Source
    transfers: tuple[TransferId, ...]
    settle_seconds: float
    seconds: float
    seed: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The task is prepared."""


@dataclass(frozen=True, slots=True)
class Go:
    """The clock runs."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """How it ended, after `Go`. `cpu_seconds` of all threads but the host's, `host_seconds` of its calls."""

    finished_at: tuple[float, ...] = ()
    wrong_pages: int = 0
    cpu_seconds: float = 0.0
    host_seconds: float = 0.0
    problems: tuple[str, ...] = ()


@dataclass(slots=True)
class Steps:
    """How long each step of a loop took, by the clock and in CPU time of its thread."""

    wall_seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    watched_seconds: float = 0.0
    """From the first to the last, pauses included."""


@dataclass(frozen=True, slots=True)
class Outwaited:
    """The answer to `Outwait`."""

    steps: Steps
    wrong_pages: int
    problems: tuple[str, ...]


Task = SetUp | Receive | Listen | Outwait
Answer = IsUp | Ready | Arrived | Outwaited
