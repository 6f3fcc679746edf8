"""What connectors cost the engines of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

import numpy as np

from kvferry.bench.connectors import CONNECTORS
from kvferry.bench.grid import Cell
from kvferry.bench.results import CellRun, EngineCost, HookCost, SessionRun, Side, StepCost

STEP_HOOK = "build_connector_meta"
"""vLLM calls it once per step, on whichever connector."""
SIDES: tuple[Side, ...] = ("prefill", "decode")
EARLY_BYTES = "kvferry_bytes_before_prefill_end_total"
BYTES = "kvferry_transfer_bytes_total"


class Costs:
    """Figures per connector, cell and engine; None where nobody has measured them."""

    def __init__(
        self, runs_of: Callable[[str, Cell], Sequence[CellRun]], sessions: Sequence[SessionRun]
    ) -> None:
        self._runs_of = runs_of
        self._sessions = sessions

    def hooks_per_request(self, connector: str, cell: Cell, side: Side, *, cpu: bool = False) -> float | None:
        """Main-thread seconds in the connector's hooks per answered request, calls in every step included.

        `cpu` counts what the thread has computed, without what it has waited, for a core among others.
        """
        return self._per_request(connector, cell, side, attrgetter("cpu_seconds" if cpu else "seconds"))

    def busy_hooks_per_request(
        self, connector: str, cell: Cell, side: Side, *, cpu: bool = False
    ) -> float | None:
        """The same without calls that had nothing to do for any request."""
        return self._per_request(
            connector, cell, side, attrgetter("busy_cpu_seconds" if cpu else "busy_seconds")
        )

    def hooks_per_idle_step(self, connector: str, cell: Cell, side: Side) -> float | None:
        """Main-thread seconds of the hooks of a step in which none of them has anything to do.

        Such a step calls each hook as often as a step does on average, for as long as its idle calls took.
        """
        hooks = self.hook_costs(connector, cell, side)
        steps = sum(hook.count for hook in hooks if hook.hook == STEP_HOOK)
        idle = [hook for hook in hooks if hook.idle_count]
        if not steps or not idle:
            return None
        return sum(hook.idle_seconds / hook.idle_count * hook.count / steps for hook in idle)

    def hook_costs(self, connector: str, cell: Cell, side: Side) -> list[HookCost]:
        """Each hook's cost over all repeats."""
        found: dict[tuple[str, str], HookCost] = {}
        for cost in self._costs(self._runs_of(connector, cell), side):
            for hook in cost.hooks:
                before = found.get((hook.side, hook.hook))
                found[hook.side, hook.hook] = hook if before is None else _joined(before, hook)
        return sorted(found.values(), key=lambda hook: -hook.seconds)

    def steps(self, connector: str, cell: Cell, side: Side) -> StepCost | None:
        """How late steps were: the repeat with the median of all p95."""
        steps = [cost.steps for cost in self._costs(self._runs_of(connector, cell), side) if cost.steps]
        return sorted(steps, key=lambda one: one.p95)[len(steps) // 2] if steps else None

    def cpu_share(self, connector: str, cell: Cell, side: Side) -> float | None:
        """Cores that an engine has kept busy during a cell."""
        runs = [run for run in self._runs_of(connector, cell) if side in run.engines]
        seconds = sum(run.load.seconds for run in runs)
        return sum(run.engines[side].cpu_seconds for run in runs) / seconds if seconds else None

    def parts_per_request(self, connector: str, cell: Cell, side: Side) -> dict[str, float]:
        """CPU seconds of an engine per answered request, by what its threads do."""
        runs = self._runs_of(connector, cell)
        requests = _answered(runs)
        found: dict[str, float] = {}
        for cost in self._costs(runs, side):
            for part, seconds in cost.parts.items():
                found[part] = found.get(part, 0.0) + seconds / requests
        return found

    def hidden_share(self, connector: str, cell: Cell) -> float | None:
        """Share of the KV's bytes that were posted before prefill had ended; None where nobody counts it."""
        if CONNECTORS[connector].kind != "ours":
            return None
        counters = [cost.counters for cost in self._costs(self._runs_of(connector, cell), "prefill")]
        sent = sum(one.get(BYTES, 0.0) for one in counters)
        return sum(one.get(EARLY_BYTES, 0.0) for one in counters) / sent if sent else None

    def counted(self, connector: str, cell: Cell, side: Side) -> dict[str, float]:
        """What an engine's metrics have counted about transfers, over all repeats."""
        found: dict[str, float] = {}
        for cost in self._costs(self._runs_of(connector, cell), side):
            for name, value in cost.counters.items():
                found[name] = found.get(name, 0.0) + value
        return found

    def idle_share(self, connector: str, side: Side) -> float | None:
        """Cores that an idle engine keeps busy: the median of its sessions."""
        shares = [
            run.idle_cpu_seconds[side] / run.idle_seconds
            for run in self._sessions
            if run.connector == connector and side in run.idle_cpu_seconds
        ]
        return float(np.median(shares)) if shares else None

    def idle_thread_share(self, connector: str, side: Side) -> float | None:
        """Cores that kvferry's own threads keep busy in an idle engine: the median of its sessions."""
        shares = [
            run.idle_thread_seconds[side] / run.idle_seconds
            for run in self._sessions
            if run.connector == connector and side in run.idle_thread_seconds
        ]
        return float(np.median(shares)) if shares else None

    def _per_request(
        self, connector: str, cell: Cell, side: Side, seconds: Callable[[HookCost], float]
    ) -> float | None:
        runs = self._runs_of(connector, cell)
        requests = _answered(runs)
        hooks = [hook for cost in self._costs(runs, side) for hook in cost.hooks]
        return sum(map(seconds, hooks)) / requests if hooks and requests else None

    @staticmethod
    def _costs(runs: Iterable[CellRun], side: Side) -> list[EngineCost]:
        return [run.engines[side] for run in runs if side in run.engines]


def _answered(runs: Iterable[CellRun]) -> int:
    return sum(len(run.load.records) - len(run.load.failures) for run in runs)


def _joined(one: HookCost, other: HookCost) -> HookCost:
    return HookCost(
        side=one.side,
        hook=one.hook,
        count=one.count + other.count,
        seconds=one.seconds + other.seconds,
        cpu_seconds=one.cpu_seconds + other.cpu_seconds,
        max_seconds=max(one.max_seconds, other.max_seconds),
        idle_count=one.idle_count + other.idle_count,
        idle_seconds=one.idle_seconds + other.idle_seconds,
        idle_cpu_seconds=one.idle_cpu_seconds + other.idle_cpu_seconds,
    )
