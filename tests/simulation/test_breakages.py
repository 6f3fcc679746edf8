"""Engines that close, break or refuse, worlds that differ in their settings, and clocks that run apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvferry.ids import EngineId
from kvferry.protocol.codec import Decoder
from kvferry.protocol.commands import Advance, ReceiveFailed
from kvferry.protocol.messages import AnyMessage, Failed, HelloRefused
from kvferry.simulator.engine.engine import Engine
from kvferry.simulator.engine.rank import RankProcess
from kvferry.simulator.faults.breakages import Breakages
from kvferry.simulator.faults.plot import Plot
from kvferry.simulator.faults.plots import _edge
from kvferry.simulator.ground.events import (
    Commanded,
    EngineCrashed,
    EngineStarted,
    FaultInjected,
    MessageSent,
    Observed,
    Reported,
)
from kvferry.simulator.ground.ground import CLOCK_ERROR_MAX, stream
from kvferry.simulator.ground.options import Options
from kvferry.simulator.play.history import History
from kvferry.simulator.world.router import Dispatch
from kvferry.simulator.world.shape import PART_BYTES
from kvferry.simulator.world.world import World

pytestmark = pytest.mark.timeout(120)

SEED = 5


class Seen:
    """An observer that keeps everything."""

    def __init__(self) -> None:
        self.events: list[Observed] = []

    def observe(self, event: Observed) -> None:
        """Take one event."""
        self.events.append(event)

    def messages(self) -> list[AnyMessage]:
        """All that was sent."""
        decoder = Decoder(1 << 20)
        sent = [event for event in self.events if isinstance(event, MessageSent)]
        found = [decoder.decode(event.rank, event.payload) for event in sent]
        return [message for message in found if message is not None]


def played(act: Callable[[History], object], *, at_seconds: float = 0.02) -> tuple[History, Seen]:
    """A calm history into which `act` reaches once."""
    history, seen = History(SEED, Options(world="calm")), Seen()
    history.world.ground.watch(seen)
    history.world.at(at_seconds, lambda: act(history))
    history.run()
    assert history.inspection.remains() == []
    return history, seen


def engine_of(history: History, *, produces: bool) -> Engine:
    """The first engine of a kind."""
    facts = next(one for one in history.world.shape.engines if one.produces is produces)
    life = history.world.engines[facts.engine]
    assert life is not None
    return life


def when_writing(history: History, act: Callable[[Engine, RankProcess], object]) -> None:
    """Act as soon as a rank of the first producer has a write under way."""
    engine = engine_of(history, produces=True)
    rank = next((one for one in engine.ranks if one.loop.producer.in_flight()), None)
    if rank is None:
        history.world.later(0.001, lambda: when_writing(history, act))
    else:
        act(engine, rank)


# --- engines ---------------------------------------------------------------------------------------


def test_an_engine_that_closes_tells_its_peers_and_answers_until_its_ranks_have_left() -> None:
    directories: list[bool] = []

    def act(engine: Engine, rank: RankProcess) -> None:
        name = engine.facts.engine
        assert Breakages(history_of[0].levers).close(name, 0.5)
        assert history_of[0].world.engines[name] is None
        assert not Breakages(history_of[0].levers).close(name)
        directories.append(history_of[0].world.fleet.closing[name].directory() is not None)

    history_of: list[History] = []

    def start(history: History) -> None:
        history_of.append(history)
        when_writing(history, act)

    history, seen = played(start)
    assert directories == [True]
    assert history.world.fleet.closing == {}
    closed = [message for message in seen.messages() if isinstance(message, Failed)]
    assert any(message.reason.startswith("closed") for message in closed)
    kinds = [type(event) for event in seen.events if isinstance(event, EngineCrashed | EngineStarted)]
    assert kinds[-2:] == [EngineCrashed, EngineStarted]


def test_a_rank_that_leaves_without_a_word_is_found() -> None:
    def act(engine: Engine, rank: RankProcess) -> None:
        rank.loop.producer.handle_close = lambda now: None  # type: ignore[method-assign]
        Breakages(history.levers).close(engine.facts.engine)

    history = History(SEED, Options(world="calm"))
    history.world.at(0.02, lambda: when_writing(history, act))
    with pytest.raises(AssertionError, match="leaves and has not told the end of"):
        history.run()


def test_a_forward_pass_that_raises_publishes_nothing_and_ends_its_engine() -> None:
    failing: list[EngineId] = []

    def act(history: History) -> None:
        engine = engine_of(history, produces=True)
        failing.append(engine.facts.engine)
        assert Breakages(history.levers).fail_forward(engine.facts.engine, 0, 0.2, 0.5)

    _, seen = played(act, at_seconds=0.0)
    raised = next(event for event in seen.events if isinstance(event, FaultInjected))
    assert raised.kind == "forward_fails"
    [crashed] = [event for event in seen.events if isinstance(event, EngineCrashed)]
    assert crashed.engine == failing[0]
    assert crashed.at_seconds == pytest.approx(raised.at_seconds + 0.2)
    published = [event for event in seen.events if isinstance(event, Commanded)]
    first = crashed.ranks[0]
    assert not [one for one in published if one.rank == first and isinstance(one.command, Advance)]


@pytest.mark.parametrize("call", ["receive", "poll"])
def test_an_agent_that_breaks_calls_nothing_safe_and_its_engine_is_replaced(call: str) -> None:
    broken: list[RankProcess] = []

    def act(history: History) -> None:
        engine = engine_of(history, produces=call == "poll")
        rank = engine.ranks[0]
        rank.transport.breaks_at = call
        broken.append(rank)

    history, seen = played(act)
    assert broken[0].broken
    assert not broken[0].alive
    [crashed] = [event for event in seen.events if isinstance(event, EngineCrashed)]
    assert broken[0].name in crashed.ranks
    failed = [
        event.result
        for event in seen.events
        if isinstance(event, Reported)
        and event.rank == broken[0].name
        and isinstance(event.result, ReceiveFailed)
    ]
    assert call == "poll" or failed
    assert not any(result.fenced for result in failed)
    assert history.world.router.served > 0


def test_whoever_introduces_itself_to_a_rank_that_refuses_is_told_so() -> None:
    def act(history: History) -> None:
        process = engine_of(history, produces=True).ranks[0]
        assert Breakages(history.levers).refuse_hellos(process, 5.0)

    history, seen = played(act, at_seconds=0.0)
    refused = [message for message in seen.messages() if isinstance(message, HelloRefused)]
    assert refused
    assert history.world.router.served > 0


# --- worlds ----------------------------------------------------------------------------------------


def test_clocks_differ_by_as_much_as_is_promised_and_by_no_more() -> None:
    rates = [World(seed, Options()).ground.clock_error()[1] for seed in range(200)]
    assert max(rates) - min(rates) > 1.9 * CLOCK_ERROR_MAX
    assert all(abs(rate - 1) <= CLOCK_ERROR_MAX for rate in rates)
    assert CLOCK_ERROR_MAX == 0.005


def test_some_engines_have_limits_of_their_own_and_nobody_waits_longer_than_the_most_patient() -> None:
    differing = 0
    for seed in range(60):
        world = World(seed, Options())
        limits = [facts.limits for facts in world.shape.engines]
        differing += len(set(limits)) > 1
        assert world.limits.lease_seconds == max(one.lease_seconds for one in limits)
        assert world.limits.silence_seconds == max(one.silence_seconds for one in limits)
        for life in world.engines.values():
            assert life is None or all(rank.limits == life.facts.limits for rank in life.ranks)
    assert differing > 5
    same = [World(seed, Options(faults=frozenset({"crash"}))).shape.engines for seed in range(60)]
    assert all(len({facts.limits for facts in engines}) == 1 for engines in same)


def test_small_tables_of_every_kind_are_played() -> None:
    small = set()
    for seed in range(200):
        for facts in World(seed, Options()).shape.engines:
            small |= {
                name
                for name in ("consumers_max", "tombstones_max", "transfers_max")
                if getattr(facts.limits, name) < 5
            }
    assert small == {"consumers_max", "tombstones_max", "transfers_max"}


def test_in_some_worlds_messages_travel_in_parts() -> None:
    def limit(seed: int, options: Options) -> int:
        return World(seed, options).shape.fabric.notification_bytes_max

    seed = next(seed for seed in range(100) if limit(seed, Options(world="calm")) == PART_BYTES)
    history, seen = History(seed, Options(world="calm")), Seen()
    history.world.ground.watch(seen)
    history.run()
    sent = [event.payload for event in seen.events if isinstance(event, MessageSent)]
    assert max(map(len, sent)) <= PART_BYTES
    assert len(seen.messages()) < len(sent)
    assert history.inspection.remains() == []
    others = frozenset({"crash"})
    assert all(limit(seed, Options(faults=others)) > PART_BYTES for seed in range(100))


def test_a_write_of_the_last_moment_is_posted_just_before_its_permission_ends() -> None:
    """By the producer's clock. Where the KV was ready before, the plot comes too late."""
    assert any(until - 0.05 < posted <= until for seed in range(30) for posted, until in edges(seed))


def edges(seed: int) -> list[tuple[float, float]]:
    """When the first write of a plot was posted, and when its permission ends."""
    history = History(seed, Options(world="calm"))
    world = history.world
    world.shape = replace(world.shape, safety_seconds=30.0)
    found: list[tuple[float, float]] = []

    def begin(dispatch: Dispatch) -> None:
        producer, consumer = world.engines[dispatch.item.producer], world.engines[dispatch.item.consumer]
        assert producer is not None
        assert consumer is not None
        plot = Plot(history.levers, stream(1, 1), dispatch, 0, producer, producer.ranks[0], consumer.ranks[0])
        world.later(0.011, lambda: (_edge(plot), wait(plot)))

    def wait(plot: Plot) -> None:
        if plot.is_written():
            [until] = {one.permission_until for one in plot.deliveries if one.in_flight}
            found.append((world.now, plot.writer.clock.true_at(until)))
        elif world.now < 60.0:
            world.later(0.0005, lambda: wait(plot))

    world.router.plots.append(begin)
    history.run()
    return found
