"""Directories of engines on virtual time: slow, refusing, silent behind a partition, or not ready yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random

from kvferry.agent.directory import Directory
from kvferry.errors import PeerError, PeerGoneError, TransportError
from kvferry.ids import EngineId
from kvferry.simulator.engine.rank import RankProcess
from kvferry.simulator.ground.ground import Ground
from kvferry.simulator.world.fleet import Fleet
from kvferry.simulator.world.network import Network

ASK_SECONDS = 0.25
"""Pause before an engine is asked again that is not ready or does not answer."""
Callback = Callable[[Directory | Exception], None]


@dataclass(slots=True)
class Directories:
    """All engines' side channels. `slow_until` is when answers come quickly again."""

    ground: Ground
    fleet: Fleet
    network: Network
    random: Random
    slow_until: float = 0.0
    slow_seconds: float = 0.0
    unready_until: dict[EngineId, float] = field(default_factory=dict)
    """Engines whose directories do not answer until then."""
    misled_until: dict[EngineId, float] = field(default_factory=dict)
    """Engines at whose addresses another engine answers until then."""

    def calm(self) -> None:
        """Nothing is slow or refused any more."""
        self.slow_until = 0.0
        self.unready_until.clear()
        self.misled_until.clear()

    def of(self, process: RankProcess) -> RankResolver:
        """How one rank asks."""
        return RankResolver(self, process)

    def ask(
        self, process: RankProcess, port: int, callback: Callback, until: float, *, patient: bool
    ) -> None:
        """Ask now; ask again until then, if patient even where nobody listens."""
        now = self.ground.now
        facts = self.fleet.facts_at(port)
        ours = self.network.engine_of(process.name)
        if facts is None:
            self._answer(process, callback, TransportError(f"nobody has port {port}"), until)
            return
        engine = self.fleet.lives.get(facts.engine) or self.fleet.closing.get(facts.engine)
        silent = self.network.is_cut(ours, facts.engine) or now < self.unready_until.get(facts.engine, 0.0)
        directory = None if engine is None else engine.directory()
        if not silent and directory is None and not patient:
            self._answer(process, callback, PeerGoneError(f"nobody listens on port {port}"), until)
            return
        if directory is not None and not silent:
            misled = now < self.misled_until.get(facts.engine, 0.0)
            another = PeerError(f"port {port} is not that of {facts.engine}")
            self._answer(process, callback, another if misled else directory, until)
        elif now + ASK_SECONDS >= until:
            self._answer(process, callback, _silent(), until)
        else:
            # Whoever has not been refused at once is as good as any that is starting.
            again = partial(self.ask, process, port, callback, until, patient=True)
            self.ground.at(now + ASK_SECONDS, process.guard(again))

    def seconds(self) -> float:
        """How long a question or an answer takes now."""
        slow = self.slow_seconds if self.ground.now < self.slow_until else 0.0
        return 1e-3 + 4e-3 * self.random.random() + slow * self.random.random()

    def _answer(
        self, process: RankProcess, callback: Callback, answer: Directory | Exception, until: float
    ) -> None:
        arrives_at = self.ground.now + self.seconds()
        if arrives_at > until:
            # Whoever asked waits no longer.
            arrives_at, answer = (
                max(until, self.ground.now),
                TransportError("the directory did not answer in time"),
            )

        def arrive() -> None:
            callback(answer)
            process.wake()

        self.ground.at(arrives_at, process.guard(arrive))


def _silent() -> TransportError:
    return TransportError("the directory did not answer in time")


@dataclass(frozen=True, slots=True)
class RankResolver:
    """One rank's `agent.links.Resolver`."""

    directories: Directories
    process: RankProcess

    def resolve(
        self, host: str, port: int, engine: EngineId, callback: Callback, *, patient: bool = True
    ) -> None:
        """Ask for the directory at `port`."""
        ground = self.directories.ground
        until = ground.now + self.process.limits.handshake_seconds
        ask = partial(self.directories.ask, self.process, port, callback, until, patient=patient)
        ground.at(min(ground.now + self.directories.seconds(), until), self.process.guard(ask))

    def close(self) -> None:
        """Nothing to stop."""
