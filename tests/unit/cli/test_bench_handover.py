"""The command line of `kvferry bench handover`: options, table, file, exit code and last line."""

from __future__ import annotations

import argparse
import csv
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli import bench_handover
from kvferry.cli import main as cli
from kvferry.microbench import handover
from kvferry.microbench.figures import CellFigures
from kvferry.microbench.handover import Measured, Options, Waiting
from kvferry.microbench.producer import Sample
from kvferry.microbench.tasks import Steps

SMALL = ["--blocks", "64", "--pages", "2048", "--layouts", "LBHNC", "--concurrency", "1", "--repeats", "2"]


def chosen(*arguments: str) -> Options:
    parser = argparse.ArgumentParser()
    bench_handover.add_arguments(parser)
    return bench_handover.read_options(parser.parse_args(arguments))


def plant(monkeypatch: pytest.MonkeyPatch, wrong_pages: int = 0, repeats: int = 2) -> None:
    """Measurements in which kvferry takes a tenth longer than raw NIXL."""

    def measure(options: Options, watcher: Any) -> Measured:
        ferry = Sample("ferry", 1.1, 1.1, 0.5, 0.25, 4e-6, 8e-6, 4096, wrong_pages)
        kinds = {"ferry": [ferry] * repeats, "raw": [replace(ferry, kind="raw", seconds=1.0)] * repeats}
        steps = Steps([0.001], [0.0005], 1.0)
        waiting = [Waiting(count, steps, steps, 0, ()) for count in (1, 1000)]
        watcher.doing("what it is told")
        watcher.advance(1)
        return Measured({cell: dict(kinds) for cell in options.grid.cells}, repeats, [2.0**33], waiting)

    monkeypatch.setattr(handover, "measure", measure)


def test_the_defaults_have_every_kind_and_fit() -> None:
    made = chosen()
    assert {cell.blocks for cell in made.grid.cells} == {16, 64, 256, 1024}
    assert {cell.shape.page_bytes for cell in made.grid.cells} == {2048, 8192}
    assert {cell.shape.order for cell in made.grid.cells} == {"LBHNC", "BLHNC"}
    assert {cell.fragmentation for cell in made.grid.cells} == {"contiguous", "scattered", "churned"}
    assert {cell.concurrency for cell in made.grid.cells} == {1, 4, 16}
    assert (made.repeats, made.outstanding, made.seconds) == (5, 1000, 600.0)
    assert made.corrupt_block is None


def test_quick_is_less_of_it_and_can_be_told_more() -> None:
    made = chosen("--quick")
    assert len(made.grid.cells) == 16
    assert made.repeats == 3
    more = chosen(
        "--quick", "--blocks", "16,64,1024", "--repeats", "7", "--extra-config", '{"slice_bytes": 4096}'
    )
    assert (len(more.grid.cells), more.repeats, more.extra) == (24, 7, {"slice_bytes": 4096})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--blocks", "many"], "--blocks must be whole numbers, such as 16,1024, not 'many'"),
        (["--blocks", "0"], "--blocks must be from 1 to 65536, not 0"),
        (
            ["--fragmentation", "torn"],
            "--fragmentation must be some of contiguous, scattered, churned, not 'torn'",
        ),
        (["--layouts", "LBH"], "--layouts must be some of LBHNC, BLHNC, not 'LBH'"),
        (["--repeats", "0"], "--repeats must be at least 1, not 0"),
        (["--outstanding", "-1"], "--outstanding must be at least 0, not -1"),
        (["--minutes", "0"], "--minutes must be above 0, not 0"),
        (["--cache-mib", "1"], "--cache-mib must be at least 4 for the smallest transfer"),
        (["--extra-config", "7"], "--extra-config must be a JSON object, such as '{\"top_k\": 1}'"),
        (["--extra-config", '{"slice": 1}'], "kv_connector_extra_config.slice is not known; the keys are: "),
        (["--output", "/nowhere/x.json"], "--output: there is no directory /nowhere; make it first"),
        (["--csv", "/nowhere/x.csv"], "--csv: there is no directory /nowhere; make it first"),
    ],
)
def test_impossible_options_say_what_is_possible(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "handover", *arguments]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"kvferry: {said}")


