"""The producer's rows: the arithmetic that belongs to them."""

from __future__ import annotations

import pytest

from kvferry.ids import ConsumerId, PeerName, TransferId
from kvferry.protocol.slices import blocks_covering, expanded
from kvferry.protocol.sources import Delivery, SourceRow
from kvferry.protocol.states import DeliveryState

T = TransferId("t")


def row(*deliveries: tuple[str, str, DeliveryState, int], attempts: tuple[int, ...] = ()) -> SourceRow:
    found = SourceRow(T)
    numbers = attempts or (1,) * len(deliveries)
    for (peer, consumer, state, sharers), attempt in zip(deliveries, numbers, strict=True):
        delivery = Delivery(T, ConsumerId(consumer), PeerName(peer), attempt, state, sharers)
        found.deliveries[delivery.key] = delivery
    return found


def test_a_consumer_is_served_when_every_rank_that_shares_us_has_ended() -> None:
    """P42: which rank, not how many messages."""
    ended, posting = DeliveryState.WRITTEN, DeliveryState.REGISTERED
    assert row().served() == 0
    assert row(("d0", "a", ended, 1)).served() == 1
    assert row(("d0", "a", ended, 2)).served() == 0
    assert row(("d0", "a", ended, 2), ("d1", "a", posting, 2)).served() == 0
    assert row(("d0", "a", ended, 2), ("d1", "a", DeliveryState.FAILED, 2)).served() == 1
    assert row(("d0", "a", ended, 1), ("d0", "b", DeliveryState.CANCELLED, 1)).served() == 2


@pytest.mark.parametrize("attempts", [(1, 2, 3), (3, 2, 1), (2, 3, 1)])
def test_only_the_newest_attempt_of_a_rank_counts(attempts: tuple[int, ...]) -> None:
    """P42: an abort and a second request under the same ids; the order of arrival does not matter."""

    def served(newest: DeliveryState) -> int:
        states = [newest if attempt == 3 else DeliveryState.CANCELLED for attempt in attempts]
        return row(*(("d0", "a", state, 1) for state in states), attempts=attempts).served()

    assert served(DeliveryState.REGISTERED) == 0
    assert served(DeliveryState.WRITTEN) == 1


def test_attempts_of_one_rank_are_no_sharers_of_it() -> None:
    """P42: two ranks share us; the first has ended twice, the second has not been heard of, or is open."""
    ended = DeliveryState.CANCELLED
    twice = (("d0", "a", ended, 2), ("d0", "a", ended, 2))
    assert row(*twice, attempts=(1, 2)).served() == 0
    assert row(*twice, ("d1", "a", DeliveryState.REGISTERED, 2), attempts=(1, 2, 7)).served() == 0
    assert row(*twice, ("d1", "a", ended, 2), attempts=(1, 2, 7)).served() == 1


def test_blocks_of_tokens() -> None:
    assert blocks_covering(0, 1, 16) == (0, 1)
    assert blocks_covering(16, 48, 16) == (1, 3)
    assert blocks_covering(17, 49, 16) == (1, 4)


def test_spans_become_blocks_in_their_order() -> None:
    assert list(expanded(((7, 2), (3, 1)))) == [7, 8, 3]
    assert list(expanded(())) == []
