"""A round strikes the right process in the right way, and tells what it leaves: on stub servers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.cli import soak_rounds
from kvferry.cli.engines import Endpoints
from kvferry.cli.fleet import Fleet
from kvferry.cli.processes import ServerProcess
from kvferry.cli.requests import RequestError, fetch
from kvferry.cli.soak_client import Kind, Reply
from kvferry.cli.soak_load import Outcome
from kvferry.cli.soak_plan import Ask, Fault, Mix, RoundPlan, Stage, Target
from kvferry.cli.soak_report import summary
from kvferry.cli.soak_rounds import Rounds
from kvferry.cli.soak_stages import Gauges, StageError, StageMissedError, Victim
from tests.support.stub_fleet import ends, stub_spec
from tests.unit.cli.test_soak_judge import BOUNDS

NAMES = ("prefill-0", "decode-0", "router")
SECONDS = 10.0


class FakeLoad:
    """Answers everything at once; `kind` is what comes of it."""

    seconds_max = 10.0

    def __init__(self) -> None:
        self.kind = Kind.RIGHT
        self.kinds: Iterator[Kind] = iter(())
        """Of the next probes."""
        self.is_open = False
        self.outcomes: list[Outcome] = []
        self.opened = 0

    def open(self) -> None:
        self.is_open = True
        self.opened += 1

    def shut(self) -> None:
        self.is_open = False

    def is_idle(self) -> bool:
        return not self.is_open

    def take(self) -> list[Outcome]:
        taken, self.outcomes = self.outcomes, []
        return taken

    def count_right_since(self, moment: float) -> int:
        self.ask(Ask(prompt=(1,), answer_tokens=1), Reply(), "load")
        return sum(o.kind is Kind.RIGHT and o.began >= moment for o in self.outcomes)

    def ask(self, ask: Ask, reply: Reply, what: str) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        kind = next(self.kinds, self.kind) if what == "probe" else self.kind
        future.set_result(Outcome(what=what, kind=kind, began=time.monotonic(), seconds=0.0))
        self.outcomes.append(future.result())
        return future

    def wait(self, asked: Future[Any]) -> Any:
        return asked.result(0)


@dataclass
class FakeStages:
    """Every stage shows at once; `completed` grows with each look unless `stuck`."""

    server: str = "prefill-0"
    late_server: str = ""
    late: list[tuple[bool, bool]] = field(default_factory=list)
    stuck: bool = False
    left: str = ""
    failure: Exception | None = None
    world: Any = None
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def reach(self, plan: RoundPlan) -> Victim:
        if self.failure is not None:
            raise self.failure

        def send_late() -> Future[Any]:
            server = self.world.fleet[self.server]
            self.late.append((server.exited, is_stopped(server)))
            future: Future[Any] = Future()
            future.set_result(None)
            return future

        return Victim(self.server, late_server=self.late_server, send_late=send_late)

    def in_passing(self, plan: RoundPlan) -> Victim:
        return Victim(self.server)

    def completed(self) -> int:
        return 0 if self.stuck else next(self.numbers)

    def left_over(self) -> str:
        return self.left


def states(server: ServerProcess) -> set[str]:
    """The states of a server's processes, as /proc tells them."""
    texts = [Path(f"/proc/{pid}/stat").read_text() for pid in server.members()]
    return {text.rpartition(")")[2].split()[0] for text in texts}


def is_stopped(server: ServerProcess) -> bool:
    return not server.exited and states(server) == {"T"}


