"""Prove the protocol in made-up histories: the real cores and agents on virtual time, faults from a seed.

examples:
  kvferry simulate                                 1,000 seeds of the small world with all faults
  kvferry simulate --seeds 100000 --coverage FILE  more of them, and all that they visited
  kvferry simulate --faults crash,partition        only these faults; --list says what each is
  kvferry simulate --replay 17                     one seed as readable lines
  kvferry simulate --replay 17 --timeline FILE     and a picture (SVG) of one of its transfers
  kvferry simulate --mutants                       whether planted faults are found; needs a checkout
  kvferry simulate --mutants --list                which ones there are
  kvferry simulate --replay 17 --mutants NAME      one seed with a planted fault

Many seeds end with tables of what they visited (--brief leaves them out). Exits with 0 only when no promise
was broken and every seed has a result, or when every mutant was found.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry.cli import simulate_mutants, simulate_replay
from kvferry.cli import simulate_report as report
from kvferry.cli.interrupts import first_interrupt_only
from kvferry.errors import UsageError

if TYPE_CHECKING:
    from kvferry.simulator.ground.options import Options
    from kvferry.simulator.show.table import Grid
    from kvferry.simulator.trials.batch import Batch, Tally

SEEDS = 1000
SEEDS_MAX = 10_000_000
"""Of one run; days of it."""
DIGITS_MAX = 18
WORLD, FAULTS_ALL = "small", "all"
DEFAULTS = {"world": WORLD, "faults": FAULTS_ALL}
NUMBER_MAX = 9999
"""No workload item and no fault has a higher number."""
JOBS_MAX = 256
"""Processes; more of them are a slip of the keyboard, and a machine that no longer answers."""
SHRUNK_MAX = 3
"""So many failing seeds are made smaller."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to run, and what to show of it."""
    parser.add_argument(
        "--list", action="store_true", help="say what each world and fault is, or with --mutants each mutant"
    )
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="show all: what was visited, as Markdown, and why the rest cannot be; every line of a replay",
    )
    _add_batch_arguments(parser)
    world = parser.add_argument_group("every seed")
    world.add_argument(
        "--world",
        default=WORLD,
        metavar="NAME",
        help="see --list; calm has no harmful faults (default: %(default)s)",
    )
    world.add_argument(
        "--faults",
        default=FAULTS_ALL,
        metavar="NAMES",
        help="all, none, or names with commas (see --list); a seed draws some (default: %(default)s)",
    )
    _add_other_arguments(parser)


def _add_batch_arguments(parser: argparse.ArgumentParser) -> None:
    batch = parser.add_argument_group("many seeds")
    batch.add_argument(
        "--seeds",
        type=_whole("--seeds"),
        metavar="N",
        help=f"how many (default: {SEEDS:,}, {simulate_mutants.SEEDS:,} per mutant)",
    )
    batch.add_argument(
        "--from", type=_whole("--from"), dest="first", metavar="S", help="the first seed (default: 0)"
    )
    batch.add_argument(
        "--jobs", type=_whole("--jobs"), metavar="J", help="processes (default: one per usable core)"
    )
    batch.add_argument(
        "--stop-after", type=_whole("--stop-after"), metavar="N", help="run no more seeds when N have failed"
    )
    batch.add_argument(
        "--brief",
        action="store_true",
        help="name what was not visited only where it is little, and leave the tables out",
    )
    batch.add_argument("--no-shrink", action="store_true", help="do not make failing seeds smaller")
    batch.add_argument(
        "--coverage",
        type=Path,
        metavar="FILE",
        help="write all that was visited, as Markdown; - prints it",
    )


def _add_other_arguments(parser: argparse.ArgumentParser) -> None:
    one = parser.add_argument_group("one seed")
    one.add_argument(
        "--replay", type=_whole("--replay"), metavar="SEED", help="show this seed's history, event by event"
    )
    one.add_argument(
        "--drop",
        default="",
        metavar="NUMBERS",
        help="leave out what has these numbers (ITEM lines), e.g. 3,7-9",
    )
    one.add_argument("--timeline", type=Path, metavar="FILE", help="draw one transfer's life there, as SVG")
    one.add_argument(
        "--transfer",
        metavar="ID",
        help="which transfer to draw, or how its id begins (default: the one that was violated)",
    )
    mutants = parser.add_argument_group("planted faults")
    mutants.add_argument(
        "--mutants",
        nargs="*",
        metavar="NAME",
        help="try whether seeds find these mutants (default: all; --mutants --list names them)",
    )
    mutants.add_argument(
        "--mutant-seeds-all",
        action="store_true",
        help="run every seed and count those that find a mutant; else the first one that does ends its trial",
    )


