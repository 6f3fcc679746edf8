"""A whole comparison against stub engines: what is run, what is kept, what stops it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from kvferry.bench import compare as subject
from kvferry.bench import watch
from kvferry.bench.analysis import Comparison
from kvferry.bench.compare import Outcome, run_comparison
from kvferry.bench.connectors import BASELINE
from kvferry.bench.grid import Cell
from kvferry.bench.plan import Options
from kvferry.bench.results import Results, open_results, read_results
from kvferry.bench.stream import LegError
from kvferry.errors import KvferryError, UsageError
from tests.support.bench_pair import StubLauncher, StubPair
from tests.support.bench_results import options

CELLS = ((40.0, 30), (80.0, 60))


class Audience:
    """Remembers what it hears."""

    def __init__(self) -> None:
        self.done = 0.0
        self.told: list[str] = []

    def advance(self, amount: float = 1) -> None:
        """So much more is done."""
        self.done += amount

    def doing(self, what: str) -> None:
        """What is being done."""
        self.told.append(what)

    def say(self, line: str) -> None:
        """Something to remember."""
        self.told.append(line)


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "IDLE_SECONDS", 0.01)
    monkeypatch.setattr(subject, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(watch, "NOTED_SECONDS_MAX", 0.2)


def small(**changed: object) -> Options:
    return options(**({"cells": CELLS, "repeats": 1, "cell_seconds": 0.1, "output_tokens": 3} | changed))


ALONE = small(connectors=("ferry-push",), baseline=False)


def compared(
    directory: Path, launcher: StubLauncher, made: Options | None = None, deadline: float = 1e12
) -> tuple[Results, Outcome, Audience]:
    results = open_results(directory / "out", made or small())
    audience = Audience()
    outcome = run_comparison(results, launcher, audience, deadline=deadline)
    return results, outcome, audience


def test_every_cell_of_every_connector_is_run_and_kept(tmp_path: Path) -> None:
    results, outcome, audience = compared(tmp_path, StubLauncher(tmp_path / "engines"))
    assert outcome == Outcome(0, ())
    keys = {run.key for run in results.runs}
    expected = {(name, 0, Cell(*cell)) for name in ("ferry-push", "vllm-push", "vllm-pull") for cell in CELLS}
    assert keys == expected | {(BASELINE, 0, Cell(80, 60))}
    assert all(run.load.failures == [] for run in results.runs)
    assert read_results(tmp_path / "out").runs == results.runs
    assert any("ferry-push: 40 x 30" in told for told in audience.told)


def test_all_connectors_meet_the_same_requests_at_the_same_moments(tmp_path: Path) -> None:
    launcher = StubLauncher(tmp_path / "engines")
    results, _, _ = compared(tmp_path, launcher)
    for cell in CELLS:
        runs = [run for run in results.runs if run.cell == cell and run.connector != BASELINE]
        due = {tuple(sorted((one.request, one.due) for one in run.load.records)) for run in runs}
        assert len(due) == 1
    prompts = [
        {
            (headers["X-Request-Id"], tuple(body["prompt"]))
            for body, headers in pair.engines["decode"].asked
            if not headers["X-Request-Id"].startswith("meet-")
        }
        for (name, _), pair in launcher.pairs.items()
        if name != BASELINE
    ]
    assert prompts[0] == prompts[1] == prompts[2]


def test_what_engines_noted_and_cost_in_a_cell_is_kept_without_the_warm_up(tmp_path: Path) -> None:
    results, _, _ = compared(tmp_path, StubLauncher(tmp_path / "engines"))
    run = next(run for run in results.runs if run.connector == "ferry-push" and run.cell == CELLS[1])
    count = len(run.load.records)
    assert count == 8
    assert len(run.phases) == count
    assert all(one.handover is not None for one in run.phases)
    decode = run.engines["decode"]
    assert decode.pages == 64 * count
    (hook,) = decode.hooks
    assert (hook.hook, hook.count) == ("get_finished", 10 * count)
    assert hook.seconds == pytest.approx(0.002 * count)
    assert (hook.idle_count, hook.busy_count) == (9 * count, count)
    assert hook.busy_seconds == pytest.approx(0.0015 * count)
    assert decode.counters == {"kvferry_x_total": count}
    assert decode.steps is not None
    assert (decode.steps.count, decode.steps.modelled) == (count, 0.005)
    assert decode.steps.p50 == pytest.approx(0.001)
    assert decode.cpu_seconds == pytest.approx(0.1)
    assert decode.parts == pytest.approx({"main": 0.05, "kvferry": 0.02})


def test_each_cell_has_what_the_machine_did_meanwhile(tmp_path: Path) -> None:
    """The stub engines use 0.1 s each from one look to the next: before, at mark, for costs, after."""
    results, _, _ = compared(tmp_path, StubLauncher(tmp_path / "engines"), ALONE)
    for run in results.runs:
        assert run.machine is not None
        assert run.machine.engines == pytest.approx(0.6)
        assert run.machine.cores == os.cpu_count()
        assert run.load.seconds <= run.machine.seconds < 60
        assert 0 < run.machine.load_generator <= run.machine.seconds * run.machine.cores
    (session,) = results.sessions
    assert session.machine is not None
    assert session.machine.memory_bytes > 1 << 20


def test_idle_engines_are_watched_before_the_first_cell(tmp_path: Path) -> None:
    results, _, _ = compared(tmp_path, StubLauncher(tmp_path / "engines"))
    sessions = {run.connector: run for run in results.sessions}
    assert sessions["vllm-push"].idle_cpu_seconds == pytest.approx({"prefill": 0.1, "decode": 0.1})
    assert sessions["vllm-push"].idle_thread_seconds == pytest.approx({"prefill": 0.02, "decode": 0.02})
    assert sessions[BASELINE].idle_cpu_seconds == pytest.approx({"decode": 0.1})


def test_warm_up_sends_every_length_before_the_first_cell(tmp_path: Path) -> None:
    launcher = StubLauncher(tmp_path / "engines")
    compared(tmp_path, launcher, small(baseline=False))
    asked = launcher.pairs["vllm-pull", 0].engines["decode"].asked
    first_cell = next(i for i, (_, h) in enumerate(asked) if h["X-Request-Id"].startswith("bench-"))
    assert [len(body["prompt"]) for body, _ in asked[:first_cell]] == [300, 30, 60, 30, 60]


def test_only_what_is_missing_is_run_again(tmp_path: Path) -> None:
    results, _, _ = compared(tmp_path, StubLauncher(tmp_path / "engines"))
    lines = (tmp_path / "out" / "results.jsonl").read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if not (b'"vllm-push"' in line and b'"type":"run"' in line)]
    (tmp_path / "out" / "results.jsonl").write_bytes(b"".join(kept))
    again = StubLauncher(tmp_path / "again")
    finished, _, _ = compared(tmp_path, again)
    assert again.started == [("vllm-push", 0)]
    assert {run.key for run in finished.runs} == {run.key for run in results.runs}


def test_no_session_starts_that_would_end_too_late(tmp_path: Path) -> None:
    launcher = StubLauncher(tmp_path / "engines")
    results, outcome, _ = compared(tmp_path, launcher, deadline=-1.0)
    assert launcher.started == []
    assert results.runs == []
    assert outcome == Outcome(7, ())


def test_no_cell_starts_that_would_end_too_late(tmp_path: Path) -> None:
    """The engines took longer than they usually do: time passes only while they start."""
    now = [0.0]

    def dawdle(pair: StubPair) -> None:
        now[0] = 1000.0

    results = open_results(tmp_path / "out", ALONE)
    launcher = StubLauncher(tmp_path / "engines", dawdle)
    outcome = run_comparison(results, launcher, Audience(), deadline=500.0, clock=lambda: now[0])
    assert outcome == Outcome(2, ())
    assert results.runs == []
    assert len(results.sessions) == 1


def test_an_engine_that_has_ended_is_told_as_such(tmp_path: Path) -> None:
    def spoil(pair: StubPair) -> None:
        pair.engines["prefill"].status = 500
        pair.ended = "prefill ended with signal SIGKILL"

    with pytest.raises(KvferryError, match="prefill ended with signal SIGKILL"):
        compared(tmp_path, StubLauncher(tmp_path / "engines", spoil))


def test_a_broken_session_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    launcher = StubLauncher(tmp_path / "engines")

    def spoil(pair: StubPair) -> None:
        if launcher.started[-1] == ("vllm-push", 0):
            pair.engines["decode"].status = 500

    launcher.prepare = spoil
    results, outcome, audience = compared(tmp_path, launcher)
    (broken,) = outcome.broken
    assert re.match(r"repeat 1, vllm-push: http://.*: answered 500: .*unwell", broken)
    assert broken in audience.told
    assert {run.connector for run in results.runs} == {"ferry-push", "vllm-pull", BASELINE}
    # The same command tries it again.
    again = StubLauncher(tmp_path / "again")
    _, healed, _ = compared(tmp_path, again)
    assert again.started == [("vllm-push", 0)]
    assert healed == Outcome(0, ())


def test_two_broken_sessions_in_succession_stop_the_comparison(tmp_path: Path) -> None:
    def spoil(pair: StubPair) -> None:
        pair.engines["decode"].status = 500

    launcher = StubLauncher(tmp_path / "engines", spoil)
    with pytest.raises(LegError, match="decode is unwell"):
        compared(tmp_path, launcher)
    assert len(launcher.started) == 2


def test_engines_that_cannot_be_started_so_stop_it_at_once(tmp_path: Path) -> None:
    def refuse(pair: StubPair) -> None:
        raise UsageError("preset 'x' is unknown")

    launcher = StubLauncher(tmp_path / "engines", refuse)
    with pytest.raises(UsageError, match="preset 'x' is unknown"):
        compared(tmp_path, launcher)
    assert len(launcher.started) == 1


def test_wrong_pages_are_counted(tmp_path: Path) -> None:
    def spoil(pair: StubPair) -> None:
        pair.engines["decode"].mismatches = 5

    results, _, _ = compared(tmp_path, StubLauncher(tmp_path / "engines", spoil), ALONE)
    # They all came while the engines warmed up; a cell counts what came in it.
    assert [session.mismatches for session in results.sessions] == [5]
    assert results.runs[0].engines["decode"].mismatches == 0
    assert Comparison(results).checks.mismatches() == 5


def test_an_engine_that_notes_nothing_is_waited_for_only_so_long(tmp_path: Path) -> None:
    def silence(pair: StubPair) -> None:
        for engine in pair.engines.values():
            engine.silent = True

    results, outcome, _ = compared(tmp_path, StubLauncher(tmp_path / "engines", silence), ALONE)
    assert outcome == Outcome(0, ())
    assert all(run.phases == () for run in results.runs)
