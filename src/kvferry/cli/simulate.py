"""Prove the protocol in made-up histories: the real cores and agents on virtual time, faults from a seed.

examples:
  kvferry simulate                                 1,000 seeds of the small world with all faults
  kvferry simulate --seeds 100000 --coverage FILE  more of them, and what they visited
  kvferry simulate --faults crash,partition        only these faults
  kvferry simulate --replay 17                     one seed as readable lines
  kvferry simulate --replay 17 --timeline FILE     and a picture (SVG) of one of its transfers
  kvferry simulate --mutants                       whether planted faults are found; needs a checkout

Exits with 0 only when no promise was broken, or when every mutant was found.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry.cli import simulate_report as report
from kvferry.errors import UsageError

if TYPE_CHECKING:
    from kvferry.simulator.ground.options import Options
    from kvferry.simulator.ground.outcome import Violation
    from kvferry.simulator.show.table import Grid
    from kvferry.simulator.show.timeline import Recorder
    from kvferry.simulator.trials.batch import Batch, Tally
    from kvferry.simulator.trials.mutation import Verdict

SEEDS, MUTANT_SEEDS = 1000, 2000
NUMBER_MAX = 9999
"""No workload item and no fault has a higher number."""
SHRUNK_MAX = 3
"""So many failing seeds are made smaller."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to run, and what to show of it."""
    batch = parser.add_argument_group("many seeds")
    batch.add_argument(
        "--seeds", type=int, metavar="N", help=f"how many (default: {SEEDS:,}, {MUTANT_SEEDS:,} per mutant)"
    )
    batch.add_argument(
        "--from", type=int, default=0, dest="first", metavar="S", help="the first seed (default: %(default)s)"
    )
    batch.add_argument("--jobs", type=int, metavar="J", help="processes (default: one per usable core)")
    batch.add_argument("--stop-after", type=int, metavar="N", help="stop when so many seeds have failed")
    batch.add_argument("--no-shrink", action="store_true", help="do not make failing seeds smaller")
    batch.add_argument(
        "--coverage", type=Path, metavar="FILE", help="write all that was visited there, as Markdown"
    )
    world = parser.add_argument_group("every seed")
    world.add_argument(
        "--world",
        default="small",
        metavar="NAME",
        help="small: two or three engines; wide: up to eight of a kind; tall: four ranks each; both: every "
        "engine prefills and decodes; long: many requests; calm: no faults (default: %(default)s)",
    )
    world.add_argument(
        "--faults",
        default="all",
        metavar="NAMES",
        help="all, none, or names with commas, of which each seed draws some (default: %(default)s)",
    )
    one = parser.add_argument_group("one seed")
    one.add_argument("--replay", type=int, metavar="SEED", help="show this seed's history, event by event")
    one.add_argument(
        "--drop", default="", metavar="NUMBERS", help="leave out workload items and faults, e.g. 3,7-9"
    )
    one.add_argument("--timeline", type=Path, metavar="FILE", help="draw one transfer's life there, as SVG")
    one.add_argument(
        "--transfer", metavar="ID", help="which transfer to draw (default: the one that was violated)"
    )
    mutants = parser.add_argument_group("planted faults")
    mutants.add_argument(
        "--mutants", nargs="*", metavar="NAME", help="try whether seeds find these mutants (default: all)"
    )
    mutants.add_argument(
        "--mutant-seeds-all", action="store_true", help="run every seed, not only until a mutant is found"
    )


def run(namespace: argparse.Namespace) -> int:
    """Run seeds, one seed or mutants, and say what they came to in the last line."""
    _check(namespace)
    options = _options(namespace)
    if namespace.replay is not None:
        return _replay(namespace, options)
    if namespace.mutants is not None:
        return _mutants(namespace, options)
    return _batch(namespace, options)


