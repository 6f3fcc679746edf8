"""What the engines of a pair cost and noted between two moments."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kvferry.bench.counters import read_counters, since
from kvferry.bench.results import EngineCost, HookCost, Side, StepCost
from kvferry.bench.timing import (
    HookTimes,
    RequestTimes,
    Row,
    StepTimes,
    TimingFile,
    TransferTimes,
    Verified,
    by_request,
    transfers_by_request,
)

if TYPE_CHECKING:
    import aiohttp

NOTED_SECONDS_MAX = 5.0
"""How long is waited for engines to write down the requests that have ended."""
_INTERVAL_SECONDS = 0.1


class Pair(Protocol):
    """A running prefill and decode engine."""

    @property
    def urls(self) -> Mapping[Side, str]:
        """Where each engine answers; a baseline has no prefill engine."""
        ...

    @property
    def journals(self) -> Mapping[Side, Path]:
        """The file in which each engine notes what it does."""
        ...

    def cpu_seconds(self) -> dict[Side, float]:
        """CPU time of each engine's processes so far."""
        ...

    def part_seconds(self) -> dict[Side, dict[str, float]]:
        """CPU time of each engine so far by its parts, of which `kvferry` is its own threads."""
        ...

    def check(self) -> None:
        """Raise what ended an engine, if one has ended."""
        ...


@dataclass(slots=True)
class _Noted:
    """What one engine's journal has said so far."""

    file: TimingFile
    hooks: dict[tuple[str, str], HookTimes] = field(default_factory=dict)
    verified: Verified = field(default_factory=lambda: Verified(pages=0, mismatches=0))
    requests: dict[str, RequestTimes] = field(default_factory=dict)
    transfers: dict[str, list[TransferTimes]] = field(default_factory=dict)
    steps: list[StepTimes] = field(default_factory=list)

    def read(self) -> None:
        """Take in what is new."""
        rows = self.file.new_rows()
        self.requests |= by_request(rows)
        for request, transfers in transfers_by_request(rows).items():
            self.transfers.setdefault(request, []).extend(transfers)
        for row in rows:
            self._take(row)

    def _take(self, row: Row) -> None:
        if isinstance(row, HookTimes):
            self.hooks[row.side, row.hook] = row
        elif isinstance(row, Verified):
            self.verified = row
        elif isinstance(row, StepTimes):
            self.steps.append(row)


@dataclass(frozen=True, slots=True)
class Mark:
    """One engine at one moment."""

    cpu_seconds: float
    parts: Mapping[str, float]
    counters: Mapping[str, float]
    hooks: Mapping[tuple[str, str], HookTimes]
    verified: Verified


class Watch:
    """Follows both engines of a pair."""

    def __init__(self, pair: Pair, session: aiohttp.ClientSession) -> None:
        self._pair = pair
        self._session = session
        self._noted = {side: _Noted(TimingFile(path)) for side, path in pair.journals.items()}

    async def mark(self) -> dict[Side, Mark]:
        """Remember where the engines stand, and forget the requests and steps before."""
        cpu_seconds, parts = self._pair.cpu_seconds(), self._pair.part_seconds()
        marks = {}
        for side, noted in self._noted.items():
            noted.read()
            noted.requests, noted.transfers, noted.steps = {}, {}, []
            counters = await read_counters(self._session, self._pair.urls[side])
            marks[side] = Mark(cpu_seconds[side], parts[side], counters, dict(noted.hooks), noted.verified)
        return marks

    async def wait_for(self, requests: Iterable[str]) -> None:
        """Wait, within a bound, until each engine has written down these requests."""
        wanted = set(requests)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + NOTED_SECONDS_MAX
        while True:
            for noted in self._noted.values():
                noted.read()
            missing = any(wanted - noted.requests.keys() for noted in self._noted.values())
            if not missing or loop.time() > deadline:
                return
            await asyncio.sleep(_INTERVAL_SECONDS)

    def requests(self, side: Side) -> Mapping[str, RequestTimes]:
        """What an engine has noted of each request since the mark."""
        noted = self._noted.get(side)
        return noted.requests if noted else {}

    def transfers(self, request: str) -> Sequence[TransferTimes]:
        """What has been posted of a request's KV since the mark, by whichever engine posts."""
        return [one for noted in self._noted.values() for one in noted.transfers.get(request, ())]

    async def costs(self, marks: Mapping[Side, Mark]) -> dict[Side, EngineCost]:
        """What each engine has cost since the mark."""
        cpu_seconds, parts = self._pair.cpu_seconds(), self._pair.part_seconds()
        return {
            side: await self._cost(side, mark, cpu_seconds[side], parts[side]) for side, mark in marks.items()
        }

    async def _cost(
        self, side: Side, mark: Mark, cpu_seconds: float, parts: Mapping[str, float]
    ) -> EngineCost:
        noted = self._noted[side]
        counters = await read_counters(self._session, self._pair.urls[side])
        return EngineCost(
            cpu_seconds=round(cpu_seconds - mark.cpu_seconds, 4),
            # A thread that has ended meanwhile takes its time along.
            parts={part: round(max(now - mark.parts[part], 0.0), 4) for part, now in parts.items()},
            hooks=tuple(_hook_costs(noted.hooks, mark.hooks)),
            steps=step_cost(noted.steps),
            pages=noted.verified.pages - mark.verified.pages,
            mismatches=noted.verified.mismatches - mark.verified.mismatches,
            counters=since(counters, mark.counters),
        )


def step_cost(steps: Sequence[StepTimes]) -> StepCost | None:
    """The summary of how late steps were; None of none."""
    if not steps:
        return None
    late = np.asarray([step.late_seconds for step in steps])
    p50, p95, p99 = (round(float(figure), 6) for figure in np.quantile(late, (0.5, 0.95, 0.99)))
    return StepCost(
        count=late.size,
        modelled=round(float(np.median([step.intended_seconds for step in steps])), 6),
        mean=round(float(late.mean()), 6),
        p50=p50,
        p95=p95,
        p99=p99,
        max=round(float(late.max()), 6),
    )


def _hook_costs(
    now: Mapping[tuple[str, str], HookTimes], before: Mapping[tuple[str, str], HookTimes]
) -> Iterable[HookCost]:
    for (side, hook), times in sorted(now.items()):
        earlier = before.get((side, hook)) or HookTimes(side=side, hook=hook, count=0, seconds=0.0)
        if times.count > earlier.count:
            yield HookCost(
                side=side,
                hook=hook,
                count=times.count - earlier.count,
                seconds=round(times.seconds - earlier.seconds, 6),
                cpu_seconds=round(times.cpu_seconds - earlier.cpu_seconds, 6),
                # The largest since the engine's start; one cell's own is not known.
                max_seconds=round(times.max_seconds, 6),
                idle_count=times.idle_count - earlier.idle_count,
                idle_seconds=round(times.idle_seconds - earlier.idle_seconds, 6),
                idle_cpu_seconds=round(times.idle_cpu_seconds - earlier.idle_cpu_seconds, 6),
            )
