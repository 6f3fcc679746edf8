"""Stands in for the simulator: histories whose violations are known beforehand. Picklable, for processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress

from kvferry.ids import EngineId
from kvferry.simulator.ground.events import EngineStarted, Observer
from kvferry.simulator.ground.options import Options
from kvferry.simulator.ground.outcome import Outcome, Violation
from kvferry.simulator.watch.trace import TraceHash, TraceLines
from tests.support.sample_history import one_transfer

ITEMS = 12
GUILTY = frozenset({3, 8})
"""A failing history fails as long as both of these are in it."""
PLANTED: list[str] = []
"""A mutant of a test plants itself by adding its name: then seeds from 5 on break promise 4."""


def fails(seed: int) -> bool:
    """Whether a seed breaks promise 2."""
    return seed % 10 == 7


def simulate(
    seed: int, options: Options, *, traced: bool = False, observers: Sequence[Observer] = ()
) -> Outcome:
    """One transfer; every tenth seed breaks promise 2, unless one of the guilty items is left out."""
    kept = [number for number in range(ITEMS) if number not in options.drop]
    broken = fails(seed) and set(kept) >= GUILTY
    violations = (Violation(2, 2.05, f"a late write of transfer-1 in seed {seed}"),) if broken else ()
    if PLANTED and seed >= 5:
        violations = (Violation(4, 1.0, f"found {PLANTED[0]}"),)
    events = one_transfer(fails=broken)
    digest, lines = TraceHash(), TraceLines()
    everybody: list[Observer] = [digest, *observers]
    if traced:
        everybody.append(lines)
    for event in events:
        for observer in everybody:
            observer.observe(event)
    return Outcome(
        seed=seed,
        violations=violations,
        trace_hash=digest.hexdigest(),
        events=len(events),
        virtual_seconds=1.5,
        transfers=7,
        outcomes={"failed" if broken else "completed": 2},
        transitions={("source", "queued", "advance"): 1, ("part", "written", "failed"): 1},
        cells={("posted", "D abort"): 1, ("decoding", "late"): 1},
        items=tuple((number, f"item {number}") for number in kept),
        trace=tuple(lines.lines),
    )


def unsteady(
    seed: int, options: Options, *, traced: bool = False, observers: Sequence[Observer] = ()
) -> Outcome:
    """Never the same twice."""
    PLANTED.append("x")
    for event in (*one_transfer()[:3], EngineStarted(3.0, EngineId(f"run-{len(PLANTED)}"), (), 1)):
        for observer in observers:
            observer.observe(event)
    return Outcome(seed, (), f"hash-{len(PLANTED)}", 4, 1.0, 1)


def raising(
    seed: int, options: Options, *, traced: bool = False, observers: Sequence[Observer] = ()
) -> Outcome:
    """Seed 2 raises."""
    if seed == 2:
        raise ZeroDivisionError(f"in seed {seed}")
    return simulate(seed, options)


def endless(
    seed: int, options: Options, *, traced: bool = False, observers: Sequence[Observer] = ()
) -> Outcome:
    """Seed 2 never ends, computes all the time, and swallows errors."""
    for event in one_transfer() if seed == 2 else ():
        for observer in observers:
            observer.observe(event)
    while seed == 2:
        with suppress(Exception):
            sum(range(1000))
    return simulate(seed, options)


def dying(
    seed: int, options: Options, *, traced: bool = False, observers: Sequence[Observer] = ()
) -> Outcome:
    """Seed 2 takes its process with it."""
    if seed == 2:
        os._exit(9)
    return simulate(seed, options)


def squared(number: int) -> tuple[int, int]:
    """Work for a process: the answer, and which process gave it. A negative number is refused."""
    if number < 0:
        raise ValueError(f"{number} is negative")
    return number * number, os.getpid()


def interrupts_blocked(_: int) -> bool:
    """Work for a process: whether a terminal's interrupt does not reach it."""
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