def _check(namespace: argparse.Namespace) -> None:
    for name in ("seeds", "jobs", "stop_after"):
        value = getattr(namespace, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    for name, flag in (("first", "--from"), ("replay", "--replay")):
        value = getattr(namespace, name)
        if value is not None and value < 0:
            raise UsageError(f"{flag} must not be negative, {value} is")
    if namespace.replay is not None and namespace.mutants is not None:
        raise UsageError("--replay and --mutants do not go together; choose one")
    if namespace.transfer and not namespace.timeline:
        raise UsageError("--transfer says what --timeline draws; add --timeline FILE")
    _belongs(namespace, ("drop", "timeline"), namespace.replay is not None, "--replay SEED")
    _belongs(namespace, ("mutant_seeds_all",), namespace.mutants is not None, "--mutants")
    plain = namespace.replay is None and namespace.mutants is None
    _belongs(namespace, ("stop_after", "no_shrink", "coverage"), plain, "neither --replay nor --mutants")
    for name in ("coverage", "timeline"):
        path: Path | None = getattr(namespace, name)
        if path is not None:
            _check_file(f"--{name}", path)


def _check_file(flag: str, path: Path) -> None:
    """Said before hours of seeds, not after them."""
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{flag}: there is no directory {path.parent}; make it first")
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise UsageError(f"{flag}: {path} cannot be written; name a file that can")


def _belongs(namespace: argparse.Namespace, names: tuple[str, ...], fits: bool, to: str) -> None:
    for name in names:
        if getattr(namespace, name) and not fits:
            raise UsageError(f"--{name.replace('_', '-')} goes with {to}")


def _options(namespace: argparse.Namespace) -> Options:
    from kvferry.simulator.ground.options import Options  # noqa: PLC0415 - imported by the command that needs it

    chosen: dict[str, frozenset[str]] = {}
    if namespace.faults != "all":
        names = [] if namespace.faults == "none" else [name.strip() for name in namespace.faults.split(",")]
        if "all" in names or "" in names:
            raise UsageError("--faults is all, none, or names with commas; 'all' and nothing are no names")
        chosen["faults"] = frozenset(names)
    return Options(world=namespace.world, drop=_numbers(namespace.drop), **chosen)


def _numbers(text: str) -> frozenset[int]:
    """`3,7-9` as numbers."""
    numbers: set[int] = set()
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match is None:
            raise UsageError(f"--drop: {part!r} is neither a number nor a range like 7-9")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last <= NUMBER_MAX:
            raise UsageError(f"--drop: {part!r} must rise, and numbers go to {NUMBER_MAX} at most")
        numbers.update(range(first, last + 1))
    return frozenset(numbers)


def _jobs(namespace: argparse.Namespace) -> int:
    return namespace.jobs or len(os.sched_getaffinity(0))


def _say(lines: list[str], progress: report.Progress | None = None) -> None:
    if progress is not None:
        progress.clear()
    print("\n".join(lines), flush=True)


# --- many seeds -----------------------------------------------------------------------------------


def _batch(namespace: argparse.Namespace, options: Options) -> int:
    from kvferry.simulator.run import simulate  # noqa: PLC0415 - as above
    from kvferry.simulator.trials import batch as batches  # noqa: PLC0415 - as above

    count = namespace.seeds or SEEDS
    batch = batches.Batch(
        namespace.first, count, options, simulate, min(_jobs(namespace), count), namespace.stop_after
    )
    tally, started, interrupted = batches.Tally(), time.monotonic(), False
    progress = report.Progress(count, "seeds")
    try:
        with contextlib.closing(batches.run_batch(batch)) as parts:
            for part in parts:
                tally.merge(part)
                for outcome in part.failures:
                    _say(report.failure_lines(outcome, options), progress)
                progress.update(tally.seeds, _violations(tally))
        progress.clear()
        if not namespace.no_shrink:
            _shrink(tally, batch)
    except KeyboardInterrupt:
        interrupted = True
        progress.clear()
    _show_coverage(namespace, tally)
    word = "interrupted after " if interrupted else ""
    seconds = time.monotonic() - started
    seeds, transfers = _count(tally.seeds, "seed"), _count(tally.transfers, "transfer")
    print(f"{word}{seeds}, {_violations(tally)}, {transfers}, {seconds:.1f} s")
    if interrupted:
        return 130
    return 1 if tally.failed_seeds else 0


def _violations(tally: Tally) -> str:
    if not tally.failed_seeds:
        return "0 violations"
    return f"{_count(tally.violations, 'violation')} in {_count(tally.failed_seeds, 'seed')}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _shrink(tally: Tally, batch: Batch) -> None:
    from kvferry.simulator.trials.batch import SEED_SECONDS_MAX  # noqa: PLC0415 - as above
    from kvferry.simulator.trials.processes import spread  # noqa: PLC0415 - as above
    from kvferry.simulator.trials.shrink import Shrink, shrink  # noqa: PLC0415 - as above

    tasks = [
        Shrink(failing, batch.options, batch.simulate, seed_seconds_max=SEED_SECONDS_MAX)
        for failing in tally.failures[:SHRUNK_MAX]
    ]
    with contextlib.closing(spread(shrink, tasks, jobs=batch.jobs)) as answers:
        for _, shrunk in answers:
            _say(report.shrunk_lines(shrunk))


def _show_coverage(namespace: argparse.Namespace, tally: Tally) -> None:
    from kvferry.simulator.show import table  # noqa: PLC0415 - as above

    grid = _grid()
    if namespace.coverage is not None:
        last = namespace.first + max(tally.seeds, 1) - 1
        histories = (
            f"{tally.seeds:,} seeds ({namespace.first:,} to {last:,}) of the {namespace.world} world, "
            f"faults: {namespace.faults}"
        )
        page = table.coverage(tally.transitions, tally.cells, grid, histories=histories)
        namespace.coverage.write_text(page, encoding="utf-8")
    else:
        print(table.overview(tally.transitions, tally.cells, grid), end="\n\n")
    ends: Counter[str] = Counter()
    for name, times in tally.outcomes.items():
        side_and_outcome = " ".join(name.split()[:2])
        ends[side_and_outcome] += times
    print(table.summary(tally.transitions, tally.cells, grid))
    print("requests:", ", ".join(f"{name} {times:,}" for name, times in sorted(ends.items())) or "none")
    print(f"{tally.events:,} events in {tally.virtual_seconds:,.0f} s of virtual time")


def _grid() -> Grid:
    from kvferry.simulator.show.table import Grid  # noqa: PLC0415 - as above
    from kvferry.simulator.watch import grid, stages  # noqa: PLC0415 - as above

    return Grid(stages.STAGES, grid.FAULTS, grid.IMPOSSIBLE)


# --- one seed -------------------------------------------------------------------------------------


def _replay(namespace: argparse.Namespace, options: Options) -> int:
    from kvferry.simulator.run import simulate  # noqa: PLC0415 - as above
    from kvferry.simulator.show.timeline import Recorder  # noqa: PLC0415 - as above

    seed, started, recorder = namespace.replay, time.monotonic(), Recorder()
    outcome = simulate(seed, options, traced=True, observers=(recorder,))
    seconds = time.monotonic() - started
    again = simulate(seed, options, traced=True)
    _say(list(outcome.trace))
    for violation in outcome.violations:
        print(f"VIOLATION of {report.violation_words(violation)}")
    if namespace.timeline is not None:
        _draw(namespace, recorder, outcome.violations)
    same = outcome.trace_hash == again.trace_hash
    if not same:
        print(f"NOT DETERMINISTIC: a second run has trace hash {again.trace_hash}")
        print(_first_difference(outcome.trace, again.trace))
    found = len(outcome.violations)
    print(
        f"seed {seed}: {_count(found, 'violation')}, {_count(outcome.transfers, 'transfer')}, "
        f"{outcome.events:,} events, trace hash {outcome.trace_hash}, {seconds:.1f} s"
    )
    return 0 if same and not found else 1


def _first_difference(first: tuple[str, ...], second: tuple[str, ...]) -> str:
    for number, (one, other) in enumerate(zip(first, second, strict=False), 1):
        if one != other:
            return f"line {number} was\n{one}\nand is\n{other}"
    return f"one run has {len(first):,} lines, the other {len(second):,}; what both have is equal"


def _draw(namespace: argparse.Namespace, recorder: Recorder, violations: tuple[Violation, ...]) -> None:
    from kvferry.simulator.show.picture import draw  # noqa: PLC0415 - as above
    from kvferry.simulator.show.timeline import choose, story  # noqa: PLC0415 - as above

    transfer = choose(recorder.events, violations, namespace.transfer)
    title = f"seed {namespace.replay} of the {namespace.world} world"
    if violations:
        title += f": promise {violations[0].promise} broken"
    namespace.timeline.write_text(draw(story(recorder.events, transfer, violations), title), encoding="utf-8")
    print(f"{namespace.timeline} shows transfer {transfer}")


# --- planted faults -------------------------------------------------------------------------------


def _mutants(namespace: argparse.Namespace, options: Options) -> int:
    from kvferry.simulator.run import simulate  # noqa: PLC0415 - as above
    from kvferry.simulator.trials import mutation  # noqa: PLC0415 - as above

    checkout = mutation.find_checkout(Path.cwd())
    mutants = {one.name: one for one in mutation.chosen(mutation.load(checkout), namespace.mutants)}
    enough = None if namespace.mutant_seeds_all else 1
    trials = [
        mutation.Trial(
            checkout, name, namespace.first, namespace.seeds or MUTANT_SEEDS, options, simulate, enough
        )
        for name in mutants
    ]
    verdicts: list[Verdict] = []
    started, progress = time.monotonic(), report.Progress(len(trials), "mutants")
    try:
        with contextlib.closing(mutation.run_trials(trials, jobs=_jobs(namespace))) as done:
            for verdict in done:
                verdicts.append(verdict)
                _say(report.mutant_lines(mutants[verdict.mutant], verdict), progress)
                progress.update(len(verdicts), f"{sum(one.survived for one in verdicts)} survived")
    except KeyboardInterrupt:
        progress.clear()
        print(f"interrupted after {len(verdicts)} of {len(trials)} mutants")
        return 130
    progress.clear()
    survivors = sorted(one.mutant for one in verdicts if one.survived)
    if survivors:
        print(f"survivors: {', '.join(survivors)}")
    blind = [mutants[one.mutant].blind for one in verdicts if not one.survived]
    planted_blind = sum(one.blind for one in mutants.values())
    seconds = time.monotonic() - started
    print(
        f"{len(verdicts)} mutants, {len(blind)} found ({sum(blind)} of {planted_blind} blind ones), "
        f"{len(survivors)} survived, {seconds:.1f} s"
    )
    return 1 if survivors else 0
