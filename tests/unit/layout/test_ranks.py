"""Which ranks meet."""

from __future__ import annotations

import pytest

from kvferry.errors import GeometryError
from kvferry.ids import Rank
from kvferry.layout.ranks import EngineSizes, check_sizes, sharers, size_errors, sources


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_equal_engines_meet_rank_by_rank(tp: int) -> None:
    sizes = EngineSizes(tp=tp, pp=1)
    assert sizes.ranks() == tuple(Rank(0, index) for index in range(tp))
    for rank in sizes.ranks():
        assert sources(rank, sizes, sizes) == (rank,)
        assert sharers(rank, sizes, sizes) == 1


@pytest.mark.parametrize(("consumer", "producer"), [(4, 1), (1, 4), (2, 4)])
def test_unequal_tensor_parallel_sizes_are_refused(consumer: int, producer: int) -> None:
    """V07: at the handshake, never at the first transfer."""
    ours, theirs = EngineSizes(consumer, 1), EngineSizes(producer, 1)
    for ask in (sources, sharers):
        with pytest.raises(GeometryError, match="tp_size differs") as caught:
            ask(Rank(0, 0), ours, theirs)
        assert (caught.value.field, caught.value.ours, caught.value.theirs) == ("tp_size", consumer, producer)


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 2)])
def test_pipeline_stages_are_refused(sizes: tuple[int, int]) -> None:
    """V11: until the plan covers stages."""
    consumer, producer = (EngineSizes(1, pp) for pp in sizes)
    with pytest.raises(GeometryError, match="pp_size differs"):
        sources(Rank(0, 0), consumer, producer)


@pytest.mark.parametrize("rank", [Rank(0, 2), Rank(0, -1), Rank(1, 0), Rank(-1, 0)])
def test_a_rank_that_no_engine_has_is_refused(rank: Rank) -> None:
    """X16"""
    sizes = EngineSizes(2, 1)
    for ask in (sources, sharers):
        with pytest.raises(GeometryError) as caught:
            ask(rank, sizes, sizes)
        assert caught.value.field == "rank"


def test_all_sizes_that_differ_are_told() -> None:
    errors = size_errors(EngineSizes(1, 1), EngineSizes(2, 2))
    assert [error.field for error in errors] == ["tp_size", "pp_size"]
    check_sizes(EngineSizes(4, 1), EngineSizes(4, 1))


def test_ranks_are_listed_stage_by_stage() -> None:
    assert EngineSizes(tp=2, pp=2).ranks() == (Rank(0, 0), Rank(0, 1), Rank(1, 0), Rank(1, 1))
