"""Results of comparisons that never ran: made-up latencies, so that analysis and report can be judged."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvferry.bench.arrivals import schedule
from kvferry.bench.connectors import BASELINE
from kvferry.bench.grid import Cell
from kvferry.bench.machine import Machine, MachineUse
from kvferry.bench.phases import Phases
from kvferry.bench.plan import Options, requests_in, sessions
from kvferry.bench.records import Load, Record
from kvferry.bench.results import CellRun, EngineCost, HookCost, Results, SessionRun, StepCost, open_results

CELLS = (Cell(1, 1024), Cell(1, 16384), Cell(8, 16384))
NAMES = ("ferry-push", "vllm-push", "vllm-pull")
MACHINE = Machine(processor="Imagined 9000", cores=2, memory_bytes=24 << 30, kernel="Linux 9.9")


def options(**changed: object) -> Options:
    """Options of a small comparison."""
    values: dict[str, object] = {
        "connectors": NAMES,
        "cells": tuple((cell.rate, cell.input_tokens) for cell in CELLS),
        "repeats": 2,
        "cell_seconds": 8.0,
        "output_tokens": 64,
        "baseline": True,
        "seed": 0,
        "vocabulary": (300, 1000),
        "engines": {"preset": "made-up", "step_tokens": 2048},
        "versions": {"kvferry": "0"},
    }
    return Options(**(values | changed))  # type: ignore[arg-type]


@dataclass(frozen=True)
class World:
    """How long things take: seconds, by connector where they differ."""

    handover: Mapping[str, float] = field(
        default_factory=lambda: {"ferry-push": 0.03, "vllm-push": 0.13, "vllm-pull": 0.11, BASELINE: 0.0}
    )
    """At 16k tokens; shorter prompts take their share."""
    moving: float | None = 0.16
    """A prompt's KV at 16k tokens; None where engines do not tell of their transfers."""
    tpot: Mapping[str, float] = field(default_factory=lambda: {"vllm-pull": 0.0066, BASELINE: 0.0056})
    tells_idle_calls: bool = False
    """Whether the engines tell calls of hooks that had nothing to do from the others."""
    hooks: Mapping[str, float] = field(default_factory=lambda: {"vllm-push": 0.008, "vllm-pull": 0.014})
    idle: Mapping[str, float] = field(default_factory=lambda: {"vllm-push": 1.0, "vllm-pull": 1.0})
    early: float = 0.9
    """Share of our bytes that are posted early."""
    others: Mapping[tuple[str, float], float] | None = field(default_factory=dict)
    """Share of two cores that others use, by connector and rate; a hundredth elsewhere. None: not noted."""
    mismatches: int = 0
    failing: str | None = None
    """A connector under which the first request of every cell fails."""
    answers: Mapping[str, int] = field(default_factory=dict)
    """A connector's answers differ from the others' by so much."""

    def run(self, name: str, repeat: int, cell: Cell, made: Options) -> CellRun:
        """One cell of one connector."""
        count = requests_in(cell, made.cell_seconds)
        due = schedule(count, cell.rate, 1.0, seed=repeat) or []
        rows = [self._request(name, repeat, cell, made, position, at) for position, at in enumerate(due)]
        records = tuple(record for record, _ in rows)
        load = Load(started_ns=10**18, seconds=due[-1] + 2, records=records)
        cut = tuple(phases for record, phases in rows if record.succeeded)
        sides = ("decode",) if name == BASELINE else ("prefill", "decode")
        engines = {side: self._engine(name, side, count) for side in sides}
        return CellRun(
            connector=name,
            repeat=repeat,
            cell=(cell.rate, cell.input_tokens),
            load=load,
            phases=cut,
            engines=engines,
            machine=None if self.others is None else self._machine(self.others.get((name, cell.rate), 0.01)),
        )

    def _machine(self, others_share: float) -> MachineUse:
        used = {"engines": 15.0, "load_generator": 1.0}
        total = sum(used.values()) + others_share * 20.0
        return MachineUse(seconds=10.0, cores=2, used=total, **used)

    def _request(
        self, name: str, repeat: int, cell: Cell, made: Options, position: int, due: float
    ) -> tuple[Record, Phases]:
        # The same chance for every connector: they meet the same requests.
        chance = random.Random(f"{repeat} {cell.name} {position}")
        share = cell.input_tokens / 16384
        parts = {
            "send": 0.002,
            "queue": chance.expovariate(1.0) * 0.01 * cell.rate * share,
            "prefill": 0.11 * share,
            "write": self.handover[name] * share * 0.8 * chance.uniform(0.9, 1.2),
            "notice": self.handover[name] * share * 0.2,
            "wait": 0.006,
            "first step": 0.006,
            "answer": 0.001,
        }
        parts = {phase: round(seconds, 6) for phase, seconds in parts.items()}
        tokens = made.output_tokens
        tpot = self.tpot.get(name, 0.0057) * chance.uniform(0.98, 1.02)
        first = due + sum(parts.values())
        chunks = tuple(round(first + tpot * token, 6) for token in range(tokens))
        request = f"bench-{repeat}-{cell.rate:g}x{cell.input_tokens}-{position}"
        failed = name == self.failing and position == 0
        record = Record(
            request=request,
            due=due,
            sent=due,
            chunks=() if failed else chunks,
            end=None if failed else chunks[-1],
            prompt_tokens=cell.input_tokens,
            completion_tokens=tokens,
            answer=position + self.answers.get(name, 0),
            error="answered 500: unwell" if failed else None,
        )
        after = parts["write"] + parts["notice"] + parts["wait"] + parts["first step"]
        return record, Phases(
            request=request,
            seconds=parts,
            handover=after,
            received=after - 0.012,
            moving=None if self.moving is None else self.moving * share,
        )

    def _engine(self, name: str, side: str, count: int) -> EngineCost:
        seconds = self.hooks.get(name, 0.0003) * count
        hook = HookCost(
            side="worker",
            hook="get_finished",
            count=64 * count,
            seconds=seconds,
            cpu_seconds=seconds / 2,
            max_seconds=0.1,
        )
        builds = HookCost(
            side="scheduler",
            hook="build_connector_meta",
            count=32 * count,
            seconds=32e-6 * count,
            cpu_seconds=16e-6 * count,
            max_seconds=0.001,
            idle_count=32 * count,
            idle_seconds=32e-6 * count,
            idle_cpu_seconds=16e-6 * count,
        )
        late = StepCost(count=100, modelled=0.0055, mean=0.0003, p50=0.0002, p95=0.0007, p99=0.002, max=0.01)
        counters = {}
        if name == "ferry-push" and side == "prefill":
            counters = {
                "kvferry_transfer_bytes_total": 1e9,
                "kvferry_bytes_before_prefill_end_total": 1e9 * self.early,
            }
        return EngineCost(
            cpu_seconds=1.5,
            parts={"main": 0.02 * count, "kvferry": 0.03 * count},
            hooks=() if name == BASELINE else (hook, builds) if self.tells_idle_calls else (hook,),
            steps=late,
            pages=0 if side == "prefill" else 1000,
            mismatches=self.mismatches if side == "decode" and name == "ferry-push" else 0,
            counters=counters,
        )

    def lines(self, made: Options) -> Iterator[CellRun | SessionRun]:
        """Everything that a whole comparison would have kept."""
        for session in sessions(made):
            idle = self.idle.get(session.connector, 0.01)
            sides = ("decode",) if session.connector == BASELINE else ("prefill", "decode")
            yield SessionRun(
                connector=session.connector,
                repeat=session.repeat,
                startup_seconds=12.0,
                idle_seconds=3.0,
                idle_cpu_seconds=dict.fromkeys(sides, 3 * idle),
                idle_thread_seconds=dict.fromkeys(sides, 1.5 * idle),
                machine=None if self.others is None else MACHINE,
            )
            for cell in session.cells:
                yield self.run(session.connector, session.repeat, cell, made)


def imagined(world: World | None = None, made: Options | None = None) -> Results:
    """A finished comparison that is in no directory."""
    made = made or options()
    return Results(Path("nowhere"), made, list((world or World()).lines(made)))


def made_up(directory: Path, world: World | None = None, made: Options | None = None) -> Results:
    """A directory with a finished comparison."""
    results = open_results(directory, made or options())
    for line in (world or World()).lines(results.options):
        results.append(line)
    return results
