"""What a world notices by itself: transfers that no longer work at the end, and agents that never sleep."""

from __future__ import annotations

import pytest

from kvferry.ids import ConsumerId
from kvferry.simulator.engine.rank import SPIN_STEPS
from kvferry.simulator.ground.events import LegSent, Observed
from kvferry.simulator.ground.options import Options
from kvferry.simulator.play.history import History
from kvferry.simulator.play.probes import PAUSE_SECONDS, TRIES

pytestmark = pytest.mark.timeout(120)
"""So long only where something hangs; a loaded machine is slow."""


class Saboteur:
    """Has the decode legs of probes aborted, of so many tries of each pair."""

    def __init__(self, history: History, tries: int) -> None:
        self.history = history
        self.left = tries
        self.probes: list[float] = []

    def observe(self, event: Observed) -> None:
        """Take one event."""
        if not isinstance(event, LegSent) or not event.transfer.startswith("t3"):
            return
        if event.consumer is None:
            self.probes.append(event.at_seconds)
        elif self.left:
            self.left -= 1
            consumer = ConsumerId(event.request)
            levers = self.history.levers
            self.history.world.later(0.0, lambda: levers.abort_decode(event.transfer, consumer))


def play(tries: int) -> tuple[History, Saboteur]:
    history = History(5, Options(world="calm"))
    saboteur = Saboteur(history, tries)
    history.world.ground.watch(saboteur)
    history.run()
    return history, saboteur


def test_each_producer_is_asked_for_one_more_transfer_to_each_consumer() -> None:
    history, saboteur = play(0)
    engines = history.world.shape.engines
    pairs = [(p, c) for p in engines for c in engines if p.produces and c.consumes and p is not c]
    assert len(saboteur.probes) == len(pairs)
    assert history.violations == []


def test_one_failed_probe_is_tried_again_after_a_pause() -> None:
    history, saboteur = play(1)
    assert history.violations == []
    first, second = saboteur.probes[:2]
    assert second - first >= PAUSE_SECONDS


def test_a_second_failed_probe_has_no_excuse() -> None:
    history, saboteur = play(TRIES)
    [violation] = history.violations
    assert violation.promise == 6
    assert "still fails" in violation.what
    assert saboteur.left == 0


def test_an_agent_that_never_sleeps_is_noticed() -> None:
    history = History(5, Options(world="calm"))

    def spin() -> None:
        process = next(iter(history.world.engines.values())).ranks[0]  # type: ignore[union-attr]
        for _ in range(2 * SPIN_STEPS):
            process.step()

    history.world.at(0.01, spin)
    with pytest.raises(AssertionError, match="spins"):
        history.run()


def test_a_wake_up_that_the_agent_sleeps_through_is_lost_here_too() -> None:
    """The world steps an agent when it would have polled: one that says it need not poll is not stepped."""
    history = History(5, Options(world="calm"))
    history.world.at(0.005, lambda: _deafen(history))
    history.run()
    assert any("receiving" in what for what in history.inspection.remains())


def _deafen(history: History) -> None:
    for engine in history.world.engines.values():
        for process in engine.ranks if engine is not None and engine.facts.consumes else ():
            process.loop._pause = lambda: float("inf")  # type: ignore[method-assign]
