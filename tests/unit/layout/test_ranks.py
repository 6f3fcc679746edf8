"""Which ranks meet, who serves whom where several could, and who only hears that it need not send."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from kvferry.errors import GeometryError
from kvferry.ids import EngineId, Rank
from kvferry.layout.ranks import (
    Duties,
    EngineShape,
    Meeting,
    duties,
    heads_of,
    meetings,
    sent_heads,
    shape_of,
    splits,
    turn_of,
)
from tests.support.caches import changed, with_group
from tests.support.engines import Sizes, caches_of

SIZES = (1, 2, 4, 8)
HEADS = (1, 2, 8)


def shape(tp: int, split: tuple[int, ...] = (4,), heads: int = 8) -> EngineShape:
    """An engine whose stages hold so many layers each."""
    stages, first = [], 0
    for count in split:
        stages.append({heads: frozenset((0, f"l{layer}") for layer in range(first, first + count))})
        first += count
    return EngineShape(tp, tuple(stages))


def test_heads_are_split_evenly_and_replicated_evenly() -> None:
    assert [heads_of(rank, 2, 8) for rank in range(2)] == [range(4), range(4, 8)]
    assert [heads_of(rank, 4, 2) for rank in range(4)] == [range(1), range(1), range(1, 2), range(1, 2)]
    assert [heads_of(rank, 3, 1) for rank in range(3)] == [range(1)] * 3


@pytest.mark.parametrize(("tp", "heads"), [(3, 8), (8, 6), (5, 2)])
def test_heads_that_do_not_split_evenly_are_refused(tp: int, heads: int) -> None:
    assert not splits(tp, heads)
    for ask in (
        lambda: heads_of(0, tp, heads),
        lambda: duties(0, tp, 1, heads),
        lambda: duties(0, 1, tp, heads),
    ):
        with pytest.raises(GeometryError) as caught:
            ask()
        assert (caught.value.field, caught.value.ours) == ("tp_size", tp)


@pytest.mark.parametrize(
    ("receivers", "senders", "expected"),
    [
        (1, 4, [Duties((0,), (1, 2, 3))]),
        (2, 4, [Duties((0,), (1,)), Duties((2,), (3,))]),
        (4, 2, [Duties((0,), ()), Duties((0,), ()), Duties((1,), ()), Duties((1,), ())]),
        (3, 2, [Duties((0,), ()), Duties((0,), ()), Duties((1,), ())]),
        (2, 3, [Duties((0,), ()), Duties((1,), (2,))]),
        (4, 4, [Duties((rank,), ()) for rank in range(4)]),
    ],
)
def test_replicas_of_one_head_are_shared_out(receivers: int, senders: int, expected: list[Duties]) -> None:
    """MLA: one rank serves each, by a rule that both sides know; each other one hears so once."""
    assert [duties(rank, receivers, senders, heads=1) for rank in range(receivers)] == expected


def test_the_turn_moves_within_a_rank_s_own_share() -> None:
    """Many engines of one rank each use all of the producer's network cards."""
    assert [duties(0, 1, 4, heads=1, turn=turn).serving for turn in range(5)] == [
        (0,),
        (1,),
        (2,),
        (3,),
        (0,),
    ]
    assert [duties(1, 2, 4, heads=1, turn=turn).serving for turn in range(3)] == [(2,), (3,), (2,)]
    assert duties(1, 4, 4, heads=1, turn=3).serving == (1,), "equal engines meet rank by rank"
    chosen = Counter(duties(0, 1, 8, heads=1, turn=turn_of(EngineId(f"d_dp{n}"))).serving for n in range(64))
    assert len(chosen) == 8
    assert max(chosen.values()) <= 16


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("turn", [0, 1, 5])
@pytest.mark.parametrize(("receivers", "senders"), list(product(SIZES, SIZES)))
def test_each_head_comes_from_one_rank_and_every_rank_hears_of_it(
    receivers: int, senders: int, turn: int, heads: int
) -> None:
    """V06: (2→4)(4→8)(8→16)(16→8)(16→16) and all others; nobody is left to hold blocks for nobody."""
    told: Counter[int] = Counter()
    load: Counter[int] = Counter()
    for receiver in range(receivers):
        duty = duties(receiver, receivers, senders, heads, turn)
        assert not set(duty.serving) & set(duty.spared)
        sent = [
            head
            for sender in range(senders)
            for head in sent_heads(sender, senders, receiver, receivers, heads, turn)
        ]
        assert sorted(sent) == list(heads_of(receiver, receivers, heads))
        assert all(sent_heads(s, senders, receiver, receivers, heads, turn) for s in duty.serving)
        told.update(duty.serving + duty.spared)
        load.update(duty.serving)
    assert set(told) == set(range(senders))
    # Balanced: no rank serves two more ranks than another one that serves.
    assert max(load.values()) - min(load.values()) <= 1


