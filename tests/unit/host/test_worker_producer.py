"""A rank's prefill requests: reported once, with the right times, for the right ones."""

from __future__ import annotations

import pytest

from kvferry.host.events import Ended
from kvferry.host.orders import Sender
from kvferry.host.worker_producer import WorkerProducer
from kvferry.protocol.commands import Released


def producer_of():
    producer = WorkerProducer(rank=3)
    producer.start(Sender("t", "r", "pull"))
    producer.publish(["t", "unknown"])
    return producer


def test_a_second_release_is_no_second_end():
    """Promise 8: exactly one outcome, although a result may be repeated."""
    producer = producer_of()
    assert producer.release(Released("t", "written"), 1.0) is not None
    assert producer.release(Released("t", "lease_expired"), 2.0) is None
    assert producer.release(Released("unknown", "written"), 2.0) is None


@pytest.mark.parametrize(
    ("outcome", "seconds", "failed", "cancelled", "mode"),
    [
        ("written", 2.5, False, False, "push"),
        ("fetched", 2.5, False, False, "pull"),
        ("lease_expired", None, True, False, "pull"),
        ("peer_lost: gone", None, True, False, "pull"),
        ("cancelled: left", None, True, True, "pull"),
    ],
)
def test_only_what_was_handed_over_has_a_time(outcome, seconds, failed, cancelled, mode):
    """How it was moved says the mode, and what was asked for where it was not."""
    producer = producer_of()
    producer.prefill_ended("t", 10.0)
    assert producer.release(Released("t", outcome), 12.5) == Ended(
        3, "r", outcome, handover_seconds=seconds, failed=failed, cancelled=cancelled, mode=mode, sending=True
    )


def test_a_request_that_never_ended_has_no_time():
    assert producer_of().release(Released("t", "written"), 12.5).handover_seconds is None


@pytest.mark.parametrize("order", ["finish first", "release first"])
def test_it_is_taken_once_when_both_have_happened(order):
    producer = producer_of()
    steps = [lambda: producer.finish(["r", "x"]), lambda: producer.release(Released("t", "written"), 1.0)]
    for step in steps if order == "finish first" else reversed(steps):
        assert producer.take_released(["t"]) == set()
        step()
    assert producer.take_released(["t", "unknown"]) == {"r"}
    assert producer.take_released(["t"]) == set()
    assert len(producer) == 0
    assert producer.transfer_of("r") is None


def test_what_was_refused_or_is_unknown_is_not_the_agents():
    producer = producer_of()
    assert not producer.is_refused("t")
    producer.refuse("t")
    producer.refuse("unknown")
    assert producer.is_refused("t")
    assert producer.is_refused("unknown")
