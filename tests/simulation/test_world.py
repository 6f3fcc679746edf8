"""Worlds as wholes: one seed is one history, calm worlds succeed, and levers do what they say."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from random import Random

import pytest

from kvferry.ids import EngineId
from kvferry.simulator.faults import chance
from kvferry.simulator.ground import options
from kvferry.simulator.ground.events import (
    BlocksReturned,
    BlocksTaken,
    Commanded,
    DecodeStarted,
    EngineCrashed,
    EngineStarted,
    FabricFault,
    FaultInjected,
    Healed,
    LegSent,
    MessageEnded,
    Observed,
    Posted,
    PostEnded,
    Reported,
    RequestEnded,
)
from kvferry.simulator.ground.options import FAULTS, WORLDS, Options
from kvferry.simulator.play.history import History
from kvferry.simulator.run import simulate
from kvferry.simulator.world.world import World

pytestmark = pytest.mark.timeout(120)
"""So long only where something hangs; a loaded machine is slow."""

SEEDS = range(12)


class Seen:
    """An observer that keeps everything."""

    def __init__(self) -> None:
        self.events: list[Observed] = []

    def observe(self, event: Observed) -> None:
        """Take one event."""
        self.events.append(event)

    def of(self, kind: type[Observed]) -> list[Observed]:
        """Events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]


def test_the_same_seed_gives_the_same_history() -> None:
    """Also when other histories have run in between."""
    seeds = range(5)
    first = [simulate(seed, Options()) for seed in seeds]
    again = [simulate(seed, Options()) for seed in reversed(seeds)]
    assert [one.trace_hash for one in first] == [one.trace_hash for one in reversed(again)]
    assert len({one.trace_hash for one in first}) == len(seeds)


def test_the_same_seed_gives_the_same_history_in_another_process() -> None:
    """Whatever that process's hash seed is: no set of texts decides the order of anything."""
    program = (
        "from kvferry.simulator.run import simulate\n"
        "from kvferry.simulator.ground.options import Options\n"
        "for seed in range(2):\n"
        "    print(simulate(seed, Options(world='both')).trace_hash)"
    )
    hashes = set()
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
        )
        hashes.add(done.stdout)
    here = "".join(f"{simulate(seed, Options(world='both')).trace_hash}\n" for seed in range(2))
    assert hashes == {here}


def test_a_traced_history_is_the_same_history() -> None:
    assert simulate(3, Options(), traced=True).trace_hash == simulate(3, Options()).trace_hash


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_fails_in_a_calm_world(seed: int) -> None:
    outcome = simulate(seed, Options(world="calm"))
    assert outcome.violations == ()
    assert {"consumer completed written", "consumer completed fetched"} & outcome.outcomes.keys()
    failed = {name for name in outcome.outcomes if " failed " in name}
    assert failed == set()


def test_every_decode_request_of_a_calm_world_is_served() -> None:
    history = History(5, Options(world="calm"))
    history.run()
    router = history.world.router
    asked = sum(len(dispatch.decodes) for dispatch in router.dispatches.values())
    assert asked >= history.world.shape.transfers
    assert router.served == asked
    assert history.inspection.remains() == []


@pytest.mark.parametrize("name", WORLDS)
def test_each_world_runs_to_its_end(name: str) -> None:
    outcome = simulate(4, Options(world=name, faults=frozenset()))
    assert outcome.violations == ()
    assert outcome.transfers > 0


def test_an_item_that_is_dropped_leaves_the_others_as_they_are() -> None:
    """So that a failing history can be made smaller."""
    whole, part = Seen(), Seen()
    outcome = simulate(7, Options(), observers=(whole,))
    numbers = [number for number, _ in outcome.items]
    assert numbers[0] < 1000 <= numbers[-1]
    less = simulate(7, Options(drop=frozenset(numbers[1:])), observers=(part,))
    assert less.items == outcome.items[:1]
    first = _legs(part)
    assert first
    assert first <= _legs(whole)


def _legs(seen: Seen) -> set[tuple[float, str]]:
    return {(leg.at_seconds, leg.transfer) for leg in seen.of(LegSent) if "t3" not in leg.transfer}  # type: ignore[attr-defined]


def test_faults_that_are_switched_off_do_not_happen() -> None:
    struck = set()
    for seed in SEEDS:
        seen = Seen()
        simulate(seed, Options(faults=frozenset({"replay", "message_doubled"})), observers=(seen,))
        assert {event.kind for event in seen.of(FaultInjected)} <= {"replay", "message_doubled"}  # type: ignore[attr-defined]
        struck |= {event.fault for event in seen.of(FabricFault)}  # type: ignore[attr-defined]
        assert not seen.of(EngineCrashed)
    assert struck == {"double"}


