"""`kvferry simulate --mutants`: whether planted faults are found, and by which seed."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry.cli import simulate_report as report

if TYPE_CHECKING:
    from kvferry.simulator.ground.options import Options
    from kvferry.simulator.trials.mutation import Mutant, Trial, Verdict

SEEDS = 2000
"""Per mutant, where no other number was asked for."""


def chosen_checkout() -> Path:
    """The checkout whose mutants are planted; whoever may mean another one is warned."""
    from kvferry.simulator.trials import mutation  # noqa: PLC0415 - imported by the command that needs it

    checkout = mutation.find_checkout(Path.cwd())
    if doubt := mutation.doubt_of(checkout, Path.cwd()):
        print(f"kvferry: warning: {doubt}", file=sys.stderr)
    return checkout


def list_all(names: Sequence[str]) -> int:
    """Say what each mutant is, or each of these."""
    from kvferry.simulator.trials import mutation  # noqa: PLC0415 - as above

    mutants = mutation.chosen(mutation.load(chosen_checkout()), names)
    print("\n".join(report.listed_mutants(mutants)))
    return 0


def try_all(namespace: argparse.Namespace, options: Options, *, jobs: int) -> int:
    """Try the chosen mutants, each in a process of its own."""
    from kvferry.simulator.trials import mutation  # noqa: PLC0415 - as above

    checkout = chosen_checkout()
    mutants = {one.name: one for one in mutation.chosen(mutation.load(checkout), namespace.mutants)}
    trials = _trials(namespace, options, checkout, list(mutants.values()))
    verdicts: list[Verdict] = []
    started, progress, interrupted = time.monotonic(), report.Progress(len(trials), "mutant"), False
    try:
        with contextlib.closing(mutation.run_trials(trials, jobs=jobs)) as done:
            for verdict in done:
                verdicts.append(verdict)
                mutant, first = mutants[verdict.mutant], namespace.first or 0
                tried = _options_of(mutant, options)
                report.say(report.mutant_lines(mutant, verdict, tried, first=first), progress)
                progress.update(len(verdicts), f"{sum(one.survived for one in verdicts)} survived")
    except KeyboardInterrupt:
        interrupted = True
    progress.clear()
    return _end(mutants, verdicts, interrupted, time.monotonic() - started)


def _options_of(mutant: Mutant, options: Options) -> Options:
    """The options that were asked for, in the world that can show the mutant."""
    return dataclasses.replace(options, world=mutant.world) if mutant.world else options


def _trials(
    namespace: argparse.Namespace, options: Options, checkout: Path, mutants: list[Mutant]
) -> list[Trial]:
    from kvferry.simulator.run import simulate  # noqa: PLC0415 - as above
    from kvferry.simulator.trials.mutation import Trial  # noqa: PLC0415 - as above

    first, count = namespace.first or 0, namespace.seeds or SEEDS
    enough = None if namespace.mutant_seeds_all else 1
    return [
        Trial(checkout, one.name, first, count, _options_of(one, options), simulate, enough)
        for one in mutants
    ]


def _end(mutants: dict[str, Mutant], verdicts: list[Verdict], interrupted: bool, seconds: float) -> int:
    survivors = sorted(one.mutant for one in verdicts if one.survived)
    lost = sorted(one.mutant for one in verdicts if one.lost)
    found = [mutants[one.mutant] for one in verdicts if one.found]
    if survivors:
        print(f"survivors: {', '.join(survivors)}")
    if lost:
        print(f"not tried: {', '.join(lost)}")
    word = "INTERRUPTED" if interrupted else "FAILED" if survivors or lost else "PASSED"
    blind = sum(one.blind for one in found), sum(one.blind for one in mutants.values())
    figures = (
        (f"{len(verdicts):,} of " if interrupted else "") + report.count_words(len(mutants), "mutant"),
        f"{len(found):,} found" + (f" ({blind[0]} of {blind[1]} planted blindly)" if blind[1] else ""),
        f"{len(survivors):,} survived",
        f"{len(lost):,} not tried" if lost else "",
    )
    print(report.last_line(word, *figures, seconds=seconds), flush=True)
    return {"INTERRUPTED": 130, "FAILED": 1, "PASSED": 0}[word]
