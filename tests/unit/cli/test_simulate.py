"""`kvferry simulate`: exit codes, last lines, what it prints, and every wrong use; on a made-up simulation.

The simulation's real one is run by `tests/simulation`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

import kvferry
from kvferry.cli import main as cli
from kvferry.cli import simulate as command
from kvferry.cli import simulate_replay
from kvferry.cli import simulate_report as report
from kvferry.simulator.ground.options import FAULTS, HARMLESS, WORLDS, Options
from kvferry.simulator.ground.outcome import Outcome
from kvferry.simulator.show import table
from kvferry.simulator.show.table import Grid
from kvferry.simulator.trials import batch, mutation
from kvferry.simulator.watch import coverage, grid, stages, trace
from kvferry.transport.faults import MessageFault, PostFault
from tests.support import fake_simulation as fake

Run = Callable[..., tuple[int, list[str]]]
FIGURES = r"[\d,]+ events in [\d,]+ s of virtual time, \d+\.\d s"
GRID = Grid(("posted", "decoding"), ("D abort", "late"), {("decoding", "D abort"): "nobody can"})


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command on the fake simulation: exit code and lines."""
    use(monkeypatch, fake.simulate)
    monkeypatch.setattr(command, "_whole_grid", lambda: GRID)
    monkeypatch.setattr(grid, "within_reach", lambda kinds: GRID.faults if kinds - HARMLESS else ("late",))

    def call(*arguments: str) -> tuple[int, list[str]]:
        code = cli.main(["simulate", *arguments])
        captured = capsys.readouterr()
        return code, (captured.out + captured.err).splitlines()

    return call


def use(monkeypatch: pytest.MonkeyPatch, simulate: Callable[..., Outcome]) -> None:
    module = ModuleType("kvferry.simulator.run")
    module.simulate = simulate  # type: ignore[attr-defined] - it is made here
    monkeypatch.setitem(sys.modules, "kvferry.simulator.run", module)


# --- many seeds -----------------------------------------------------------------------------------


def test_without_a_violation_it_exits_with_0_and_says_the_figures_last(run: Run) -> None:
    code, lines = run("--seeds", "6", "--jobs", "1")
    assert code == 0
    assert re.fullmatch(rf"PASSED: 6 seeds, 0 violations, 42 transfers, {FIGURES}", lines[-1])


def test_large_figures_are_readable(run: Run) -> None:
    _, lines = run("--seeds", "1003", "--from", "10007", "--jobs", "1", "--stop-after", "1000", "--no-shrink")
    found = "101 violations in 101 seeds"
    assert re.fullmatch(rf"FAILED: 1,003 seeds, {found}, 7,021 transfers, {FIGURES}", lines[-1])


def test_a_failing_seed_is_printed_with_its_replay_and_shrunk(run: Run) -> None:
    code, lines = run("--seeds", "10", "--jobs", "1")
    assert code == 1
    assert lines[:2] == [
        "seed 7: promise 2 at 2.050000 s: a late write of transfer-1 in seed 7",
        "    kvferry simulate --replay 7 --world small",
    ]
    at = next(index for index, line in enumerate(lines) if "enough" in line)
    assert re.fullmatch(r"seed 7: 2 of its 12 requests and faults are enough \(\d+ runs\)", lines[at])
    assert lines[at + 1 : at + 4] == [
        "    3: item 3",
        "    8: item 8",
        "    kvferry simulate --replay 7 --world small --drop 0-2,4-7,9-11",
    ]
    assert re.fullmatch(rf"FAILED: 10 seeds, 1 violation in 1 seed, 70 transfers, {FIGURES}", lines[-1])


def test_it_stops_after_so_many_failures(run: Run) -> None:
    code, lines = run("--seeds", "1000", "--jobs", "1", "--stop-after", "2", "--no-shrink")
    assert code == 1
    assert lines[-1].startswith("FAILED: 18 seeds, 2 violations in 2 seeds, 126 transfers, ")
    assert not any("enough" in line or "no result" in line for line in lines)


def test_several_processes_find_the_same(run: Run) -> None:
    code, lines = run("--seeds", "20", "--jobs", "2", "--no-shrink")
    assert code == 1
    assert sum(line.startswith("    kvferry simulate --replay") for line in lines) == 2
    assert lines[-1].startswith("FAILED: 20 seeds, 2 violations in 2 seeds, 140 transfers, ")


