"""The figures as rows, CSV and one document."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from kvferry.bench.analysis import Comparison
from kvferry.bench.connectors import BASELINE
from kvferry.bench.results import read_results
from kvferry.bench.tables import Row, as_csv, as_document, cell_rows
from kvferry.bench.targets import targets
from tests.support.bench_results import World, imagined, made_up, options


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return Comparison(imagined(World(failing="vllm-push")))


@pytest.fixture(scope="module")
def rows(comparison: Comparison) -> list[Row]:
    return cell_rows(comparison)


def test_each_connector_has_a_row_per_cell_and_the_baseline_one(rows: list[Row]) -> None:
    assert len(rows) == 3 * 3 + 1
    assert [row["connector"] for row in rows if row["rate"] == 8][-1] == BASELINE


def test_a_row_has_counts_quantiles_intervals_and_ratios(rows: list[Row]) -> None:
    ours = next(row for row in rows if row["connector"] == "ferry-push" and row["rate"] == 8)
    assert (ours["requests"], ours["failed"], ours["repeats"]) == (128, 0, 2)
    assert ours["ttft_p50_ms_low"] < ours["ttft_p50_ms"] < ours["ttft_p50_ms_high"] < ours["ttft_p95_ms"]
    assert ours["ttft_p50_ratio_to"] == "vllm-pull"
    assert ours["ttft_p50_ratio"] == pytest.approx(0.72, abs=0.04)
    assert ours["posted_before_prefill_end"] == pytest.approx(0.9)
    assert ours["prefill_hooks_ms_per_request"] == pytest.approx(0.3)
    assert ours["prefill_busy_hooks_ms_per_request"] == pytest.approx(0.3)
    assert ours["prefill_hooks_us_per_idle_step"] is None
    theirs = next(row for row in rows if row["connector"] == "vllm-push" and row["rate"] == 8)
    assert theirs["failed"] == 2
    assert "ttft_p50_ratio" not in theirs


def test_csv_has_every_column_for_every_row(rows: list[Row]) -> None:
    read = list(csv.DictReader(io.StringIO(as_csv(rows))))
    assert len(read) == len(rows)
    assert float(read[0]["ttft_p50_ms"]) == rows[0]["ttft_p50_ms"]
    baseline = next(row for row in read if row["connector"] == BASELINE)
    assert baseline["prefill_busy_cores"] == ""
    assert baseline["ttft_p50_ratio"] == ""


def test_the_document_has_everything_and_is_json(comparison: Comparison, rows: list[Row]) -> None:
    told = json.loads(json.dumps(as_document(comparison, rows, targets(comparison)), allow_nan=False))
    assert told["cells"] == rows
    assert told["options"]["engines"]["preset"] == "made-up"
    assert {one["verdict"] for one in told["targets"]} <= {"met", "missed", "not measured"}
    assert told["idle_cores"]["vllm-push"] == {"prefill": 1.0, "decode": 1.0}
    assert len(told["failures"]) == 6
    assert told["failures"][0]["error"] == "answered 500: unwell"
    assert (told["pages"], told["mismatches"], told["different_answers"]) == (20000, 0, 0)
    phases = next(one for one in told["phases_ms"] if one["connector"] == "vllm-pull" and one["rate"] == 8)
    assert phases["prefill"] == pytest.approx(110.0)


def test_figures_are_the_same_every_time() -> None:
    made = options(cells=((1, 1024),), repeats=1)
    first, again = (cell_rows(Comparison(imagined(made=made))) for _ in range(2))
    assert first == again


def test_figures_of_a_run_are_those_of_its_files(tmp_path: Path) -> None:
    """A rate of 1 is 1.0 once it has been in a file."""
    made = options(cells=((1, 1024),), repeats=1)
    ran, read = made_up(tmp_path, World(), made), read_results(tmp_path)
    assert as_csv(cell_rows(Comparison(ran))) == as_csv(cell_rows(Comparison(read)))
