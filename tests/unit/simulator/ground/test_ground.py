"""The ground of a history: who hears of what, when planned things are due, and what each process gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvferry.ids import EngineId, Rank
from kvferry.simulator.ground.arena import CacheShape
from kvferry.simulator.ground.content import Contents
from kvferry.simulator.ground.events import BlocksReturned, Healed, Observed
from kvferry.simulator.ground.ground import Ground, stream


class Everything:
    """Hears of everything."""

    def __init__(self, heard: list[tuple[str, Observed]], name: str) -> None:
        self.heard, self.name = heard, name

    def observe(self, event: Observed) -> None:
        self.heard.append((self.name, event))


class OnlyHealing(Everything):
    """Wants one kind of event."""

    def taker(self, kind: type[Observed]) -> Callable[[Any], None] | None:
        return self.observe if kind is Healed else None


def ground(*, clocks_differ: bool = True) -> Ground:
    return Ground(7, Contents(2, 16), clocks_differ=clocks_differ)


def test_observers_hear_in_the_order_in_which_they_came() -> None:
    here, heard = ground(), []
    healed, returned = Healed(1.0, 2.0), BlocksReturned(1.0, EngineId("P0"), (1,))
    here.watch(Everything(heard, "first"), OnlyHealing(heard, "choosy"))
    here.emit(returned)
    here.emit(healed)
    assert heard == [("first", returned), ("first", healed), ("choosy", healed)]


def test_who_comes_later_hears_only_of_what_follows() -> None:
    here, heard = ground(), []
    before, after = Healed(1.0, 2.0), Healed(2.0, 3.0)
    here.watch(Everything(heard, "first"))
    here.emit(before)
    here.watch(Everything(heard, "second"))
    here.emit(after)
    assert heard == [("first", before), ("first", after), ("second", after)]


def test_what_is_planned_counts_from_now() -> None:
    here, done = ground(), []
    here.clock.now = 5.0
    here.later(1.0, lambda: done.append("later"))
    here.at(5.5, lambda: done.append("at"))
    assert here.now == 5.0
    due = []
    while (at_seconds := here.schedule.next_due()) is not None:
        due.append(at_seconds)
        here.schedule.pop()()
    assert (due, done) == ([5.5, 6.0], ["at", "later"])


def test_clocks_differ_only_where_they_may() -> None:
    errors = [ground().clock_error(), ground().clock_error()]
    assert errors[0] == errors[1] != (0.0, 1.0)
    assert ground(clocks_differ=False).clock_error() == (0.0, 1.0)


def test_every_rank_gets_memory_of_its_own() -> None:
    here, shape = ground(), CacheShape("LBHNC", 2, 8, 4, 1)
    slots = [here.next_slot(shape, Rank(0, 0)) for _ in range(3)]
    assert [slot.number for slot in slots] == [0, 1, 2]
    first, second, _ = (slot.parts[0].values for slot in slots)
    first[:] = 1
    second[:] = 2
    assert (first == 1).all()


def test_each_purpose_has_a_random_source_of_its_own() -> None:
    drawn = [stream(seed, purpose).random() for seed in range(3) for purpose in range(64)]
    assert len(set(drawn)) == len(drawn)
