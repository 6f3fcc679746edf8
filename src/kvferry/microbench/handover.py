"""The whole measurement: every cell by kvferry and by raw NIXL in turn, repeat after repeat; then waiting."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

from kvferry.errors import UsageError
from kvferry.host.settings import read_settings
from kvferry.microbench.cells import Cell, Grid
from kvferry.microbench.memory import Memory
from kvferry.microbench.outstanding import blocks_needed
from kvferry.microbench.placement import place
from kvferry.microbench.producer import Kind, Placed, Producer, Sample, opened
from kvferry.microbench.tasks import SetUp, Steps

KINDS: tuple[Kind, ...] = ("ferry", "raw")
SETTLE_SECONDS = 1.5
"""Between the start of transfers that wait and their measurement: they are admitted and registered."""
OUTWAIT_SECONDS = 5.0
"""Two rounds of renewals at least."""


@dataclass(frozen=True, slots=True)
class Options:
    """What is measured, and for how long."""

    grid: Grid
    cache_bytes: int
    repeats: int
    seconds: float
    """After so long no further repeat begins; the first is always finished."""
    outstanding: int
    """Transfers that wait; 0 leaves that measurement out."""
    seconds_max: float = 60.0
    """For each hand-over; beyond it the measurement has failed."""
    seed: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    """`kv_connector_extra_config` of both sides."""
    corrupt_block: int | None = None
    """The planted fault: this block of each of kvferry's transfers is damaged. Its pages must be found."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Loop steps of both sides with `transfers` that wait, and what was wrong with them."""

    transfers: int
    producer: Steps
    consumer: Steps
    wrong_pages: int
    problems: tuple[str, ...]


@dataclass(slots=True)
class Measured:
    """Everything that was measured."""

    samples: dict[Cell, dict[Kind, list[Sample]]]
    repeats: int = 0
    copy_bytes_per_second: list[float] = field(default_factory=list)
    waiting: list[Waiting] = field(default_factory=list)


class Watcher(Protocol):
    """Who is told how far it is."""

    def doing(self, what: str) -> None:
        """What comes next."""
        ...

    def advance(self, amount: float) -> None:
        """So many hand-overs more are measured."""
        ...


def hand_overs(options: Options) -> int:
    """How many the watcher is told of when time is not short."""
    return len(KINDS) * len(options.grid.cells) * options.repeats


def measure(options: Options, watcher: Watcher, clock: Callable[[], float] = time.monotonic) -> Measured:
    """Measure all cells, interleaved, and the cost of waiting.

    Raises:
        UsageError: the options do not fit together.
        MicrobenchError, TransportError: it could not be carried out.
    """
    settings = read_settings(options.extra, environment={})
    shapes = options.grid.shapes
    _check_outstanding(options)
    memory = Memory(options.cache_bytes)
    set_up = SetUp(options.cache_bytes, shapes, options.extra, options.seconds_max)
    measured = Measured({cell: {kind: [] for kind in KINDS} for cell in options.grid.cells})
    random = Random(options.seed)
    deadline = clock() + options.seconds
    with opened(memory, shapes, settings, set_up) as producer:
        producer.corrupt(options.corrupt_block)
        _warm_up(producer, options, random, watcher)
        while measured.repeats < options.repeats and (not measured.repeats or clock() < deadline):
            copied, seconds = memory.copy_seconds()
            measured.copy_bytes_per_second.append(copied / seconds)
            _repeat(producer, options, measured, random, watcher)
            measured.repeats += 1
        if options.outstanding:
            for count in (1, options.outstanding):
                watcher.doing(f"{count} transfers that wait")
                measured.waiting.append(_wait(producer, options, count, random))
    return measured


def _check_outstanding(options: Options) -> None:
    fitting = options.cache_bytes // options.grid.shapes[0].block_bytes
    if options.outstanding and blocks_needed(options.outstanding) > fitting:
        most = fitting - blocks_needed(0)
        raise UsageError(f"--outstanding must be at most {most} with this cache, not {options.outstanding}")


def _warm_up(producer: Producer, options: Options, random: Random, watcher: Watcher) -> None:
    """The first transfer of each shape opens its links; no figure is taken of it."""
    watcher.doing("warm-up")
    for shape in options.grid.shapes:
        cell = min((one for one in options.grid.cells if one.shape == shape), key=lambda one: one.bytes)
        for kind in KINDS:
            _hand_over(producer, cell, kind, random)


def _repeat(
    producer: Producer, options: Options, measured: Measured, random: Random, watcher: Watcher
) -> None:
    for number, cell in enumerate(options.grid.cells):
        watcher.doing(cell.name)
        # Whoever comes second finds warmer caches.
        first = (number + measured.repeats) % len(KINDS)
        for kind in KINDS[first:] + KINDS[:first]:
            measured.samples[cell][kind].append(_hand_over(producer, cell, kind, random))
            watcher.advance(1)


def _hand_over(producer: Producer, cell: Cell, kind: Kind, random: Random) -> Sample:
    pool = producer.blocks(cell.shape)
    sources, targets = (
        place(cell.fragmentation, pool, cell.blocks, cell.concurrency, random) for _ in range(2)
    )
    placed = Placed(tuple(map(tuple, sources)), tuple(map(tuple, targets)), random.getrandbits(48))
    return producer.ferry(cell, placed) if kind == "ferry" else producer.raw(cell, placed)


def _wait(producer: Producer, options: Options, count: int, random: Random) -> Waiting:
    steps, answer = producer.outwait(
        options.grid.shapes[0], count, SETTLE_SECONDS, OUTWAIT_SECONDS, random.getrandbits(48)
    )
    return Waiting(count, steps, answer.steps, answer.wrong_pages, answer.problems)
