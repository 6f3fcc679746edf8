"""Composite faults of pull: something befalls a transfer just while it is read, or about to be.

As in `plots` each part alone happens by chance as well, and the coincidence on one transfer almost never
does: reads that end when their source has been given away, and offers that arrive when nobody waits for them.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from kvferry.simulator.faults.breakages import Breakages
from kvferry.simulator.faults.levers import Levers
from kvferry.simulator.faults.plot import Plot, when_met
from kvferry.simulator.world.router import Dispatch, Leg
from kvferry.transport.memory import Traffic

MANY = 40
"""More READs than one transfer takes."""
COINCIDENCES = 6
"""Weight of the plots that are possible only where a READ may outlive the lease."""

SELDOM = 20
"""Weight of the plot that needs a reader which bears silence for longer than the lease."""


def late_read(levers: Levers, random: Random) -> None:
    """Let the next transfer that is read be read late, and something else happen to it meanwhile."""

    def is_reading(leg: Leg, dispatch: Dispatch) -> bool:
        return leg.engine.alive and leg.index is not None and dispatch.item.mode(leg.index) == "pull"

    levers.world.router.reading_plots.append(
        lambda dispatch: when_met(levers, random, dispatch, lambda leg: is_reading(leg, dispatch), _begin)
    )


def _begin(plot: Plot) -> None:
    names = [*sorted(_PLOTS), "offer of before"]
    if _outlives(plot):
        names += COINCIDENCES * ["asleep", "offer late", "unheard"]
        if plot.limits.silence_seconds > _lease_seconds(plot):
            names += SELDOM * ["unheard"]
    _PLOTS[plot.random.choice(names)](plot)


def _outlives(plot: Plot) -> bool:
    """Whether a READ can land when the lease has ended, and faults last until then."""
    world, seconds = plot.levers.world, 1.5 * _lease_seconds(plot)
    bound = world.shape.fabric.retry_bound_seconds
    return seconds <= bound and world.now + seconds < world.shape.safety_seconds


def _lease_seconds(plot: Plot) -> float:
    return plot.producer.facts.limits.lease_seconds


def _hold_answers(plot: Plot, seconds: float) -> Callable[[], None]:
    """What the producer says to the reader arrives so much later, or when what is returned is called."""
    fabric, pair = plot.levers.world.network.fabric, (plot.writer.name, plot.target.name)
    plot.levers.tell("message_late", f"all from {pair[0]} to {pair[1]}")
    fabric.hold(*pair, Traffic.MESSAGES)

    def let_go() -> None:
        fabric.release(*pair, Traffic.MESSAGES)

    # Even where faults end before.
    plot.levers.world.later(seconds, let_go)
    return let_go


def _abort(plot: Plot) -> None:
    plot.delay_reads()
    plot.when(plot.is_read, lambda: plot.later(plot.wait_seconds(), plot.abort))


def _asleep(plot: Plot) -> None:
    """The reader sleeps over the end of the lease, and its READs land meanwhile or afterwards."""
    lease = _lease_seconds(plot)

    def act() -> None:
        plot.levers.stall_agent(plot.target.name, lease * (1.1 + 0.4 * plot.random.random()) + 0.3)
        if plot.random.random() < 0.5:
            # It finds nothing in its inbox that tells of the end.
            _hold_answers(plot, 2.0 * lease)

    plot.delay_reads(lease * (0.8 + 0.6 * plot.random.random()))
    plot.when(plot.is_read, act)


def _deaf(plot: Plot) -> None:
    """The producer hears nothing of its reader, and ends the lease."""
    plot.delay_reads(_lease_seconds(plot) * (0.8 + 0.6 * plot.random.random()))
    plot.when(plot.is_read, lambda: plot.deafen(_lease_seconds(plot) + 2.0))


def _unheard(plot: Plot) -> None:
    """Neither hears the other while READs land, and then the next ones would be posted."""
    lease = _lease_seconds(plot)

    def act() -> None:
        plot.hold_back(lease + 2.0)
        _hold_answers(plot, lease + 2.0)

    plot.delay_reads(lease * (0.4 + 0.7 * plot.random.random()), MANY)
    plot.when(plot.is_read, act)


def _offer_late(plot: Plot) -> None:
    """The offer arrives when the lease has almost ended, and nothing prolongs it."""
    lease = _lease_seconds(plot)
    let_go = _hold_answers(plot, 2.0 * lease)

    def act() -> None:
        plot.delay_reads(lease * (0.3 + 0.4 * plot.random.random()), MANY)
        plot.hold_back(lease + 2.0)
        plot.later(lease * (0.3 + 0.6 * plot.random.random()), let_go)

    plot.when(plot.is_lent, act)


def _offer_of_before(plot: Plot) -> None:
    """Given up while its offer is under way, and sent again under the same ids."""
    let_go = _hold_answers(plot, 6.0)

    def again() -> None:
        plot.abort_prefill()
        plot.later(0.05, plot.replay)
        plot.later(0.05 + plot.random.random(), let_go)

    def act() -> None:
        plot.abort()
        plot.when(plot.is_ended, again)

    plot.when(plot.is_lent, act)


def _closed(plot: Plot) -> None:
    """One of both engines is stopped in good order."""

    def act() -> None:
        ends = plot.producer.facts.engine, plot.decode.engine.facts.engine
        Breakages(plot.levers).close(plot.random.choice(ends), plot.random.choice((0.0, 2.0, None)))

    plot.delay_reads()
    plot.when(plot.is_read, act)


def _released(plot: Plot) -> None:
    """The router says that nobody will come, and somebody reads."""

    def act() -> None:
        plot.levers.tell("abort", "the prefill leg's client, although it is read", plot.dispatch.transfer)
        plot.levers.world.router.release(plot.dispatch)

    plot.delay_reads()
    plot.when(plot.is_read, act)


def _dark(plot: Plot) -> None:
    plot.delay_reads()
    plot.when(plot.is_read, lambda: plot.later(plot.wait_seconds() / 4, plot.darken))


def _struck_dumb(plot: Plot) -> None:
    """The agent that reads, or is read, breaks."""

    def act() -> None:
        one = plot.random.choice((plot.writer, plot.target))
        Breakages(plot.levers).break_agent(one, plot.random)

    plot.delay_reads()
    plot.when(plot.is_read, act)


_PLOTS: dict[str, Callable[[Plot], None]] = {
    "abort": _abort,
    "asleep": _asleep,
    "closed": _closed,
    "dark": _dark,
    "deaf": _deaf,
    "offer late": _offer_late,
    "offer of before": _offer_of_before,
    "released": _released,
    "struck dumb": _struck_dumb,
    "unheard": _unheard,
}
