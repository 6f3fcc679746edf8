"""A request's way is cut without a gap and without an overlap."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvferry.bench.phases import PHASES, Phases, as_fetched, phases
from kvferry.bench.records import Record
from kvferry.bench.timing import RequestTimes, TransferTimes

START = 10**18
RECORD = Record(request="a", due=1.0, sent=1.0, chunks=(1.5, 1.6), end=1.6, completion_tokens=2)


def at(seconds: float) -> int:
    return START + round(seconds * 1e9)


def moved(*posted_and_done: tuple[float, float]) -> list[TransferTimes]:
    return [
        TransferTimes(request="p", posted_ns=at(posted), done_ns=at(done)) for posted, done in posted_and_done
    ]


def cut(
    prefill: RequestTimes | None,
    decode: RequestTimes | None,
    transfers: Sequence[TransferTimes] = (),
) -> Phases:
    found = phases(RECORD, START, prefill, decode, transfers)
    assert found is not None
    return found


PREFILL = RequestTimes(request="p", arrived_ns=at(1.01), scheduled_ns=at(1.03), prefill_end_ns=at(1.2))


def test_every_milestone_makes_its_phase_and_together_they_are_the_time_to_first_token() -> None:
    prefill = RequestTimes(
        request="p",
        arrived_ns=at(1.01),
        scheduled_ns=at(1.03),
        prefill_end_ns=at(1.2),
    )
    decode = RequestTimes(
        request="d",
        allocated_ns=at(1.21),
        received_ns=at(1.35),
        first_step_ns=at(1.41),
        first_token_ns=at(1.47),
    )
    found = cut(prefill, decode, moved((1.25, 1.3), (1.22, 1.26)))
    assert found.seconds == pytest.approx(
        {
            "send": 0.01,
            "queue": 0.02,
            "prefill": 0.17,
            "registration": 0.01,
            "match": 0.01,
            "write": 0.08,
            "notice": 0.05,
            "wait": 0.06,
            "first step": 0.06,
            "answer": 0.03,
        },
        abs=1e-6,
    )
    assert list(found.seconds) == [name for name in PHASES if name not in {"read", "transfer"}]
    assert sum(found.seconds.values()) == pytest.approx(0.5, abs=1e-6)
    assert found.handover == pytest.approx(0.27)
    assert found.received == pytest.approx(0.15)


def test_what_happened_behind_prefill_costs_nothing() -> None:
    prefill = RequestTimes(request="p", prefill_end_ns=at(1.2))
    decode = RequestTimes(request="d", allocated_ns=at(1.02), received_ns=at(1.22), first_token_ns=at(1.3))
    found = cut(prefill, decode, moved((1.05, 1.21)))
    assert found.seconds["registration"] == found.seconds["match"] == 0.0
    assert found.seconds["write"] == pytest.approx(0.01)


def test_what_the_decode_engine_fetches_is_read() -> None:
    reads = [
        TransferTimes(request="d", posted_ns=at(posted), done_ns=at(done), operation="READ")
        for posted, done in ((1.25, 1.28), (1.26, 1.31))
    ]
    decode = RequestTimes(request="d", allocated_ns=at(1.22), received_ns=at(1.33), first_token_ns=at(1.4))
    found = cut(PREFILL, decode, reads)
    hand_over = {name: found.seconds[name] for name in ("registration", "match", "read", "notice")}
    assert hand_over == pytest.approx({"registration": 0.02, "match": 0.03, "read": 0.06, "notice": 0.02})
    assert "write" not in found.seconds


def test_what_older_runs_called_a_write_of_a_pull_is_a_read() -> None:
    old = Phases(request="p", seconds={"match": 0.01, "write": 0.2, "notice": 0.02}, handover=0.3)
    new = as_fetched(old)
    assert list(new.seconds.items()) == [("match", 0.01), ("read", 0.2), ("notice", 0.02)]
    assert new.handover == 0.3
    assert as_fetched(new) is new


def test_moving_is_when_at_least_one_transfer_was_posted_and_not_done() -> None:
    found = cut(PREFILL, None, moved((1.25, 1.3), (1.1, 1.2), (1.28, 1.31), (1.27, 1.29), (1.4, 1.5)))
    assert found.moving == pytest.approx(0.1 + 0.06 + 0.1)
    assert cut(PREFILL, None).moving is None


def test_what_nobody_noted_is_in_the_next_phase() -> None:
    found = cut(PREFILL, RequestTimes(request="d", received_ns=at(1.4)))
    assert list(found.seconds) == ["send", "queue", "prefill", "transfer", "answer"]
    assert found.seconds["transfer"] == pytest.approx(0.2)
    assert sum(found.seconds.values()) == pytest.approx(0.5)
    assert found.handover is None


def test_a_stamp_that_is_late_cannot_make_a_phase_negative() -> None:
    decode = RequestTimes(request="d", received_ns=at(1.4), first_step_ns=at(1.39), first_token_ns=at(1.9))
    found = cut(PREFILL, decode)
    assert found.seconds["wait"] == 0.0
    assert found.seconds["answer"] == 0.0
    assert sum(found.seconds.values()) == pytest.approx(0.5)


def test_one_engine_alone_has_no_hand_over() -> None:
    found = cut(None, RequestTimes(request="d", first_token_ns=at(1.4)))
    assert list(found.seconds) == ["first step", "answer"]
    assert (found.handover, found.received) == (None, None)


def test_without_a_token_or_any_note_there_is_nothing_to_cut() -> None:
    assert phases(RECORD, START, None, None) is None
    assert phases(Record(request="a", due=1.0, error="lost"), START, PREFILL, None) is None
