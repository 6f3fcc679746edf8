"""One rank's process: memory, transport, the production agent on a clock of its own, and when that wakes.

The agent's thread sleeps for as long as `Loop.step` says, or until its mailbox wakes it. To save events it
is stepped here only when a step could find something: at the first time that it would have polled after
something arrived, or that a timer is due. So a pause that is too long loses a wake-up here as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Protocol

from kvferry.agent.desk import Desk
from kvferry.agent.links import Identity, Resolver
from kvferry.agent.loop import Loop
from kvferry.agent.stats import Stats
from kvferry.ids import PeerName
from kvferry.protocol.commands import Command, Result
from kvferry.protocol.limits import Limits
from kvferry.simulator.engine.transport import BrokenError, RankTransport
from kvferry.simulator.ground.arena import Slot
from kvferry.simulator.ground.clock import ProcessClock
from kvferry.simulator.ground.events import Commanded, Reported
from kvferry.simulator.ground.ground import Ground
from kvferry.simulator.ground.schedule import Entry
from kvferry.transport.memory import MemoryFabric

LOOK_SECONDS = 0.2
"""While something is in flight an agent is stepped at least this often: it may have failed silently."""
CALM_LOOK_SECONDS = 1.0
"""The same where nobody is cut off: then what ends tells so."""

IDLE_SECONDS_MAX = 60.0
"""Agents that give idle links up sooner than this are stepped for it."""
SPIN_STEPS = 256
SPIN_SECONDS = 0.002
"""So many steps within so little time are more than commands and polling account for."""


class RankNetwork(Protocol):
    """What a rank needs of the network."""

    @property
    def fabric(self) -> MemoryFabric:
        """What carries messages and writes."""
        ...

    @property
    def is_troubled(self) -> bool:
        """Whether what is under way may fail without a sign."""
        ...


class Resolvers(Protocol):
    """Where a rank gets its way to other engines' directories."""

    def of(self, process: RankProcess) -> Resolver:
        """How this rank asks."""
        ...


class RankDesk(Desk):
    """A desk whose results are seen."""

    def __init__(self, limits: Limits, seen: Callable[[Result], None]) -> None:
        super().__init__(limits)
        self._seen = seen

    def deliver(self, result: Result) -> None:
        """Pass a result on to whoever waits for it."""
        self._seen(result)
        super().deliver(result)


