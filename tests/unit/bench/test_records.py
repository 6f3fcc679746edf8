"""What follows from a record."""

from __future__ import annotations

import msgspec
import pytest

from kvferry.bench.records import Load, Record

RECORD = Record(
    request="r-0",
    due=1.0,
    sent=1.25,
    chunks=(2.0, 2.1, 2.4),
    end=2.5,
    prompt_tokens=10,
    completion_tokens=6,
)


def test_latency_counts_from_the_due_moment_and_tokens_from_usage() -> None:
    assert RECORD.ttft_seconds == pytest.approx(1.0)
    assert RECORD.e2e_seconds == pytest.approx(1.5)
    assert RECORD.tpot_seconds == pytest.approx(0.5 / 5)
    # As the field defines it, whatever the chunks were.
    assert RECORD.tpot_seconds == pytest.approx((RECORD.e2e_seconds - RECORD.ttft_seconds) / (6 - 1))
    assert RECORD.lag_seconds == pytest.approx(0.25)
    assert RECORD.gaps_seconds == pytest.approx([0.1, 0.3])


def test_one_token_has_no_time_per_token() -> None:
    single = msgspec.structs.replace(RECORD, chunks=(2.0,), completion_tokens=1)
    assert single.tpot_seconds is None
    assert single.gaps_seconds == []


def test_a_request_without_an_answer_has_no_figures() -> None:
    failed = Record(request="r-1", due=1.0, error="refused")
    assert not failed.succeeded
    assert (failed.ttft_seconds, failed.tpot_seconds, failed.e2e_seconds, failed.lag_seconds) == (None,) * 4


def test_a_load_names_its_failures_and_survives_a_file() -> None:
    load = Load(started_ns=5, seconds=3.0, records=(RECORD, Record(request="r-1", due=2.0, error="refused")))
    assert [record.request for record in load.failures] == ["r-1"]
    assert msgspec.json.decode(msgspec.json.encode(load), type=Load) == load
