"""Sends requests when they are due, keeps a record of each, and stops by itself.

The schedule is absolute: each request has its moment after the start, and one that goes out late does not
move those behind it. With a limit on concurrency a due request waits for a slot, and that wait counts.
Without a schedule a request is due as soon as a slot is free.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp

from kvferry.bench.dispatch import Ask, Dispatch
from kvferry.bench.records import Load, Record
from kvferry.bench.stream import LegError, Seen
from kvferry.errors import UsageError

IN_FLIGHT_MAX = 4096
"""Without a limit of their own, requests beyond so many are recorded as failed and not sent."""
REQUEST_SECONDS_MAX = 600.0
IDLE_CONNECTION_SECONDS = 2.0
"""A server closes an idle connection, vLLM's after 5 s; a request that is on its way then is lost."""
_DIGITS = 6
"""Records are kept to the microsecond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadLimits:
    """Bounds of one load."""

    concurrency_max: int | None = None
    """Requests in flight; those beyond wait."""
    request_seconds_max: float = REQUEST_SECONDS_MAX
    """How long a request may take from its start; what takes longer is given up and recorded as failed."""

    def __post_init__(self) -> None:
        if self.concurrency_max is not None and not 1 <= self.concurrency_max <= IN_FLIGHT_MAX:
            raise UsageError(
                f"--max-concurrency must be from 1 to {IN_FLIGHT_MAX}, not {self.concurrency_max}"
            )
        if not self.request_seconds_max > 0:
            raise UsageError(f"--request-seconds must be above 0, not {self.request_seconds_max}")


@asynccontextmanager
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    """The HTTP session of a load: as many connections as it wants, and no bounds but those of requests."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_SECONDS)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=None), read_bufsize=1 << 20
    ) as session:
        yield session


async def run_load(
    session: aiohttp.ClientSession,
    dispatch: Dispatch,
    asks: Sequence[Ask],
    due: Sequence[float] | None,
    limits: LoadLimits,
    on_record: Callable[[Record], None] = lambda record: None,
) -> Load:
    """Send every request of `asks` at its moment in `due`, and return when all have ended.

    `due` has seconds after the start, in ascending order; None sends each as soon as a slot is free.
    """
    if due is not None and len(due) != len(asks):
        raise ValueError(f"{len(asks)} requests and {len(due)} moments")
    run = _Running(session, dispatch, limits, on_record)
    async with asyncio.TaskGroup() as tasks:
        for position, ask in enumerate(asks):
            if due is None:
                await run.slots.acquire()
                tasks.create_task(run.one(ask, run.now(), has_slot=True))
            else:
                await asyncio.sleep(due[position] - run.now())
                tasks.create_task(run.one(ask, due[position], has_slot=False))
    return Load(started_ns=run.started_ns, seconds=round(run.now(), _DIGITS), records=tuple(run.records))


class _Running:
    """One load while it runs."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        dispatch: Dispatch,
        limits: LoadLimits,
        on_record: Callable[[Record], None],
    ) -> None:
        self._session = session
        self._dispatch = dispatch
        self._limits = limits
        self._on_record = on_record
        self.slots = asyncio.Semaphore(limits.concurrency_max or IN_FLIGHT_MAX)
        self.records: list[Record] = []
        self._clock = asyncio.get_running_loop().time
        self.started_ns = time.time_ns()
        self._started = self._clock()

    def now(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._started

    async def one(self, ask: Ask, due: float, *, has_slot: bool) -> None:
        """Send one request and keep its record."""
        seen = Seen(self.now)
        if not has_slot and self._limits.concurrency_max is None and self.slots.locked():
            self._keep(ask, due, seen, f"not sent: {IN_FLIGHT_MAX} requests were in flight")
            return
        if not has_slot:
            await self.slots.acquire()
        try:
            error = await self._send(ask, seen)
        finally:
            self.slots.release()
        self._keep(ask, due, seen, error)

    async def _send(self, ask: Ask, seen: Seen) -> str | None:
        seconds = self._limits.request_seconds_max
        try:
            async with asyncio.timeout(seconds):
                await self._dispatch.send(self._session, ask, seen)
        except LegError as error:
            return str(error)
        except TimeoutError:
            return f"not answered within {seconds:g} s"
        if not seen.chunks:
            return "answered without a token"
        return None

    def _keep(self, ask: Ask, due: float, seen: Seen, error: str | None) -> None:
        record = Record(
            request=ask.request,
            due=round(due, _DIGITS),
            sent=None if seen.sent is None else round(seen.sent, _DIGITS),
            chunks=tuple(round(at, _DIGITS) for at in seen.chunks),
            end=round(self.now(), _DIGITS) if error is None else None,
            prompt_tokens=seen.prompt_tokens,
            completion_tokens=seen.completion_tokens,
            answer=seen.checksum,
            error=error,
        )
        self.records.append(record)
        self._on_record(record)
