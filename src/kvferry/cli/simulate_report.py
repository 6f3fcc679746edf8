"""What `kvferry simulate` says: progress while it runs, and each finding as it comes."""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from kvferry.simulator.ground.options import Options
    from kvferry.simulator.ground.outcome import Outcome, Violation
    from kvferry.simulator.trials.mutation import Mutant, Verdict
    from kvferry.simulator.trials.shrink import Shrunk

VIOLATIONS_SHOWN_MAX = 3
BAR_CELLS = 24
REDRAW_SECONDS = 0.1
LINE_SECONDS = 10.0
"""Between two lines of progress where there is no terminal."""


class Progress:
    """A bar on a terminal; elsewhere a line now and then. Goes to standard error."""

    def __init__(
        self, total: int, unit: str, *, stream: TextIO | None = None, clock: Callable[[], float] | None = None
    ) -> None:
        self._total, self._unit = total, unit
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
        text = f"{done:,} of {self._total:,} {self._unit}, {words}, {self._left(done, now)}"
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
        if not done:
            return f"{passed:.0f} s"
        return f"{passed:.0f} s, {passed / done * (self._total - done):.0f} s left"


def replay_command(seed: int, options: Options) -> str:
    """What shows one history again."""
    words = ["kvferry", "simulate", "--replay", str(seed), "--world", options.world]
    if options.faults != type(options)().faults:
        words += ["--faults", ",".join(sorted(options.faults)) or "none"]
    if options.drop:
        words += ["--drop", number_words(options.drop)]
    return shlex.join(words)


def number_words(numbers: Iterable[int]) -> str:
    """Numbers as `--drop` takes them: `1-3,7`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def failure_lines(outcome: Outcome, options: Options) -> list[str]:
    """A failing seed, why, and how to see it again."""
    lines = [
        f"seed {outcome.seed}: {violation_words(violation)}"
        for violation in outcome.violations[:VIOLATIONS_SHOWN_MAX]
    ]
    more = len(outcome.violations) - VIOLATIONS_SHOWN_MAX
    if more > 0:
        lines.append(f"seed {outcome.seed}: and {more} more violations")
    return [*lines, f"    {replay_command(outcome.seed, options)}"]


def violation_words(violation: Violation) -> str:
    """Which promise was broken, when, and how."""
    when = f"{violation.at_seconds:.6f} s" if math.isfinite(violation.at_seconds) else "the end"
    return f"promise {violation.promise} at {when}: {violation.what}"


def shrunk_lines(shrunk: Shrunk) -> list[str]:
    """What is left of a failing seed."""
    seed = shrunk.outcome.seed
    if not shrunk.items:
        return [f"seed {seed}: not shrunk, it broke before anything had a number"]
    head = (
        f"seed {seed}: {shrunk.items_before} workload items and faults shrunk to {len(shrunk.items)} "
        f"in {shrunk.runs} runs"
    )
    items = [f"    {number}: {words}" for number, words in shrunk.items]
    return [head, *items, f"    {replay_command(seed, shrunk.options)}"]


def mutant_lines(mutant: Mutant, verdict: Verdict) -> list[str]:
    """A mutant's verdict."""
    tried = f"{verdict.found:,} of {verdict.tried:,} seeds"
    if verdict.unsound:
        tried += f" (not counting {verdict.unsound:,} that fail without it)"
    kind = " (blind)" if mutant.blind else ""
    if verdict.survived:
        return [f"SURVIVED  {mutant.name}{kind}: found in {tried}; breaks {mutant.promise}: {mutant.what}"]
    numbers = ", ".join(str(number) for number, _ in verdict.promises.most_common())
    return [
        f"found     {mutant.name}{kind}: in {tried}, first {verdict.first_seed}, by promise {numbers}; "
        f"breaks {mutant.promise}: {mutant.what}",
        f"              {verdict.example}",
    ]
