"""What an engine keeps after turns: how much, for how long, and who gets the memory back first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.handoff import DecodeParams, SourceParams
from kvferry.host.events import Ended
from kvferry.host.facts import EngineFacts
from kvferry.host.holding import GIVE_BACK_SECONDS_MAX, Holding, HoldLimits
from kvferry.host.orders import StepOrders
from kvferry.host.pins import Pins
from kvferry.ids import EngineId, TransferId
from kvferry.protocol import reasons
from kvferry.protocol.commands import Advance, Command, Expect, Finish, Reclaim

FACTS = EngineFacts(EngineId("d"), tp=2, pp=1, produces=True, consumes=True, block_tokens=16, block_count=100)
SOURCE = SourceParams(engine=EngineId("d"), host="10.0.0.2", port=5600, mode="push")


class Pool:
    """A block pool of which all but `free` blocks are in use."""

    def __init__(self) -> None:
        self.blocks = range(FACTS.block_count)
        self.held: Counter[int] = Counter()
        self.free = 50

    def touch(self, blocks: Any) -> None:
        self.held.update(blocks)

    def free_blocks(self, ordered_blocks: Any) -> None:
        self.held.subtract(ordered_blocks)

    def get_num_free_blocks(self) -> int:
        return self.free


class Counted(Counter[tuple[str, ...]]):
    """Counters by their labels."""

    def count(self, name: str, amount: int = 1, labels: tuple[str, ...] = ()) -> None:
        self[labels] += amount

    def observe(self, name: str, value: float) -> None:
        raise AssertionError(f"{name} is not for holds")


class World:
    """One `Holding` and what it is told of."""

    def __init__(self, blocks_max: int = 20, tokens_min: int = 1) -> None:
        self.pool, self.pins, self.counted, self.now = Pool(), Pins(), Counted(), 100.0
        self.pins.bind(self.pool)
        minted = count()
        limits = HoldLimits(60.0, blocks_max, tokens_min)
        self.holding = Holding(
            FACTS, self.pins, self.counted, limits, lambda: self.now, lambda: f"minted-{next(minted):04}"
        )

    def finish(self, name: str = "r", tokens: int = 34, **changes: Any) -> Any:
        """A request of so many tokens ends; all have the same blocks."""
        params = DecodeParams(
            source=SOURCE, transfer=TransferId(f"origin-{name}"), consumers=changes.pop("consumers", 1)
        )
        request = SimpleNamespace(
            request_id=name,
            num_prompt_tokens=20,
            all_token_ids=list(range(tokens)),
            num_tokens=tokens,
            num_computed_tokens=changes.pop("computed", tokens - 1),
            status=SimpleNamespace(name=changes.pop("status", "FINISHED_LENGTH_CAPPED")),
            **(
                {"mm_features": [], "prompt_embeds": None, "lora_request": None, "cache_salt": None} | changes
            ),
        )
        self.holding.note(request, params)
        return self.holding.finish(request, list(range(-(-tokens // 16))), SOURCE)

    def told(self) -> list[Command]:
        """The commands of the next step."""
        orders = StepOrders()
        self.holding.plan(orders)
        return orders.commands

    def reclaimed(self) -> list[str]:
        return [command.transfer for command in self.told() if isinstance(command, Reclaim)]

    def end(
        self, number: int, reason: str = reasons.FETCHED, ranks: Iterator[int] | range = range(2)
    ) -> None:
        for rank in ranks:
            self.holding.rank_ended(Ended(rank, f"held {number}", reason, sending=True, held=True))


@pytest.fixture
def world() -> World:
    return World()


def test_a_turn_is_a_transfer_with_a_lease_of_its_own(world: World) -> None:
    held = world.finish(tokens=34)
    assert (held.tokens, held.transfer, held.lease_seconds, held.source.mode) == (
        33,
        "minted-0000",
        60.0,
        None,
    )
    assert held.prefixes[-1].tokens == 33
    orders = StepOrders()
    world.holding.plan(orders)
    assert [(one.transfer, one.request, one.held) for one in orders.senders] == [
        ("minted-0000", "held 1", True)
    ]
    assert orders.commands == [
        Expect(held.transfer, 33),
        Advance(held.transfer, 33, 0, (((0, 3),),)),
        Finish(held.transfer, keep_seconds=60.0),
    ]
    assert not world.holding.has_orders
    assert [world.pool.held[block] for block in range(4)] == [1, 1, 1, 0]


@pytest.mark.parametrize(
    "changes",
    [
        {"status": "FINISHED_ABORTED"},
        {"consumers": 2},
        {"mm_features": [1]},
        {"tokens": 8},
    ],
)
def test_what_is_of_no_use_is_not_kept(changes: dict[str, Any]) -> None:
    world = World(tokens_min=8)
    assert world.finish(**changes) is None
    assert not world.told()
    assert not len(world.holding)


def test_a_request_that_no_router_handed_over_is_not_kept(world: World) -> None:
    assert world.holding.finish(SimpleNamespace(request_id="other"), [1], SOURCE) is None


def test_only_what_has_been_computed_is_kept(world: World) -> None:
    assert world.finish(tokens=40, computed=17).tokens == 17


def test_blocks_come_back_when_every_rank_has_let_go(world: World) -> None:
    world.finish()
    world.end(1, ranks=range(1))
    assert (len(world.holding), world.pool.held[0], world.counted) == (1, 1, {})
    world.end(1)
    world.end(1)
    assert (len(world.holding), world.holding.blocks, world.pool.held[0]) == (0, 0, 0)
    assert world.counted == {("used",): 1}


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        (reasons.WRITTEN, "used"),
        (reasons.CANCELLED, "unused"),
        (reasons.LEASE_EXPIRED, "expired"),
        ("starved: why", "reclaimed"),
        (reasons.PEER_LOST, "failed"),
    ],
)
def test_each_hold_ends_under_one_name(world: World, reason: str, outcome: str) -> None:
    world.finish()
    world.end(1, reason)
    assert world.counted == {(outcome,): 1}


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_a_rank_that_did_not_go_well_speaks_for_all(world: World, bad_rank: int) -> None:
    world.finish()
    for rank in range(2):
        world.end(1, reasons.PEER_LOST if rank == bad_rank else reasons.WRITTEN, range(rank, rank + 1))
    assert world.counted == {("failed",): 1}


def test_the_oldest_make_room_for_the_newest(world: World) -> None:
    """P63: the share is bounded; 20 blocks are six turns of three."""
    for number in range(6):
        assert world.finish(f"r{number}") is not None
    world.told()
    assert world.finish("new") is not None
    assert world.reclaimed() == ["minted-0000"]
    assert world.holding.blocks == 21, "the oldest is on its way back"
    world.end(1, reasons.STARVED)
    assert world.holding.blocks == 18


def test_nothing_is_kept_beyond_the_share(world: World) -> None:
    """Not even when nothing of what is given back comes: ranks may be busy with it."""
    assert world.finish(tokens=16 * 21) is None
    kept = sum(world.finish(f"r{number}") is not None for number in range(40))
    assert kept < 40
    assert world.holding.blocks <= 2 * 20 + 3
    assert world.counted[("no_room",)] == 40 - kept + 1


def test_a_request_that_finds_no_memory_gets_the_oldest(world: World) -> None:
    for number in range(4):
        world.finish(f"r{number}")
    world.told()
    world.holding.make_way(50)
    assert not world.reclaimed(), "the pool has as many"
    world.holding.make_way(54)
    assert world.reclaimed() == ["minted-0000", "minted-0001"]
    world.holding.make_way(54)
    assert not world.reclaimed(), "asked again in the next step, those are still to come"
    world.holding.make_way(1000)
    assert world.reclaimed() == ["minted-0002", "minted-0003"]


def test_waiting_is_better_than_preempting_for_a_moment(world: World) -> None:
    """A hold that somebody is reading does not come back, and then the engine preempts."""
    assert not world.holding.is_giving_back()
    world.finish()
    assert world.holding.is_giving_back()
    assert world.reclaimed() == ["minted-0000"]
    world.now += GIVE_BACK_SECONDS_MAX
    assert not world.holding.is_giving_back()
    assert not world.told()


def test_what_is_kept_of_a_request_is_told_to_who_knows_its_transfer(world: World) -> None:
    held = world.finish()
    assert world.holding.kept_of(TransferId("origin-r")) is held
    assert world.holding.kept_of(TransferId("origin-s")) is None
    assert world.holding.give_all_back()
    assert world.holding.kept_of(TransferId("origin-r")) is None
    assert not world.holding.give_all_back()
    again = world.finish()
    world.end(1, reasons.STARVED)
    assert world.holding.kept_of(TransferId("origin-r")) is again, (
        "the older one's end is not the newer one's"
    )
