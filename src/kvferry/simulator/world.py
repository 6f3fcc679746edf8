"""A world: engines, network, router and faults on one virtual clock, all of it from one seed.

It holds the parts together; what happens in which order is in `history`.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from kvferry.ids import EngineId, Incarnation
from kvferry.protocol.limits import Limits
from kvferry.simulator import arena, shape
from kvferry.simulator.checkers import Checker
from kvferry.simulator.clock import TrueClock
from kvferry.simulator.content import Contents
from kvferry.simulator.engine import Engine, EngineFacts
from kvferry.simulator.events import Observed, Observer
from kvferry.simulator.history import History
from kvferry.simulator.inspection import Inspection
from kvferry.simulator.levers import Levers
from kvferry.simulator.network import Network
from kvferry.simulator.options import Options
from kvferry.simulator.outcome import Violation
from kvferry.simulator.rank import RankProcess
from kvferry.simulator.requests import Request
from kvferry.simulator.resolver import Directories
from kvferry.simulator.router import Router
from kvferry.simulator.schedule import Entry, Schedule

_SHAPE, _NETWORK, _RESOLVER, _CLOCKS = range(4)


class World:
    """One history. `run` plays it; everything else is for its parts and observers."""

    def __init__(self, seed: int, options: Options) -> None:
        self.seed = seed
        self.options = options
        self.clock = TrueClock()
        self.observers: list[Observer] = []
        self._takers: dict[type[Observed], list[Callable[[Any], None]]] = {}
        """Per kind of event what takes it, of the first so many observers."""
        self._takers_of = 0
        self.shape = shape.draw(options, self.stream(_SHAPE))
        self.faults = self.shape.faults
        self.limits: Limits = self.shape.limits
        self.contents = Contents(shape.LAYERS, self.shape.tokens_max)
        self.network = Network(self, self.stream(_NETWORK), self.shape.fabric, self.shape.link)
        self.resolver = Directories(self, self.stream(_RESOLVER))
        self.router = Router(self)
        self.inspection = Inspection(self)
        self.levers = Levers(self)
        self.engines: dict[EngineId, Engine | None] = {}
        self.outcomes: dict[str, int] = {}
        self.outcome_of: dict[str, str] = {}
        """By request, once counted."""
        self.violations: list[Violation] = []
        """What is found by other means than checkers."""
        self.items: list[tuple[int, str]] = []
        self.healed_at: float | None = None
        self.deadline_seconds = 0.0
        self.schedule = Schedule()
        self._lives: dict[EngineId, int] = {}
        self._latest: dict[EngineId, Engine] = {}
        self._slots = 0
        self._clocks = self.stream(_CLOCKS)

    def stream(self, purpose: int) -> Random:
        """A random source of its own for each purpose, so that one does not shift another."""
        return Random(self.seed * 64 + purpose)

    @property
    def now(self) -> float:
        """True virtual seconds."""
        return self.clock.now

    def run(self) -> None:
        """Play the history to its end."""
        History(self).run()

    # --- for its parts -------------------------------------------------------------------------------

    def emit(self, event: Observed) -> None:
        """Tell every observer."""
        kind = type(event)
        if len(self.observers) != self._takers_of:
            self._takers.clear()
            self._takers_of = len(self.observers)
        takers = self._takers.get(kind)
        if takers is None:
            takers = self._takers[kind] = _takers(self.observers, kind)
        for take in takers:
            take(event)

    def at(self, at_seconds: float, action: Callable[[], object]) -> Entry:
        """Plan an action for a true time."""
        return self.schedule.at(at_seconds, action)

    def later(self, seconds: float, action: Callable[[], object]) -> Entry:
        """Plan an action for so many seconds from now."""
        return self.schedule.at(self.clock.now + seconds, action)

    def facts(self, engine: EngineId) -> EngineFacts:
        """What an engine is in all its lives."""
        return next(facts for facts in self.shape.engines if facts.engine == engine)

    def facts_at(self, port: int) -> EngineFacts | None:
        """The engine whose directory is at a port."""
        return next((facts for facts in self.shape.engines if facts.port == port), None)

    def living(self, engine: EngineId) -> list[RankProcess]:
        """The ranks of an engine's life now."""
        life = self.engines.get(engine)
        return [] if life is None else life.ranks

    def last_incarnation(self, engine: EngineId) -> Incarnation:
        """Of an engine's newest life."""
        return self._latest[engine].incarnation

    def next_slot(self, cache: arena.CacheShape, tp: int) -> arena.Slot:
        """Memory for one more rank."""
        self._slots += 1
        return arena.slot(self._slots - 1, cache, tp)

    def fillings(self) -> int:
        """How often the smallest cache would have to be filled for the requests that have not ended."""
        tokens = sum(
            request.prompt.tokens + request.outputs_max
            for engine in self.engines.values()
            if engine is not None
            for request in engine.scheduler.requests.values()
        )
        smallest = min(facts.cache.block_count for facts in self.shape.engines)
        return 1 + tokens // (smallest * shape.BLOCK_TOKENS)

    def clock_error(self) -> tuple[float, float]:
        """Offset and rate of one more process's clock."""
        offset, rate = self._clocks.random() * 1e6, 1 + self._clocks.uniform(-1e-3, 1e-3)
        return (offset, rate) if self.shape.clocks_differ else (0.0, 1.0)

    def count(self, request: Request, outcome: str, reason: str) -> None:
        """A transfer has ended on one side."""
        self.outcome_of[request.name] = outcome
        side = "consumer" if request.is_decode else "producer"
        key = f"{side} {outcome} {reason.partition(':')[0]}"
        self.outcomes[key] = self.outcomes.get(key, 0) + 1

    def start(self, name: EngineId) -> None:
        """Start an engine that is down."""
        life = self._lives.get(name, -1) + 1
        self._lives[name] = life
        if name in self._latest:
            # Whoever starts an engine sees to it that nothing of the one before is left.
            self._latest[name].crash()
        engine = self._latest[name] = Engine(self, self.facts(name), life)
        self.engines[name] = engine
        self.network.add(name, engine.ranks)


def _takers(observers: list[Observer], kind: type[Observed]) -> list[Callable[[Any], None]]:
    found = [one.taker(kind) if isinstance(one, Checker) else one.observe for one in observers]
    return [take for take in found if take is not None]
