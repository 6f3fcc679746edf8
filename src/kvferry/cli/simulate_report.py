"""What `kvferry simulate` says: progress while it runs, and each finding as it comes."""

from __future__ import annotations

import math
import shlex
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, TextIO

from kvferry.simulator.ground.outcome import broken_words, findings, plain

if TYPE_CHECKING:
    from pathlib import Path

    from kvferry.simulator.ground.options import Options
    from kvferry.simulator.ground.outcome import Finding, Outcome, Violation
    from kvferry.simulator.trials.batch import Tally
    from kvferry.simulator.trials.mutation import Mutant, Verdict
    from kvferry.simulator.trials.shrink import Shrunk

VIOLATIONS_SHOWN_MAX = 3
BAR_CELLS = 24
LIST_COLUMNS = 120
REDRAW_SECONDS = 0.1
SECONDS_MIN, DONE_MIN = 10.0, 20
"""Earlier than both the pace says little, and no time is told that is left."""
LINE_SECONDS = 10.0
"""Between two lines of progress where there is no terminal."""


class Progress:
    """A bar on a terminal; elsewhere a line now and then. Goes to standard error."""

    def __init__(
        self, total: int, noun: str, *, stream: TextIO | None = None, clock: Callable[[], float] | None = None
    ) -> None:
        self._total, self._noun = total, noun
        self._stream = sys.stderr if stream is None else stream
        self._clock = time.monotonic if clock is None else clock
        self._terminal = self._stream.isatty()
        self._start = self._clock()
        self._told = -math.inf if self._terminal else self._start
        self._drawn = 0

    def update(self, done: int, words: str) -> None:
        """Tell how far it is, if it is time to."""
        now = self._clock()
        if now - self._told < (REDRAW_SECONDS if self._terminal else LINE_SECONDS):
            return
        self._told = now
        text = f"{done:,} of {count_words(self._total, self._noun)}, {words}, {self._left(done, now)}"
        if self._terminal:
            full = BAR_CELLS * done // max(1, self._total)
            self._draw(f"[{'#' * full}{'.' * (BAR_CELLS - full)}] {text}")
        else:
            print(text, file=self._stream, flush=True)

    def clear(self) -> None:
        """Take the bar away, so that something else can be printed."""
        if self._drawn:
            self._draw("")
            print("\r", end="", file=self._stream, flush=True)
            self._drawn = 0

    def _draw(self, text: str) -> None:
        print(f"\r{text:<{self._drawn}}", end="", file=self._stream, flush=True)
        self._drawn = len(text)

    def _left(self, done: int, now: float) -> str:
        passed = now - self._start
        if done >= self._total or not done or (passed < SECONDS_MIN and done < DONE_MIN):
            return f"{passed:.0f} s"
        return f"{passed:.0f} s, {passed / done * (self._total - done):.0f} s left"


def replay_command(seed: int, options: Options, *, mutant: str = "") -> str:
    """What shows one history again."""
    words = ["kvferry", "simulate", "--replay", str(seed), "--world", options.world]
    if options.faults != type(options)().faults:
        words += ["--faults", ",".join(sorted(options.faults)) or "none"]
    if options.drop:
        words += ["--drop", number_words(options.drop)]
    if mutant:
        words += ["--mutants", mutant]
    return shlex.join(words)


def number_words(numbers: Iterable[int]) -> str:
    """Numbers as `--drop` takes them: `1-3,7`."""
    runs: list[range] = []
    for number in sorted(numbers):
        if runs and number == runs[-1].stop:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return range_words(runs)


def range_words(ranges: Iterable[range]) -> str:
    """Ranges as `1-3,7`."""
    return ",".join(f"{one[0]}" if len(one) == 1 else f"{one[0]}-{one[-1]}" for one in ranges)


