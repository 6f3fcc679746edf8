"""What is kept of a run, and how a run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.bench.grid import Cell
from kvferry.bench.plan import Session, sessions
from kvferry.bench.results import PLAN, RESULTS, CellRun, open_results, read_results
from kvferry.errors import UsageError
from tests.support.bench_results import World, made_up, options

SMALL = Cell(1, 1024)


def run(connector: str = "ferry-push", repeat: int = 0, cell: Cell = SMALL) -> CellRun:
    return World().run(connector, repeat, cell, options())


def test_what_was_kept_is_read_again(tmp_path: Path) -> None:
    kept = made_up(tmp_path)
    again = read_results(tmp_path)
    assert again.runs == kept.runs
    assert again.sessions == kept.sessions
    assert again.options == kept.options


def test_a_run_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    results = open_results(tmp_path, options())
    session = Session(0, "ferry-push", (Cell(1, 1024), Cell(8, 16384)))
    assert results.missing(session) == session
    results.append(run())
    results.append(run("vllm-push", cell=Cell(8, 16384)))
    results.append(run(repeat=1, cell=Cell(8, 16384)))
    again = open_results(tmp_path, options())
    assert again.missing(session).cells == (Cell(8, 16384),)


def test_a_finished_run_misses_nothing(tmp_path: Path) -> None:
    results = made_up(tmp_path)
    assert [results.missing(session).cells for session in sessions(results.options)] == [()] * 8


def test_a_line_that_was_cut_off_is_measured_again(tmp_path: Path) -> None:
    results = open_results(tmp_path, options())
    results.append(run())
    results.append(run("vllm-push"))
    path = tmp_path / RESULTS
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    again = open_results(tmp_path, options())
    assert [one.connector for one in again.runs] == ["ferry-push"]
    again.append(run("vllm-push"))
    assert path.read_bytes() == whole
    assert len(read_results(tmp_path).runs) == 2


def test_other_options_are_refused_by_name(tmp_path: Path) -> None:
    open_results(tmp_path, options())
    with pytest.raises(UsageError) as refused:
        open_results(tmp_path, options(repeats=5))
    first, repeats, advice = str(refused.value).splitlines()
    assert first.startswith(f"--output {tmp_path} holds a run with other settings")
    assert repeats == "  --repeats  there 2, now 5"
    assert advice.endswith("by its own settings: --repeats 2")


def test_a_directory_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    with pytest.raises(UsageError, match="neither empty nor a comparison"):
        open_results(tmp_path, options())
    assert [entry.name for entry in tmp_path.iterdir()] == ["precious"]


def test_no_comparison_and_a_broken_one_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"holds no comparison: there is no {PLAN}"):
        read_results(tmp_path)
    (tmp_path / PLAN).write_text("{")
    with pytest.raises(UsageError, match="cannot be read"):
        read_results(tmp_path)


def test_a_line_that_makes_no_sense_is_named(tmp_path: Path) -> None:
    results = open_results(tmp_path, options())
    results.append(run())
    with (tmp_path / RESULTS).open("a") as file:
        file.write('{"type": "run"}\n')
    with pytest.raises(UsageError, match=r"results.jsonl, line 2 cannot be read"):
        read_results(tmp_path)


def test_a_cell_that_was_run_twice_counts_once(tmp_path: Path) -> None:
    results = open_results(tmp_path, options())
    results.append(run())
    results.append(run())
    assert len(results.runs) == 1
