"""Names: what a peer is called, and how much of a transfer id may be shown."""

from __future__ import annotations

import itertools

from kvferry.ids import EngineId, Incarnation, Rank, TransferId, peer_name, redacted


def test_a_peers_name_differs_by_everything_that_makes_it_another_peer() -> None:
    """V24, A08: engine, incarnation, pipeline stage and tensor rank; a restarted rank is a new name."""
    parts = itertools.product(("p", "p_dp0", "p_dp1"), ("i1", "i2"), (0, 1), (0, 1))
    names = [peer_name(EngineId(e), Incarnation(i), Rank(pp, tp)) for e, i, pp, tp in parts]
    assert len(set(names)) == 24


def test_ranks_order_by_stage_then_tensor_rank() -> None:
    assert sorted([Rank(1, 0), Rank(0, 1), Rank(0, 0)]) == [Rank(0, 0), Rank(0, 1), Rank(1, 0)]


def test_a_redacted_id_finds_and_does_not_claim() -> None:
    transfer = TransferId("0123456789abcdef0123456789abcdef")
    assert transfer.startswith(redacted(transfer).removesuffix("~"))
    assert len(redacted(transfer)) == 7
    assert redacted(TransferId("abc")) == "abc~"
