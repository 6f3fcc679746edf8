"""V13: an engine whose caches do not fit ours shows, for as long as requests name it."""

from __future__ import annotations

from kvferry.host.events import Ended
from kvferry.host.misfits import MISFIT_SECONDS, MISFITS_MAX, Misfits
from kvferry.ids import EngineId

P, Q = EngineId("p"), EngineId("q")
REFUSED = "geometry: dtype differs: ours is float32, theirs is bfloat16"


def ended(reason, *, failed, request="r"):
    return Ended(0, request, reason, failed=failed)


def test_a_refusal_counts_until_a_transfer_from_that_engine_has_come():
    misfits = Misfits()
    misfits.ended(P, ended(REFUSED, failed=True), 0.0)
    misfits.ended(Q, ended(REFUSED, failed=True), 1.0)
    assert misfits.count(1.0) == 2
    misfits.ended(P, ended("peer_silent", failed=True), 2.0)
    assert misfits.count(2.0) == 2
    misfits.ended(P, ended("written", failed=False), 3.0)
    assert misfits.count(3.0) == 2, "another rank of the same request has been refused"
    misfits.ended(P, ended("written", failed=False, request="next"), 3.0)
    assert misfits.count(3.0) == 1


def test_other_failures_say_nothing_of_the_caches():
    misfits = Misfits()
    misfits.ended(P, ended("peer_lost: gone", failed=True), 0.0)
    assert misfits.count(0.0) == 0


def test_an_engine_that_nobody_names_any_more_is_forgotten():
    misfits = Misfits()
    misfits.ended(P, ended(REFUSED, failed=True), 0.0)
    misfits.ended(Q, ended(REFUSED, failed=True), 10.0)
    misfits.ended(P, ended(REFUSED, failed=True), 20.0)
    assert misfits.count(10.0 + MISFIT_SECONDS - 1) == 2
    assert misfits.count(10.0 + MISFIT_SECONDS) == 1
    assert misfits.count(20.0 + MISFIT_SECONDS) == 0


def test_no_more_than_so_many_engines_are_remembered():
    misfits = Misfits()
    for number in range(MISFITS_MAX + 5):
        misfits.ended(EngineId(f"p{number}"), ended(REFUSED, failed=True), float(number) / 1e6)
    assert misfits.count(1.0) == MISFITS_MAX