def test_many_seeds_end_with_tables_of_what_they_visited_and_not(run: Run) -> None:
    _, lines = run("--seeds", "6", "--jobs", "1")
    at = lines.index(next(line for line in lines if line.startswith("machine ")))
    assert lines[at + 1].startswith("source     1 of 10  unknown + expect, ")
    assert any(line.endswith("failed + failed (late)") for line in lines)
    at = lines.index("fault    posted  decoding")
    assert lines[at + 1 : at + 5] == [
        "D abort       6         -",
        "late          0         6",
        "-: impossible, --verbose says why",
        "not visited: late at posted",
    ]
    assert lines[-3].startswith("coverage: ")
    assert lines[-1].startswith("PASSED: ")


@pytest.mark.parametrize("more", [("--seeds", "1"), ("--seeds", "6", "--brief")])
def test_one_seed_has_no_tables_and_many_have_none_where_they_are_not_wanted(
    run: Run, more: tuple[str, ...]
) -> None:
    _, lines = run("--jobs", "1", *more)
    assert not any(line.startswith(("machine", "fault", "|", "#")) for line in lines)
    assert "not visited: 1 of the grid's cells: late at posted" in lines


@pytest.mark.parametrize(
    ("chosen", "has"),
    [
        (("--world", "calm"), False),
        (("--faults", "none"), False),
        (("--faults", "clock,parts"), False),
        (("--faults", "crash"), True),
    ],
)
def test_what_histories_without_faults_cannot_visit_is_not_listed(
    run: Run, monkeypatch: pytest.MonkeyPatch, chosen: tuple[str, ...], has: bool
) -> None:
    def nothing_visited(seed: int, options: Options, **keywords: object) -> Outcome:
        return replace(fake.simulate(seed, options, **keywords), cells={})

    use(monkeypatch, nothing_visited)
    _, lines = run("--seeds", "2", "--jobs", "1", *chosen)
    assert ("not visited: D abort at every stage" in lines) is has
    assert "not visited: late at every stage" in lines
    of = 3 if has else 2
    assert any(f" 0 of {of} possible cells " in line for line in lines)
    use(monkeypatch, fake.simulate)
    _, lines = run("--seeds", "2", "--jobs", "1", *chosen)
    assert "D abort       2         -" in lines, "what was visited is shown in any case"


def test_without_more_words_gaps_are_named_and_tables_left_out(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "NAMED_MAX", 90)
    _, lines = run("--seeds", "6", "--jobs", "1", "--brief")
    assert len(lines) <= 6
    assert not any(line.startswith(("|", "#")) for line in lines)
    assert "not visited: 1 of the grid's cells: late at posted" in lines
    assert re.match(r"not visited: \d+ of the transitions: source unknown \+ expect; ", lines[0])
    monkeypatch.setattr(table, "NAMED_MAX", 3)
    _, lines = run("--seeds", "6", "--jobs", "1", "--brief")
    assert re.fullmatch(
        r"not visited: \d+ of the transitions: --verbose names them, and more seeds .*", lines[0]
    )


def test_the_coverage_is_shown_on_request_and_gaps_are_named(run: Run) -> None:
    _, lines = run("--seeds", "6", "--jobs", "1", "--verbose")
    assert "| fault | posted | decoding |" in lines
    assert "| D abort | 6 | n/a |" in lines
    assert "- posted: late" in lines
    assert any(line.startswith("- source: unknown + expect, unknown + end, ") for line in lines)
    assert any(line.startswith("coverage: 1 of ") for line in lines)
    assert "requests: completed 12" in lines


