"""The journal and the timelines: rows are whole, in order and bounded, and say when stages were passed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.emulator.journal import Journal, Row, WallClock
from kvferry.emulator.timelines import Timelines


def journal(tmp_path: Path, **changed: Any) -> Journal:
    def snapshot() -> Iterator[Row]:
        yield {"kind": "snapshot"}

    arguments: dict[str, Any] = {
        "report": lambda: {"engine": "prefill-0", "mismatches": 0},
        "snapshot": snapshot,
        "rows_max": 100,
    }
    return Journal(str(tmp_path / "rows.jsonl"), str(tmp_path / "report.json"), **{**arguments, **changed})


def rows(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]


def test_rows_are_written_in_order_and_a_snapshot_follows(tmp_path: Path) -> None:
    one = journal(tmp_path)
    for number in range(3):
        one.append({"number": number})
    one.close()
    assert rows(tmp_path) == [{"number": 0}, {"number": 1}, {"number": 2}, {"kind": "snapshot"}]


def test_more_rows_than_allowed_are_dropped_and_counted(tmp_path: Path) -> None:
    one = journal(tmp_path, rows_max=2)
    for number in range(5):
        one.append({"number": number})
    one.close()
    assert rows(tmp_path) == [{"number": 0}, {"number": 1}]
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["rows"], report["rows_dropped"]) == (2, 3)


def test_there_is_a_report_from_the_start_and_a_last_one_at_the_end(tmp_path: Path) -> None:
    counters = {"mismatches": 0}
    one = journal(tmp_path, report=lambda: dict(counters))
    assert json.loads((tmp_path / "report.json").read_text())["mismatches"] == 0
    counters["mismatches"] = 7
    one.changed()
    one.close()
    assert json.loads((tmp_path / "report.json").read_text())["mismatches"] == 7
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "rows.jsonl"]


def test_without_paths_nothing_is_written(tmp_path: Path) -> None:
    one = Journal(None, None, report=dict, snapshot=list, rows_max=1)
    one.append({"number": 1})
    one.changed()
    one.close()
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="missing"):
        Journal(str(tmp_path / "missing" / "rows"), None, report=dict, snapshot=list, rows_max=1)


class FixedWall(WallClock):
    """A wall clock that is the monotonic one."""

    def ns(self, monotonic_seconds: float) -> int:
        return int(monotonic_seconds * 1e9)


def test_a_request_has_one_row_with_the_first_time_of_each_stage() -> None:
    written: list[Row] = []
    timelines = Timelines(written.append, FixedWall())
    timelines.arrive("r", 40)
    timelines.reach("r", "scheduled", 2.0)
    timelines.reach("r", "prefill_end", 3.0)
    timelines.reach("r", "scheduled", 4.0)
    timelines.reach("unknown", "scheduled", 4.0)
    assert not written
    timelines.finish("r", "FINISHED_LENGTH_CAPPED", 8)
    (row,) = written
    assert (row["kind"], row["request"]) == ("request", "r")
    assert (row["scheduled_ns"], row["prefill_end_ns"]) == (2_000_000_000, 3_000_000_000)
    assert row["arrived_ns"] <= row["finished_ns"]
    assert (row["prompt_tokens"], row["output_tokens"], row["status"]) == (40, 8, "FINISHED_LENGTH_CAPPED")
    assert "received_ns" not in row


def test_a_request_that_ended_is_forgotten() -> None:
    written: list[Row] = []
    timelines = Timelines(written.append, FixedWall())
    timelines.arrive("r", 1)
    timelines.finish("r", "FINISHED_ABORTED", 0)
    timelines.reach("r", "received")
    timelines.finish("r", "FINISHED_ABORTED", 0)
    assert len(written) == 1


def test_steps_say_what_was_intended_and_what_came_of_it() -> None:
    written: list[Row] = []
    Timelines(written.append, FixedWall()).step(start=1.0, end=1.5, seen=1.75, idle=0.25, decodes=2)
    assert written == [
        {
            "kind": "step",
            "at_ns": 1_500_000_000,
            "intended_seconds": 0.5,
            "actual_seconds": 0.75,
            "idle_seconds": 0.25,
            "decodes": 2,
        }
    ]
