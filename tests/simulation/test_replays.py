"""The same ids again, and what is plotted against one transfer: the world lets both happen, and they hold."""

from __future__ import annotations

import pytest

from kvferry.protocol.commands import Receive
from kvferry.simulator.ground.events import Commanded, FabricFault, FaultInjected, LegSent, Observed
from kvferry.simulator.ground.options import FAULTS, Options
from kvferry.simulator.ground.outcome import findings
from kvferry.simulator.run import simulate
from kvferry.simulator.show.lines import told
from kvferry.simulator.show.story import Kind
from kvferry.simulator.show.timeline import Recorder, choose, story
from kvferry.simulator.watch.trace import TraceLines
from tests.mutants import MUTANTS

pytestmark = pytest.mark.timeout(120)
"""So long only where something hangs; a loaded machine is slow."""

REPLAYS = Options(faults=frozenset({"replay", "abort"}))
LATE_READS = Options(faults=frozenset({"late_read", "limits"}))
LATE = ("late_read", "late_write")
LATE_WRITES = Options(faults=frozenset({"late_write"}))
SEEDS = range(25)


class Names:
    """Counts legs and destinations that have the name of an earlier one in the same life."""

    def __init__(self) -> None:
        self.legs: dict[tuple[str, str], list[float]] = {}
        self.destinations: dict[tuple[str, str, str], int] = {}
        self.struck: dict[str, int] = {}

    def observe(self, event: Observed) -> None:
        """Take one event."""
        if isinstance(event, LegSent):
            self.legs.setdefault((event.engine, event.request), []).append(event.at_seconds)
        elif isinstance(event, Commanded) and isinstance(event.command, Receive):
            key = event.rank, event.command.transfer, event.command.consumer
            self.destinations[key] = self.destinations.get(key, 0) + 1
        elif isinstance(event, FaultInjected):
            self.struck[event.kind] = self.struck.get(event.kind, 0) + 1
        elif isinstance(event, FabricFault):
            self.struck[event.fault] = self.struck.get(event.fault, 0) + 1


def played(options: Options, seeds: range = SEEDS) -> Names:
    names = Names()
    for seed in seeds:
        seen = Names()
        assert simulate(seed, options, observers=(seen,)).violations == ()
        names.legs |= {(f"{seed} {engine}", name): at for (engine, name), at in seen.legs.items()}
        names.destinations |= {(f"{seed} {rank}", *rest): n for (rank, *rest), n in seen.destinations.items()}  # type: ignore[misc]
        for kind, count in seen.struck.items():
            names.struck[kind] = names.struck.get(kind, 0) + count
    return names


def test_a_replayed_leg_may_have_the_name_of_the_first_one() -> None:
    """Then its transfer and consumer are known already, under another attempt: nothing may mix the two up."""
    names = played(REPLAYS)
    again = [name for _, name in [key for key, times in names.legs.items() if len(times) > 1]]
    assert any(name.startswith("p-") for name in again)
    assert any(name.startswith("d0-") for name in again)
    assert any(count > 1 for count in names.destinations.values())


def test_an_aborted_leg_may_come_again_within_the_same_step() -> None:
    class AtOnce:
        def __init__(self) -> None:
            self.aborted: dict[str, float] = {}
            self.times = 0

        def observe(self, event: Observed) -> None:
            """Take one event."""
            if isinstance(event, FaultInjected) and event.kind == "abort":
                self.aborted[event.what] = event.at_seconds
            elif isinstance(event, LegSent) and self.aborted.get(event.request) == event.at_seconds:
                self.times += 1

    seen = AtOnce()
    for seed in SEEDS:
        simulate(seed, REPLAYS, observers=(seen,))
    assert seen.times > 0


def test_nobody_replays_where_that_is_switched_off() -> None:
    names = played(Options(faults=frozenset(FAULTS) - {"replay", *LATE, "post_late"}), range(10))
    assert all(len(times) == 1 for times in names.legs.values())
    assert "replay" not in names.struck
    assert "delay_post" not in names.struck


def test_late_writes_meet_an_abort_a_preemption_and_a_partition() -> None:
    names = played(LATE_WRITES)
    assert {"delay_post", "stall", "abort", "preempt", "partition", "replay"} <= set(names.struck)


def test_late_reads_meet_an_abort_a_sleep_and_a_partition() -> None:
    """Some are seen to end when their source has been given back, which is why they do not count."""
    names = played(LATE_READS)
    struck = {"delay_post", "abort", "stall_agent", "partition", "message_late", "replay"}
    assert struck <= set(names.struck)
    (mutant,) = (one for one in MUTANTS if one.name == "late_read_is_used")
    with mutant.apply():
        outcomes = (simulate(seed, LATE_READS) for seed in range(100))
        found = (violation.what for outcome in outcomes for violation in outcome.violations)
        assert any("came after its source had been given back" in what for what in found)


def test_a_planted_hang_is_one_finding_and_short_to_read() -> None:
    """Slices that are forgotten never end, and who waits for them renews until the history is over."""
    (mutant,) = (one for one in MUTANTS if one.name == "other_slices_forgotten")
    with mutant.apply():
        for seed in range(100):
            recorder, trace = Recorder(), TraceLines()
            outcome = simulate(seed, Options(), observers=(recorder, trace))
            hangs = [one for one in findings(outcome.violations) if one.violation.unfinished]
            if hangs and len(trace.lines) > 1000:
                break
    (hang,) = hangs
    assert "owed since" in hang.violation.what
    assert len(hang.consequences) > 3
    shown = told(recorder.events, trace.lines, outcome.violations)
    assert len(shown) < len(trace.lines) / 2
    assert any("  NEVER ENDS  " in line and f"{hang.violation.at_seconds:.6f}" in line for line in shown)
    assert any("  DEADLINE  " in line or "  GIVEN UP  " in line for line in shown)
    picture = story(recorder.events, choose(recorder.events, outcome.violations), outcome.violations)
    assert len(picture.arrows) < 500
    assert sum(mark.kind is Kind.VIOLATION for mark in picture.marks) == 2
