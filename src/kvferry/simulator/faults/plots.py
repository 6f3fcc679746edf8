"""Composite faults: something befalls a transfer just while its writes are late or stand still.

Each part alone happens by chance as well, but the coincidence on one transfer almost never does: writes that
land after their request has gone, after its permission has run out, or after its blocks were taken away.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from kvferry.simulator.faults.breakages import Breakages
from kvferry.simulator.faults.levers import Levers
from kvferry.simulator.faults.plot import LOOKS_MAX, Plot, when_met

PREEMPTIONS = 2
"""Weight of the plot that seldom comes off."""
EDGES = 10
"""Weight of the plot that is possible only where clocks differ the right way."""
FORGETFUL = 2
FORGOTTEN = 60
"""Weight of the plot that is possible only where so few ended transfers are remembered."""
EDGE_SECONDS = 0.002
"""So much before the last moment."""


def late_write(levers: Levers, random: Random) -> None:
    """Let writes of the next transfer be late, and something else happen to it meanwhile."""
    levers.world.router.plots.append(
        lambda dispatch: when_met(levers, random, dispatch, lambda leg: leg.engine.alive, _begin)
    )


def _begin(plot: Plot) -> None:
    producer, random = plot.producer, plot.random
    plots = _PLOTS | (_OF_LONG_PREFILLS if plot.is_long else {})
    names = sorted(plots) + PREEMPTIONS * [name for name in ("preempt",) if name in plots]
    if _has_edge(plot):
        plots, names = plots | {"edge": _edge}, names + EDGES * ["edge"]
    if producer.facts.limits.tombstones_max <= FORGETFUL and plot.has_company:
        plots, names = plots | {"forgotten": _forgotten}, names + FORGOTTEN * ["forgotten"]
    plots[random.choice(names)](plot)


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


def _struck_dumb(plot: Plot) -> None:
    """The agent that is written to breaks."""

    def act() -> None:
        Breakages(plot.levers).break_agent(plot.target, plot.random)

    plot.delay()
    plot.when(plot.is_written, lambda: plot.later(plot.wait_seconds() / 4, act))


def _closed(plot: Plot) -> None:
    """One of both engines is stopped in good order."""

    def act() -> None:
        ends = plot.producer.facts.engine, plot.decode.engine.facts.engine
        Breakages(plot.levers).close(plot.random.choice(ends), plot.random.choice((0.0, 2.0, None)))

    plot.delay()
    plot.when(plot.is_written, act)


def _refused(plot: Plot) -> None:
    """The consumer has to introduce itself anew, and is refused by a rank that writes to it."""

    def act() -> None:
        Breakages(plot.levers).refuse_hellos(plot.writer, 0.5 + 3.0 * plot.random.random())
        plot.levers.break_connection(plot.target.name, plot.writer.name)
        if plot.random.random() < 0.5:
            plot.later(plot.wait_seconds() / 4, plot.abort)

    plot.delay()
    plot.when(plot.is_written, act)


def _asleep(plot: Plot) -> None:
    """The writer sleeps over the end of the permission while renewals wait in its inbox or are lost."""
    random, levers = plot.random, plot.levers
    first = 0.1 + 0.3 * random.random()
    seconds = plot.bound_seconds * 1.05 + 2.0 * random.random()
    levers.stall_engine(plot.producer.facts.engine, first + 0.1)
    plot.later(first, lambda: levers.stall_agent(plot.writer.name, seconds))
    heard = first + plot.limits.renew_seconds * (0.2 + 1.5 * random.random())
    plot.later(heard, lambda: plot.deafen(seconds + 1.0))


def _has_edge(plot: Plot) -> bool:
    """Whether the consumer, without a margin, would have counted to its end before the last write lands."""
    world, seconds = plot.levers.world, plot.limits.write_seconds
    written = seconds / plot.writer.clock.rate + world.shape.fabric.retry_bound_seconds
    slack = written - plot.bound_seconds / plot.target.clock.rate
    link = world.shape.link
    needed = link.latency_seconds + link.jitter_seconds + plot.writer.lag_seconds_max + 3 * EDGE_SECONDS
    return slack > needed and world.now + seconds + 1.0 < world.shape.safety_seconds


def _edge(plot: Plot) -> None:
    """Posted just before the permission ends, to land as late as the transport lets it.

    Meanwhile the consumer, which has given the request up and hears no answer, counts how long its blocks
    may still be written: the clocks of both decide who is first.
    """
    levers, writer = plot.levers, plot.writer
    tp = plot.producer.ranks.index(writer)
    # Nothing is computed until the permission is known, so that nothing is posted earlier.
    levers.stall_engine(plot.producer.facts.engine, min(2.0, 0.8 * plot.limits.write_seconds), rank=tp)

    def act() -> None:
        until = max(one.permission_until for one in plot.deliveries)
        seconds = writer.clock.true_at(until) - levers.world.now - EDGE_SECONDS - writer.lag_seconds_max
        levers.stall_agent(writer.name, max(seconds, 0.0))
        plot.deafen(plot.bound_seconds * 1.1 + 1.0)
        plot.delay(levers.world.shape.fabric.retry_bound_seconds - EDGE_SECONDS)
        plot.later(EDGE_SECONDS, plot.abort)

    plot.when(lambda: any(one.permission_until > writer.clock() for one in plot.deliveries), act)


def _forgotten(plot: Plot) -> None:
    """Ended, forgotten for others' sake, and sent again, while a copy of what was said first is under way."""
    seconds, transfer = plot.limits.write_seconds, plot.dispatch.transfer
    rows = plot.writer.loop.producer.state.rows

    def once_more() -> None:
        plot.replay()
        plot.when(lambda: transfer in rows, plot.let_go)

    def again() -> None:
        plot.crowd_out()
        plot.when(lambda: not plot.is_remembered, once_more)

    def act() -> None:
        plot.hold_back(0.8 * seconds)
        plot.abort_prefill()
        plot.when(lambda: transfer not in rows, again)

    plot.echo(min(0.2 * seconds, 1.0))
    plot.when(plot.is_permitted, act, 2 * LOOKS_MAX)


_PLOTS: dict[str, Callable[[Plot], None]] = {
    "abort": _abort,
    "asleep": _asleep,
    "closed": _closed,
    "dark": _dark,
    "deaf": _deaf,
    "echo": _echo,
    "preempt last": _preempt_last,
    "refused": _refused,
    "replay": _replay,
    "struck dumb": _struck_dumb,
    "twice": _twice,
}
_OF_LONG_PREFILLS: dict[str, Callable[[Plot], None]] = {
    "abort and preempt": _abort_and_preempt,
    "preempt": _preempt,
}
