"""The producer's rows: the arithmetic that belongs to them."""

from __future__ import annotations

from kvferry.ids import ConsumerId, PeerName, TransferId
from kvferry.protocol.sources import Delivery, SourceRow, blocks_covering, expanded
from kvferry.protocol.states import DeliveryState

T = TransferId("t")


def row(*deliveries: tuple[str, str, DeliveryState, int]) -> SourceRow:
    found = SourceRow(T)
    for peer, consumer, state, sharers in deliveries:
        delivery = Delivery(T, ConsumerId(consumer), PeerName(peer), state, sharers)
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


def test_blocks_of_tokens() -> None:
    assert blocks_covering(0, 1, 16) == (0, 1)
    assert blocks_covering(16, 48, 16) == (1, 3)
    assert blocks_covering(17, 49, 16) == (1, 4)


def test_spans_become_blocks_in_their_order() -> None:
    assert list(expanded(((7, 2), (3, 1)))) == [7, 8, 3]
    assert list(expanded(())) == []
