"""Composite faults: something befalls a transfer just while its writes are late or stand still.

Each part alone happens by chance as well, but the coincidence on one transfer almost never does: writes that
land after their request has gone, after its permission has run out, or after its blocks were taken away.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from kvferry.ids import ConsumerId
from kvferry.protocol.sources import SourceRow
from kvferry.protocol.states import DeliveryState
from kvferry.simulator.engine.engine import Engine
from kvferry.simulator.engine.rank import RankProcess
from kvferry.simulator.faults.levers import Levers
from kvferry.simulator.world.router import Dispatch, Leg
from kvferry.transport.memory import PostFault

LOOK_SECONDS = 0.003
LOOKS_MAX = 700
"""So often it is looked whether the time has come; then the plot is given up."""
ECHO_SECONDS = 1.0
BUDGETS = 2
"""Prefills of fewer steps than so many are over before they can be preempted."""
PREEMPTIONS = 2
"""Weight of the plot that seldom comes off."""


def late_write(levers: Levers, random: Random) -> None:
    """Let writes of the next transfer be late, and something else happen to it meanwhile."""
    levers.world.router.plots.append(lambda dispatch: _begin(levers, random, dispatch))


def _begin(levers: Levers, random: Random, dispatch: Dispatch, looks_left: int = LOOKS_MAX) -> None:
    """Wait until the transfer has both of its legs."""
    world = levers.world
    producer = world.engines.get(dispatch.item.producer)
    if not looks_left or world.healed_at is not None or producer is None or dispatch.cancelled:
        return
    decode = next((leg for leg in dispatch.decodes if leg.engine.alive), None)
    if decode is None or not dispatch.prefills:
        world.later(LOOK_SECONDS, lambda: _begin(levers, random, dispatch, looks_left - 1))
        return
    tp = random.randrange(len(producer.ranks))
    plot = Plot(levers, random, dispatch, decode.index, producer, producer.ranks[tp], decode.engine.ranks[tp])
    plots = _PLOTS | (_OF_LONG_PREFILLS if plot.is_long else {})
    names = sorted(plots) + PREEMPTIONS * [name for name in ("preempt",) if name in plots]
    plots[random.choice(names)](plot)


@dataclass(frozen=True, slots=True)
class Plot:
    """One transfer, one pair of its ranks, and what is done to both."""

    levers: Levers
    random: Random
    dispatch: Dispatch
    index: int | None
    """Which of its consumers."""
    producer: Engine
    writer: RankProcess
    target: RankProcess

    @property
    def decode(self) -> Leg:
        """The newest decode leg of the consumer."""
        return next(leg for leg in reversed(self.dispatch.decodes) if leg.index == self.index)

    @property
    def is_long(self) -> bool:
        """Whether prefill takes long enough to be preempted."""
        return self.dispatch.item.prompt.tokens > BUDGETS * self.producer.facts.pace.token_budget

    # --- what may be done ----------------------------------------------------------------------------

    def abort(self) -> None:
        """The decode leg's client leaves."""
        self.levers.abort(self.decode.request)

    def preempt(self) -> None:
        """The prefill leg loses its blocks."""
        self.levers.preempt_prefill(self.dispatch.transfer)

    def deafen(self, seconds: float) -> None:
        """The producer hears nothing of the consumer: no renewal, and no cancel."""
        consumer = self.decode.engine.facts.engine
        self.levers.cut(consumer, self.producer.facts.engine, seconds)

    def darken(self) -> None:
        """The consumer's end of the link breaks, and nobody tells it whether the producer lives."""
        engine, world = self.producer.facts.engine, self.levers.world
        world.resolver.unready_until[engine] = world.now + 3.0 + 12.0 * self.random.random()
        self.levers.break_connection(self.target.name, self.writer.name)

    def abort_prefill(self) -> None:
        """The prefill leg's client leaves."""
        self.levers.abort_prefill(self.dispatch.transfer)

    def replay(self) -> None:
        """Both legs are sent again."""
        self.levers.replay_soon(self.dispatch.transfer)

    def echo(self) -> None:
        """For a while whatever the consumer says is heard twice, late and in no order."""
        fabric = self.levers.world.network.fabric
        pair = self.target.name, self.writer.name
        link = fabric.exchange.plan(pair).link
        echoing = replace(link, double_rate=1.0, jitter_seconds=ECHO_SECONDS, overtaking=True)
        fabric.set_link(*pair, echoing)
        self.later(3 * ECHO_SECONDS, lambda: fabric.set_link(*pair, link))

    # --- when ----------------------------------------------------------------------------------------

    def delay(self, seconds: float | None = None) -> None:
        """The next writes are late, by this or by chance, or stand still."""
        fault = self.random.choice((PostFault.DELAY, PostFault.DELAY, PostFault.STALL))
        by_chance = self.random.choice((1.0, 5.0, 20.0)) * (0.5 + self.random.random())
        fabric = self.levers.world.network.fabric
        pair = self.writer.name, self.target.name
        link = fabric.exchange.plan(pair).link
        fabric.set_link(*pair, replace(link, delay_seconds=seconds or by_chance))
        fault = fault if seconds is None else PostFault.DELAY
        self.levers.post_fault(*pair, fault, self.random.choice((1, 2, 3)))

    def when(self, holds: Callable[[], bool], act: Callable[[], None], looks_left: int = LOOKS_MAX) -> None:
        """Act as soon as something holds."""
        if not looks_left or not self.writer.alive or self.levers.world.healed_at is not None:
            return
        if holds():
            act()
        else:
            self.levers.world.later(LOOK_SECONDS, lambda: self.when(holds, act, looks_left - 1))

    def later(self, seconds: float, act: Callable[[], object]) -> None:
        """Act after a while, unless faults have ended by then."""
        self.levers.world.later(seconds, lambda: act() if self.levers.world.healed_at is None else None)

    def wait_seconds(self) -> float:
        """From a moment to just past the end of a permission."""
        longest = self.levers.world.limits.write_seconds + 1.0
        return self.random.choice((0.02, 0.1, 0.5, longest)) * (0.1 + 0.9 * self.random.random())

    @property
    def bound_seconds(self) -> float:
        """After so long without a word from the producer the consumer has its blocks back."""
        return self.levers.world.limits.write_seconds + self.levers.world.shape.fabric.retry_bound_seconds

    @property
    def row(self) -> SourceRow | None:
        """What the producer's rank knows of the transfer."""
        return self.writer.loop.producer.state.rows.get(self.dispatch.transfer)

    def is_written(self) -> bool:
        """Whether a write for the request is under way."""
        return self._has_in_flight(DeliveryState.REGISTERED, DeliveryState.STOPPING)

    def is_stopping(self) -> bool:
        """Whether it is, though the request has been given up."""
        return self._has_in_flight(DeliveryState.STOPPING)

    def is_ended(self) -> bool:
        """Whether the decode leg's engine has forgotten it."""
        return self.decode.engine.has_forgotten(self.decode.request)

    def _has_in_flight(self, *states: DeliveryState) -> bool:
        row, consumer = self.row, ConsumerId(self.decode.request)
        deliveries = () if row is None else row.deliveries.values()
        return any(one.in_flight and one.consumer == consumer and one.state in states for one in deliveries)

    def is_last_chunk(self) -> bool:
        """Whether the prefill leg's last chunk is being computed."""
        leg = next((one for one in reversed(self.dispatch.prefills) if not one.ended), None)
        request = None if leg is None else self.producer.request(leg.request)
        return request is not None and request.computed >= request.length


