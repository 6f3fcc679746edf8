"""Spans against plain lists of ids."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import GeometryError, PeerError
from kvferry.layout.spans import align, checked, count, cut, from_spans, to_spans

ids = st.lists(st.integers(0, 30), max_size=40) | st.lists(st.integers(0, 30), max_size=30).map(sorted)


@given(ids)
def test_spans_say_what_the_ids_said(blocks: list[int]) -> None:
    spans = to_spans(blocks)
    assert from_spans(spans).tolist() == blocks
    assert count(spans) == len(blocks)
    assert all(length >= 1 for _, length in spans)
    assert all(one[0] + one[1] != other[0] for one, other in pairwise(spans))


@given(ids, st.integers(-2, 45), st.integers(-2, 45))
def test_a_cut_is_a_slice(blocks: list[int], first: int, length: int) -> None:
    """P01: never more, never fewer blocks than asked for."""
    spans = to_spans(blocks)
    if first < 0 or length < 0 or first + length > len(blocks):
        with pytest.raises(GeometryError):
            cut(spans, first, length)
    else:
        assert from_spans(cut(spans, first, length)).tolist() == blocks[first : first + length]


@given(st.lists(st.tuples(st.integers(-2, 12), st.integers(-2, 12)), max_size=6), st.integers(0, 12))
def test_only_distinct_blocks_of_the_cache_pass(spans: list[tuple[int, int]], blocks_max: int) -> None:
    """V01"""
    named = Counter(block for first, length in spans for block in range(first, first + length))
    honest = (
        all(length >= 1 for _, length in spans)
        and all(0 <= block < blocks_max for block in named)
        and all(times == 1 for times in named.values())
    )
    if honest:
        assert checked(spans, blocks_max) == tuple(spans)
    else:
        with pytest.raises(PeerError):
            checked(spans, blocks_max)


@given(st.integers(0, 20), st.integers(0, 200), st.integers(1, 32))
def test_aligned_blocks_cover_the_tokens_and_no_more(block: int, tokens: int, block_tokens: int) -> None:
    start = block * block_tokens
    covered = {token // block_tokens for token in range(start, start + tokens)}
    assert list(align(start, start + tokens, block_tokens)) == sorted(covered)
