"""One transfer that a composite fault is aimed at: what may be done to it, and when.

`plots` puts the parts together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random

from kvferry.simulator.faults.levers import Levers
from kvferry.simulator.faults.partners import partner
from kvferry.simulator.faults.subject import Subject
from kvferry.simulator.world.router import Dispatch, Leg
from kvferry.transport.memory import PostFault, Traffic

LOOK_SECONDS = 0.003
LOOKS_MAX = 700
"""So often it is looked whether the time has come; then the plot is given up."""
ECHO_SECONDS = 1.0
CROWD = 6
"""Transfers that are sent again to crowd another one out."""


class Plot(Subject):
    """What is done to a transfer and to its pair of ranks, and when."""

    __slots__ = ()

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

    def crowd_out(self) -> None:
        """Others are sent again and end at once: with them the producer may forget how this one ended."""
        mine, rows = self.dispatch, self.writer.loop.producer.state.rows
        others = [
            one.transfer
            for one in self.levers.world.router.dispatches.values()
            if one is not mine and one.item.producer == mine.item.producer and one.transfer not in rows
        ]
        for other in others[-CROWD:]:
            self.levers.replay_soon(other)
            self.when(partial(rows.__contains__, other), partial(self.levers.abort_prefill, other))

    def hold_back(self, seconds: float) -> None:
        """What the consumer has said and says is not heard, until `let_go` or for so long."""
        pair = self.target.name, self.writer.name
        self.levers.tell("message_late", f"all from {pair[0]} to {pair[1]}")
        self.levers.world.network.fabric.hold(*pair, Traffic.MESSAGES)
        # Even where faults end before.
        self.levers.world.later(seconds, self.let_go)

    def let_go(self) -> None:
        """What was held back is heard now."""
        fabric = self.levers.world.network.fabric
        fabric.release(self.target.name, self.writer.name, Traffic.MESSAGES)

    def echo(self, seconds: float = ECHO_SECONDS) -> None:
        """For a while whatever the consumer says is heard twice, late and in no order."""
        fabric = self.levers.world.network.fabric
        pair = self.target.name, self.writer.name
        link = fabric.exchange.plan(pair).link
        echoing = replace(link, double_rate=1.0, jitter_seconds=seconds, overtaking=True)
        fabric.set_link(*pair, echoing)
        self.later(3 * seconds, lambda: fabric.set_link(*pair, link))

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

    def delay_reads(self, seconds: float | None = None, count: int | None = None) -> None:
        """The next reads are late, by this or by chance."""
        by_chance = self.random.choice((1.0, 5.0, 20.0)) * (0.5 + self.random.random())
        fabric = self.levers.world.network.fabric
        # Bytes move from the producer to the consumer, who posts.
        way = self.writer.name, self.target.name
        link = fabric.exchange.plan(way).link
        fabric.set_link(*way, replace(link, delay_seconds=seconds or by_chance))
        fault = self.random.choice((PostFault.DELAY, PostFault.DELAY, PostFault.STALL))
        fault = fault if seconds is None else PostFault.DELAY
        self.levers.post_fault(*way[::-1], fault, count or self.random.choice((1, 2, 3)))

    def when(self, holds: Callable[[], bool], act: Callable[[], object], looks_left: int = LOOKS_MAX) -> None:
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
        longest = self.limits.write_seconds + 1.0
        return self.random.choice((0.02, 0.1, 0.5, longest)) * (0.1 + 0.9 * self.random.random())


def when_met(
    levers: Levers,
    random: Random,
    dispatch: Dispatch,
    wanted: Callable[[Leg], bool],
    begin: Callable[[Plot], object],
    looks_left: int = LOOKS_MAX,
) -> None:
    """Begin the plot of a transfer once it has both legs, aimed at the first decode leg that is wanted."""
    world = levers.world
    producer = world.engines.get(dispatch.item.producer)
    if not looks_left or world.healed_at is not None or producer is None or dispatch.cancelled:
        return
    decode = next(filter(wanted, dispatch.decodes), None)
    if decode is None or not dispatch.prefills:
        world.later(LOOK_SECONDS, lambda: when_met(levers, random, dispatch, wanted, begin, looks_left - 1))
        return
    tp = random.randrange(len(producer.ranks))
    target = partner(producer, tp, decode.engine)
    begin(Plot(levers, random, dispatch, decode.index, producer, producer.ranks[tp], target))
