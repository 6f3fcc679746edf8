"""Sets of token ranges, against a set of tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.ranges import Ranges

pieces = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=12)


@given(pieces, st.integers(0, 31))
def test_reach_is_the_first_token_that_is_missing(added: list[tuple[int, int]], start: int) -> None:
    ranges = Ranges()
    tokens: set[int] = set()
    for first, stop in added:
        ranges.add(first, stop)
        tokens |= set(range(first, stop))
    reach = start
    while reach in tokens:
        reach += 1
    assert ranges.reach(start) == reach


@given(pieces)
def test_ranges_stay_apart_and_sorted(added: list[tuple[int, int]]) -> None:
    ranges = Ranges()
    for first, stop in added:
        ranges.add(first, stop)
    bounds = [bound for pair in zip(ranges._starts, ranges._stops, strict=True) for bound in pair]
    assert bounds == sorted(set(bounds))
    assert len(ranges) == len(bounds) // 2


def test_a_prefix_that_grows_in_order_is_one_range() -> None:
    ranges = Ranges()
    for start in range(0, 4000, 4):
        ranges.add(start, start + 4)
    assert len(ranges) == 1
    assert ranges.reach(0) == 4000