@pytest.mark.parametrize("tp", SIZES)
def test_equal_engines_meet_rank_by_rank(tp: int) -> None:
    for rank in range(tp):
        assert meetings(Rank(0, rank), shape(tp), shape(tp)) == (Meeting(Rank(0, rank), True, 1),)


def test_stages_meet_where_they_share_a_layer() -> None:
    """V11: by name, whatever the split."""
    consumer, producer = shape(1, (3, 1)), shape(1, (1, 2, 1))
    assert meetings(Rank(0, 0), consumer, producer) == (
        Meeting(Rank(0, 0), True, 1),
        Meeting(Rank(1, 0), True, 1),
    )
    assert meetings(Rank(1, 0), consumer, producer) == (Meeting(Rank(2, 0), True, 1),)
    assert meetings(Rank(0, 0), shape(1, (4,)), shape(1, (2, 2))) == tuple(
        Meeting(Rank(pp, 0), True, 1) for pp in range(2)
    )


def test_stages_that_share_a_rank_count_as_its_sharers() -> None:
    """P42: a producer rank knows how many ranks of the consumer it has to hear of."""
    (meeting,) = meetings(Rank(1, 1), shape(2, (2, 2)), shape(1, (4,)))
    assert meeting == Meeting(Rank(0, 0), True, 4)


def test_replicas_hear_from_every_stage_that_shares_their_layers() -> None:
    consumer, producer = shape(1, (2, 2), heads=1), shape(2, (4,), heads=1)
    for pp in range(2):
        assert meetings(Rank(pp, 0), consumer, producer) == (
            Meeting(Rank(0, 0), True, 2),
            Meeting(Rank(0, 1), False, 2),
        )


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("receivers", "senders"), list(product(SIZES, SIZES)))
@pytest.mark.parametrize(("theirs", "ours"), [((4,), (4,)), ((2, 2), (4,)), ((1, 3), (2, 1, 1))])
def test_both_sides_count_the_same(
    receivers: int, senders: int, heads: int, theirs: tuple[int, ...], ours: tuple[int, ...]
) -> None:
    """P51: what a producer rank waits for is what registers with it, and nobody is forgotten."""
    consumer, producer = shape(receivers, ours, heads), shape(senders, theirs, heads)
    heard: Counter[Rank] = Counter()
    stated: dict[Rank, set[int]] = {}
    for pp, tp in product(range(len(ours)), range(receivers)):
        for meeting in meetings(Rank(pp, tp), consumer, producer, turn=3):
            heard[meeting.rank] += 1
            stated.setdefault(meeting.rank, set()).add(meeting.sharers)
    assert set(heard) == {Rank(pp, tp) for pp, tp in product(range(len(theirs)), range(senders))}
    assert stated == {rank: {count} for rank, count in heard.items()}


@pytest.mark.parametrize("rank", [Rank(0, 2), Rank(0, -1), Rank(1, 0), Rank(-1, 0)])
def test_a_rank_that_no_engine_has_is_refused(rank: Rank) -> None:
    """X16"""
    with pytest.raises(GeometryError) as caught:
        meetings(rank, shape(2), shape(2))
    assert caught.value.field == "rank"


def test_an_engine_whose_stages_are_unknown_has_no_shape() -> None:
    """V11"""
    spec = caches_of(Sizes())[Rank(0, 0)]
    bare = with_group(spec, stages=())
    assert shape_of(bare) == shape_of(spec)
    with pytest.raises(GeometryError, match="stages"):
        shape_of(changed(bare, pp_size=2))


def test_every_rank_describes_the_same_engine() -> None:
    caches = caches_of(Sizes(tp=2, split=(2, 1), heads=2))
    found = shape_of(caches[Rank(0, 0)])
    assert all(shape_of(spec) == found for spec in caches.values())
    assert (found.tp, found.pp) == (2, 2)
    assert found.stages[1] == {2: frozenset({(0, "layer2")})}
