"""What a comparison does, in which order, and how long it takes.

One pair of engines runs at a time, because vLLM's own connectors keep a core busy even when idle. Each
repeat starts every connector's pair once, and begins with another connector than the repeat before; within a
repeat all connectors meet the same cells in the same order, with the same prompts at the same moments.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry.bench.connectors import BASELINE
from kvferry.bench.grid import Cell
from kvferry.errors import UsageError

STARTUP_SECONDS = 25.0
"""Of one pair of engines, with its end; for the estimate only."""
WARMUP_SECONDS = 6.0
IDLE_SECONDS = 3.0
TAIL_SECONDS = 2.0
"""From the last request's moment to the end of its answer and the reading of what the engines wrote."""
CELL_SECONDS_MIN = 3.0
CELL_SECONDS_MAX = 30.0
_SHARE_OF_TIME = 0.9
"""What is planned of the time that is allowed."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides what is measured; two runs with equal options can share their results."""

    connectors: tuple[str, ...]
    cells: tuple[tuple[float, int], ...]
    repeats: int
    cell_seconds: float
    output_tokens: int
    baseline: bool
    """Whether the largest cell is also run on a decode engine that receives nothing."""
    seed: int
    vocabulary: tuple[int, int]
    engines: dict[str, Any]
    """What the engines are started with."""
    versions: dict[str, str]


@dataclass(frozen=True, slots=True)
class Session:
    """One pair of engines from start to stop, and the cells that it runs."""

    repeat: int
    connector: str
    cells: tuple[Cell, ...]


def sessions(options: Options) -> list[Session]:
    """All sessions in order."""
    listed = []
    for repeat in range(options.repeats):
        cells = [Cell(*cell) for cell in options.cells]
        random.Random(f"cells {options.seed} {repeat}").shuffle(cells)
        turn = repeat % len(options.connectors)
        order = options.connectors[turn:] + options.connectors[:turn]
        listed += [Session(repeat, connector, tuple(cells)) for connector in order]
        if options.baseline:
            listed.append(Session(repeat, BASELINE, (max(cells),)))
    return listed


def requests_in(cell: Cell, seconds: float) -> int:
    """How many requests a cell sends: at least two, since one has no neighbour."""
    return max(2, round(cell.rate * seconds))


def estimate_seconds(listed: list[Session], cell_seconds: float) -> float:
    """How long the sessions take, by what engines usually need."""
    return sum(session_seconds(session, cell_seconds) for session in listed)


def session_seconds(session: Session, cell_seconds: float) -> float:
    """How long one session takes."""
    runs = sum(run_seconds(cell, cell_seconds) for cell in session.cells)
    return STARTUP_SECONDS + WARMUP_SECONDS + IDLE_SECONDS + runs


def run_seconds(cell: Cell, cell_seconds: float) -> float:
    """How long one cell takes."""
    return requests_in(cell, cell_seconds) / cell.rate + TAIL_SECONDS


def fitting_cell_seconds(listed: list[Session], minutes_max: float) -> float:
    """The longest time per cell with which all sessions end in time.

    Raises:
        UsageError: even the shortest is too long.
    """
    allowed = minutes_max * 60 * _SHARE_OF_TIME
    least = estimate_seconds(listed, CELL_SECONDS_MIN)
    if least > allowed:
        raise UsageError(
            f"this takes at least {least / 60:.0f} minutes and may take {minutes_max:g}; choose fewer "
            "connectors, cells or --repeats, or raise --minutes"
        )
    tenths = range(round(CELL_SECONDS_MIN * 10), round(CELL_SECONDS_MAX * 10) + 1)
    fitting = [tenth / 10 for tenth in tenths if estimate_seconds(listed, tenth / 10) <= allowed]
    return max(fitting)
