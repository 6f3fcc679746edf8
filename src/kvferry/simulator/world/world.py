"""A world: engines, network, directories and router on one ground, all of it from one seed.

It is made of its parts and holds them together. What goes wrong in it is done from above, by `faults`; what
happens in which order is up to `play`.
"""

from __future__ import annotations

from collections.abc import Callable

from kvferry.ids import EngineId
from kvferry.simulator.engine.engine import Engine
from kvferry.simulator.engine.requests import Request
from kvferry.simulator.ground.content import Contents
from kvferry.simulator.ground.events import Observed
from kvferry.simulator.ground.ground import Ground, stream
from kvferry.simulator.ground.options import Options
from kvferry.simulator.ground.schedule import Entry
from kvferry.simulator.world import shape
from kvferry.simulator.world.conversations import Conversations
from kvferry.simulator.world.fleet import Fleet
from kvferry.simulator.world.network import Network
from kvferry.simulator.world.resolver import Directories
from kvferry.simulator.world.router import Router

_SHAPE, _NETWORK, _RESOLVER = range(3)
_ENGINES = 10
"""Among the random sources of a seed."""


class World:
    """The world of one history. Its engines see it as `engine.Surroundings`."""

    def __init__(self, seed: int, options: Options) -> None:
        self.seed = seed
        self.options = options
        self.shape = shape.draw(options, stream(seed, _SHAPE), stream(seed, _ENGINES))
        self.faults = self.shape.faults
        self.limits = self.shape.limits
        self.contents = Contents(self.shape.layers, self.shape.tokens_max)
        self.ground = Ground(seed, self.contents, clocks_differ=self.shape.clocks_differ)
        self.fleet = Fleet(self.shape.engines)
        self.engines = self.fleet.lives
        self.network = Network(
            self.ground, self.fleet, stream(seed, _NETWORK), self.shape.fabric, self.shape.link
        )
        self.resolver = Directories(self.ground, self.fleet, self.network, stream(seed, _RESOLVER))
        self.router = Router(self.ground, self.fleet)
        self.router.conversations = Conversations(
            self.ground,
            self.fleet,
            self.shape.turn_tokens_max,
            lambda turn, kept: self.router.dispatch(turn, history=kept),
        )
        self.outcomes: dict[str, int] = {}
        """How many transfers have ended how, as engines have counted them."""
        self.outcome_of: dict[str, str] = {}
        """By request, once counted."""
        self._starts: dict[EngineId, int] = {}

    def start(self, name: EngineId) -> None:
        """Start an engine that is down."""
        life = self._starts.get(name, 0)
        self._starts[name] = life + 1
        if name in self.fleet.newest:
            # Whoever starts an engine sees to it that nothing of the one before is left.
            self.fleet.newest[name].crash()
            self.fleet.closing.pop(name, None)
        engine = Engine(self.ground, self, self.fleet.facts(name), life)
        self.fleet.newest[name] = self.fleet.lives[name] = engine
        self.network.add(name, engine.ranks)

    def count(self, request: Request, outcome: str, reason: str) -> None:
        """A transfer has ended on one side."""
        self.outcome_of[request.name] = outcome
        side = "consumer" if request.is_decode else "producer"
        key = f"{side} {outcome} {reason.partition(':')[0]}"
        self.outcomes[key] = self.outcomes.get(key, 0) + 1

    # --- its ground, for those above -----------------------------------------------------------------

    @property
    def now(self) -> float:
        """True virtual seconds."""
        return self.ground.now

    @property
    def healed_at(self) -> float | None:
        """When faults have stopped."""
        return self.ground.healed_at

    def at(self, at_seconds: float, action: Callable[[], object]) -> Entry:
        """Plan an action for a true time."""
        return self.ground.at(at_seconds, action)

    def later(self, seconds: float, action: Callable[[], object]) -> Entry:
        """Plan an action for so many seconds from now."""
        return self.ground.later(seconds, action)

    def emit(self, event: Observed) -> None:
        """Tell every observer."""
        self.ground.emit(event)
