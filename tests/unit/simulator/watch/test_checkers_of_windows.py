"""Checkers of caches with windows, and of caches that do not fit: each finds what is planted, and no more."""

from __future__ import annotations

import pytest

from kvferry.protocol.commands import Advance, Expect, Received, absent
from kvferry.simulator.ground.arena import GroupShape
from kvferry.simulator.watch.checkers.base import Checker
from kvferry.simulator.watch.checkers.content import ContentIsExact
from kvferry.simulator.watch.checkers.ledger import Ledger
from kvferry.simulator.watch.checkers.posting import PostedUnderPermission
from kvferry.simulator.watch.checkers.readers import OnlyKeptIsUsed
from kvferry.simulator.watch.checkers.windows import MisfitsAreRefused, OnlyTheWindowTravels
from tests.support.history import CONSUMER, D0, P0, C, History, T, receive

GROUPS = GroupShape(4), GroupShape(4, window_tokens=5)
RECEIVED = Received(T, C, 1)


def history_of(checker: type[Checker]) -> History:
    history = History(checker)
    history.oracle.groups = GROUPS
    return history


def opened(checker: type[Checker]) -> History:
    """Tokens [0, 11) in blocks 10 to 12, and of the window, which is tokens [7, 11), in blocks 20 and 21."""
    history = history_of(checker)
    history.command(D0, receive([10, 11, 12], stop=11, more=[[20, 21]]))
    history.post(1, [1, 2, 3, 4, 5], [10, 11, 12, 20, 21])
    return history


def written(history: History, *places: tuple[int, int]) -> None:
    history.oracle.memory.update({(D0, block, place): 9 for block, place in places})


def test_whole_blocks_of_a_window_and_the_rest_of_the_last_cell_may_be_written() -> None:
    history = opened(OnlyTheWindowTravels)
    written(history, *((block, place) for block in (10, 11, 12, 20, 21) for place in range(4)))
    history.report(D0, RECEIVED)
    assert history.finish() == []


def test_what_is_written_behind_the_last_cell_is_found() -> None:
    """The producer's blocks of the window are half as large, so that cells of two tokens travel."""
    history = history_of(OnlyTheWindowTravels)
    history.oracle.groups_by_rank[P0] = GroupShape(4), GroupShape(2, window_tokens=5)
    history.command(D0, receive([10, 11, 12], stop=9, more=[[20, 21]]))
    history.post(1, [1, 2, 3, 4, 5], [10, 11, 12, 20, 21])
    written(history, (21, 1), (12, 3), (21, 2))
    history.report(D0, RECEIVED)
    assert history.finish() == [f"{P0} has written token 10 of group 1 of {C} on {D0}, which nobody needs"]


def test_a_listed_block_of_before_the_window_is_found_once_it_is_written() -> None:
    history = history_of(OnlyTheWindowTravels)
    history.command(D0, receive([10, 11, 12], stop=11, more=[[19, 20, 21]]))
    history.post(1, [1, 2, 3, 4, 5, 6], [10, 11, 12, 19, 20, 21])
    written(history, (19, 3))
    history.report(D0, RECEIVED)
    (found,) = history.finish()
    assert "token 3 of group 1" in found


def test_of_a_window_only_its_tokens_must_be_right() -> None:
    history = opened(ContentIsExact)
    history.report(D0, RECEIVED)
    history.decode([10, 11, 12], [0, 20, 21], tokens=11)
    history.end_decode()
    assert history.finish() == []


def test_blocks_that_a_window_has_moved_on_from_may_be_others() -> None:
    history = opened(ContentIsExact)
    history.report(D0, RECEIVED)
    history.decode([10, 11, 12], [0, 20, 21], tokens=11)
    history.give(CONSUMER, 20)
    history.oracle.wrong.add((D0, 20))
    history.end_decode()
    assert history.finish() == []


def test_blocks_that_a_window_still_has_are_compared_at_the_end() -> None:
    history = opened(ContentIsExact)
    history.report(D0, RECEIVED)
    history.decode([10, 11, 12], [0, 20, 21], tokens=11)
    history.give(CONSUMER, 20)
    history.oracle.wrong.add((D0, 21))
    history.end_decode()
    (found,) = history.finish()
    assert "has decoded from KV that is not its own" in found


@pytest.mark.parametrize(("block", "broken"), [(12, True), (20, True), (21, True), (19, False)])
def test_each_group_s_bytes_are_compared(block: int, broken: bool) -> None:
    history = opened(ContentIsExact)
    history.oracle.wrong.add((D0, block))
    history.report(D0, RECEIVED)
    assert bool(history.finish()) is broken


def test_a_destination_that_lacks_a_block_of_its_window_is_found() -> None:
    history = history_of(OnlyKeptIsUsed)
    history.command(D0, receive([10, 11, 12], stop=11, more=[[20, 21]], mode="pull"))
    history.read(1, [1, 2, 3, 5], [10, 11, 12, 21])
    history.end_post(1, rank=D0)
    history.report(D0, RECEIVED)
    assert history.finish() == [f"{D0} calls block 20 good and has never read it"]


def test_source_blocks_of_every_group_are_held() -> None:
    history = history_of(PostedUnderPermission)
    history.command(P0, Expect(T, 12))
    history.command(P0, Advance(T, 12, 0, (((1, 3),), (*absent(1), (5, 2))), (0, 0)))
    history.command(D0, receive([10, 11, 12], stop=11, more=[[20, 21]]))
    history.post(1, [1, 2, 3, 5, 6], [10, 11, 12, 20, 21])
    assert history.finish() == []
    history.post(2, [4], [20])
    (found,) = history.finish()
    assert "source blocks [4] are not held" in found


def test_nothing_moves_between_caches_that_do_not_fit() -> None:
    history = opened(MisfitsAreRefused)
    assert history.finish() == []
    history.oracle.misfits.add((P0, D0))
    history.post(2, [4], [12])
    (found,) = history.finish()
    assert "whose caches do not fit" in found


def test_the_ledger_knows_blocks_by_group() -> None:
    history = opened(MisfitsAreRefused)
    assert isinstance(history.ledger, Ledger)
    (opening,) = history.ledger.openings[D0, T, C]
    assert opening.groups == ((10, 11, 12), (20, 21))
    assert list(opening.needed(GROUPS, 11)) == [(0, 0, (10, 11, 12)), (1, 7, (20, 21))]
    assert list(opening.needed(GROUPS, 7)) == [(0, 0, (10, 11, 12))]