def _whole(flag: str) -> Callable[[str], int]:
    """Takes a whole number, and says in our words what is none."""

    def read(text: str) -> int:
        if re.fullmatch(r"[+-]?[0-9]+", text) is None:
            raise UsageError(f"{flag}: {text!r} is not a whole number; write its digits, such as 1000")
        if len(text) > DIGITS_MAX:
            raise UsageError(f"{flag}: {text!r} is too long; numbers have {DIGITS_MAX} digits at most")
        return int(text)

    return read


def run(namespace: argparse.Namespace) -> int:
    """Run seeds, one seed or mutants, and say what they came to in the last line."""
    with first_interrupt_only():
        return _run(namespace)


def _run(namespace: argparse.Namespace) -> int:
    if namespace.list:
        _check_list(namespace)
        return _list() if namespace.mutants is None else simulate_mutants.list_all(namespace.mutants)
    _check(namespace)
    options = _options(namespace)
    if namespace.replay is not None:
        return simulate_replay.replay(namespace, options)
    if namespace.mutants is not None:
        return simulate_mutants.try_all(namespace, options, jobs=_jobs(namespace))
    return _batch(namespace, options)


def _list() -> int:
    from kvferry.simulator.ground.options import FAULTS, WORLDS  # noqa: PLC0415 - imported by what needs it

    print("\n".join(report.listed_lines("worlds (--world):", WORLDS)), end="\n\n")
    print("\n".join(report.listed_lines("faults (--faults):", FAULTS)))
    return 0


# --- what goes together ---------------------------------------------------------------------------

_BATCH, _REPLAY, _MUTANTS = "many seeds", "--replay SEED", "--mutants"
_GOES_WITH: dict[str, tuple[tuple[str, ...], str]] = {
    "seeds": ((_BATCH, _MUTANTS), "a replay shows one seed"),
    "first": ((_BATCH, _MUTANTS), "a replay shows one seed"),
    "jobs": ((_BATCH, _MUTANTS), "a replay runs one seed, in one process"),
    "stop_after": ((_BATCH,), "it counts failing seeds; a mutant's end with its first find anyway"),
    "no_shrink": ((_BATCH,), "only many seeds without planted faults are made smaller"),
    "coverage": ((_BATCH,), "only many seeds without planted faults are counted"),
    "brief": ((_BATCH,), "nothing else ends with tables"),
    "verbose": ((_BATCH, _REPLAY), "mutants have no more to show"),
    "drop": ((_REPLAY,), "numbers are those of one seed"),
    "timeline": ((_REPLAY,), "it draws one seed's history"),
    "mutant_seeds_all": ((_MUTANTS,), "it says how long a mutant is tried"),
}
"""Per option what it goes with, and why with nothing else."""


def _check(namespace: argparse.Namespace) -> None:
    _check_numbers(namespace)
    _check_together(namespace)
    for name in ("coverage", "timeline"):
        path: Path | None = getattr(namespace, name)
        if path is not None and (name, str(path)) != ("coverage", "-"):
            _check_file(_flag(name), path)


def _check_list(namespace: argparse.Namespace) -> None:
    """What else is asked for would be ignored."""
    flags = [
        _flag(name)
        for name, value in vars(namespace).items()
        if _is_given(value) and name not in ("list", "mutants") and (name, value) not in DEFAULTS.items()
    ]
    if flags:
        raise UsageError(f"--list runs nothing, so {', '.join(flags)} would say nothing; leave it out")


def _check_numbers(namespace: argparse.Namespace) -> None:
    for name in ("seeds", "jobs", "stop_after"):
        value = getattr(namespace, name)
        if value is not None and value < 1:
            raise UsageError(f"{_flag(name)} must be at least 1, not {value}")
    if namespace.seeds is not None and namespace.seeds > SEEDS_MAX:
        raise UsageError(
            f"--seeds must be at most {SEEDS_MAX:,}, not {namespace.seeds:,}; run further ones with --from"
        )
    if namespace.jobs is not None and namespace.jobs > JOBS_MAX:
        raise UsageError(
            f"--jobs must be at most {JOBS_MAX}, not {namespace.jobs}; a process per core is the fastest"
        )
    for name in ("first", "replay"):
        value = getattr(namespace, name)
        if value is not None and value < 0:
            raise UsageError(f"{_flag(name)} must not be negative, {value} is")


