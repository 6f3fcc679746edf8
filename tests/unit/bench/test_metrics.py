"""Samples, goodput, and the options that name metrics."""

from __future__ import annotations

import pytest

from kvferry.bench.metrics import (
    as_milliseconds,
    parse_metrics,
    parse_objectives,
    samples,
    summaries,
    totals,
)
from kvferry.bench.records import Load, Record
from kvferry.bench.statistics import Summary
from kvferry.errors import UsageError


def record(position: int, ttft: float, tpot: float, tokens: int = 5, error: str | None = None) -> Record:
    first = position + ttft
    end = first + tpot * (tokens - 1)
    return Record(
        request=f"r-{position}",
        due=float(position),
        sent=float(position),
        chunks=(first, end),
        end=end,
        prompt_tokens=100,
        completion_tokens=tokens,
        error=error,
    )


RECORDS = (record(0, 0.1, 0.01), record(1, 0.3, 0.02), record(2, 9.9, 9.9, error="lost"))


def test_samples_leave_failed_requests_out() -> None:
    assert samples("ttft", RECORDS) == pytest.approx([0.1, 0.3])
    assert samples("tpot", RECORDS) == pytest.approx([0.01, 0.02])
    assert samples("itl", RECORDS) == pytest.approx([0.04, 0.08])
    assert samples("e2el", RECORDS) == pytest.approx([0.14, 0.38])


def test_a_metric_without_samples_has_no_summary() -> None:
    assert summaries(("ttft", "tpot"), [record(0, 0.1, 0.0, tokens=1)]).keys() == {"ttft"}


def test_a_single_token_does_not_lower_the_time_per_token_of_the_others() -> None:
    assert samples("tpot", [RECORDS[0], record(1, 0.3, 0.0, tokens=1)]) == pytest.approx([0.01])


def test_totals_count_what_was_answered_in_full() -> None:
    told = totals(Load(started_ns=0, seconds=4.0, records=RECORDS), {})
    assert (told.requests, told.failed, told.prompt_tokens, told.completion_tokens) == (3, 1, 200, 10)
    assert told.requests_per_second == pytest.approx(0.5)
    assert told.completion_tokens_per_second == pytest.approx(2.5)
    assert told.goodput_per_second is None


@pytest.mark.parametrize(
    ("objectives", "good"),
    [({"ttft": 0.2}, 1), ({"ttft": 0.5}, 2), ({"ttft": 0.5, "tpot": 0.015}, 1), ({"e2el": 0.1}, 0)],
)
def test_a_good_request_meets_every_objective(objectives: dict[str, float], good: int) -> None:
    told = totals(Load(started_ns=0, seconds=2.0, records=RECORDS), objectives)
    assert told.goodput_per_second == pytest.approx(good / 2)


def test_a_single_token_is_not_judged_by_its_time_per_token() -> None:
    load = Load(started_ns=0, seconds=1.0, records=(record(0, 0.1, 0.0, tokens=1),))
    assert totals(load, {"tpot": 0.001}).goodput_per_second == pytest.approx(1.0)


def test_objectives_are_read_in_milliseconds() -> None:
    assert parse_objectives(["ttft:500", "tpot:7.5"]) == pytest.approx({"ttft": 0.5, "tpot": 0.0075})


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:-1", "ttft:x", "speed:3", "itl:3"])
def test_an_objective_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--goodput must be METRIC:MILLISECONDS"):
        parse_objectives([text])


def test_metrics_are_named_in_a_list() -> None:
    assert parse_metrics("ttft,itl") == ("ttft", "itl")
    with pytest.raises(
        UsageError, match="--percentile-metrics must be some of ttft,tpot,itl,e2el, not speed"
    ):
        parse_metrics("ttft,speed")
    with pytest.raises(UsageError, match="not nothing"):
        parse_metrics("")


def test_people_get_milliseconds() -> None:
    assert as_milliseconds(Summary(3, 0.1, 0.2, 0.3, 0.4, 0.5)) == {
        "mean": 100.0,
        "p50": 200.0,
        "p90": 300.0,
        "p95": 400.0,
        "p99": 500.0,
    }
