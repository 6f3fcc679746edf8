"""Lists of block ids as spans, and block indices of tokens."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.errors import GeometryError, PeerError
from kvferry.layout.spans import align, checked, count, cut, from_spans, to_spans

TABLE = [
    ([], ()),
    ([0], ((0, 1),)),
    ([5, 6, 7], ((5, 3),)),
    ([0, 1, 5, 6, 2], ((0, 2), (5, 2), (2, 1))),
    ([3, 2, 1], ((3, 1), (2, 1), (1, 1))),
    ([4, 4, 5], ((4, 1), (4, 2))),
]


@pytest.mark.parametrize(("ids", "spans"), TABLE)
def test_ids_become_spans_and_spans_ids(ids: list[int], spans: tuple[tuple[int, int], ...]) -> None:
    assert to_spans(ids) == spans
    assert from_spans(spans).tolist() == ids
    assert from_spans(spans).dtype == np.int64
    assert count(spans) == len(ids)


def test_ids_may_come_from_anything_that_can_be_walked() -> None:
    assert to_spans(iter(range(4))) == ((0, 4),)


@pytest.mark.parametrize(
    ("first", "blocks", "expected"),
    [
        (0, 7, ((10, 3), (20, 1), (30, 3))),
        (0, 0, ()),
        (7, 0, ()),
        (1, 1, ((11, 1),)),
        (2, 3, ((12, 1), (20, 1), (30, 1))),
        (3, 1, ((20, 1),)),
        (4, 3, ((30, 3),)),
        (5, 2, ((31, 2),)),
    ],
)
def test_a_part_of_spans(first: int, blocks: int, expected: tuple[tuple[int, int], ...]) -> None:
    assert cut(((10, 3), (20, 1), (30, 3)), first, blocks) == expected


@pytest.mark.parametrize(("first", "blocks"), [(0, 8), (7, 1), (8, 0), (-1, 2), (2, -1)])
def test_asking_for_more_blocks_than_there_are_is_an_error(first: int, blocks: int) -> None:
    """P01: fewer source blocks than asked for fails the request, it does not shorten the write."""
    with pytest.raises(GeometryError, match="7 blocks"):
        cut(((10, 3), (20, 1), (30, 3)), first, blocks)


@pytest.mark.parametrize("spans", [(), ((0, 8),), ((7, 1), (0, 3), (3, 4)), ((2, 1),)])
def test_honest_spans_pass(spans: tuple[tuple[int, int], ...]) -> None:
    assert checked(list(spans), 8) == spans


@pytest.mark.parametrize(
    "spans",
    [
        ((-1, 1),),
        ((0, 0),),
        ((0, -1),),
        ((0, 9),),
        ((8, 1),),
        ((7, 2),),
        ((1 << 70, 1),),
        ((0, 1 << 70),),
        ((0, 2), (1, 1)),
        ((4, 2), (0, 5)),
        ((3, 1), (3, 1)),
        ((0, 8), (0, 8)),
        tuple((block % 8, 1) for block in range(9)),
    ],
)
def test_hostile_spans_are_a_peer_error(spans: tuple[tuple[int, int], ...]) -> None:
    """V01: ids out of range or named twice never reach an address."""
    with pytest.raises(PeerError, match=r"^spans: "):
        checked(spans, 8)


def test_more_spans_than_blocks_are_refused_unseen() -> None:
    """Sorting them would already be work for a stranger."""
    with pytest.raises(PeerError, match="9 of them, for a cache of 8 blocks"):
        checked(((0, 1),) * 9, 8)


@pytest.mark.parametrize(
    ("start", "stop", "indices"),
    [(0, 1, [0]), (0, 16, [0]), (0, 17, [0, 1]), (32, 40, [2]), (16, 16, []), (0, 0, []), (16, 48, [1, 2])],
)
def test_tokens_fall_into_blocks(start: int, stop: int, indices: list[int]) -> None:
    """P22: an empty range needs no block."""
    assert list(align(start, stop, 16)) == indices


@pytest.mark.parametrize(("start", "stop", "field"), [(1, 5, "start"), (-16, 5, "start"), (32, 31, "stop")])
def test_a_range_that_starts_inside_a_block_is_refused(start: int, stop: int, field: str) -> None:
    with pytest.raises(GeometryError) as caught:
        align(start, stop, 16)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("cached", "registered", "pairs"),
    [
        (5, [3, 4, 5], [(15, 3), (16, 4), (17, 5)]),
        (0, [8, 1, 2, 3, 4, 5, 6, 7], list(zip(range(10, 18), [8, 1, 2, 3, 4, 5, 6, 7], strict=True))),
        (7, [9], [(17, 9)]),
        (8, [], []),
    ],
)
def test_blocks_are_paired_by_token_position(
    cached: int, registered: list[int], pairs: list[tuple[int, int]]
) -> None:
    """P01: the consumer holds the first blocks already and registers the rest only."""
    source, block_tokens, tokens = to_spans(range(10, 18)), 4, 31
    wanted = align(cached * block_tokens, max(tokens, cached * block_tokens), block_tokens)
    part = from_spans(cut(source, wanted.start, len(wanted)))
    assert list(zip(part.tolist(), registered, strict=True)) == pairs
