"""Active checks of the engines, and asking them who they are.

A refused connection takes a worker down at once and forgets its identity; a slow health check does so when it
happens twice in a row, for a busy engine may miss one. One that stays silent ends the legs that wait for it:
its process hangs, or its host is gone. One check per worker runs at a time, whoever asked for it.

An engine that has not been asked yet tells its models, its version and how many data-parallel ranks are
behind its address; each rank becomes a worker of its own. A prefill engine tells its coordinates, each rank
its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp

from kvferry.router.engines.pool import Pool, Role, Worker
from kvferry.router.engines.probe import ProbeError, models_of, probe, ranks_of, version_of
from kvferry.router.ground.settings import RouterSettings

logger = logging.getLogger(__name__)

_LATE_CHECKS_MAX = 2
_UNSUITABLE_PAUSE_SECONDS = 30.0
_MODELS_SECONDS = 30.0
"""After so long an engine is asked for its models again: adapters come and go."""


@dataclass(slots=True)
class _Late:
    """A worker's health checks that were not answered in time, in a row."""

    since: float
    checks: int = 0


class Monitor:
    """Keeps the pool's view of its workers current."""

    def __init__(
        self, pool: Pool, session: aiohttp.ClientSession, settings: RouterSettings, headers: Mapping[str, str]
    ) -> None:
        self._pool = pool
        self._session = session
        self._settings = settings
        self._headers = headers
        self._checks: dict[Worker, asyncio.Task[None]] = {}
        self._loops: dict[Worker, asyncio.Task[None]] = {}
        self._late: dict[Worker, _Late] = {}
        self._probe_after: dict[Worker, float] = {}
        self._asked: dict[Worker, tuple[int, float]] = {}
        """How often an engine had been lost when it was last asked for its models, and when that was."""
        self._warned: set[str] = set()

    def start(self) -> None:
        """Check every worker now and then in the configured interval, those that join later, too."""
        for worker in self._pool.workers():
            self.watch(worker)

    def watch(self, worker: Worker) -> None:
        """Check a worker from now on, until it is out of the pool and nothing is open there."""
        self._loops[worker] = asyncio.create_task(self._watch(worker))

    async def close(self) -> None:
        """Stop checking."""
        tasks = [*self._loops.values(), *self._checks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def check(self, worker: Worker) -> None:
        """Check one worker, or wait for the check of it that is running."""
        await asyncio.shield(self._check_task(worker))

    async def recheck(self, role: Role) -> None:
        """Look again at a role's workers that are not ready; returns when one is, or none can be soon.

        A request calls this when nobody is ready, so that the first one after an engine's return finds it.
        """
        checks = {
            self._check_task(worker): worker
            for worker in self._pool.workers(role)
            if not worker.ready and not worker.hanging and not worker.draining
        }
        deadline = asyncio.get_running_loop().time() + self._settings.recheck_seconds
        waiting = set(checks)
        while waiting and not self._pool.any_ready(role):
            left = deadline - asyncio.get_running_loop().time()
            done, waiting = await asyncio.wait(
                waiting, timeout=max(left, 0), return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                for task in waiting:
                    checks[task].hanging = True
                return

    def _check_task(self, worker: Worker) -> asyncio.Task[None]:
        task = self._checks.get(worker)
        if task is None:
            task = asyncio.create_task(self._check(worker))
            self._checks[worker] = task
            task.add_done_callback(lambda _: self._checks.pop(worker, None))
        return task

    async def _watch(self, worker: Worker) -> None:
        while not worker.gone or worker.legs:
            await self.check(worker)
            await asyncio.sleep(self._settings.health_interval_seconds)
        del self._loops[worker]
        for known in (self._late, self._probe_after, self._asked):
            known.pop(worker, None)

    async def _check(self, worker: Worker) -> None:
        was_ready = worker.ready
        if await self._healthy(worker):
            await self._describe(worker)
            self._pool.alive(worker)
            if worker.gone:
                return
            if worker.role is Role.PREFILL and worker.source is None:
                await self._identify(worker)
        if worker.ready is not was_ready:
            state = "ready" if worker.ready else f"not ready: {worker.problem}"
            logger.info("%s %s is %s", worker.role.value, worker.name, state)

    async def _healthy(self, worker: Worker) -> bool:
        timeout = aiohttp.ClientTimeout(total=self._settings.health_timeout_seconds)
        try:
            url = f"{worker.url}/health"
            async with self._session.get(url, headers=self._headers, timeout=timeout) as response:
                status = response.status
        except TimeoutError:
            worker.hanging = True
            self._note_late(worker)
            return False
        except (aiohttp.ClientError, OSError) as error:
            worker.hanging = False
            self._late.pop(worker, None)
            # Nobody listens there any more, so who comes next has failed nothing yet.
            worker.breaker.reset()
            self._pool.down(worker, f"cannot be reached: {error}")
            return False
        self._late.pop(worker, None)
        if status != 200:
            self._pool.down(worker, f"its health check answers {status}")
        return status == 200

    def _note_late(self, worker: Worker) -> None:
        now = asyncio.get_running_loop().time()
        late = self._late.get(worker)
        if late is None:
            # Its check began so long ago, and it has been silent since then.
            late = self._late[worker] = _Late(now - self._settings.health_timeout_seconds)
            worker.found_silent()
        late.checks += 1
        if late.checks >= _LATE_CHECKS_MAX:
            self._pool.down(worker, "its health check does not answer in time")
        if now - late.since >= self._settings.silence_seconds:
            worker.cut()

    async def _describe(self, worker: Worker) -> None:
        """Ask for what does not decide about readiness; an engine that does not tell is asked again later."""
        now = asyncio.get_running_loop().time()
        losses, asked = self._asked.get(worker, (-1, now))
        same = losses == worker.losses
        if worker.gone or (same and now - asked < _MODELS_SECONDS):
            return
        self._asked[worker] = (worker.losses, now)
        headers = {**self._headers, **worker.headers}
        try:
            async with asyncio.timeout(self._settings.health_timeout_seconds):
                worker.models = await models_of(self._session, worker.url, headers)
                if not same:
                    worker.version = await version_of(self._session, worker.url, headers)
                    ranks = await ranks_of(self._session, worker.url, headers)
                    self._spread(worker, ranks)
        except (ProbeError, TimeoutError, aiohttp.ClientError, OSError) as error:
            logger.debug("%s does not tell what it serves: %s", worker.name, error)
        self._compare_lengths(worker)

    def _spread(self, worker: Worker, count: int | None) -> None:
        """Have one worker for each of the ranks behind an address, which has told their number."""
        if not self._settings.data_parallel or count is None:
            return
        wanted: list[int | None] = [None] if count == 1 else list(range(count))
        there = {each.rank: each for each in self._pool.workers(worker.role) if each.url == worker.url}
        for rank in wanted:
            if rank not in there:
                other = Worker(worker.url, worker.role, rank, worker.origin, draining=worker.draining)
                self._pool.join(other)
        for rank, other in there.items():
            if rank not in wanted:
                self._pool.remove(other)

    def _compare_lengths(self, worker: Worker) -> None:
        """Warn of engines of which one accepts what another has to reject."""
        lengths = {
            (model.name, model.length_max)
            for each in self._pool.workers()
            for model in each.models
            if model.length_max is not None
        }
        for model in worker.models:
            others = sorted({length for name, length in lengths if name == model.name})
            if len(others) > 1 and model.name not in self._warned:
                self._warned.add(model.name)
                logger.warning(
                    "model %r: engines differ in max_model_len (%s); prompts over the least are rejected by"
                    " some of them",
                    model.name,
                    ", ".join(map(str, others)),
                )

    async def _identify(self, worker: Worker) -> None:
        now = asyncio.get_running_loop().time()
        if now < self._probe_after.get(worker, now):
            return
        try:
            async with asyncio.timeout(self._settings.probe_timeout_seconds):
                source = await probe(self._session, worker.url, {**self._headers, **worker.headers})
        except ProbeError as error:
            worker.problem = str(error)
            if error.unsuitable:
                self._probe_after[worker] = now + _UNSUITABLE_PAUSE_SECONDS
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            worker.problem = f"did not answer the probe: {str(error) or type(error).__name__}"
        else:
            self._pool.learn(worker, source)