def count_words(number: int, noun: str) -> str:
    """A number and what it counts, in its plural where that is due."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def say(lines: Iterable[str], progress: Progress | None = None) -> None:
    """Print lines at once, instead of a bar of progress."""
    if progress is not None:
        progress.clear()
    print("\n".join(lines), flush=True)


def violations_found(tally: Tally) -> str:
    """How many violations, in how many seeds."""
    if not tally.failed_seeds:
        return "0 violations"
    return f"{count_words(tally.violations, 'violation')} in {count_words(tally.failed_seeds, 'seed')}"


def tally_figures(tally: Tally, missing: int) -> tuple[str, ...]:
    """What many seeds came to."""
    return (
        count_words(tally.seeds, "seed"),
        f"{missing:,} without a result" if missing else "",
        violations_found(tally),
        count_words(tally.transfers, "transfer"),
        f"{tally.events:,} events in {tally.virtual_seconds:,.0f} s of virtual time",
    )


def last_line(word: str, *figures: str, seconds: float) -> str:
    """How every run of the command ends: one word, its figures, its duration."""
    return f"{word}: {', '.join(filter(None, figures))}, {seconds:.1f} s"


def failure_lines(outcome: Outcome, options: Options) -> list[str]:
    """A failing seed, why, and how to see it again."""
    found = findings(outcome.violations)
    lines: list[str] = []
    for finding in found[:VIOLATIONS_SHOWN_MAX]:
        lines += finding_lines(finding, f"seed {outcome.seed}: ")
    more = len(found) - VIOLATIONS_SHOWN_MAX
    if more > 0:
        lines.append(f"seed {outcome.seed}: and {count_words(more, 'more violation')}")
    return [*lines, f"    {replay_command(outcome.seed, options)}"]


def finding_lines(finding: Finding, head: str, *, consequences_max: int = 0) -> list[str]:
    """A violation, and what follows from it: how much, and that many of it in words."""
    lines = [head + violation_words(finding.violation)]
    if finding.consequences:
        promises = Counter(one.promise for one in finding.consequences)
        counts = ", ".join(f"{count} of {broken_words(one)}" for one, count in sorted(promises.items()))
        lines.append(f"    and what else is unfinished then: {counts}")
    told = finding.consequences[:consequences_max]
    more = len(finding.consequences) - len(told)
    lines += [f"        {violation_words(one)}" for one in told]
    return [*lines, f"        and {more} more; --verbose names them"] if told and more else lines


def violation_words(violation: Violation) -> str:
    """Which promise was broken, when, and how."""
    if not math.isfinite(violation.at_seconds):
        when = "at the end"
    elif violation.unfinished:
        when = f"from {violation.at_seconds:.6f} s to the end"
    else:
        when = f"at {violation.at_seconds:.6f} s"
    return f"{broken_words(violation.promise)} {when}: {plain(violation.what)}"


def shrunk_lines(shrunk: Shrunk) -> list[str]:
    """What is left of a failing seed."""
    seed, before = shrunk.outcome.seed, shrunk.items_before
    if not before:
        return [
            f"seed {seed}: it broke before its first request or fault, so there is nothing to leave out; "
            "the command above shows it"
        ]
    if not shrunk.items:
        head = (
            f"seed {seed}: it still breaks with all {before} requests and faults left out. What remains "
            "always happens: engines start, and at the end one transfer from each to each must work"
        )
        return [head, f"    {replay_command(seed, shrunk.options)}"]
    enough = f"{len(shrunk.items)} of its {before} requests and faults are enough"
    head = f"seed {seed}: {enough} ({shrunk.runs} runs)"
    items = [f"    {number}: {words}" for number, words in shrunk.items]
    return [head, *items, f"    {replay_command(seed, shrunk.options)}"]


def mutant_lines(mutant: Mutant, verdict: Verdict, options: Options, *, first: int) -> list[str]:
    """A mutant's verdict, why, and how to see it. `first` is the seed that was tried first."""
    kind = ", planted blindly" if mutant.blind else ""
    name = f"{mutant.name} (breaks promise {mutant.promise}{kind}): {mutant.what}"
    if verdict.lost:
        return [f"NOT TRIED {name}", *(f"    {line}" for line in verdict.lost.splitlines())]
    unsound = ""
    if verdict.unsound:
        unsound = f"; {verdict.unsound:,} more fail without it too, and do not count"
    tried, seconds = count_words(verdict.tried, "seed"), f"{verdict.seconds:.1f} s{unsound}"
    if verdict.first_seed is None:
        return [f"SURVIVED  {name}", f"    no seed has found it ({tried}, {seconds})"]
    broken = ", ".join(broken_words(number) for number, _ in verdict.promises.most_common())
    number = verdict.first_seed - first + 1
    by_seed = f"by seed {verdict.first_seed}, the {ordinal(number)} tried"
    if verdict.tried == number:
        found = f"first found {by_seed}, by {broken} ({seconds})"
    else:
        found = f"found by {verdict.found:,} of {tried}, first {by_seed}; by {broken} ({seconds})"
    return [
        f"found     {name}",
        f"    {found}",
        f"    {plain(verdict.example)}",
        f"    {replay_command(verdict.first_seed, options, mutant=mutant.name)}",
    ]


def ordinal(number: int) -> str:
    """A place in a row: `3rd`."""
    ending = "th" if number // 10 % 10 == 1 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number:,}{ending}"


def listed_mutants(mutants: Iterable[Mutant]) -> list[str]:
    """Mutants by the promise that they break, those that were planted blindly with a mark."""
    groups: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        groups.setdefault(mutant.promise, []).append(mutant)
    lines: list[str] = []
    for promise, members in sorted(groups.items()):
        lines += [
            f"{count_words(len(members), 'mutant')} that break{'' if members[1:] else 's'} promise {promise}:"
        ]
        for mutant in members:
            head = f"  {'*' if mutant.blind else ' '} {mutant.name}: "
            lines += textwrap.wrap(head + mutant.what, LIST_COLUMNS, subsequent_indent=" " * 8)
        lines.append("")
    return [*lines, "*: planted blindly, by somebody who had not seen the checkers"]


def written(path: Path, text: str) -> str:
    """Write a file; returns why it could not be, or nothing. The verdict has to be said in any case."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        return f"{path} was not written ({error.strerror})"
    return ""


def listed_lines(title: str, sentences: Mapping[str, str]) -> list[str]:
    """Names and what they mean, one a line."""
    width = max(map(len, sentences))
    return [title, *(f"  {name:<{width}}  {sentence}" for name, sentence in sentences.items())]
