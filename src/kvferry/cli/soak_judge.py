"""What must hold after each round of a soak, and over all. Pure: results in, problems in words out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvferry.cli.soak_client import Kind
from kvferry.cli.soak_load import Outcome
from kvferry.cli.soak_plan import STOP_SECONDS_MAX, RoundPlan, Target
from kvferry.protocol.fences import CLOCK_DRIFT_MAX
from kvferry.protocol.limits import Limits

MEBIBYTE = 1 << 20
COMPUTE_SECONDS = 90.0
"""For computing what is queued, on two cores that all engines share with their own restarts."""
REFERENCE, ROUTER = "reference", "router"
MEMORY_ALLOWANCE_BYTES = 96 * MEBIBYTE
"""Between a server's early and late rounds, beyond what the engine without kvferry grew by."""
TOLD_MAX = 3
"""Requests of one kind that a round's problems tell one by one."""
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
    struck_at: float
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

    def is_excused(self, outcome: Outcome) -> bool:
        """Whether it failed because D was away: nobody could decode, or its stream had begun on that D."""
        if outcome.kind is not Kind.FAILED or self.plan.target is not Target.DECODE:
            return False
        recovered = math.inf if self.recovered_at is None else self.recovered_at
        return outcome.began < recovered and outcome.began + outcome.seconds >= self.struck_at

    @property
    def excused(self) -> int:
        """How many failed because D was away."""
        return sum(map(self.is_excused, self.outcomes))


Judge = Callable[[RoundResult, Bounds], list[str]]


def judge_answers(result: RoundResult, bounds: Bounds) -> list[str]:
    """No wrong answer."""
    del bounds
    return _some("wrong answer", (o for o in result.outcomes if o.kind is Kind.WRONG))


def judge_ends(result: RoundResult, bounds: Bounds) -> list[str]:
    """Every request ends within its bound, by an answer or an explicit error."""
    bound = bounds.request_seconds
    late = (o for o in result.outcomes if o.kind is Kind.LATE or o.seconds > bound + 1.0)
    return [
        *_some("no answer and no error", (o for o in result.outcomes if o.kind is Kind.SILENT)),
        *_some("a well-formed request was rejected", (o for o in result.outcomes if o.kind is Kind.REJECTED)),
        *_some(f"not ended within {bound:.0f} s", late),
    ]


def judge_failures(result: RoundResult, bounds: Bounds) -> list[str]:
    """A fault of P fails no request, and one of D only while D is away."""
    del bounds
    when = "although only P was struck"
    if result.plan.target is Target.DECODE:
        when = "before D was struck or after its return"
    failed = (o for o in result.outcomes if o.kind is Kind.FAILED and not result.is_excused(o))
    return _some(f"failed {when}", failed)


def judge_survivors(result: RoundResult, bounds: Bounds) -> list[str]:
    """Nobody ends but who was killed."""
    del bounds
    return [f"{name} ended or is unwell, and was not killed" for name in result.survivors_ended]


def judge_recovery(result: RoundResult, bounds: Bounds) -> list[str]:
    """Transfers are pushed again, and requests answered."""
    if result.pushed_again_seconds is None:
        until = f"within {bounds.pushed_again_seconds:.0f} s of"
        if result.survivors_ended:
            # Then nobody waits for the bound.
            until = "after"
        return [f"no pushed transfer {until} {result.server}'s return"]
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
    def is_ours(self) -> bool:
        """Whether it is judged: the engine without kvferry only serves to compare with."""
        return self.server != REFERENCE

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


def memory_unjudged(results: Sequence[RoundResult]) -> list[str]:
    """Servers of ours of which no life was long enough."""
    names = {name: None for result in results for name, _ in result.memory_bytes if name != REFERENCE}
    judged = {growth.server for growth in memory_growth(results)}
    return [name for name in names if name not in judged]


def memory_problems(growths: Sequence[Growth]) -> list[str]:
    """Memory of survivors does not grow beyond the allowance; the engine without kvferry is not ours."""
    allowed = MEMORY_ALLOWANCE_BYTES
    return [
        f"{growth.server} grew by {growth.bytes / MEBIBYTE:.0f} MiB over {growth.rounds} rounds, more than "
        f"{allowed // MEBIBYTE} MiB, what the engine without kvferry grew by not counted"
        for growth in growths
        if growth.bytes > allowed and growth.is_ours
    ]


def _some(what: str, outcomes: Iterable[Outcome]) -> list[str]:
    """The first of these requests, and how many more there are."""
    found = list(outcomes)
    shown = [f"{what}: {told(outcome)}" for outcome in found[:TOLD_MAX]]
    more = len(found) - len(shown)
    return [*shown, f"{what}: {more:,} more"] if more else shown


def told(outcome: Outcome) -> str:
    """One request in words."""
    return f"{outcome.what}, {outcome.seconds:.1f} s" + (f": {outcome.detail}" if outcome.detail else "")
