"""The order of measurements, repeats within the time, and what is refused before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest

from kvferry.errors import UsageError
from kvferry.microbench import handover
from kvferry.microbench.cells import Cell, Shape, make_grid
from kvferry.microbench.handover import Options, hand_overs, measure
from kvferry.microbench.producer import Kind, Placed, Sample
from kvferry.microbench.tasks import Outwaited, Steps

MIB = 1 << 20


class StubProducer:
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[Kind, Cell]] = []
        self.placed: list[Placed] = []
        self.waited: list[int] = []
        self.corrupted: int | None = None

    def corrupt(self, block: int | None) -> None:
        self.corrupted = block

    def blocks(self, shape: Shape) -> int:
        return 4 * MIB // shape.block_bytes

    def ferry(self, cell: Cell, placed: Placed) -> Sample:
        return self._note("ferry", cell, placed)

    def raw(self, cell: Cell, placed: Placed) -> Sample:
        return self._note("raw", cell, placed)

    def _note(self, kind: Kind, cell: Cell, placed: Placed) -> Sample:
        self.asked.append((kind, cell))
        self.placed.append(placed)
        return Sample(kind, 1.0, 1.0, 0.0)

    def outwait(
        self, shape: Shape, transfers: int, settle_seconds: float, seconds: float, seed: int
    ) -> tuple[Steps, Outwaited]:
        self.waited.append(transfers)
        return Steps([0.1]), Outwaited(Steps([0.2]), 0, ())


class Watcher:
    """Counts."""

    def __init__(self) -> None:
        self.done = 0.0

    def doing(self, what: str) -> None:
        """Not looked at."""

    def advance(self, amount: float) -> None:
        self.done += amount


@pytest.fixture
def producer(monkeypatch: pytest.MonkeyPatch) -> StubProducer:
    stub = StubProducer()

    @contextmanager
    def opened(*arguments: Any) -> Iterator[StubProducer]:
        yield stub

    monkeypatch.setattr(handover, "opened", opened)
    return stub


def options(**changed: Any) -> Options:
    grid = make_grid(
        blocks=(4,),
        pages=(2048,),
        layers=4,
        layouts=("LBHNC", "BLHNC"),
        fragmentations=("scattered",),
        concurrencies=(1, 2),
        cache_bytes=4 * MIB,
    )
    given = {"grid": grid, "cache_bytes": 4 * MIB, "repeats": 3, "seconds": 100.0, "outstanding": 8}
    return Options(**given | changed)


def ticking(seconds: float) -> Callable[[], float]:
    ticks = count()
    return lambda: next(ticks) * seconds


def test_both_kinds_take_turns_in_every_cell_and_repeat(producer: StubProducer) -> None:
    watcher, chosen = Watcher(), options()
    measured = measure(chosen, watcher, ticking(0.0))
    assert measured.repeats == len(measured.copy_bytes_per_second) == 3
    warm_up, rest = producer.asked[:4], producer.asked[4:]
    assert {cell.shape for _, cell in warm_up} == set(chosen.grid.shapes)
    pairs = [rest[at : at + 2] for at in range(0, len(rest), 2)]
    assert [pair[0][1] for pair in pairs] == list(chosen.grid.cells) * 3
    assert all(one[1] == other[1] and {one[0], other[0]} == {"ferry", "raw"} for one, other in pairs)
    first = chosen.grid.cells[0]
    assert [pair[0][0] for pair in pairs if pair[0][1] == first] == ["ferry", "raw", "ferry"]
    assert all(len(kinds["ferry"]) == len(kinds["raw"]) == 3 for kinds in measured.samples.values())
    assert watcher.done == hand_overs(chosen) == 24


def test_each_hand_over_has_blocks_and_content_of_its_own(producer: StubProducer) -> None:
    measure(options(), Watcher(), ticking(0.0))
    assert len({placed.seed for placed in producer.placed}) == len(producer.placed)
    assert len({placed.sources for placed in producer.placed}) > len(producer.placed) // 2


def test_when_time_is_over_no_further_repeat_begins_but_the_first_is_whole(producer: StubProducer) -> None:
    assert measure(options(seconds=1.0), Watcher(), ticking(2.0)).repeats == 1
    assert measure(options(seconds=3.0), Watcher(), ticking(2.0)).repeats == 2


def test_waiting_is_measured_for_one_and_for_many(producer: StubProducer) -> None:
    measured = measure(options(corrupt_block=1), Watcher(), ticking(0.0))
    assert producer.waited == [one.transfers for one in measured.waiting] == [1, 8]
    assert measured.waiting[0].producer.wall_seconds == [0.1]
    assert measured.waiting[0].consumer.wall_seconds == [0.2]
    assert producer.corrupted == 1
    assert measure(options(outstanding=0), Watcher(), ticking(0.0)).waiting == []


def test_more_waiting_transfers_than_blocks_are_refused(producer: StubProducer) -> None:
    """4 MiB are 512 blocks of four 2 KiB pages; on one side each transfer's block is one further."""
    measure(options(outstanding=511), Watcher(), ticking(0.0))
    with pytest.raises(UsageError, match="--outstanding must be at most 511 with this cache, not 512"):
        measure(options(outstanding=512), Watcher(), ticking(0.0))
