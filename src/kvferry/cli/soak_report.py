"""What `kvferry soak` says: a few lines for each round, and the summary, whose last line has the figures."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from kvferry.cli.soak_client import Kind
from kvferry.cli.soak_judge import RoundResult, memory_growth, memory_unjudged, told
from kvferry.cli.soak_plan import ROUNDS_WHOLE, Fault, RoundPlan, Target

INDENT = "    "
_SIDES = {Target.PREFILL: "P", Target.DECODE: "D"}
_BAD = (Kind.WRONG, Kind.REJECTED, Kind.SILENT, Kind.LATE)


def strike_line(plan: RoundPlan, server: str, *, seen: bool, rounds: int | None = None) -> str:
    """What is done to whom, at the moment of the strike. `rounds`: how many there will be, if known."""
    number = f"round {plan.number}" + (f" of {rounds}" if rounds else "")
    stage = f"stage {plan.stage.value}"
    if not seen:
        stage = f"another stage than {plan.stage.value}, which did not show"
    how = "killed" if plan.fault is Fault.KILL else f"stopped for {plan.seconds:.1f} s"
    return f"{number}: {_SIDES[plan.target]} ({server}) {how} at {stage}"


def result_lines(result: RoundResult) -> list[str]:
    """What became of the fleet and of the requests."""
    away = f"away for {result.away_seconds:.1f} s"
    again = result.pushed_again_seconds
    pushed = "never pushed again" if again is None else f"pushed again {again:.1f} s after its return"
    settled = result.settled_seconds
    empty = "never empty" if settled is None else f"empty {settled:.1f} s after the last request"
    longest = max((outcome.seconds for outcome in result.outcomes), default=0.0)
    requests = f"requests: {_requests([result])}; longest {longest:.1f} s"
    return [f"{INDENT}{away}, {pushed}, {empty}", f"{INDENT}{requests}"]


def summary(
    results: Sequence[RoundResult], problems: Sequence[str], *, interrupted: bool = False
) -> list[str]:
    """The last lines; the very last one is the verdict with the figures."""
    lines = [growth.text for growth in memory_growth(results)]
    lines.append(f"requests: {_requests(results)}")
    slowest = max((o for result in results for o in result.outcomes), key=lambda o: o.seconds, default=None)
    if slowest is not None:
        lines.append(f"longest request: {slowest.kind.value}, {told(slowest)}")
    missed = [result.plan for result in results if not result.seen]
    if missed:
        stages = ", ".join(f"{plan.stage.value} of round {plan.number}" for plan in missed)
        lines.append(f"stages that did not show, struck at another one: {stages}")
    lines += [f"PROBLEM: {problem}" for problem in problems]
    verdict = "INTERRUPTED: " if interrupted else "PASSED: "
    if problems:
        verdict = f"FAILED: {len(problems)} problem" + ("; " if len(problems) == 1 else "s; ")
    return [*lines, verdict + figure(results)]


def figure(results: Sequence[RoundResult]) -> str:
    """Rounds, answers compared, the longest request, how soon transfers were pushed again, and memory."""
    outcomes = [outcome for result in results for outcome in result.outcomes]
    kinds = Counter(outcome.kind for outcome in outcomes)
    right, compared = kinds[Kind.RIGHT], kinds[Kind.RIGHT] + kinds[Kind.WRONG]
    longest = max((outcome.seconds for outcome in outcomes), default=0.0)
    again = [r.pushed_again_seconds for r in results if r.pushed_again_seconds is not None]
    pushed = (
        f"pushed again after {statistics.median(again):.1f} s (median)" if again else "never pushed again"
    )
    rounds = f"{len(results)} round" + ("" if len(results) == 1 else "s")
    missed = sum(not result.seen for result in results)
    if missed:
        rounds += f" ({missed} at another stage than planned)"
    return (
        f"{rounds}, {right:,} of {compared:,} answers equal one engine's; longest request {longest:.1f} s, "
        f"{pushed}; memory: {_memory(results)}"
    )


def _memory(results: Sequence[RoundResult]) -> str:
    """Of whom it was judged; a growth beyond what is allowed is a problem and told as such."""
    judged = list(dict.fromkeys(growth.server for growth in memory_growth(results) if growth.is_ours))
    unjudged = memory_unjudged(results)
    if not judged:
        return f"not judged, {ROUNDS_WHOLE} rounds needed"
    text = f"judged for {', '.join(judged)}"
    if unjudged:
        text += f", not for {', '.join(unjudged)} ({ROUNDS_WHOLE} rounds needed)"
    return text


def _requests(results: Sequence[RoundResult]) -> str:
    outcomes = [outcome for result in results for outcome in result.outcomes]
    kinds = Counter(outcome.kind for outcome in outcomes)
    excused = sum(result.excused for result in results)
    parts = [f"{kinds[Kind.RIGHT]:,} right"]
    if excused:
        parts.append(f"{excused:,} failed while D was away (expected)")
    if kinds[Kind.FAILED] > excused:
        parts.append(f"{kinds[Kind.FAILED] - excused:,} FAILED")
    if kinds[Kind.LEFT]:
        parts.append(f"{kinds[Kind.LEFT]:,} left by their client")
    parts += [f"{kinds[kind]:,} {kind.value.upper()}" for kind in _BAD if kinds[kind]]
    return ", ".join(parts)
