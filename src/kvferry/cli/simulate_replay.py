"""`kvferry simulate --replay`: one history as lines for people, and the life of one transfer as a picture."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from kvferry.cli import simulate_report as report
from kvferry.cli.simulate_mutants import chosen_checkout
from kvferry.errors import UsageError
from kvferry.simulator.ground.outcome import ITEMS_MAX, Outcome, Violation, broken_words, findings

if TYPE_CHECKING:
    from kvferry.ids import TransferId
    from kvferry.simulator.ground.events import Observer
    from kvferry.simulator.ground.options import Options
    from kvferry.simulator.show.timeline import Recorder
    from kvferry.simulator.trials.batch import Simulate
    from kvferry.simulator.trials.mutation import Mutant

SECONDS_MAX = 120.0
"""CPU time. A history that takes more does not end; what there is of it is shown."""
CONSEQUENCES_SHOWN_MAX = 5
EDGE_LINES = 200
"""So many lines of a history without an end are shown of its beginning, and as many of what came last."""


def replay(namespace: argparse.Namespace, options: Options) -> int:
    """Show one history, twice run: with the same events, if all is decided by the seed."""
    from kvferry.simulator.run import simulate  # noqa: PLC0415 - imported by the command that needs it
    from kvferry.simulator.show.timeline import Recorder  # noqa: PLC0415 - as above
    from kvferry.simulator.trials import mutation  # noqa: PLC0415 - as above
    from kvferry.simulator.watch.trace import TraceLines  # noqa: PLC0415 - as above

    mutant = _mutant(namespace)
    seed, started, recorder, lines = namespace.replay, time.monotonic(), Recorder(), TraceLines()
    again_lines = TraceLines()
    with mutation.planted(mutant):
        _check_drop(seed, options, simulate)
        outcome = _run(simulate, seed, options, recorder, lines)
        drawn = _drawn(namespace, recorder, outcome.violations)
        ended = _has_ended(outcome)
        again = _run(simulate, seed, options, again_lines) if ended else outcome
    report.say([_title(namespace, outcome, mutant), *_told(namespace, recorder, lines.lines, outcome)])
    for finding in findings(outcome.violations):
        most = len(finding.consequences) if namespace.verbose else CONSEQUENCES_SHOWN_MAX
        report.say(report.finding_lines(finding, "VIOLATION: ", consequences_max=most))
    unwritten = ""
    if drawn is not None:
        unwritten = _draw(namespace, recorder, outcome.violations, drawn)
    same = outcome.trace_hash == again.trace_hash
    if not same:
        print(f"NOT DETERMINISTIC: a second run has trace hash {again.trace_hash}")
        print(_first_difference(lines.lines, again_lines.lines))
    found = len(findings(outcome.violations))
    figures = (
        f"seed {seed}",
        report.count_words(found, "violation"),
        report.count_words(outcome.transfers, "transfer") if ended else "",
        f"{len(recorder.events):,} events",
        f"trace hash {outcome.trace_hash}" if ended else "",
        unwritten,
    )
    word = "PASSED" if same and not found and not unwritten else "FAILED"
    print(report.last_line(word, *figures, seconds=time.monotonic() - started))
    return 0 if word == "PASSED" else 1


def _run(simulate: Simulate, seed: int, options: Options, *observers: Observer) -> Outcome:
    from kvferry.simulator.trials.batch import guarded  # noqa: PLC0415 - as above

    return guarded(simulate, seed, options, seconds_max=SECONDS_MAX, observers=observers)


def _has_ended(outcome: Outcome) -> bool:
    """Whether it came to its end: by itself, or by an exception within."""
    return bool(outcome.trace_hash)


def _mutant(namespace: argparse.Namespace) -> Mutant | None:
    from kvferry.simulator.trials import mutation  # noqa: PLC0415 - as above

    if namespace.mutants is None:
        return None
    (mutant,) = mutation.chosen(mutation.load(chosen_checkout()), namespace.mutants)
    return mutant


def _check_drop(seed: int, options: Options, simulate: Simulate) -> None:
    """A number that nothing has is an error of whoever wrote it."""
    if not options.drop:
        return
    whole = _run(simulate, seed, replace(options, drop=frozenset()))
    known = {number for number, _ in whole.items}
    unknown = options.drop - known
    if unknown and _has_ended(whole):
        always = f"; what has {ITEMS_MAX} or more always happens" if max(unknown) >= ITEMS_MAX else ""
        raise UsageError(
            f"--drop: seed {seed} has no {report.number_words(unknown)}, it has "
            f"{report.number_words(known) or 'nothing with a number'}{always}"
        )


def _title(namespace: argparse.Namespace, outcome: Outcome, mutant: Mutant | None) -> str:
    planted = "" if mutant is None else f", with {mutant.name} planted ({mutant.what})"
    numbers = report.number_words(number for number, _ in outcome.items)
    return (
        f"seed {namespace.replay} of the {namespace.world} world, faults: {namespace.faults}{planted}; "
        f"--drop leaves out any of {numbers or 'nothing'}, see the ITEM lines"
    )


def _told(namespace: argparse.Namespace, recorder: Recorder, lines: list[str], outcome: Outcome) -> list[str]:
    from kvferry.simulator.show.lines import told  # noqa: PLC0415 - as above

    shown = told(recorder.events, lines, outcome.violations, folded=not namespace.verbose)
    left_out = len(shown) - 2 * EDGE_LINES
    if _has_ended(outcome) or left_out <= 0:
        return shown
    return [*shown[:EDGE_LINES], f"... {left_out:,} lines left out ...", *shown[-EDGE_LINES:]]


def _first_difference(first: list[str], second: list[str]) -> str:
    for number, (one, other) in enumerate(zip(first, second, strict=False), 1):
        if one != other:
            return f"event {number} was\n{one}\nand is\n{other}"
    return f"one run has {len(first):,} events, the other {len(second):,}; what both have is equal"


def _drawn(
    namespace: argparse.Namespace, recorder: Recorder, violations: tuple[Violation, ...]
) -> TransferId | None:
    """The transfer to draw, if one is; a wrong name is told before the history is shown."""
    from kvferry.simulator.show.timeline import choose  # noqa: PLC0415 - as above

    if namespace.timeline is None or not recorder.events:
        return None
    return choose(recorder.events, violations, namespace.transfer)


def _draw(
    namespace: argparse.Namespace,
    recorder: Recorder,
    violations: tuple[Violation, ...],
    transfer: TransferId,
) -> str:
    """Returns why there is no picture, or nothing."""
    from kvferry.simulator.show.picture import draw  # noqa: PLC0415 - as above
    from kvferry.simulator.show.timeline import story  # noqa: PLC0415 - as above

    title = f"seed {namespace.replay} of the {namespace.world} world"
    if violations:
        title += f": {broken_words(violations[0].promise)}{' broken' if violations[0].promise else ''}"
    picture = draw(story(recorder.events, transfer, violations), title)
    if unwritten := report.written(namespace.timeline, picture):
        return unwritten
    print(f"{namespace.timeline} shows transfer {transfer}")
    return ""