class RankProcess:
    """One rank of one life of an engine. Dead for good after `die`."""

    def __init__(
        self,
        ground: Ground,
        network: RankNetwork,
        resolvers: Resolvers,
        identity: Identity,
        slot: Slot,
        clock: ProcessClock,
        limits: Limits,
        lag_seconds_max: float,
    ) -> None:
        self.ground = ground
        self._network = network
        self.name: PeerName = identity.peer
        self.slot = slot
        self.clock = clock
        self.limits = limits
        self.alive = True
        self.broken = False
        """The agent has stopped, and the process lives on."""
        self.stalled_until = 0.0
        self.has_reported: Callable[[], None] = _nobody
        self._random = Random(ground.seed * 4093 + slot.number)
        self.lag_seconds_max = lag_seconds_max
        self.transport = RankTransport(network.fabric, self.name)
        self.transport.register(slot.cache.regions)
        self.metadata = self.transport.local_metadata()
        self.desk = RankDesk(limits, self._delivered)
        self.loop = Loop(
            identity,
            slot.cache,
            self.transport,
            limits,
            resolvers.of(self),
            self.desk.inbox,
            self.desk.deliver,
            Stats(),
            clock,
        )
        self._stepped_at = ground.now
        self._pause_seconds = 0.0
        self._due: Entry | None = None
        self._steps = 0
        self._steps_since = -1.0
        self._garbage = self._random.getrandbits(32)
        self.scribble(range(slot.cache.block_counts[0]))

    # --- the engine's thread -----------------------------------------------------------------------

    def submit(self, command: Command, ready: Callable[[], bool] | None = None) -> bool:
        """Hand a command to the agent; False when it is refused."""
        if not self.desk.submit(command, ready):
            return False
        self.commanded(command)
        return True

    def commanded(self, command: Command) -> None:
        """The agent's mailbox has got a command."""
        self.ground.emit(Commanded(self.ground.now, self.name, command))
        self.wake()

    def step_lag(self) -> float:
        """How long the engine's thread takes to begin a step that it was given."""
        return self._random.random() * 5e-4

    def jitter(self) -> float:
        """From 0 to 1."""
        return self._random.random()

    def scribble(self, blocks: list[int] | range) -> None:
        """The content of these blocks is lost."""
        self._garbage = (self._garbage * 1664525 + 1013904223) & 0xFFFFFFFF
        places = list(blocks)
        for part in self.slot.parts:
            part.values[places] = self._garbage

    def guard(self, action: Callable[[], None]) -> Callable[[], None]:
        """`action`, unless this process has died by then."""
        return partial(self._unless_dead, action)

    def _unless_dead(self, action: Callable[[], None]) -> None:
        if self.alive:
            action()

    # --- the agent's thread ------------------------------------------------------------------------

    def wake(self) -> None:
        """Something is in the agent's mailbox."""
        self._step_at(self.ground.now)

    def progressed(self) -> None:
        """Something has arrived that the agent finds when it polls next."""
        if self.alive:
            poll = self._poll_after(self.ground.now)
            if poll is not None:
                self._step_at(poll)

    def stall(self, seconds: float) -> None:
        """The agent's thread does not run for so long."""
        self.stalled_until = max(self.stalled_until, self.ground.now + seconds)

    def unstall(self) -> None:
        """It runs again, and nothing of it breaks any more."""
        self.stalled_until = 0.0
        self.transport.breaks_at = None
        self.transport.refuses_until = 0.0
        self.wake()

    def step(self) -> None:
        """Run the agent once."""
        self._due = None
        now = self.ground.now
        if not self.alive or self.broken:
            return
        if now < self.stalled_until:
            self._due = self.ground.at(self.stalled_until, self.step)
            return
        self._watch()
        try:
            pause = self.loop.step()
        except BrokenError as error:
            self.broken = True
            self.desk.fail_everything(self.loop, error)
            return
        if self.loop.closing and self.loop.quiet:
            rows = self.loop.producer.state.rows.values()
            untold = [one.name for row in rows for one in row.open_deliveries()]
            assert not untold, f"{self.name} leaves and has not told the end of {untold}"
            self.transport.close()
            self.die()
            return
        self.loop.producer.check_invariants()
        self.loop.consumer.check_invariants()
        self._stepped_at = now
        self._pause_seconds = pause / self.clock.rate
        self._plan()

    def _watch(self) -> None:
        """Notice an agent that never sleeps.

        Raises:
            AssertionError: it was stepped far more often than it may poll.
        """
        self._steps += 1
        if self._steps % SPIN_STEPS == 0:
            seconds = self.ground.now - self._steps_since
            self._steps_since = self.ground.now
            assert seconds > SPIN_SECONDS, f"{self.name} spins: {SPIN_STEPS} steps in {seconds:g} s"

    def close(self) -> None:
        """Tell every peer, wait for what is in flight, and end."""
        self.desk.close()
        self.wake()

    def die(self) -> None:
        """The process is gone."""
        self.alive = False
        if self._due is not None:
            self._due.cancel()

    def _plan(self) -> None:
        """Find the next time at which a step could find something."""
        if self.desk.inbox:
            self.wake()
            return
        looks = []
        if not self.loop.quiet:
            seconds = LOOK_SECONDS if self._network.is_troubled else CALM_LOOK_SECONDS
            looks.append(self.ground.now + seconds)
        if self.limits.idle_seconds < IDLE_SECONDS_MAX:
            looks.append(self.ground.now + self.limits.idle_seconds)
        timers = (self.loop.producer.next_due(), self.loop.consumer.next_due())
        looks += [max(self.clock.true_at(due), self.ground.now) for due in timers if due is not None]
        if looks:
            poll = self._poll_after(min(looks))
            if poll is not None:
                self._step_at(poll)

    def _poll_after(self, at_seconds: float) -> float | None:
        """The first time from then on that the agent polls by itself; None when it sleeps for ever."""
        pause = self._pause_seconds
        if pause == math.inf:
            return None
        if pause <= 1e-6:
            return max(at_seconds, self._stepped_at + 1e-6)
        times = math.ceil((at_seconds - self._stepped_at) / pause)
        return self._stepped_at + max(times, 1) * pause

    def _step_at(self, at_seconds: float) -> None:
        at_seconds = max(at_seconds, self.stalled_until)
        if self.lag_seconds_max:
            at_seconds += self._random.random() * self.lag_seconds_max
        if self._due is not None:
            if self._due.at_seconds <= at_seconds:
                return
            self._due.cancel()
        self._due = self.ground.at(at_seconds, self.step)

    def _delivered(self, result: Result) -> None:
        self.ground.emit(Reported(self.ground.now, self.name, result))
        self.has_reported()


def _nobody() -> None:
    """Nobody waits for results."""
