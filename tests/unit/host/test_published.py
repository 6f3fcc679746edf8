"""Which blocks of a prefill request the ranks are told of, by cache group."""

from __future__ import annotations

import pytest

from kvferry.host.facts import CacheGroup, EngineFacts
from kvferry.host.published import PublishedBlocks
from kvferry.ids import EngineId
from kvferry.layout.spans import from_spans

FULL = CacheGroup(4)


def ids(spans):
    """Block ids; None for one that is not there."""
    return [int(block) if block >= 0 else None for block in from_spans(spans)]


def test_blocks_are_published_as_the_frontier_moves():
    blocks = PublishedBlocks((FULL,), 22)
    blocks.add(([5, 6, 7, 8],), replaced=True)
    first = blocks.advance(9)
    assert (first.first_block, first.first_blocks, first.held) == (0, (), [5, 6, 7])
    blocks.add(([20, 30],), replaced=False)
    second = blocks.advance(22)
    assert (second.first_block, second.held) == (3, [8, 20, 30])
    assert second.spans == (((8, 1), (20, 1), (30, 1)),)
    blocks.add(([1, 2],), replaced=True)
    assert blocks.advance(5).first_block == 0


def test_of_a_window_only_what_a_consumer_can_need_is_held():
    """V14: 22 tokens in blocks of 4, a window of 6: whoever computes the last token looks at the last six."""
    blocks = PublishedBlocks((FULL, CacheGroup(4, window_tokens=6)), 22)
    blocks.add(([5, 6, 7], [15, 16, 17]), replaced=True)
    first = blocks.advance(12)
    assert [ids(spans) for spans in first.spans] == [[5, 6, 7], [None, None, None]]
    assert first.held == [5, 6, 7]
    blocks.add(([8, 9, 10], [18, 19, 20]), replaced=False)
    second = blocks.advance(22)
    assert [ids(spans) for spans in second.spans] == [[8, 9, 10], [None, 19, 20]]
    assert (second.first_blocks, second.held) == ((3, 3), [8, 9, 10, 19, 20])


@pytest.mark.parametrize("tokens", range(1, 40))
@pytest.mark.parametrize("window", [1, 4, 5, 16])
def test_every_token_that_a_consumer_looks_at_is_in_a_block_that_is_held(tokens, window):
    """The consumer has all but the last token, and computes that one."""
    group = CacheGroup(4, window)
    blocks = PublishedBlocks((group,), tokens)
    blocks.add((list(range(1, group.blocks(tokens) + 1)),), replaced=True)
    held = ids(blocks.advance(tokens).spans[0])
    needed = range(max(tokens - window, 0), tokens)
    assert all(held[token // 4] for token in needed)
    assert all(block is None for block in held[: needed.start // 4])
    facts = EngineFacts(EngineId("e"), 1, 1, True, True, 4, 64, groups=(group,))
    assert group.first_needed(facts.received_stop(tokens)) * 4 <= needed.start


def test_the_null_block_is_nobody_s_block():
    """A prefix hit brings no blocks of before the window."""
    blocks = PublishedBlocks((CacheGroup(4, window_tokens=12),), 22)
    blocks.add(([0, 0, 0, 18, 19, 20],), replaced=True)
    new = blocks.advance(22)
    assert ids(new.spans[0]) == [None, None, None, 18, 19, 20]
    assert new.held == [18, 19, 20]


def test_groups_of_unlike_block_sizes_count_each_their_own():
    blocks = PublishedBlocks((FULL, CacheGroup(8, window_tokens=40)), 32)
    blocks.add(([1, 2], [3]), replaced=True)
    assert blocks.advance(8).first_blocks == (0, 0)
    blocks.add(([4, 5, 6], [7, 8]), replaced=False)
    new = blocks.advance(20)
    assert (new.first_block, new.first_blocks) == (2, (2, 1))
    assert [ids(spans) for spans in new.spans] == [[4, 5, 6], [7, 8]]
