"""What every dispatch of the router uses."""

from __future__ import annotations

from kvferry.router.affinity import Turns
from kvferry.router.budget import RetryBudget
from kvferry.router.health import Monitor
from kvferry.router.legs import Engines
from kvferry.router.metrics import RouterMetrics
from kvferry.router.pool import ANYTHING, Ask, Pool, Role, Worker
from kvferry.router.prompts import Background
from kvferry.router.settings import RouterSettings


class Services:
    """The settings, the engines and the metrics of one router, and what it runs in the background."""

    def __init__(
        self,
        settings: RouterSettings,
        pool: Pool,
        engines: Engines,
        monitor: Monitor,
        metrics: RouterMetrics,
    ) -> None:
        self.settings = settings
        self.pool = pool
        self.engines = engines
        self.monitor = monitor
        self.metrics = metrics
        self.turns = Turns(settings.turns_max, settings.turn_seconds)
        self.background = Background(settings.prefill_linger_seconds)
        self.budget = RetryBudget(settings.retry_budget)

    async def worker(
        self,
        role: Role,
        tried: set[Worker],
        preferred: Worker | None = None,
        ask: Ask = ANYTHING,
    ) -> Worker | None:
        """A worker that is usable, looking again when none is; None when there is none."""
        worker = self.pool.choose(role, tried, preferred, ask)
        if worker is None:
            await self.monitor.recheck(role)
            worker = self.pool.choose(role, tried, preferred, ask)
        return worker

    async def any_ready(self, role: Role) -> bool:
        """Whether a worker of the role is usable, after looking again when none is."""
        if not self.pool.any_ready(role):
            await self.monitor.recheck(role)
        return self.pool.any_ready(role)