@dataclass
class World:
    fleet: Fleet
    load: FakeLoad = field(default_factory=FakeLoad)
    stages: FakeStages = field(default_factory=FakeStages)
    lines: list[str] = field(default_factory=list)

    def rounds(self) -> Rounds:
        endpoints = Endpoints("router", ("p",), ("d",), "reference")
        return Rounds(
            self.fleet,
            endpoints,
            self.load,  # type: ignore[arg-type]
            Mix("x", 4096),
            bounds=BOUNDS,
            startup_seconds=SECONDS,
            report=self.lines.append,
            count=9,
        )

    def strike(self, *faults: Fault, stage: Stage = Stage.HALF, seconds: float = 0.0) -> Rounds:
        rounds = self.rounds()
        plans = [
            RoundPlan(number=number, stage=stage, target=Target.PREFILL, fault=fault, seconds=seconds)
            for number, fault in enumerate(faults, 1)
        ]
        rounds.strike_all(plans, lambda: True)
        return rounds


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(soak_rounds, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(soak_rounds, "read_gauges", lambda url: Gauges(bytes=1000))
    with Fleet(report=lambda line: None) as fleet:
        fleet.start([stub_spec(tmp_path, name) for name in NAMES])
        fleet.wait_ready(SECONDS)
        made = World(fleet)
        made.stages.world = made
        monkeypatch.setattr(soak_rounds, "Stages", lambda *arguments: made.stages)
        yield made


def test_a_killed_engine_comes_back_at_its_address(world: World) -> None:
    first = world.fleet["prefill-0"]
    others = {name: world.fleet[name].pid for name in NAMES[1:]}
    rounds = world.strike(Fault.KILL)
    second = world.fleet["prefill-0"]
    assert ends(first.pid)
    assert second.pid != first.pid
    assert second.spec == first.spec
    assert fetch(second.spec.url, "/health", seconds=SECONDS) == "ok"
    assert {name: world.fleet[name].pid for name in others} == others
    assert rounds.findings.problems == []
    (result,) = rounds.findings.rounds
    assert result.server == "prefill-0"
    assert {name for name, _ in result.memory_bytes} == set(NAMES)
    assert all(size > 1 << 20 for size in result.memory_bytes.values())
    assert result.pushed_again_seconds is not None
    assert world.lines[-3] == "round 1 of 9: P (prefill-0) killed at stage half"
    assert world.lines[-2].startswith(f"    away for {result.away_seconds:.1f} s, pushed again ")
    assert world.lines[-1].startswith("    requests: ")
    assert result.recovered_at is not None
    assert result.recovered_at - result.away_seconds - result.pushed_again_seconds == pytest.approx(
        result.struck_at
    )


def test_a_stopped_engine_is_stopped_and_goes_on(world: World) -> None:
    before = world.fleet["prefill-0"].pid
    rounds = world.strike(Fault.STOP, seconds=0.05)
    assert world.stages.late == [(False, True)], "the other leg was sent while it was stopped"
    assert world.fleet["prefill-0"].pid == before
    assert fetch(world.fleet["prefill-0"].spec.url, "/health", seconds=SECONDS) == "ok"
    assert rounds.findings.problems == []
    assert rounds.findings.rounds[0].away_seconds >= 0.05


@pytest.mark.parametrize(("late_server", "exited"), [("decode-0", True), ("prefill-0", False)])
def test_a_leg_to_the_killed_engine_waits_for_its_return(
    world: World, late_server: str, exited: bool
) -> None:
    world.stages.late_server = late_server
    world.strike(Fault.KILL)
    assert world.stages.late == [(exited, False)]


def test_an_interrupt_lets_a_stopped_engine_go_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(seconds: float) -> None:
        assert is_stopped(world.fleet["prefill-0"])
        raise KeyboardInterrupt

    monkeypatch.setattr(soak_rounds, "time", SimpleNamespace(sleep=interrupt, monotonic=time.monotonic))
    with pytest.raises(KeyboardInterrupt):
        world.strike(Fault.STOP, seconds=5.0)
    monkeypatch.undo()
    assert not is_stopped(world.fleet["prefill-0"])


@pytest.mark.parametrize("fault", list(Fault))
def test_a_survivor_that_ends_is_a_problem_and_the_last_one(world: World, fault: Fault) -> None:
    with pytest.raises(RequestError):
        fetch(world.fleet["router"].spec.url, "/die", seconds=SECONDS)
    assert ends(world.fleet["router"].pid)
    rounds = world.strike(fault, fault)
    (problem,) = rounds.findings.problems
    assert "router ended" in problem
    assert len(rounds.findings.rounds) <= 1


def test_nothing_pushed_again_is_a_problem_and_the_last_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.stages.stuck = True
    monkeypatch.setattr(type(BOUNDS), "pushed_again_seconds", 0.1)
    rounds = world.strike(Fault.STOP, Fault.STOP)
    assert len(rounds.findings.rounds) == 1
    (problem,) = rounds.findings.problems
    assert problem.startswith("round 1: no pushed transfer within 0 s of prefill-0's return")
    assert world.lines[-1] == f"    PROBLEM: {problem}"


def test_a_transfer_that_completes_while_requests_fail_is_no_recovery(world: World) -> None:
    """What had been under way may complete before the router has found the engine again."""
    kinds = iter([Kind.FAILED, Kind.FAILED, Kind.RIGHT])
    world.load.kinds = kinds
    rounds = world.strike(Fault.STOP)
    assert next(kinds, None) is None
    (result,) = rounds.findings.rounds
    failed = [o for o in result.outcomes if o.kind is Kind.FAILED]
    assert len(failed) == 2
    assert result.recovered_at is not None
    assert all(o.began < result.recovered_at for o in failed)


def test_what_is_left_over_is_a_problem_and_the_next_round_begins(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.stages.left = "decode-0: quarantined 3"
    monkeypatch.setattr(type(BOUNDS), "settle_seconds", 0.1)
    rounds = world.strike(Fault.STOP, Fault.STOP)
    assert len(rounds.findings.rounds) == 2
    assert [problem.partition(": ")[2] for problem in rounds.findings.problems] == [
        "not empty within 0 s: decode-0: quarantined 3"
    ] * 2


def test_a_stage_that_cannot_be_reached_ends_the_run_and_is_a_problem(world: World) -> None:
    world.stages.failure = StageError("prefill-0 refused a prefill")
    rounds = world.strike(Fault.STOP, Fault.STOP)
    assert rounds.findings.rounds == []
    assert rounds.findings.problems == ["round 1 could not be finished: prefill-0 refused a prefill"]


def test_an_engine_is_struck_although_its_stage_was_missed_and_the_round_says_so(world: World) -> None:
    world.stages.failure = StageMissedError("stage half did not show")
    rounds = world.strike(Fault.KILL)
    [result] = rounds.findings.rounds
    assert not result.seen
    assert rounds.findings.problems == []
    assert any("killed at another stage than half, which did not show" in line for line in world.lines)
    assert "stages that did not show, struck at another one: half of round 1" in summary([result], ())


def test_an_idle_engine_is_struck_before_the_load_begins(world: World) -> None:
    world.strike(Fault.STOP, stage=Stage.IDLE)
    assert world.load.opened == 1
    world.strike(Fault.STOP, stage=Stage.HALF)
    assert world.load.opened == 3


def test_no_round_begins_when_the_time_is_over(world: World) -> None:
    rounds = world.rounds()
    plans = [RoundPlan(number=1, stage=Stage.HALF, target=Target.PREFILL, fault=Fault.STOP, seconds=0.0)] * 5
    answers = iter([True, True, False])
    rounds.strike_all(plans, lambda: next(answers))
    assert len(rounds.findings.rounds) == 2


def test_a_fleet_that_is_not_well_is_not_struck(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.load.kind = Kind.FAILED
    findings = world.strike(Fault.KILL).findings
    assert findings.problems == ["before the first round: a request to the healthy fleet is failed: "]
    assert findings.rounds == []
    world.load.kind = Kind.RIGHT
    monkeypatch.setattr(soak_rounds, "read_gauges", lambda url: Gauges())
    findings = world.strike(Fault.KILL).findings
    assert findings.problems == ["before the first round: the healthy fleet has pushed nothing"]
    assert findings.rounds == []


def test_a_busy_survivor_may_miss_a_question_but_not_all(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = itertools.cycle([False, True])
    monkeypatch.setattr(ServerProcess, "answers", lambda server: next(answers))
    assert world.strike(Fault.STOP).findings.problems == []
    monkeypatch.setattr(ServerProcess, "answers", lambda server: False)
    problems = world.strike(Fault.STOP).findings.problems
    assert [problem.partition(": ")[2].split()[0] for problem in problems] == list(NAMES)
