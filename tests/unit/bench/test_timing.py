"""What engines write about themselves is read as it grows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvferry.bench.timing import (
    HookTimes,
    RequestTimes,
    StepTimes,
    TimingError,
    TimingFile,
    TransferTimes,
    Verified,
    by_request,
    request_of,
    transfers_by_request,
)


def write(path: Path, *rows: object) -> None:
    with path.open("a") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")


def test_each_kind_of_row_is_read(tmp_path: Path) -> None:
    path = tmp_path / "engine.jsonl"
    write(
        path,
        {"kind": "request", "request": "cmpl-a-0-0123abcd", "arrived_ns": 5, "finished_ns": None},
        {"kind": "hook", "side": "worker", "hook": "get_finished", "count": 3, "seconds": 0.5},
        {"kind": "hook", "side": "worker", "hook": "x", "count": 3, "seconds": 0.5, "idle_count": 2}
        | {"idle_seconds": 0.25, "idle_cpu_seconds": 0.125},
        {"kind": "step", "intended_seconds": 0.005, "actual_seconds": 0.006, "decodes": 3},
        {"kind": "verified", "at_ns": 7, "pages": 64, "mismatches": 0},
    )
    assert TimingFile(path).new_rows() == [
        RequestTimes(request="cmpl-a-0-0123abcd", arrived_ns=5),
        HookTimes(side="worker", hook="get_finished", count=3, seconds=0.5),
        HookTimes(
            side="worker",
            hook="x",
            count=3,
            seconds=0.5,
            idle_count=2,
            idle_seconds=0.25,
            idle_cpu_seconds=0.125,
        ),
        StepTimes(intended_seconds=0.005, actual_seconds=0.006),
        Verified(pages=64, mismatches=0),
    ]


def test_a_step_is_late_by_all_that_the_host_has_added() -> None:
    step = StepTimes(intended_seconds=0.005, actual_seconds=0.0062, idle_seconds=0.0003)
    assert step.late_seconds == pytest.approx(0.0015)


def test_only_what_is_new_and_whole_is_read(tmp_path: Path) -> None:
    path = tmp_path / "engine.jsonl"
    file = TimingFile(path)
    assert file.new_rows() == []
    write(path, {"kind": "verified", "pages": 1, "mismatches": 0})
    with path.open("a") as half:
        half.write('{"kind": "verified", "pages": 2, ')
    assert file.new_rows() == [Verified(pages=1, mismatches=0)]
    assert file.new_rows() == []
    with path.open("a") as half:
        half.write('"mismatches": 1}\n')
    assert file.new_rows() == [Verified(pages=2, mismatches=1)]


def test_kinds_of_other_versions_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "engine.jsonl"
    write(path, {"kind": "weather", "sunny": True}, {"event": "started"})
    assert TimingFile(path).new_rows() == []


def test_a_line_that_makes_no_sense_is_named(tmp_path: Path) -> None:
    path = tmp_path / "engine.jsonl"
    write(path, {"kind": "verified", "pages": 1, "mismatches": 0}, {"kind": "verified", "pages": "many"})
    with pytest.raises(TimingError, match=r"engine.jsonl, line 2: .*pages"):
        TimingFile(path).new_rows()


@pytest.mark.parametrize(
    ("engine_request", "request_id"),
    [("cmpl-bench-0-8x16384-17-0-0123abcd", "bench-0-8x16384-17"), ("cmpl-x-0", "x"), ("other", "other")],
)
def test_the_clients_request_id_is_found_in_vllms(engine_request: str, request_id: str) -> None:
    assert request_of(engine_request) == request_id


def test_requests_are_found_by_the_clients_id() -> None:
    row = RequestTimes(request="cmpl-a-0-0123abcd")
    assert by_request([row, Verified(pages=1, mismatches=0)]) == {"a": row}


def test_transfers_are_found_by_the_request_that_they_name() -> None:
    rows = [
        TransferTimes(request="cmpl-a-0-01234567", posted_ns=1, done_ns=2),
        TransferTimes(request="", posted_ns=3, done_ns=4),
        TransferTimes(request="cmpl-b-0-89abcdef", posted_ns=5, done_ns=6),
        TransferTimes(request="cmpl-a-0-01234567", posted_ns=7, done_ns=9),
    ]
    found = transfers_by_request(rows)
    assert {name: [one.posted_ns for one in some] for name, some in found.items()} == {"a": [1, 7], "b": [5]}
