"""Active checks of the engines, and asking prefill engines for their coordinates.

A refused connection takes a worker down at once and forgets its identity; a slow health check does so when it
happens twice in a row, for a busy engine may miss one. One check per worker runs at a time, whoever asked for
it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import aiohttp

from kvferry.router.pool import Pool, Role, Worker
from kvferry.router.probe import ProbeError, probe
from kvferry.router.settings import RouterSettings

logger = logging.getLogger(__name__)

_LATE_CHECKS_MAX = 2
_UNSUITABLE_PAUSE_SECONDS = 30.0


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
        self._loops: list[asyncio.Task[None]] = []
        self._late: dict[Worker, int] = {}
        self._probe_after: dict[Worker, float] = {}

    def start(self) -> None:
        """Check every worker now and then in the configured interval."""
        self._loops = [asyncio.create_task(self._watch(worker)) for worker in self._pool.workers()]

    async def close(self) -> None:
        """Stop checking."""
        tasks = [*self._loops, *self._checks.values()]
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
        workers = self._pool.workers(role)
        checks = {
            self._check_task(worker): worker for worker in workers if not worker.ready and not worker.hanging
        }
        deadline = asyncio.get_running_loop().time() + self._settings.recheck_seconds
        waiting = set(checks)
        while waiting and not any(worker.ready for worker in workers):
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
        while True:
            await self.check(worker)
            await asyncio.sleep(self._settings.health_interval_seconds)

    async def _check(self, worker: Worker) -> None:
        was_ready = worker.ready
        if await self._healthy(worker):
            self._pool.alive(worker)
            if worker.role is Role.PREFILL and worker.source is None:
                await self._identify(worker)
        if worker.ready is not was_ready:
            state = "ready" if worker.ready else f"not ready: {worker.problem}"
            logger.info("%s %s is %s", worker.role.value, worker.url, state)

    async def _healthy(self, worker: Worker) -> bool:
        timeout = aiohttp.ClientTimeout(total=self._settings.health_timeout_seconds)
        try:
            url = f"{worker.url}/health"
            async with self._session.get(url, headers=self._headers, timeout=timeout) as response:
                status = response.status
        except TimeoutError:
            worker.hanging = True
            self._late[worker] = self._late.get(worker, 0) + 1
            if self._late[worker] >= _LATE_CHECKS_MAX:
                self._pool.down(worker, "its health check does not answer in time")
            return False
        except (aiohttp.ClientError, OSError) as error:
            worker.hanging = False
            self._pool.down(worker, f"cannot be reached: {error}")
            return False
        self._late.pop(worker, None)
        if status != 200:
            self._pool.down(worker, f"its health check answers {status}")
        return status == 200

    async def _identify(self, worker: Worker) -> None:
        now = asyncio.get_running_loop().time()
        if now < self._probe_after.get(worker, now):
            return
        try:
            async with asyncio.timeout(self._settings.probe_timeout_seconds):
                source = await probe(self._session, worker.url, self._headers)
        except ProbeError as error:
            worker.problem = str(error)
            if error.unsuitable:
                self._probe_after[worker] = now + _UNSUITABLE_PAUSE_SECONDS
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            worker.problem = f"did not answer the probe: {str(error) or type(error).__name__}"
        else:
            self._pool.learn(worker, source)
