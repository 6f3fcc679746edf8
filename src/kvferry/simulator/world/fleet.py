"""The engines of a world by name: what each is, and the life that it has now."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.ids import EngineId, Incarnation
from kvferry.simulator.engine.engine import Engine
from kvferry.simulator.engine.facts import EngineFacts
from kvferry.simulator.engine.rank import RankProcess


@dataclass(frozen=True, slots=True)
class Fleet:
    """All engines of a world."""

    engines: tuple[EngineFacts, ...]
    lives: dict[EngineId, Engine | None] = field(default_factory=dict)
    """None while an engine is down."""
    closing: dict[EngineId, Engine] = field(default_factory=dict)
    """Lives that are down for those who send requests, and whose ranks have not left yet."""
    newest: dict[EngineId, Engine] = field(default_factory=dict)
    """The last life of each that was started, whether it has ended or not."""

    def facts(self, engine: EngineId) -> EngineFacts:
        """What an engine is in all its lives."""
        return next(facts for facts in self.engines if facts.engine == engine)

    def facts_at(self, port: int) -> EngineFacts | None:
        """The engine whose directory is at a port."""
        return next((facts for facts in self.engines if facts.port == port), None)

    def living(self, engine: EngineId) -> list[RankProcess]:
        """The ranks of an engine's life now."""
        life = self.lives.get(engine)
        return [] if life is None else life.ranks

    def last_incarnation(self, engine: EngineId) -> Incarnation:
        """Of an engine's newest life."""
        return self.newest[engine].incarnation