def _check_together(namespace: argparse.Namespace) -> None:
    if namespace.transfer and not namespace.timeline:
        raise UsageError("--transfer says what --timeline draws; add --timeline FILE")
    if namespace.brief and namespace.verbose:
        raise UsageError("--brief leaves out what --verbose shows; choose one of them")
    mode = _BATCH if namespace.mutants is None else _MUTANTS
    if namespace.replay is not None:
        mode = _REPLAY
    for name, (modes, why) in _GOES_WITH.items():
        if _is_given(getattr(namespace, name)) and mode not in modes:
            alone = " alone" if modes == (_BATCH,) else ""
            raise UsageError(f"{_flag(name)} goes with {' or '.join(modes)}{alone}: {why}")
    if mode == _REPLAY and namespace.mutants is not None and len(namespace.mutants) != 1:
        raise UsageError("--replay under a planted fault needs its name, one: --mutants NAME")


def _is_given(value: object) -> bool:
    """Not by its truth: 0 is a seed."""
    return value is not None and value is not False and value != ""


def _flag(name: str) -> str:
    return "--from" if name == "first" else f"--{name.replace('_', '-')}"


def _check_file(flag: str, path: Path) -> None:
    """Said before hours of seeds, not after them."""
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{flag}: there is no directory {path.parent}; make it first")
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise UsageError(f"{flag}: {path} cannot be written; name a file that can")
    if not path.exists():
        # Some directories are writable by their mode, and take no files all the same.
        try:
            place = path.resolve()
            place.touch()
            place.unlink()
        except OSError as error:
            raise UsageError(
                f"{flag}: {path} cannot be written ({error.strerror}); name a file that can"
            ) from error


def _options(namespace: argparse.Namespace) -> Options:
    from kvferry.simulator.ground.options import HARMLESS, Options  # noqa: PLC0415 - as above

    chosen: dict[str, frozenset[str]] = {}
    if namespace.faults != FAULTS_ALL:
        names = [] if namespace.faults == "none" else [name.strip() for name in namespace.faults.split(",")]
        if {"all", "none", ""} & set(names):
            raise UsageError(
                "--faults is all, or none, or names with commas (see --list); choose one of these"
            )
        chosen["faults"] = frozenset(names)
    options = Options(world=namespace.world, drop=_numbers(namespace.drop), **chosen)
    never = sorted(chosen.get("faults", frozenset()) - HARMLESS)
    if options.world == "calm" and never:
        raise UsageError(
            f"--faults: the calm world never has {', '.join(never)}, only {' and '.join(sorted(HARMLESS))}; "
            "choose another world, or leave --faults out"
        )
    return options


def _numbers(text: str) -> frozenset[int]:
    """`3,7-9` as numbers."""
    numbers: set[int] = set()
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match is None:
            raise UsageError(f"--drop: {part!r} is neither a number nor a range like 7-9")
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last:
            raise UsageError(f"--drop: {part!r} runs backwards; write {last}-{first}")
        if last > NUMBER_MAX:
            raise UsageError(f"--drop: {part!r} is too high; numbers go to {NUMBER_MAX} at most")
        numbers.update(range(first, last + 1))
    return frozenset(numbers)


def _jobs(namespace: argparse.Namespace) -> int:
    return namespace.jobs or min(JOBS_MAX, len(os.sched_getaffinity(0)))


# --- many seeds -----------------------------------------------------------------------------------


def _batch(namespace: argparse.Namespace, options: Options) -> int:
    from kvferry.simulator.run import simulate  # noqa: PLC0415 - as above
    from kvferry.simulator.trials import batch as batches  # noqa: PLC0415 - as above

    count = namespace.seeds or SEEDS
    batch = batches.Batch(
        namespace.first or 0, count, options, simulate, min(_jobs(namespace), count), namespace.stop_after
    )
    tally, started, interrupted = batches.Tally(), time.monotonic(), False
    progress = report.Progress(count, "seed")
    try:
        with contextlib.closing(batches.run_batch(batch)) as parts:
            for part in parts:
                tally.merge(part)
                for outcome in part.failures:
                    report.say(report.failure_lines(outcome, options), progress)
                progress.update(tally.seeds, report.violations_found(tally))
        progress.clear()
        if not namespace.no_shrink:
            _shrink(tally, batch)
    except KeyboardInterrupt:
        interrupted = True
        progress.clear()
    stopped = interrupted or (batch.stop_after is not None and tally.failed_seeds >= batch.stop_after)
    missing = [] if stopped and not tally.lost else _missing(batch, tally, stopped=stopped)
    unwritten = _show_coverage(namespace, tally, options)
    failed = tally.failed_seeds or missing or unwritten
    word = "INTERRUPTED" if interrupted else "FAILED" if failed else "PASSED"
    figures = (*report.tally_figures(tally, sum(map(len, missing))), unwritten)
    print(report.last_line(word, *figures, seconds=time.monotonic() - started), flush=True)
    return {"INTERRUPTED": 130, "FAILED": 1, "PASSED": 0}[word]