def test_the_last_line_has_the_figures_and_a_missed_target_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(monkeypatch)
    monkeypatch.setattr("kvferry.microbench.figures.SCATTERED_RATIO_MAX", 1.05)
    assert cli.main(["bench", "handover", *SMALL, "--fragmentation", "contiguous,scattered"]) == 0
    *_, contiguous, scattered, step, last = capsys.readouterr().out.splitlines()
    assert contiguous == "met     contiguous, 64 blocks, share of raw NIXL's bandwidth, at least 85%: 91%"
    assert scattered == "missed  scattered, 64 blocks, times raw NIXL's time, at most 1.05: 1.10"
    assert step == "met     longest loop step with 1000 transfers waiting, ms of CPU, less than 5: 0.50"
    assert last.startswith("handover: contiguous, 64 blocks, share of raw NIXL's bandwidth 91%; scattered, ")
    assert last.endswith("; 32,768 pages looked at, 0 wrong")


def test_the_tables_fit_into_a_terminal_of_100_columns_at_the_largest_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seconds for a hand-over, thousands of milliseconds per GiB; and every row is as wide as its head."""
    sizes = ["--blocks", "4096", "--pages", "65536", "--layers", "4", "--concurrency", "4"]
    slow = Sample("ferry", 12.3456, 12.3, 9.5, 4.25, 4e-3, 8e-3, 1048576, 0)

    def measure(options: Options, watcher: Any) -> Measured:
        kinds = {"ferry": [slow], "raw": [replace(slow, kind="raw", seconds=1.0)]}
        waiting = [Waiting(10000, *[Steps([0.123456] * 12345, [0.0123] * 12345, 2000.0)] * 2, 0, ())]
        return Measured({cell: dict(kinds) for cell in options.grid.cells}, 1, [2.0**33], waiting)

    monkeypatch.setattr(handover, "measure", measure)
    code = cli.main(["bench", "handover", *sizes, "--repeats", "1", "--cache-mib", "8192"])
    assert code == 0
    lines = capsys.readouterr().out.splitlines()
    above, head, *rest = lines
    rows = rest[: rest.index("")]
    assert len(above) == len(head) == 100
    assert [len(row) for row in rows] == [100] * 6
    assert rows[0].split() == [
        *("LBHNC", "65536", "contiguous", "4096", "4", "12345.60", "1000.00", "12.35"),
        *("12.35-12.35", "0.32", "2375", "1062", "2375"),
    ]
    place = next(at for at, line in enumerate(lines) if line.startswith("steps of the loop"))
    assert [len(line) <= 100 for line in lines[place : place + 3]] == [True] * 3
    assert len({len(line) for line in lines[place : place + 3]}) == 1


def test_the_csv_has_every_column_of_every_cell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plant(monkeypatch)
    file = tmp_path / "handover.csv"
    assert cli.main(["bench", "handover", *SMALL, "--csv", str(file)]) == 0
    rows = list(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))
    assert [row["fragmentation"] for row in rows] == ["contiguous", "scattered", "churned"]
    row = rows[0]
    assert (row["layout"], row["blocks"], row["layers"], row["bytes"]) == ("LBHNC", "64", "64", "8388608")
    assert (row["ms"], row["raw_ms"], row["ratio"], row["ratio_low"]) == ("1100.0", "1000.0", "1.1", "1.1")
    assert (row["producer_host_us_per_transfer"], row["descriptors"]) == ("4.0", "4096")
    figures = {field.name for field in fields(CellFigures)}
    assert len(row) == 7 + len(figures) - 1 + 2  # the cell in parts, and the ratio's quarters


def test_one_wrong_page_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    plant(monkeypatch, wrong_pages=1)
    assert cli.main(["bench", "handover", *SMALL, "--fragmentation", "churned"]) == 1
    *_, ferry, raw, last = capsys.readouterr().out.splitlines()
    assert ferry == "WRONG: LBHNC 2048 B churned 64 blocks x 1, ferry: 1 pages are wrong"
    assert raw == "WRONG: LBHNC 2048 B churned 64 blocks x 1, raw: 1 pages are wrong"
    assert last == "handover FAILED: 2 problems, 4 pages wrong"


def test_what_is_left_out_or_cut_short_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(monkeypatch, repeats=1)
    assert cli.main(["bench", "handover", *SMALL, "--concurrency", "1,1024"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("3 cells are left out: they do not fit into --cache-mib\n")
    assert "time was short: 1 of 2 repeats\n" in said


def test_the_file_has_options_figures_and_every_sample(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plant(monkeypatch)
    file = tmp_path / "handover.json"
    assert cli.main(["bench", "handover", *SMALL, "--output", str(file)]) == 0
    written = json.loads(file.read_text())
    assert written["options"]["repeats"] == 2
    assert "nixl" in written["versions"]
    assert len(written["figures"]["cells"]) == len(written["samples"]) == 3
    assert [one["kind"] for one in written["samples"][0]["samples"]] == ["ferry", "ferry", "raw", "raw"]
    assert written["figures"]["targets"][0]["figure"] == "91%"
