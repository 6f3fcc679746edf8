"""Runs the rounds of a soak: load, stage, fault, return, recovery, and a look at what is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvferry.cli.engines import Endpoints
from kvferry.cli.fleet import Fleet
from kvferry.cli.processes import ServerProcess
from kvferry.cli.requests import RequestError
from kvferry.cli.soak_client import Kind, Reply
from kvferry.cli.soak_judge import Bounds, RoundResult, round_problems
from kvferry.cli.soak_load import Load
from kvferry.cli.soak_plan import Fault, Mix, RoundPlan, Stage
from kvferry.cli.soak_report import INDENT, result_lines, strike_line
from kvferry.cli.soak_stages import StageMissedError, Stages, Victim, read_gauges
from kvferry.errors import KvferryError

WARM_UP_REQUESTS = 3
RIGHT_AFTER_RECOVERY = 10
"""Requests that must have begun and been answered after the recovery before the load is shut."""
HEALTH_QUESTIONS = 5
_POLL_SECONDS, _PAUSE_SECONDS_MAX = 0.1, 1.0


class SoakError(KvferryError):
    """The soak cannot go on; the message says what does not work."""


@dataclass(slots=True)
class Findings:
    """Results of the rounds so far, and what did not hold."""

    rounds: list[RoundResult] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Rounds:
    """A running fleet under load, struck round by round. Use `strike_all`."""

    def __init__(
        self,
        fleet: Fleet,
        endpoints: Endpoints,
        load: Load,
        mix: Mix,
        *,
        bounds: Bounds,
        startup_seconds: float,
        report: Callable[[str], None],
        count: int | None = None,
    ) -> None:
        """`count`: how many rounds there will be, if that is known."""
        self._fleet = fleet
        self._endpoints = endpoints
        self._load = load
        self._mix = mix
        self._bounds = bounds
        self._startup_seconds = startup_seconds
        self._report = report
        self._count = count
        self._stages: Stages | None = None
        self.findings = Findings()

    def strike_all(self, plans: Iterable[RoundPlan], goes_on: Callable[[], bool]) -> None:
        """Run rounds until the plans or the time are over, or a round leaves something that will not heal.

        Findings are kept in `findings`, also when an interrupt ends it.
        """
        try:
            self._warm_up()
        except KvferryError as error:
            self._note([f"before the first round: {error}"])
            return
        for plan in plans:
            if not goes_on():
                return
            try:
                result = self._strike(plan)
            except KvferryError as error:
                self._note([f"round {plan.number} could not be finished: {error}"])
                return
            self.findings.rounds.append(result)
            for line in result_lines(result):
                self._report(line)
            self._note([f"round {plan.number}: {text}" for text in round_problems(result, self._bounds)])
            if result.survivors_ended or result.pushed_again_seconds is None:
                return

    def _note(self, problems: list[str]) -> None:
        for problem in problems:
            self._report(f"{INDENT}PROBLEM: {problem}")
        self.findings.problems += problems

    def _warm_up(self) -> None:
        """First requests, and how many bytes a token has.

        Raises:
            SoakError: a healthy fleet does not answer, or nothing is pushed.
        """
        tokens = 0
        for _ in range(WARM_UP_REQUESTS):
            ask = self._mix.long()
            outcome = self._load.wait(self._load.ask(ask, Reply(), "warm-up"))
            if outcome.kind is not Kind.RIGHT:
                raise SoakError(f"a request to the healthy fleet is {outcome.kind.value}: {outcome.detail}")
            tokens += len(ask.prompt)
        self._load.take()
        pushed = sum(read_gauges(url).bytes for url in self._endpoints.prefill)
        if not pushed:
            raise SoakError("the healthy fleet has pushed nothing")
        self._stages = Stages(self._endpoints, self._load, self._mix, pushed / tokens)

    def _strike(self, plan: RoundPlan) -> RoundResult:
        assert self._stages is not None
        if plan.stage is not Stage.IDLE:
            self._load.open()
        victim, seen = self._victim(self._stages, plan)
        self._report(strike_line(plan, victim.server, seen=seen, rounds=self._count))
        struck = time.monotonic()
        self._bring_down(plan, victim)
        back = time.monotonic()
        victim.send_other_leg()
        again = self._wait_for_push(back)
        recovered = None if again is None else back + again
        self._linger(recovered)
        self._load.shut()
        quiet = self._drain(victim)
        settled, left_over = self._wait_for_emptiness() if quiet else (None, "requests are still running")
        return RoundResult(
            plan=plan,
            server=victim.server,
            seen=seen,
            outcomes=tuple(self._load.take()),
            struck_at=struck,
            away_seconds=back - struck,
            pushed_again_seconds=again,
            recovered_at=recovered,
            settled_seconds=settled,
            left_over=left_over,
            survivors_ended=self._ended(),
            memory_bytes={(s.spec.name, s.pid): s.memory_bytes() for s in self._fleet.servers},
        )

    @staticmethod
    def _victim(stages: Stages, plan: RoundPlan) -> tuple[Victim, bool]:
        """The engine to strike, and whether it was seen to be at the stage."""
        try:
            return stages.reach(plan), True
        except StageMissedError:
            return stages.in_passing(plan), False

    def _bring_down(self, plan: RoundPlan, victim: Victim) -> None:
        """Strike, and return when the engine answers again."""
        server = self._fleet[victim.server]
        try:
            if plan.fault is Fault.KILL:
                server.kill()
            else:
                server.pause()
            # At an idle stage the first requests now meet an engine that does not answer.
            self._load.open()
            if plan.fault is Fault.STOP or victim.late_server != victim.server:
                victim.send_other_leg()
            time.sleep(plan.seconds)
        finally:
            if plan.fault is Fault.STOP:
                server.resume()
        if plan.fault is Fault.KILL:
            self._fleet.start([server.spec])
            self._fleet.wait_ready(self._startup_seconds)

    def _wait_for_push(self, since: float) -> float | None:
        """Seconds until a request is answered right while the decode engines count one more transfer."""
        assert self._stages is not None
        deadline = since + self._bounds.pushed_again_seconds
        pause = _POLL_SECONDS
        while time.monotonic() < deadline:
            before = self._stages.completed()
            asked = self._load.ask(self._mix.short(), Reply(), "probe")
            outcome = self._load.wait(asked)
            if outcome.kind is Kind.RIGHT and self._stages.completed() > before:
                return time.monotonic() - since
            if any(server.exited for server in self._fleet.servers):
                return None
            time.sleep(pause)
            pause = min(2 * pause, _PAUSE_SECONDS_MAX)
        return None

    def _linger(self, recovered: float | None) -> None:
        """Let the load show that requests are answered again."""
        if recovered is None:
            return
        deadline = time.monotonic() + self._bounds.request_seconds
        while self._load.count_right_since(recovered) < RIGHT_AFTER_RECOVERY:
            if time.monotonic() > deadline:
                return
            time.sleep(_POLL_SECONDS)

    def _drain(self, victim: Victim) -> bool:
        """Whether every request ends; each has its own bound, so this one is only for a broken soak."""
        deadline = time.monotonic() + self._load.seconds_max
        while not self._load.is_idle() or not all(asked.done() for asked in victim.open):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def _wait_for_emptiness(self) -> tuple[float | None, str]:
        assert self._stages is not None
        began = time.monotonic()
        while left_over := self._left_over():
            if time.monotonic() - began > self._bounds.settle_seconds:
                return None, left_over
            time.sleep(_POLL_SECONDS)
        return time.monotonic() - began, ""

    def _left_over(self) -> str:
        assert self._stages is not None
        try:
            return self._stages.left_over()
        except RequestError as error:
            return str(error)

    def _ended(self) -> tuple[str, ...]:
        """Servers that have ended, or say that they are not well."""
        return tuple(server.spec.name for server in self._fleet.servers if not _is_well(server))


def _is_well(server: ServerProcess) -> bool:
    """Whether it runs and says that it is well; a busy one may miss a question."""
    return not server.exited and any(server.answers() for _ in range(HEALTH_QUESTIONS))
