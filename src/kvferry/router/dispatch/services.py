"""What every dispatch of the router uses."""

from __future__ import annotations

import asyncio

from kvferry.router.dispatch.affinity import Continuation, Turns
from kvferry.router.dispatch.budget import RetryBudget
from kvferry.router.dispatch.prompt import Prompt
from kvferry.router.dispatch.prompts import Background
from kvferry.router.engines.health import Monitor
from kvferry.router.engines.pool import ANYTHING, Ask, Pool, Role, Worker
from kvferry.router.ground.policy import CACHE_POLICIES
from kvferry.router.ground.settings import RouterSettings
from kvferry.router.legs.tasks import Engines
from kvferry.router.record.metrics import RouterMetrics

_BLOCK_TOKENS = 16
"""What vLLM's blocks hold unless told otherwise; the router does not learn of another size."""


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
        self._keeps_prefixes = {role for role in Role if settings.policy(role) in CACHE_POLICIES}
        self.clock = asyncio.get_running_loop().time
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

    def continuation(self, prompt: Prompt) -> Continuation | None:
        """The prompt, and the turn that it continues if one is known; None where that is not looked for."""
        if self.settings.affinity != "conversation":
            return None
        turn = self.turns.recall(prompt.fingerprint, self.pool.clock())
        return Continuation(prompt.fingerprint, turn, self.metrics)

    def remember_prefix(self, prompt: Prompt, worker: Worker) -> None:
        """A worker has computed the prompt."""
        if worker.role in self._keeps_prefixes:
            self.pool.prefixes.note(prompt.fingerprint.chain, worker, self.pool.clock())

    def note_held(self, tokens: int, seconds: float) -> None:
        """A decode engine held room for a prompt of so many tokens while its prefill had not ended."""
        blocks = -(-tokens // _BLOCK_TOKENS)
        self.metrics.held_block_seconds.inc(max(seconds, 0.0) * blocks)