def test_the_coverage_goes_into_a_file_when_asked(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "coverage.md"
    _, lines = run(
        "--seeds", "6", "--from", "10", "--jobs", "1", "--faults", "crash", "--coverage", str(page)
    )
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# Coverage of 6 seeds (10-15) of the small world, faults: crash\n")
    assert "### delivery" in text
    assert not any(line.startswith("|") for line in lines)
    _, lines = run("--seeds", "6", "--from", "10", "--jobs", "1", "--faults", "crash", "--coverage", "-")
    assert "\n".join(lines).startswith(text)


def test_a_page_that_cannot_be_written_is_named_by_the_verdict(run: Run) -> None:
    """Without it nobody knew after hours of seeds what had come of them."""
    code, lines = run("--seeds", "6", "--jobs", "1", "--coverage", "/dev/full")
    assert code == 1
    why = r"/dev/full was not written \(No space left on device\)"
    assert re.fullmatch(rf"FAILED: 6 seeds, 0 violations, 42 transfers, .*, {why}, \d+\.\d s", lines[-1])


def test_the_coverage_names_the_seeds_that_were_run(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "coverage.md"
    run(
        "--seeds",
        "100",
        "--from",
        "3",
        "--jobs",
        "1",
        "--stop-after",
        "1",
        "--no-shrink",
        "--coverage",
        str(page),
    )
    assert page.read_text(encoding="utf-8").startswith("# Coverage of 5 seeds (3-7) of the small world")


def test_seeds_without_a_result_are_named_and_the_others_count(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, fake.dying)
    code, lines = run("--seeds", "6", "--jobs", "2", "--no-shrink")
    assert code == 1
    assert "seeds 0-2 have no result: a worker process ended with exit code 9" in lines
    last = next(line for line in lines if line.startswith("FAILED: "))
    assert last.startswith("FAILED: 3 seeds, 3 without a result, 0 violations, 21 transfers, ")


def dying_always(seed: int, options: Options, **_: object) -> Outcome:
    """Every seed takes its process with it."""
    os._exit(9)


def test_it_gives_up_when_every_process_dies(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, dying_always)
    monkeypatch.setattr(batch, "LOST_MAX", 1)
    code, lines = run("--seeds", "60", "--jobs", "2", "--no-shrink")
    assert code == 1
    assert any(re.fullmatch(r"seeds [\d,-]+ were not run: too many processes died", line) for line in lines)
    last = next(line for line in lines if line.startswith("FAILED: "))
    assert last.startswith("FAILED: 0 seeds, 60 without a result, 0 violations, ")


def test_an_interrupt_tells_what_was_done(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(seed: int, options: object, **keywords: object) -> Outcome:
        if seed == 3:
            raise KeyboardInterrupt
        return fake.simulate(seed, options, **keywords)

    use(monkeypatch, interrupted)
    code, lines = run("--seeds", "9", "--jobs", "1")
    assert code == 130
    assert lines[-1].startswith("INTERRUPTED: 3 seeds, 0 violations, 21 transfers, ")


@pytest.mark.parametrize("mode", [("--replay", "1"), ("--replay", "1", "--verbose")])
def test_an_interrupted_replay_has_a_last_line_too(
    run: Run, monkeypatch: pytest.MonkeyPatch, mode: tuple[str, ...]
) -> None:
    def interrupted(seed: int, options: object, **_: object) -> Outcome:
        raise KeyboardInterrupt

    use(monkeypatch, interrupted)
    assert run(*mode) == (130, ["INTERRUPTED: before there was a result"])


def test_interrupted_mutants_are_counted(
    run: Run, mutants: list[mutation.Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts = mutation.run_trials

    def run_trials(asked: list[mutation.Trial], *, jobs: int) -> Iterator[mutation.Verdict]:
        yield from verdicts(asked[:1], jobs=jobs)
        raise KeyboardInterrupt

    monkeypatch.setattr(mutation, "run_trials", run_trials)
    code, lines = run("--mutants", "early", "late")
    assert code == 130
    last = r"INTERRUPTED: 1 of 2 mutants, 1 found \(0 of 1 planted blindly\), 0 survived, \d+\.\d s"
    assert re.fullmatch(last, lines[-1])


PROGRAM = """
import sys, types
from tests.support import fake_simulation
module = types.ModuleType("kvferry.simulator.run")
module.simulate = fake_simulation.simulate
sys.modules["kvferry.simulator.run"] = module
from kvferry.cli.main import main
sys.exit(main(["simulate", "--seeds", "1000000", "--jobs", "2"]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_in_haste_end_it_once_and_cleanly(number: signal.Signals) -> None:
    """Three times Ctrl-C: the first one counts, and neither we nor a process of ours shows a traceback."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("seed ")
            for _ in range(3):
                # A terminal's goes to all, and whoever sends SIGTERM means us.
                with contextlib.suppress(ProcessLookupError):
                    (os.killpg if number is signal.SIGINT else os.kill)(process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.02)
            out, errors = process.communicate(timeout=15)
        finally:
            process.kill()
    assert process.returncode == 130
    verdicts = [line for line in out.splitlines() if line.startswith("INTERRUPTED: ")]
    assert verdicts == out.splitlines()[-1:]
    assert "Traceback" not in errors
    assert "KeyboardInterrupt" not in errors


def test_an_interrupt_from_a_terminal_is_clean() -> None:
    """A terminal interrupts every process of the group; only the first one may answer."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("seed ")
            os.killpg(process.pid, signal.SIGINT)
            out, errors = process.communicate(timeout=15)
        finally:
            process.kill()
    assert process.returncode == 130
    assert re.match(r"INTERRUPTED: [\d,]+ seeds, [\d,]+ violations? in ", out.splitlines()[-1])
    assert "Traceback" not in errors
    assert "KeyboardInterrupt" not in errors


def test_options_reach_the_simulation(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def noting(seed: int, options: object, **keywords: object) -> Outcome:
        seen.append((seed, options.world, options.faults))
        return fake.simulate(seed, options, **keywords)

    use(monkeypatch, noting)
    run("--seeds", "1", "--from", "4", "--jobs", "1", "--world", "tall", "--faults", "crash, abort")
    run("--seeds", "1", "--jobs", "1", "--faults", "none")
    run("--seeds", "1", "--jobs", "1")
    assert seen == [
        (4, "tall", {"crash", "abort"}),
        (0, "small", frozenset()),
        (0, "small", frozenset(FAULTS)),
    ]


def test_a_thousand_seeds_of_the_small_world_are_the_default(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[batch.Batch] = []
    monkeypatch.setattr(batch, "run_batch", lambda one: asked.append(one) or (part for part in ()))
    code, lines = run()
    assert code == 1
    assert (asked[0].first, asked[0].count, asked[0].stop_after) == (0, 1000, None)
    assert asked[0].jobs >= 1
    assert "seeds 0-999 were not run: too many processes died" in lines


def test_worlds_and_faults_are_explained(run: Run) -> None:
    code, lines = run("--list")
    assert code == 0
    for name, sentence in {**WORLDS, **FAULTS}.items():
        assert any(re.fullmatch(rf"  {name} +{re.escape(sentence)}", line) for line in lines)
        assert len(sentence) < 150


def test_the_documentation_explains_them_in_the_same_words() -> None:
    page = (Path(__file__).parents[3] / "docs" / "testing.md").read_text(encoding="utf-8")
    told = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", page, flags=re.MULTILINE))
    assert told == {**WORLDS, **FAULTS}


def test_the_documentation_has_the_figures_of_the_code() -> None:
    """What was visited is a result; how much there is to visit, and how long is endless, is the code."""
    docs = Path(__file__).parents[3] / "docs"
    page = " ".join((docs / "reliability.md").read_text(encoding="utf-8").split())
    cells = len(stages.STAGES) * len(grid.FAULTS)
    for said in (
        f"all but {len(coverage.IMPOSSIBLE)} pairs which these worlds cannot take",
        f" of {cells}. Its {len(stages.STAGES)} rows are",
        f"its {len(grid.FAULTS)} columns are faults",
        f"{len(grid.BY_SIBLING)} cells cannot be had that way",
        f"does not end within {mutation.SEED_SECONDS_MAX:g} s of CPU time",
    ):
        assert said in page
    assert len(grid.IMPOSSIBLE) == 1, "the page speaks of one"
    page = (docs / "testing.md").read_text(encoding="utf-8")
    assert f"does not end within {batch.SEED_SECONDS_MAX:g} s of CPU time" in page
    assert simulate_replay.SECONDS_MAX == 120, "two minutes"


def test_the_picture_of_the_documentation_is_what_its_command_says_it_is() -> None:
    docs = Path(__file__).parents[3] / "docs"
    page = (docs / "testing.md").read_text(encoding="utf-8")
    ((seed, path),) = re.findall(
        r"^    kvferry simulate --replay (\d+) .*--timeline docs/(\S+)$", page, re.MULTILINE
    )
    picture = docs / path
    assert f"seed {seed} of the small world" in picture.read_text(encoding="utf-8")
    assert picture.stat().st_size < 60 * 1024
    assert f"]({path})" in page


def test_the_grid_calls_a_fault_by_the_name_of_its_option() -> None:
    """One name per fault, with more behind it where one kind of fault is several of the grid's."""
    for fault in grid.FAULTS:
        assert re.match(r"\w+", fault)[0] in FAULTS, fault


def test_a_fault_of_the_network_is_called_by_the_name_of_its_option() -> None:
    values = [fault.value for fault in (*MessageFault, *PostFault) if fault is not PostFault.DELAY]
    words = {trace.fault_word(value) for value in (*values, "delay_post")}
    assert words == {name for name in FAULTS if name.startswith(("message_", "post_"))}


# --- one seed -------------------------------------------------------------------------------------


def test_a_replay_shows_every_event_and_its_hash(run: Run) -> None:
    code, lines = run("--replay", "6")
    assert code == 0
    outcome = fake.simulate(6, Options())
    assert lines[0] == (
        "seed 6 of the small world, faults: all; --drop leaves out any of 0-11, see the ITEM lines"
    )
    assert "sends the prefill leg of transfer-1 to P0 as prefill-1" in lines[3]
    assert len(lines) == outcome.events + 2
    figures = f"7 transfers, {outcome.events} events, trace hash {outcome.trace_hash}"
    assert re.fullmatch(rf"PASSED: seed 6, 0 violations, {figures}, \d+\.\d s", lines[-1])


def test_a_replay_of_a_failing_seed_names_its_violations(run: Run) -> None:
    code, lines = run("--replay", "7")
    assert code == 1
    assert "VIOLATION: promise 2 at 2.050000 s: a late write of transfer-1 in seed 7" in lines
    assert lines[-1].startswith("FAILED: seed 7, 1 violation, 7 transfers, ")
    assert any(line.strip().startswith("2.050000  VIOLATION             promise 2: a late") for line in lines)


def test_a_replay_leaves_out_what_is_dropped(run: Run) -> None:
    assert run("--replay", "7", "--drop", "0-2, 4-7,9-11")[0] == 1
    assert run("--replay", "7", "--drop", "8")[0] == 0


def test_a_replay_that_differs_from_its_second_run_is_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake, "PLANTED", [])
    use(monkeypatch, fake.unsteady)
    code, lines = run("--replay", "1")
    assert code == 1
    assert "NOT DETERMINISTIC: a second run has trace hash hash-2" in lines
    at = lines.index("event 4 was")
    assert [words.split()[1] for words in (lines[at + 1], lines[at + 3])] == ["run-1", "run-2"]


def test_a_replay_without_an_end_is_ended_and_shows_what_there_is(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, fake.endless)
    monkeypatch.setattr(simulate_replay, "SECONDS_MAX", 0.3)
    monkeypatch.setattr(simulate_replay, "EDGE_LINES", 2)
    code, lines = run("--replay", "2")
    assert code == 1
    assert "VIOLATION: an error at 0.000000 s: did not end within 0.3 s of CPU time" in lines
    assert any(re.fullmatch(r"\.\.\. \d+ lines left out \.\.\.", line) for line in lines)
    assert re.fullmatch(r"FAILED: seed 2, 1 violation, \d+ events, \d+\.\d s", lines[-1])


def test_what_a_seed_does_not_have_cannot_be_dropped(run: Run) -> None:
    code, lines = run("--replay", "7", "--drop", "3,99-101")
    assert code == 2
    assert lines == ["kvferry: --drop: seed 7 has no 99-101, it has 0-11"]
    _, lines = run("--replay", "7", "--drop", "3001")
    assert lines == ["kvferry: --drop: seed 7 has no 3001, it has 0-11; what has 3000 or more always happens"]


def test_a_timeline_is_written(run: Run, tmp_path: Path) -> None:
    picture = tmp_path / "life.svg"
    code, lines = run("--replay", "7", "--timeline", str(picture))
    assert code == 1
    text = picture.read_text(encoding="utf-8")
    assert text.startswith("<svg ")
    assert "seed 7 of the small world: promise 2 broken" in text
    assert f"{picture} shows transfer transfer-1" in lines


def test_a_picture_that_cannot_be_written_is_named_by_the_verdict(run: Run) -> None:
    code, lines = run("--replay", "6", "--timeline", "/dev/full")
    assert code == 1
    why = r"/dev/full was not written \(No space left on device\)"
    assert re.fullmatch(rf"FAILED: seed 6, 0 violations, .*, {why}, \d+\.\d s", lines[-1])
    assert not any("shows transfer" in line for line in lines)


def test_the_transfer_to_draw_can_be_chosen(run: Run, tmp_path: Path) -> None:
    picture = tmp_path / "life.svg"
    run("--replay", "6", "--timeline", str(picture), "--transfer", "transfer-2")
    assert "transfer transfer-2; 0 ms is" in picture.read_text(encoding="utf-8")
    run("--replay", "6", "--timeline", str(picture), "--transfer", "transfer-1")
    assert "transfer transfer-1; 0 ms is" in picture.read_text(encoding="utf-8")
    code, lines = run("--replay", "6", "--timeline", str(picture), "--transfer", "x")
    assert code == 2
    # Nobody wants to see all of the history before that.
    (line,) = lines
    assert line.startswith("kvferry: --transfer x is not in this history; it has transfer-1")


# --- planted faults -------------------------------------------------------------------------------


class Planted:
    """A mutant that no process needs."""

    def __init__(self, name: str, *, blind: bool = False, world: str = "") -> None:
        self.name, self.promise, self.what, self.blind = name, "4", f"what {name} does", blind
        self.world = world


@pytest.fixture
def mutants(monkeypatch: pytest.MonkeyPatch) -> list[mutation.Trial]:
    """Mutants, tried in this process: one is not found, one cannot be planted. The list is of the trials."""
    listed = [Planted("early"), Planted("late", blind=True), Planted("sly", blind=True), Planted("gone")]
    verdicts = {
        "early": mutation.Verdict("early", 3, 1, 2, mutation.Counter({4: 1}), "found early", seconds=0.5),
        "late": mutation.Verdict("late", 1700, 2, 1234, mutation.Counter({6: 1, 5: 1}), "found late"),
        "sly": mutation.Verdict("sly", 2000, 0, None, unsound=1),
        "gone": mutation.Verdict("gone", 0, 0, None, lost="its work raised:\nDriftError: no such text"),
    }
    trials: list[mutation.Trial] = []

    def run_trials(asked: list[mutation.Trial], *, jobs: int) -> Iterator[mutation.Verdict]:
        trials.extend(asked)
        return (verdicts[trial.mutant] for trial in asked)

    monkeypatch.setattr(mutation, "load", lambda checkout: listed)
    monkeypatch.setattr(mutation, "run_trials", run_trials)
    return trials


def test_a_mutant_is_tried_in_the_world_that_can_show_it(
    run: Run, mutants: list[mutation.Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = [Planted("early", world="groups"), Planted("late")]
    monkeypatch.setattr(mutation, "load", lambda checkout: listed)
    code, lines = run("--mutants", "early", "late", "--world", "both")
    assert code == 0
    assert {trial.mutant: trial.options.world for trial in mutants} == {"early": "groups", "late": "both"}
    assert "    kvferry simulate --replay 2 --world groups --mutants early" in lines
    assert "    kvferry simulate --replay 1234 --world both --mutants late" in lines


def test_all_mutants_found_is_success(run: Run, mutants: list[mutation.Trial]) -> None:
    code, lines = run("--mutants", "early", "late")
    assert code == 0
    assert lines[:8] == [
        "found     early (breaks promise 4): what early does",
        "    first found by seed 2, the 3rd tried, by promise 4 (0.5 s)",
        "    found early",
        "    kvferry simulate --replay 2 --world small --mutants early",
        "found     late (breaks promise 4, planted blindly): what late does",
        "    found by 2 of 1,700 seeds, first by seed 1234, the 1,235th tried; "
        "by promise 6, promise 5 (0.0 s)",
        "    found late",
        "    kvferry simulate --replay 1234 --world small --mutants late",
    ]
    last = r"PASSED: 2 mutants, 2 found \(1 of 1 planted blindly\), 0 survived, \d+\.\d s"
    assert re.fullmatch(last, lines[-1])


def test_one_mutant_is_one(run: Run, mutants: list[mutation.Trial]) -> None:
    assert run("--mutants", "early")[1][-1].startswith("PASSED: 1 mutant, 1 found, 0 survived, ")


def test_a_seed_is_told_by_its_place_among_those_that_were_tried(
    run: Run, mutants: list[mutation.Trial]
) -> None:
    _, lines = run("--mutants", "early", "--from", "2")
    assert "    found by 1 of 3 seeds, first by seed 2, the 1st tried; by promise 4 (0.5 s)" in lines


def test_mutants_are_listed_by_promise_and_nothing_is_tried(run: Run, mutants: list[mutation.Trial]) -> None:
    code, lines = run("--mutants", "--list")
    assert (code, mutants) == (0, [])
    assert lines == [
        "4 mutants that break promise 4:",
        "    early: what early does",
        "  * late: what late does",
        "  * sly: what sly does",
        "    gone: what gone does",
        "",
        "*: planted blindly, by somebody who had not seen the checkers",
    ]
    assert run("--mutants", "late", "--list")[1][:2] == [
        "1 mutant that breaks promise 4:",
        "  * late: what late does",
    ]


def test_survivors_and_what_could_not_be_tried_are_failures_and_named(
    run: Run, mutants: list[mutation.Trial]
) -> None:
    code, lines = run("--mutants")
    assert code == 1
    at = lines.index("SURVIVED  sly (breaks promise 4, planted blindly): what sly does")
    tried = "2,000 seeds, 0.0 s; 1 more fail without it too, and do not count"
    assert lines[at + 1] == f"    no seed has found it ({tried})"
    at = lines.index("NOT TRIED gone (breaks promise 4): what gone does")
    assert lines[at + 2] == "    DriftError: no such text"
    assert lines[-3:-1] == ["survivors: sly", "not tried: gone"]
    last = r"FAILED: 4 mutants, 2 found \(1 of 2 planted blindly\), 1 survived, 1 not tried, .* s"
    assert re.fullmatch(last, lines[-1])


def test_a_seed_can_be_looked_at_under_a_mutant(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def plant() -> Iterator[None]:
        fake.PLANTED.append("early")
        yield
        fake.PLANTED.clear()

    mutant = Planted("early")
    mutant.apply = plant
    monkeypatch.setattr(mutation, "load", lambda checkout: [mutant])
    code, lines = run("--replay", "6", "--mutants", "early")
    assert code == 1
    assert ", with early planted (what early does); " in lines[0]
    assert "VIOLATION: promise 4 at 1.000000 s: found early" in lines
    assert fake.PLANTED == []
    assert run("--replay", "6")[0] == 0


def test_a_mutant_has_two_thousand_seeds_and_stops_at_the_first_find(
    run: Run, mutants: list[mutation.Trial]
) -> None:
    run("--mutants", "early")
    run("--mutants", "early", "--mutant-seeds-all", "--seeds", "50", "--from", "9", "--world", "both")
    first, second = mutants
    assert (first.first, first.count, first.found_enough, first.options.world) == (0, 2000, 1, "small")
    assert (second.first, second.count, second.found_enough, second.options.world) == (9, 50, None, "both")


def test_an_unknown_mutant_is_wrong_use(run: Run, mutants: list[mutation.Trial]) -> None:
    code, lines = run("--mutants", "x")
    assert code == 2
    known = "  early, gone, late, sly"
    assert lines == ["kvferry: --mutants: unknown x; --mutants --list says what each is. Known are", known]
    _, lines = run("--mutants", "erly")
    assert lines[0].startswith("kvferry: --mutants: unknown erly; did you mean early? --mutants --list")


def test_mutants_need_a_checkout(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kvferry, "__file__", str(tmp_path / "kvferry" / "__init__.py"))
    monkeypatch.chdir(tmp_path)
    code, lines = run("--mutants")
    assert code == 2
    assert lines[-1].startswith("kvferry: --mutants needs a checkout of kvferry")


def test_the_checkout_may_be_where_one_stands(
    run: Run, mutants: list[mutation.Trial], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = Path(__file__).parents[3]
    monkeypatch.setattr(kvferry, "__file__", str(tmp_path / "kvferry" / "__init__.py"))
    monkeypatch.chdir(root / "docs")
    code, lines = run("--mutants", "early")
    assert code == 0
    assert mutants[0].checkout == root
    [warning] = [line for line in lines if line.startswith("kvferry: warning: ")]
    assert f"the planted faults are those of {root}, the kvferry that runs is {tmp_path}" in warning
    assert warning.endswith(f"set PYTHONPATH={root / 'src'}")


def test_who_stands_in_another_checkout_is_warned(
    run: Run, mutants: list[mutation.Trial], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = Path(__file__).parents[3]
    assert not any("warning" in line for line in run("--mutants", "early")[1])
    for part in ("src/kvferry", "tests/mutants"):
        (tmp_path / part).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "src")
    _, lines = run("--mutants", "early")
    [warning] = [line for line in lines if line.startswith("kvferry: warning: ")]
    assert f"into the kvferry of {root}, not of {tmp_path}, where you are" in warning
    assert "PYTHONPATH" in run("--mutants", "--list")[1][-1]
    assert mutants[1].checkout == root


# --- wrong use ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--seeds", "0"), "--seeds must be at least 1, not 0"),
        (("--jobs", "-1"), "--jobs must be at least 1, not -1"),
        (
            ("--seeds", "10000001"),
            "--seeds must be at most 10,000,000, not 10,000,001; run further ones with --from",
        ),
        (("--seeds", "1e3"), "--seeds: '1e3' is not a whole number; write its digits, such as 1000"),
        (("--from", "1_000"), "--from: '1_000' is not a whole number"),
        (("--replay", "9" * 5000), "--replay: '999"),
        (("--jobs", "two"), "--jobs: 'two' is not a whole number"),
        (("--list", "--seeds", "3"), "--list runs nothing, so --seeds would say nothing; leave it out"),
        (
            ("--list", "--mutants", "--from", "0", "--world", "wide"),
            "--list runs nothing, so --from, --world would",
        ),
        (("--brief", "--verbose"), "--brief leaves out what --verbose shows; choose one of them"),
        (("--replay", "1", "--brief"), "--brief goes with many seeds alone: nothing else ends with tables"),
        (
            ("--world", "calm", "--faults", "crash,clock"),
            "--faults: the calm world never has crash, only clock and parts; choose another world",
        ),
        (("--world", "calm", "--faults", "rain"), "faults rain are unknown; use some of abort, "),
        (("--jobs", "257"), "--jobs must be at most 256, not 257; a process per core is the fastest"),
        (("--mutants", "--jobs", "9999"), "--jobs must be at most 256, not 9999"),
        (("--stop-after", "0"), "--stop-after must be at least 1, not 0"),
        (("--from", "-1"), "--from must not be negative, -1 is"),
        (("--replay", "-1"), "--replay must not be negative, -1 is"),
        (
            ("--world", "flat"),
            "world 'flat' is unknown; use one of small, both, wide, tall, mixed, groups, turns, long, calm",
        ),
        (("--faults", "crash,rain"), "faults rain are unknown; use some of abort, "),
        (("--drop", "3"), "--drop goes with --replay SEED"),
        (("--timeline", "x.svg"), "--timeline goes with --replay SEED"),
        (("--replay", "1", "--drop", "3,x"), "--drop: 'x' is neither a number nor a range like 7-9"),
        (("--replay", "1", "--drop", "3-"), "--drop: '3-' is neither"),
        (("--replay", "1", "--transfer", "t"), "--transfer says what --timeline draws; add --timeline FILE"),
        (
            ("--replay", "1", "--mutants"),
            "--replay under a planted fault needs its name, one: --mutants NAME",
        ),
        (("--replay", "1", "--mutants", "a", "b"), "--replay under a planted fault needs its name, one"),
        (("--mutant-seeds-all",), "--mutant-seeds-all goes with --mutants: it says how long"),
        (
            ("--replay", "1", "--seeds", "2"),
            "--seeds goes with many seeds or --mutants: a replay shows one seed",
        ),
        (
            ("--replay", "1", "--from", "0"),
            "--from goes with many seeds or --mutants: a replay shows one seed",
        ),
        (
            ("--replay", "1", "--jobs", "2"),
            "--jobs goes with many seeds or --mutants: a replay runs one seed",
        ),
        (
            ("--replay", "1", "--stop-after", "2"),
            "--stop-after goes with many seeds alone: it counts failing",
        ),
        (("--replay", "1", "--no-shrink"), "--no-shrink goes with many seeds alone: "),
        (("--mutants", "--coverage", "x.md"), "--coverage goes with many seeds alone: "),
        (("--mutants", "--verbose"), "--verbose goes with many seeds or --replay SEED: mutants have no more"),
        (
            ("--coverage", "/nowhere/at/all.md"),
            "--coverage: there is no directory /nowhere/at; make it first",
        ),
        (("--replay", "1", "--timeline", "/nowhere/x.svg"), "--timeline: there is no directory /nowhere;"),
    ],
)
def test_wrong_use_is_one_line_and_code_2(run: Run, arguments: tuple[str, ...], message: str) -> None:
    code, lines = run(*arguments)
    assert code == 2
    assert len(lines) == 1
    assert lines[0].startswith(f"kvferry: {message}")


def test_processes_are_ended_when_the_printing_fails(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk or a closed pipe must not leave workers behind."""

    def closed(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(report, "say", closed)
    run("--seeds", "1000", "--jobs", "2")
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--coverage", "."), "--coverage: . cannot be written"),
        (("--coverage", "/proc/foo.md"), "--coverage: /proc/foo.md cannot be written"),
        (("--replay", "1", "--timeline", "/proc/foo.svg"), "--timeline: /proc/foo.svg cannot be written"),
        (("--faults", ""), "--faults is all, or none, or names with commas (see --list); choose one"),
        (("--faults", "all,crash"), "--faults is all, or none, or names"),
        (("--faults", "none,crash"), "--faults is all, or none, or names"),
        (("--replay", "1", "--drop", "9-3"), "--drop: '9-3' runs backwards; write 3-9"),
        (("--replay", "1", "--drop", "0-99999999999"), "numbers go to 9999 at most"),
    ],
)
def test_what_cannot_be_is_said_before_a_seed_runs(
    arguments: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["simulate", *arguments]) == 2
    assert told in capsys.readouterr().err
