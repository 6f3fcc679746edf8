"""The count of transitions: what is counted, and that nothing stays behind."""

from __future__ import annotations

import pytest

from kvferry.errors import PeerError
from kvferry.protocol.states import (
    DELIVERY,
    PART,
    RECEPTION,
    SOURCE,
    PartEvent,
    PartState,
    ReceptionEvent,
    ReceptionState,
    SourceEvent,
    SourceState,
)
from kvferry.simulator.watch.coverage import IMPOSSIBLE, PAIRS, recording, unvisited


def test_every_listed_pair_is_known_once() -> None:
    tables = (SOURCE, DELIVERY, RECEPTION, PART)
    assert len(set(PAIRS)) == len(PAIRS) == sum(len(t.transitions) + len(t.late) for t in tables)


def test_transitions_and_late_events_are_counted() -> None:
    with recording() as counts:
        assert SOURCE.next(SourceState.UNKNOWN, SourceEvent.EXPECT) is SourceState.QUEUED
        assert SOURCE.next(SourceState.HELD, SourceEvent.ADVANCE) is SourceState.HELD
        for _ in range(2):
            assert PART.next(PartState.TOLD, PartEvent.LOST) is PartState.LOST
    assert counts == {
        ("source", "unknown", "expect"): 1,
        ("source", "held", "advance"): 1,
        ("part", "told", "lost"): 2,
    }
    assert ("part", "told", "lost") not in unvisited(counts)
    # One of the three is called impossible, and was not expected to be taken.
    assert len(unvisited(counts)) == len(PAIRS) - len(IMPOSSIBLE) - 2


def test_what_is_called_impossible_is_listed_and_has_a_reason() -> None:
    assert set(IMPOSSIBLE) <= set(PAIRS)
    assert all(IMPOSSIBLE.values())
    assert set(unvisited({})) == set(PAIRS) - set(IMPOSSIBLE)
    # The pairs of a run that goes well are not among them.
    for pair in (
        ("source", "held", "end"),
        ("delivery", "registered", "complete"),
        ("part", "told", "written"),
    ):
        assert pair not in IMPOSSIBLE


def test_an_impossible_pair_raises_and_is_not_counted() -> None:
    with recording() as counts, pytest.raises(PeerError):
        RECEPTION.next(ReceptionState.ENDED, ReceptionEvent.RECEIVE)
    assert counts == {}


def test_nothing_is_counted_after_the_end_and_inner_recordings_nest() -> None:
    with recording() as outer:
        with recording() as inner:
            PART.next(PartState.UNTOLD, PartEvent.TELL)
        PART.next(PartState.UNTOLD, PartEvent.TELL)
    PART.next(PartState.UNTOLD, PartEvent.TELL)
    key = ("part", "untold", "tell")
    assert (outer, inner) == ({key: 2}, {key: 1})
    assert all("next" not in vars(table) for table in (SOURCE, DELIVERY, RECEPTION, PART))
