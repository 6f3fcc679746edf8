"""What must hold after each round of a soak, and over all. Pure: results in, problems in words out."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvferry.cli.soak_client import Kind
from kvferry.cli.soak_load import Outcome
from kvferry.cli.soak_plan import STOP_SECONDS_MAX, Fault, RoundPlan, Target
from kvferry.protocol.fences import CLOCK_DRIFT_MAX
from kvferry.protocol.limits import Limits

MEBIBYTE = 1 << 20
COMPUTE_SECONDS = 90.0
"""For computing what is queued, on two cores that all engines share with their own restarts."""
REFERENCE, ROUTER = "reference", "router"
MEMORY_ALLOWANCE_BYTES = 96 * MEBIBYTE
"""Between a server's early and late rounds, beyond what the engine without kvferry grew by."""
MEMORY_ROUNDS_MIN = 6
"""A server's life must hold so many rounds for its memory to be judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How long things may take, from the settings of connector and router and the longest stop."""

    limits: Limits
    retry_bound_seconds: float
    decode_recovery_seconds: float
    health_seconds: float
    probe_seconds: float
    stop_seconds: float = STOP_SECONDS_MAX
    compute_seconds: float = COMPUTE_SECONDS

    @property
    def request_seconds(self) -> float:
        """From a request to its answer or error: a stop, P unreachable, then silent, then D recovers."""
        limits = self.limits
        recovery = max(self.decode_recovery_seconds, limits.unknown_seconds)
        waiting = limits.handshake_seconds + limits.silence_seconds
        return self.stop_seconds + waiting + recovery + self.compute_seconds

    @property
    def pushed_again_seconds(self) -> float:
        """From an engine's return to the next pushed transfer: a check, a probe, a handshake."""
        found = self.health_seconds + self.probe_seconds + self.limits.handshake_seconds
        return found + self.compute_seconds

    @property
    def settle_seconds(self) -> float:
        """From the last request's end to empty tables: a lease, or the lapse of a quarantine."""
        lapse = (self.limits.write_seconds + self.retry_bound_seconds) * (1 + CLOCK_DRIFT_MAX)
        return max(lapse, self.limits.lease_seconds, self.limits.unknown_seconds) + self.compute_seconds / 2

    @property
    def text(self) -> str:
        """All of them in a line."""
        return (
            f"every request ends within {self.request_seconds:.0f} s, transfers are pushed within "
            f"{self.pushed_again_seconds:.0f} s of an engine's return, tables are empty within "
            f"{self.settle_seconds:.0f} s of the last request"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult:
    """What a round found. Moments are monotonic; None stands for what did not come within its bound."""

    plan: RoundPlan
    server: str
    """The engine that was struck."""
    seen: bool = True
    """Whether it was seen to be at the plan's stage; else the stage was missed."""
    outcomes: tuple[Outcome, ...]
    away_seconds: float
    """From the fault until the engine answered again."""
    pushed_again_seconds: float | None
    """From then until a pushed transfer completed."""
    recovered_at: float | None
    settled_seconds: float | None
    left_over: str = ""
    """What was not empty at the end, or which requests were open."""
    survivors_ended: tuple[str, ...] = ()
    memory_bytes: Mapping[tuple[str, int], int] = field(default_factory=dict)
    """Of each server at the round's end, by name and process id."""

    def count(self, *kinds: Kind) -> int:
        """Requests of these kinds."""
        return sum(outcome.kind in kinds for outcome in self.outcomes)


Judge = Callable[[RoundResult, Bounds], list[str]]


def judge_answers(result: RoundResult, bounds: Bounds) -> list[str]:
    """No wrong answer."""
    del bounds
    return [f"wrong answer: {_told(o)}" for o in result.outcomes if o.kind is Kind.WRONG]


def judge_ends(result: RoundResult, bounds: Bounds) -> list[str]:
    """Every request ends within its bound, by an answer or an explicit error."""
    found = [f"no answer and no error: {_told(o)}" for o in result.outcomes if o.kind is Kind.SILENT]
    found += [
        f"a well-formed request was rejected: {_told(o)}" for o in result.outcomes if o.kind is Kind.REJECTED
    ]
    for outcome in result.outcomes:
        if outcome.kind is Kind.LATE or outcome.seconds > bounds.request_seconds + 1.0:
            found.append(f"not ended within {bounds.request_seconds:.0f} s: {_told(outcome)}")
    return found


def judge_failures(result: RoundResult, bounds: Bounds) -> list[str]:
    """A fault of P fails no request, and after the recovery no fault does."""
    del bounds
    failed = [outcome for outcome in result.outcomes if outcome.kind is Kind.FAILED]
    if result.plan.target is Target.PREFILL:
        return [f"failed although only P was struck: {_told(o)}" for o in failed]
    after = result.recovered_at
    return [
        f"failed after the recovery: {_told(o)}" for o in failed if after is not None and o.began >= after
    ]


def judge_survivors(result: RoundResult, bounds: Bounds) -> list[str]:
    """Nobody ends but who was killed."""
    del bounds
    return [f"{name} ended or is unwell, and was not killed" for name in result.survivors_ended]


def judge_recovery(result: RoundResult, bounds: Bounds) -> list[str]:
    """Transfers are pushed again, and requests answered."""
    if result.pushed_again_seconds is None:
        return [f"no pushed transfer within {bounds.pushed_again_seconds:.0f} s of {result.server}'s return"]
    after = result.recovered_at or 0.0
    if not any(o.kind is Kind.RIGHT and o.began >= after for o in result.outcomes):
        return ["no request was answered after the recovery"]
    return []


def judge_emptiness(result: RoundResult, bounds: Bounds) -> list[str]:
    """Free blocks and tables are as at the start."""
    if result.settled_seconds is not None:
        return []
    return [f"not empty within {bounds.settle_seconds:.0f} s: {result.left_over}"]


JUDGES: tuple[Judge, ...] = (
    judge_answers,
    judge_ends,
    judge_failures,
    judge_survivors,
    judge_recovery,
    judge_emptiness,
)


def round_problems(result: RoundResult, bounds: Bounds) -> list[str]:
    """What does not hold in one round; empty when all is well."""
    return [problem for judge in JUDGES for problem in judge(result, bounds)]


@dataclass(frozen=True, slots=True)
class Growth:
    """A server's memory over one life, as medians of its first and its last third of rounds."""

    server: str
    rounds: int
    early_bytes: float
    late_bytes: float
    reference_bytes: float = 0.0
    """By how much the engine without kvferry grew in the same rounds: what vLLM keeps for itself."""

    @property
    def bytes(self) -> float:
        """By how much it grew beyond that."""
        return self.late_bytes - self.early_bytes - max(self.reference_bytes, 0.0)

    @property
    def text(self) -> str:
        """It in a line."""
        line = (
            f"memory of {self.server}, {self.rounds} rounds: {self.early_bytes / MEBIBYTE:.0f} MiB early, "
            f"{self.late_bytes / MEBIBYTE:.0f} MiB late"
        )
        if not self.reference_bytes:
            return line
        return f"{line}, {self.bytes / MEBIBYTE:+.0f} MiB beyond what the reference grew by"


def memory_growth(results: Sequence[RoundResult]) -> list[Growth]:
    """One for each life long enough. A life's first round is left out: it fills caches and pools."""
    lives: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for result in results:
        reference = sum(size for (name, _), size in result.memory_bytes.items() if name == REFERENCE)
        for life, size in result.memory_bytes.items():
            lives.setdefault(life, []).append((size, reference))
    found = []
    for (server, _), sizes in lives.items():
        if len(sizes) >= MEMORY_ROUNDS_MIN:
            early, late = _medians([own for own, _ in sizes])
            before, after = _medians([reference for _, reference in sizes])
            grown = 0.0 if server in (REFERENCE, ROUTER) else after - before
            found.append(Growth(server, len(sizes), early, late, grown))
    return found


def _medians(sizes: Sequence[int]) -> tuple[float, float]:
    part = len(sizes) // 3
    return statistics.median(sizes[1 : part + 1]), statistics.median(sizes[-part:])


def memory_problems(growths: Sequence[Growth]) -> list[str]:
    """Memory of survivors does not grow beyond the allowance; the engine without kvferry is not ours."""
    allowed = MEMORY_ALLOWANCE_BYTES
    return [
        f"{growth.server} grew by {growth.bytes / MEBIBYTE:.0f} MiB over {growth.rounds} rounds, more than "
        f"{allowed // MEBIBYTE} MiB, what the engine without kvferry grew by not counted"
        for growth in growths
        if growth.bytes > allowed and growth.server != REFERENCE
    ]


def round_line(result: RoundResult) -> str:
    """One round in one line."""
    plan = result.plan
    lasted = "stopped" if plan.fault is Fault.STOP else "away"
    again = "never" if result.pushed_again_seconds is None else f"{result.pushed_again_seconds:.1f} s"
    settled = "never" if result.settled_seconds is None else f"{result.settled_seconds:.0f} s"
    memory = ", ".join(
        f"{name} {size / MEBIBYTE:.0f}"
        for (name, _), size in result.memory_bytes.items()
        if name != REFERENCE
    )
    bad = len(result.outcomes) - result.count(Kind.RIGHT, Kind.FAILED, Kind.LEFT)
    counts = (
        f"{result.count(Kind.RIGHT)} right, {result.count(Kind.FAILED)} failed, "
        f"{result.count(Kind.LEFT)} left" + (f", {bad} BAD" if bad else "")
    )
    longest = max((outcome.seconds for outcome in result.outcomes), default=0.0)
    stage = plan.stage.value if result.seen else f"({plan.stage.value})"
    struck = f"{plan.fault.value} {result.server} at {stage}"
    return (
        f"round {plan.number:>3}  {struck:<27}  {lasted} {result.away_seconds:4.1f} s  {counts:<31}  "
        f"longest {longest:4.1f} s  "
        f"pushed again after {again}  empty after {settled}  MiB: {memory}"
    )


def summary(results: Sequence[RoundResult], problems: Sequence[str]) -> list[str]:
    """The last lines; the very last one is the figure."""
    outcomes = [outcome for result in results for outcome in result.outcomes]
    lines = [growth.text for growth in memory_growth(results)]
    if not lines:
        lines.append(f"memory was not judged: no server lived through {MEMORY_ROUNDS_MIN} rounds")
    kinds = Counter(outcome.kind for outcome in outcomes)
    lines.append("requests: " + ", ".join(f"{kinds[kind]} {kind.value}" for kind in Kind if kinds[kind]))
    if outcomes:
        longest = max(outcomes, key=lambda outcome: outcome.seconds)
        lines.append(f"longest: {longest.kind.value}, {_told(longest)}")
    missed = sum(not result.seen for result in results)
    if missed:
        lines.append(f"{missed} rounds missed their stage (in parentheses) and struck at another one")
    lines += [f"PROBLEM: {problem}" for problem in problems]
    lines.append(f"FAILED: {len(problems)} problems" if problems else "PASSED")
    lines.append(figure(results))
    return lines


def figure(results: Sequence[RoundResult]) -> str:
    """Rounds, wrong answers, requests, the longest of them, and how soon transfers were pushed again."""
    outcomes = [outcome for result in results for outcome in result.outcomes]
    wrong = sum(outcome.kind is Kind.WRONG for outcome in outcomes)
    longest = max((outcome.seconds for outcome in outcomes), default=0.0)
    again = [r.pushed_again_seconds for r in results if r.pushed_again_seconds is not None]
    pushed = (
        f"pushed again after {statistics.median(again):.1f} s (median)" if again else "never pushed again"
    )
    rounds = f"{len(results)} round" + ("" if len(results) == 1 else "s")
    return f"{rounds}, {wrong} wrong answers, {len(outcomes)} requests, longest {longest:.1f} s, {pushed}"


def _told(outcome: Outcome) -> str:
    return f"{outcome.what}, {outcome.seconds:.1f} s" + (f": {outcome.detail}" if outcome.detail else "")