def test_unknown_worlds_and_faults_are_refused_by_name() -> None:
    with pytest.raises(options.UsageError, match="'large' is unknown; use one of small"):
        Options(world="large")
    with pytest.raises(options.UsageError, match="earthquake are unknown"):
        Options(faults=frozenset({"earthquake", "crash"}))


def test_every_kind_of_fault_happens_in_some_history() -> None:
    """A fault that cannot happen proves nothing."""
    worlds = (World(seed, Options()) for seed in range(200))
    drawn = {fault.kind for world in worlds for fault in chance.draw(world, Random(world.seed))}
    assert drawn == options_by_chance()


def options_by_chance() -> frozenset[str]:
    """Faults that have a time, not those that the workload or the shape is made with."""
    made = {
        "clock",
        "leg_late",
        "leg_missing",
        "limits",
        "longer_prompt",
        "misfit",
        "parts",
        "stale_incarnation",
        "table",
    }
    return frozenset(FAULTS) - made


def test_observers_see_every_kind_of_event() -> None:
    wanted = {
        BlocksReturned,
        BlocksTaken,
        Commanded,
        DecodeStarted,
        EngineCrashed,
        EngineStarted,
        FaultInjected,
        Healed,
        LegSent,
        MessageEnded,
        Posted,
        PostEnded,
        Reported,
        RequestEnded,
    }
    seen = Seen()
    for seed in range(60):
        if wanted <= {type(event) for event in seen.events}:
            break
        simulate(seed, Options(), observers=(seen,))
    assert wanted <= {type(event) for event in seen.events}


# --- levers --------------------------------------------------------------------------------------


def _played(
    act: Callable[[History], bool], *, at_seconds: float = 0.02, seed: int = 5
) -> tuple[History, Seen, bool]:
    """A calm history into which `act` reaches once."""
    history, seen, applied = History(seed, Options(world="calm")), Seen(), []
    history.world.ground.watch(seen)
    history.world.at(at_seconds, lambda: applied.append(act(history)))
    history.run()
    return history, seen, applied[0]


def _first_engine(world: World, *, produces: bool) -> EngineId:
    return next(facts.engine for facts in world.shape.engines if facts.produces is produces)


def test_a_crashed_engine_is_down_until_it_is_started_again() -> None:
    def act(history: History) -> bool:
        engine = _first_engine(history.world, produces=True)
        applied = history.levers.crash(engine)
        assert history.inspection.ranks(engine) == ()
        assert not history.levers.crash(engine)
        history.levers.restart(engine, 0.5)
        return applied

    history, seen, applied = _played(act)
    assert applied
    [crashed] = seen.of(EngineCrashed)
    started = [event for event in seen.of(EngineStarted) if event.engine == crashed.engine]  # type: ignore[attr-defined]
    assert [event.at_seconds for event in started] == [0.0, pytest.approx(0.52)]
    assert not set(started[0].ranks) & set(started[1].ranks)  # type: ignore[attr-defined]
    assert history.inspection.remains() == []


def test_ranks_may_outlive_their_core() -> None:
    """The directory refuses at once, while the agents still write: a refusal alone is a proof of nothing."""
    deaths: list[float] = []

    def act(history: History) -> bool:
        engine = _first_engine(history.world, produces=True)
        ranks = [history.world.network.process(name) for name in history.inspection.ranks(engine)]
        applied = history.levers.crash(engine, ranks_linger_seconds=0.3)
        assert history.world.engines[engine] is None
        assert all(rank.alive for rank in ranks)
        history.world.later(0.29, lambda: deaths.append(sum(rank.alive for rank in ranks)))
        history.world.later(0.31, lambda: deaths.append(sum(rank.alive for rank in ranks)))
        return applied

    _, seen, applied = _played(act)
    assert applied
    assert deaths[0] > 0
    assert deaths[1] == 0
    assert [event.at_seconds for event in seen.of(EngineCrashed)] == [pytest.approx(0.32)]


def test_a_partition_keeps_messages_from_arriving_and_ends() -> None:
    def act(history: History) -> bool:
        one, other = _first_engine(history.world, produces=True), _first_engine(history.world, produces=False)
        applied = history.levers.cut(one, other, 1.0)
        assert history.world.network.is_cut(other, one)
        history.world.later(1.01, lambda: ended.append(not history.world.network.is_cut(other, one)))
        return applied

    ended: list[bool] = []
    _, seen, applied = _played(act)
    assert applied
    assert ended == [True]
    lost = [event for event in seen.of(MessageEnded) if not event.arrived]  # type: ignore[attr-defined]
    assert all(0.02 <= event.at_seconds <= 1.02 for event in lost)


def test_levers_that_find_nothing_say_so() -> None:
    history = History(5, Options(world="calm"))
    history.run()
    transfer = next(iter(history.world.router.dispatches))
    assert not history.levers.abort_prefill(transfer)
    assert not history.levers.preempt("nobody")
    assert not history.levers.restart(EngineId("nobody"))
