"""What all parts of a history stand on: one time, one ear for what happens, and what is the same for all."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, Protocol, runtime_checkable

from kvferry.ids import Rank
from kvferry.simulator.ground import arena
from kvferry.simulator.ground.clock import TrueClock
from kvferry.simulator.ground.content import Contents
from kvferry.simulator.ground.events import Observed, Observer
from kvferry.simulator.ground.schedule import Entry, Schedule

CLOCK_ERROR_MAX = 5e-3
"""Of a process's rate, either way: two of them differ by as much as the protocol allows for."""
_CLOCKS = 3
"""Among the random sources of a seed."""


def stream(seed: int, purpose: int) -> Random:
    """A random source of its own for each purpose, so that one does not shift another."""
    return Random(seed * 64 + purpose)


@runtime_checkable
class Choosy(Protocol):
    """An observer that wants only some kinds of events."""

    def taker(self, kind: type[Observed]) -> Callable[[Any], None] | None:
        """What takes events of a kind; None when nothing does."""
        ...


class Ground:
    """The ground of one history. It knows none of those who stand on it."""

    def __init__(self, seed: int, contents: Contents, *, clocks_differ: bool) -> None:
        self.seed = seed
        self.contents = contents
        self.clock = TrueClock()
        self.schedule = Schedule()
        self.healed_at: float | None = None
        """When faults have stopped."""
        self._clocks_differ = clocks_differ
        self._clocks = stream(seed, _CLOCKS)
        self._slots = 0
        self._observers: list[Observer] = []
        self._takers: dict[type[Observed], list[Callable[[Any], None]]] = {}
        """Per kind of event what takes it."""

    # --- time ----------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """True virtual seconds."""
        return self.clock.now

    def at(self, at_seconds: float, action: Callable[[], object]) -> Entry:
        """Plan an action for a true time."""
        return self.schedule.at(at_seconds, action)

    def later(self, seconds: float, action: Callable[[], object]) -> Entry:
        """Plan an action for so many seconds from now."""
        return self.schedule.at(self.clock.now + seconds, action)

    def clock_error(self) -> tuple[float, float]:
        """Offset and rate of one more process's clock."""
        offset, rate = (
            self._clocks.random() * 1e6,
            1 + self._clocks.uniform(-CLOCK_ERROR_MAX, CLOCK_ERROR_MAX),
        )
        return (offset, rate) if self._clocks_differ else (0.0, 1.0)

    # --- what happens --------------------------------------------------------------------------------

    def watch(self, *observers: Observer) -> None:
        """Let observers see what happens from now on, behind those that do already."""
        self._observers += observers
        self._takers.clear()

    def emit(self, event: Observed) -> None:
        """Tell every observer."""
        kind = type(event)
        takers = self._takers.get(kind)
        if takers is None:
            takers = self._takers[kind] = _takers(self._observers, kind)
        for take in takers:
            take(event)

    # --- memory --------------------------------------------------------------------------------------

    def next_slot(self, cache: arena.CacheShape, rank: Rank) -> arena.Slot:
        """Memory for one more rank."""
        self._slots += 1
        return arena.slot(self._slots - 1, cache, rank)


def _takers(observers: list[Observer], kind: type[Observed]) -> list[Callable[[Any], None]]:
    found = [one.taker(kind) if isinstance(one, Choosy) else one.observe for one in observers]
    return [take for take in found if take is not None]
