"""Levers for what ends, or half ends, an engine: it closes, a forward pass raises, an agent breaks.

Each says whether it applied; see `levers`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from random import Random

from kvferry.ids import EngineId
from kvferry.simulator.engine.engine import Engine, is_broken
from kvferry.simulator.engine.rank import RankProcess
from kvferry.simulator.engine.transport import CALLS
from kvferry.simulator.faults.levers import Levers
from kvferry.simulator.world.world import World

CLOSE_SECONDS = 5.0
"""So long a closing engine waits for what is in flight."""
LOOK_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class Breakages:
    """Of the engines of one world."""

    levers: Levers

    @property
    def world(self) -> World:
        """Where it happens."""
        return self.levers.world

    def close(self, engine: EngineId, back_after_seconds: float | None = None) -> bool:
        """An engine is stopped in good order; its directory answers until its ranks have left.

        It comes back after a while, or with the end of the faults.
        """
        life = self.world.engines.get(engine)
        if life is None:
            return False
        self.levers.tell("close", engine)
        self.world.engines[engine] = None
        self.world.fleet.closing[engine] = life
        life.crash_core()
        for process in life.ranks:
            process.close()
        self.world.router.engine_crashed(life)
        self._await_close(life, self.world.now + CLOSE_SECONDS, back_after_seconds)
        return True

    def _await_close(self, life: Engine, until: float, back_after_seconds: float | None) -> None:
        engine = life.facts.engine
        if self.world.fleet.closing.get(engine) is not life:
            return
        if self.world.now < until and any(process.alive for process in life.ranks):
            again = partial(self._await_close, life, until, back_after_seconds)
            self.world.later(LOOK_SECONDS, again)
            return
        del self.world.fleet.closing[engine]
        life.crash()
        if back_after_seconds is not None:
            self.levers.restart(engine, back_after_seconds)

    def fail_forward(self, engine: EngineId, rank: int, lingers_seconds: float, back_after: float) -> bool:
        """The next forward pass that computes KV for others raises on a rank; its core ends of it."""
        life = self.world.engines.get(engine)
        if life is None:
            return False

        def raised() -> None:
            if self.world.engines.get(engine) is life:
                self.levers.tell("forward_fails", f"{engine}, rank {rank}")
                self.levers.crash(engine, 0.0, lingers_seconds)
                self.levers.restart(engine, back_after)

        life.core.workers[rank].raises = raised
        return True

    def break_agent(self, process: RankProcess, random: Random) -> bool:
        """A rank's transport raises what its agent cannot deal with; the engine is started anew in time."""
        if not process.alive or process.broken:
            return False
        call = random.choice((*CALLS, CALLS[0]))
        self.levers.tell("agent_breaks", f"{process.name}, in {call}")
        process.transport.breaks_at = call
        engine = self.world.network.engine_of(process.name)
        life = self.world.engines.get(engine)
        seconds = random.choice((0.1, 1.0, 10.0, 40.0)) * random.random()
        self.world.later(seconds, lambda: self._replace(life))
        return True

    def _replace(self, life: Engine | None) -> None:
        """Whoever looks after an engine notices that it does not transfer any more."""
        if life is not None and self.world.engines.get(life.facts.engine) is life and is_broken(life):
            self.levers.crash(life.facts.engine)
            self.levers.restart(life.facts.engine, 0.3)

    def refuse_hellos(self, process: RankProcess, seconds: float) -> bool:
        """A rank finds the memory of each peer unusable that introduces itself, for so long."""
        if not process.alive:
            return False
        self.levers.tell("hello_refused", f"{process.name} for {seconds:.3f} s")
        process.transport.refuses_until = max(process.transport.refuses_until, self.world.now + seconds)
        return True
