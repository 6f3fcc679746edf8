"""Cutting streams into events: however the bytes arrive, the events are the same."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.router.api.sse import EventSplitter, EventTooLongError, data_of, event_of

STREAM = b'data: {"a": 1}\n\n: ping\n\ndata: [DONE]\r\n\r\ndata: x\n\n'
EVENTS = [b'data: {"a": 1}\n\n', b": ping\n\n", b"data: [DONE]\r\n\r\n", b"data: x\n\n"]


@given(st.lists(st.integers(0, len(STREAM)), max_size=10))
def test_events_do_not_depend_on_how_bytes_arrive(cuts: list[int]) -> None:
    splitter = EventSplitter(100)
    edges = [0, *sorted(cuts), len(STREAM)]
    pieces = [STREAM[start:end] for start, end in pairwise(edges)]
    assert b"".join(event for piece in pieces for event in splitter.feed(piece)) == STREAM


def test_events_are_cut_at_their_blank_lines() -> None:
    assert EventSplitter(100).feed(STREAM) == EVENTS


def test_what_is_data() -> None:
    assert [data_of(event) for event in EVENTS] == [b'{"a": 1}', None, b"[DONE]", b"x"]
    assert data_of(b"event: error\ndata: a\ndata: b\n\n") == b"a\nb"
    assert data_of(b"data:tight\n\n") == b"tight"
    assert data_of(event_of(b"{}")) == b"{}"


def test_an_event_has_a_limit_finished_or_not() -> None:
    with pytest.raises(EventTooLongError):
        EventSplitter(10).feed(b"data: " + b"x" * 10)
    with pytest.raises(EventTooLongError):
        EventSplitter(10).feed(b"data: " + b"x" * 10 + b"\n\n")