def _abort(plot: Plot) -> None:
    plot.delay()
    plot.when(plot.is_written, lambda: plot.later(plot.wait_seconds(), plot.abort))


def _echo(plot: Plot) -> None:
    plot.echo()
    plot.delay(1.0 + 4.0 * plot.random.random())
    plot.when(plot.is_written, plot.abort)


def _deaf(plot: Plot) -> None:
    def act() -> None:
        plot.deafen(max(3.0, plot.bound_seconds * (0.5 + plot.random.random())))
        plot.later(0.01, plot.abort)

    plot.delay()
    plot.when(plot.is_written, lambda: plot.later(plot.wait_seconds(), act))


def _dark(plot: Plot) -> None:
    plot.delay()
    plot.when(plot.is_written, lambda: plot.later(plot.wait_seconds() / 4, plot.darken))


def _preempt(plot: Plot) -> None:
    # It resumes after the drain's bound, while the write is on its way.
    plot.delay(2.0 + 4.0 * plot.random.random())
    plot.when(plot.is_written, plot.preempt)


def _abort_and_preempt(plot: Plot) -> None:
    def act() -> None:
        plot.abort()
        plot.when(plot.is_stopping, plot.preempt)

    plot.delay()
    plot.when(plot.is_written, act)


def _preempt_last(plot: Plot) -> None:
    plot.delay()
    plot.when(plot.is_last_chunk, plot.preempt)


def _replay(plot: Plot) -> None:
    def act() -> None:
        plot.abort_prefill()
        plot.later(0.05, plot.replay)

    plot.delay()
    plot.when(plot.is_written, act)


def _twice(plot: Plot) -> None:
    """Aborted while it is written, sent again, and aborted again in the same way."""

    def again() -> None:
        plot.replay()
        plot.delay()
        plot.later(0.02, lambda: plot.when(plot.is_written, plot.abort))

    def act() -> None:
        plot.abort()
        plot.when(plot.is_ended, again)

    plot.when(plot.is_written, act)


def _asleep(plot: Plot) -> None:
    """The writer sleeps over the end of the permission while renewals wait in its inbox or are lost."""
    random, levers = plot.random, plot.levers
    first = 0.1 + 0.3 * random.random()
    seconds = plot.bound_seconds * 1.05 + 2.0 * random.random()
    levers.stall_engine(plot.producer.facts.engine, first + 0.1)
    plot.later(first, lambda: levers.stall_agent(plot.writer.name, seconds))
    heard = first + levers.world.limits.renew_seconds * (0.2 + 1.5 * random.random())
    plot.later(heard, lambda: plot.deafen(seconds + 1.0))


_PLOTS: dict[str, Callable[[Plot], None]] = {
    "abort": _abort,
    "asleep": _asleep,
    "dark": _dark,
    "deaf": _deaf,
    "echo": _echo,
    "preempt last": _preempt_last,
    "replay": _replay,
    "twice": _twice,
}
_OF_LONG_PREFILLS: dict[str, Callable[[Plot], None]] = {
    "abort and preempt": _abort_and_preempt,
    "preempt": _preempt,
}