def _missing(batch: Batch, tally: Tally, *, stopped: bool) -> list[range]:
    """Say which seeds have no result though they should, and why."""
    for lost in tally.lost:
        seeds = report.range_words([lost.seeds])
        print(f"seeds {seeds} have no result: {lost.why}", file=sys.stderr)
    missing = [lost.seeds for lost in tally.lost]
    if not stopped and tally.seeds + sum(map(len, missing)) < batch.count:
        known = {seed for one in (*tally.ran, *missing) for seed in one}
        rest = [seed for seed in range(batch.first, batch.first + batch.count) if seed not in known]
        if rest:
            print(f"seeds {report.number_words(rest)} were not run: too many processes died", file=sys.stderr)
            missing += [range(seed, seed + 1) for seed in rest]
    return missing


def _shrink(tally: Tally, batch: Batch) -> None:
    from kvferry.simulator.trials.batch import SEED_SECONDS_MAX  # noqa: PLC0415 - as above
    from kvferry.simulator.trials.processes import Lost, spread  # noqa: PLC0415 - as above
    from kvferry.simulator.trials.shrink import Shrink, shrink  # noqa: PLC0415 - as above

    tasks = [
        Shrink(failing, batch.options, batch.simulate, seed_seconds_max=SEED_SECONDS_MAX)
        for failing in tally.failures[:SHRUNK_MAX]
    ]
    with contextlib.closing(spread(shrink, tasks, jobs=batch.jobs)) as answers:
        for task, shrunk in answers:
            if isinstance(shrunk, Lost):
                report.say([f"{task} could not be made smaller: {shrunk.why}"])
            else:
                report.say(report.shrunk_lines(shrunk))


def _show_coverage(namespace: argparse.Namespace, tally: Tally, options: Options) -> str:
    """Returns why the page was not written, or nothing."""
    from kvferry.simulator.show import table, terminal  # noqa: PLC0415 - as above

    grid = _grid(options, tally)
    where, unwritten = namespace.coverage, ""
    visited = tally.transitions, tally.cells, grid
    if where is not None:
        seeds = f"{tally.seeds:,} seeds ({report.range_words(tally.ran) or 'none'})"
        histories = f"{seeds} of the {namespace.world} world, faults: {namespace.faults}"
        page = table.coverage(*visited, histories=histories)
        if str(where) == "-":
            print(page)
        else:
            unwritten = report.written(where, page)
    elif namespace.verbose:
        print(table.overview(*visited), end="\n\n")
    if namespace.brief or tally.seeds <= 1:
        lines = table.missing(*visited)
    elif namespace.verbose or str(where) == "-":
        # All of it has just been said.
        lines = []
    else:
        lines = ["", *terminal.tables(*visited), ""]
    print("\n".join([*lines, table.summary(*visited)]))
    print(_ends(tally))
    return unwritten


def _ends(tally: Tally) -> str:
    ends: Counter[str] = Counter()
    for name, times in tally.outcomes.items():
        side_and_outcome = " ".join(name.split()[:2])
        ends[side_and_outcome] += times
    listed = ", ".join(f"{name} {times:,}" for name, times in sorted(ends.items()))
    return f"requests: {listed or 'none'}"


def _grid(options: Options, tally: Tally) -> Grid:
    """What histories with these faults can visit, and all that they did visit."""
    from kvferry.simulator.ground.options import HARMLESS  # noqa: PLC0415 - as above
    from kvferry.simulator.watch import grid  # noqa: PLC0415 - as above

    kinds = options.faults & HARMLESS if options.world == "calm" else options.faults
    seen = {fault for (_, fault), times in tally.cells.items() if times}
    return _whole_grid().of_faults({*grid.within_reach(kinds), *seen})


def _whole_grid() -> Grid:
    from kvferry.simulator.show.table import Grid  # noqa: PLC0415 - as above
    from kvferry.simulator.watch import grid, stages  # noqa: PLC0415 - as above

    return Grid(stages.STAGES, grid.FAULTS, grid.IMPOSSIBLE, grid.BY_SIBLING)
