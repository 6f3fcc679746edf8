"""Push, pull and auto in the same modelled pools, under the same requests: what each mode is worth.

Who starts a router is not decided here: a `StartRouter` is given the engines, the mode and the policy.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Literal, Protocol

from kvferry.bench.dispatch import Direct, Style
from kvferry.bench.load import LoadLimits, client, run_load
from kvferry.bench.pool_cases import PoolCase, planned
from kvferry.bench.pool_engines import MODEL, PoolUrls, serving
from kvferry.bench.pool_model import ModelledPool

RATIO_MAX = 1.05
"""How much longer the 95th percentile of auto may be than that of the better mode."""
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to run the router."""

    name: str
    mode: Literal["push", "pull", "auto"]
    policy: str


class RunningRouter(Protocol):
    """A router in front of the pool."""

    @property
    def url(self) -> str:
        """Where it answers."""
        ...

    def transfers(self) -> Mapping[str, int]:
        """How many prompts it has dispatched by each mode."""
        ...


StartRouter = Callable[[PoolUrls, Arm], AbstractAsyncContextManager[RunningRouter]]


@dataclass(frozen=True, slots=True)
class PoolRun:
    """What one arm did with the requests of one seed."""

    arm: str
    seed: int
    ttft_seconds: tuple[float, ...]
    pulled: int
    failures: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CaseResult:
    """All runs of one case."""

    name: str
    runs: tuple[PoolRun, ...]

    def quantile(self, arm: str, share: float) -> float:
        """A quantile of the times to the first token of all seeds, in seconds."""
        return _quantile([one for run in self.runs if run.arm == arm for one in run.ttft_seconds], share)

    @property
    def arms(self) -> list[str]:
        """Their names in order."""
        return list(dict.fromkeys(run.arm for run in self.runs))

    @property
    def better(self) -> str:
        """The fixed mode with the lower 95th percentile."""
        return min((arm for arm in self.arms if arm != AUTO), key=lambda arm: self.quantile(arm, 0.95))

    @property
    def ratio(self) -> float:
        """The 95th percentile of auto in relation to that of the better fixed mode."""
        return self.quantile(AUTO, 0.95) / self.quantile(self.better, 0.95)

    @property
    def pulled_share(self) -> float:
        """How many of auto's transfers were pulls."""
        runs = [run for run in self.runs if run.arm == AUTO]
        return sum(run.pulled for run in runs) / max(sum(len(run.ttft_seconds) for run in runs), 1)

    @property
    def failures(self) -> list[str]:
        """What went wrong, which nothing may."""
        return [
            f"{self.name}, {run.arm}, seed {run.seed}: {text}" for run in self.runs for text in run.failures
        ]


async def measure(
    case: PoolCase,
    arms: Sequence[Arm],
    seeds: Sequence[int],
    requests: int,
    start: StartRouter,
    on_run: Callable[[], None] = lambda: None,
) -> CaseResult:
    """Run every arm with every seed; `on_run` is told of the end of each run."""
    runs = []
    for seed in seeds:
        for arm in arms:
            runs.append(await _run(case, arm, seed, requests, start))
            on_run()
    return CaseResult(case.name, tuple(runs))


async def _run(case: PoolCase, arm: Arm, seed: int, requests: int, start: StartRouter) -> PoolRun:
    asks, due = planned(case, seed, requests)
    pool = ModelledPool(case.model, seed)
    async with (
        serving(case.model, pool) as urls,
        start(urls, arm) as router,
        client() as session,
        _beside(pool.others()),
    ):
        dispatch = Direct(router.url, Style(model=MODEL))
        load = await run_load(session, dispatch, asks, due, LoadLimits())
        pulled = router.transfers().get("pull", 0)
    return PoolRun(
        arm=arm.name,
        seed=seed,
        ttft_seconds=tuple(record.ttft_seconds for record in load.records if record.ttft_seconds is not None),
        pulled=pulled,
        failures=tuple(f"{record.request}: {record.error}" for record in load.failures),
    )


@asynccontextmanager
async def _beside(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def _quantile(samples: Sequence[float], share: float) -> float:
    """The sample that a share of all does not exceed."""
    return sorted(samples)[min(int(len(samples) * share), len(samples) - 1)]
