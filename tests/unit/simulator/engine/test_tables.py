"""Block tables of engines with cache groups and sliding windows: what is held, given back and found again."""

from __future__ import annotations

import pytest

from kvferry.handoff import PrefillParams
from kvferry.ids import TransferId
from kvferry.simulator.engine.pool import BlockPool
from kvferry.simulator.engine.requests import Request
from kvferry.simulator.engine.tables import NULL, Tables
from kvferry.simulator.ground.arena import GroupShape
from kvferry.simulator.ground.content import Contents

WHOLE, WINDOW = GroupShape(4), GroupShape(2, window_tokens=5)


class Rig:
    """Tables of two groups, and what their pool has got back."""

    def __init__(self, *groups: GroupShape, blocks: int = 32) -> None:
        self.returned: list[int] = []
        self.pool = BlockPool(
            blocks, first=1, taken=lambda *_: None, returned=self.returned.extend, spoilt=lambda *_: None
        )
        self.tables = Tables(self.pool, groups or (WHOLE, WINDOW), defers=False)
        self.contents = Contents(1, 64)

    def request(self, tokens: int, **shared: int) -> Request:
        """A new one, without blocks."""
        params = PrefillParams(transfer=TransferId("t"))
        request = Request("r", self.contents.add(tokens, **shared), 1, TransferId("t"), params)
        self.tables.add(request)
        return request

    def computed(self, tokens: int, **shared: int) -> Request:
        """One that was computed at once, and is cached."""
        request = self.request(tokens, **shared)
        assert self.tables.allocate(request, [[], []], 0, tokens)
        self.tables.cache(request, tokens)
        request.computed = tokens
        return request


def test_windows_move_on_with_what_is_processed_and_not_with_what_is_in_flight() -> None:
    """The token behind 12 looks at the four before it: of blocks of two the first four are given back."""
    rig = Rig()
    request = rig.computed(12)
    request.in_flight = 4
    assert request.blocks == [[1, 2, 3], [4, 5, 6, 7, 8, 9]]
    assert rig.tables.grow(request, 14) == [[10], [11]]
    assert request.blocks[1] == [NULL, NULL, 6, 7, 8, 9, 11]
    request.in_flight = 0
    assert rig.tables.grow(request, 14) == [[], []]
    assert request.blocks == [[1, 2, 3, 10], [NULL, NULL, NULL, NULL, 8, 9, 11]]
    assert rig.returned == [5, 4, 7, 6]


def test_what_comes_from_elsewhere_takes_blocks_of_its_window_only() -> None:
    rig = Rig()
    request = rig.request(12)
    assert rig.tables.allocate(request, [[], []], 11, 0)
    assert request.blocks == [[1, 2, 3], [NULL, NULL, NULL, 4, 5, 6]]
    rig.tables.free(request)
    assert sorted(rig.returned) == [1, 2, 3, 4, 5, 6]
    assert rig.pool.free_count == rig.pool.count == 31


def test_a_hit_needs_the_window_at_its_end_and_nothing_before() -> None:
    rig = Rig()
    first = rig.computed(12, family=1, shared_tokens=12)
    assert rig.tables.grow(first, 13) is not None
    again = rig.request(13, family=1, shared_tokens=12)
    assert rig.tables.hits(again) == (12, [[1, 2, 3], [NULL, NULL, NULL, NULL, 8, 9]])
    assert rig.tables.allocate(again, rig.tables.hits(again)[1], 12, 1)
    assert again.blocks[1][:6] == [NULL, NULL, NULL, NULL, 8, 9]
    assert rig.tables.hits(rig.request(12, family=1, shared_tokens=12)) == (8, [[1, 2], [NULL, NULL, 6, 7]])


def test_where_a_block_of_the_window_is_gone_the_hit_is_shorter() -> None:
    rig = Rig(blocks=12)
    first = rig.computed(12, family=1, shared_tokens=12)
    assert rig.tables.grow(first, 13) is not None
    # The pool has nothing but what windows have left, and takes it.
    other = rig.request(4)
    assert rig.tables.allocate(other, [[], []], 0, 4)
    assert set(other.blocks[0] + other.blocks[1]) & {4, 5, 6, 7}
    assert rig.tables.hits(rig.request(12, family=1, shared_tokens=12))[0] == 0


@pytest.mark.parametrize("window", [1, 3, 8, 9])
def test_hits_are_whole_blocks_of_every_group(window: int) -> None:
    rig = Rig(GroupShape(4), GroupShape(8, window))
    request = rig.computed(20, family=1, shared_tokens=20)
    again = rig.request(21, family=1, shared_tokens=20)
    tokens, (whole, newest) = rig.tables.hits(again)
    assert (tokens, whole) == (16, request.blocks[0][:4])
    skipped = (17 - window) // 8
    assert newest == [NULL] * skipped + request.blocks[1][skipped:2]


def test_too_few_blocks_change_nothing() -> None:
    rig = Rig(blocks=8)
    request = rig.request(12)
    assert not rig.tables.allocate(request, [[], []], 0, 12)
    assert request.blocks == [[], []]
    assert rig.tables.allocate(request, [[], []], 0, 8)
    request.computed, request.in_flight = 8, 8
    assert rig.tables.grow(request, 12) is None
    assert request.blocks == [[1, 2], [3, 4, 5, 6]]
