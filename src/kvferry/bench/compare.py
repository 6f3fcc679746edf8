"""Runs a comparison: session after session, cell after cell, each kept as soon as it is known."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvferry.bench.arrivals import schedule
from kvferry.bench.connectors import CONNECTORS, Connector
from kvferry.bench.dispatch import PROBE_TOKENS, Ask, Dispatch, Style, asks_of
from kvferry.bench.grid import Cell
from kvferry.bench.load import LoadLimits, client, run_load
from kvferry.bench.machine import machine, moment, use
from kvferry.bench.phases import Phases, phases
from kvferry.bench.plan import (
    IDLE_SECONDS,
    Session,
    requests_in,
    run_seconds,
    session_seconds,
    sessions,
)
from kvferry.bench.prompts import token_prompts
from kvferry.bench.records import Load
from kvferry.bench.results import CellRun, Results, SessionRun, Side
from kvferry.bench.statistics import seed_of
from kvferry.bench.stream import LegError
from kvferry.bench.watch import Pair, Watch
from kvferry.errors import KvferryError, UsageError

if TYPE_CHECKING:
    import aiohttp

MODEL = "emulated"
REQUEST_SECONDS_MAX = 90.0
SETTLE_SECONDS = 0.3
"""Between the end of one cell and the next, so that leases and last steps of one are not in the other."""
WARM_ROUNDS = 2
FAILURES_IN_SUCCESSION_MAX = 2

Launch = Callable[[Connector, int], AbstractContextManager[Pair]]
"""Starts the engines of a connector for a repeat; leaving the context stops them."""


class Audience(Protocol):
    """Hears how far a comparison is; `cli.progress.Progress` is one."""

    def advance(self, amount: float = 1) -> None:
        """So many more seconds of the estimate are done."""
        ...

    def doing(self, what: str) -> None:
        """What is being done now."""
        ...

    def say(self, line: str) -> None:
        """Something to remember."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a comparison ended."""

    left_out: int
    """Cells that were not run because the time was over."""
    broken: tuple[str, ...]
    """Sessions that failed, and why; their other cells were not run."""


def run_comparison(
    results: Results,
    launch: Launch,
    audience: Audience,
    *,
    deadline: float,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Run every cell that has not been run yet. No session starts that would end after `deadline`.

    A session that fails does not stop the others, but a second one right after it does.

    Raises:
        UsageError: engines cannot be started so.
        KvferryError: two sessions in succession failed; this is the second one's error.
    """
    options = results.options
    left_out, broken, in_succession = 0, [], 0
    for session in map(results.missing, sessions(options)):
        if not session.cells:
            continue
        if clock() + session_seconds(session, options.cell_seconds) > deadline:
            left_out += len(session.cells)
            continue
        try:
            left_out += _run_session(results, session, launch, audience, deadline, clock)
            in_succession = 0
        except UsageError:
            raise
        except KvferryError as error:
            in_succession += 1
            if in_succession == FAILURES_IN_SUCCESSION_MAX:
                raise
            broken.append(f"repeat {session.repeat + 1}, {session.connector}: {error}")
            audience.say(broken[-1])
    return Outcome(left_out, tuple(broken))


def _run_session(
    results: Results,
    session: Session,
    launch: Launch,
    audience: Audience,
    deadline: float,
    clock: Callable[[], float],
) -> int:
    """How many cells were left out because engines took longer than they usually do."""
    connector = CONNECTORS[session.connector]
    audience.doing(f"repeat {session.repeat + 1}, {connector.name}: starting engines")
    began = clock()
    with launch(connector, session.repeat) as pair:
        measured = _Measured(results, session, connector, pair, audience)
        try:
            return asyncio.run(measured.run(clock() - began, lambda seconds: clock() + seconds <= deadline))
        except LegError:
            # If an engine has ended, its own words say more.
            pair.check()
            raise


@dataclass(slots=True)
class _Measured:
    """One session while it runs."""

    results: Results
    session: Session
    connector: Connector
    pair: Pair
    audience: Audience

    async def run(self, startup_seconds: float, in_time: Callable[[float], bool]) -> int:
        """Warm up, watch the idle engines, and run the cells; how many of them were left out.

        `in_time` says whether what takes so many seconds would end in time.
        """
        options, name = self.results.options, f"repeat {self.session.repeat + 1}, {self.connector.name}"
        async with client() as http:
            dispatch = self._dispatch()
            self.audience.doing(f"{name}: warming up")
            await self._warm_up(http, dispatch)
            self.audience.doing(f"{name}: idle")
            idle_cpu_seconds, idle_thread_seconds = await self._idle()
            watch = Watch(self.pair, http)
            verified = [mark.verified for mark in (await watch.mark()).values()]
            self.results.append(
                SessionRun(
                    connector=self.connector.name,
                    repeat=self.session.repeat,
                    startup_seconds=round(startup_seconds, 3),
                    idle_seconds=IDLE_SECONDS,
                    idle_cpu_seconds=idle_cpu_seconds,
                    idle_thread_seconds=idle_thread_seconds,
                    pages=sum(one.pages for one in verified),
                    mismatches=sum(one.mismatches for one in verified),
                    machine=machine(),
                )
            )
            runs = sum(run_seconds(cell, options.cell_seconds) for cell in self.session.cells)
            self.audience.advance(session_seconds(self.session, options.cell_seconds) - runs)
            for done, cell in enumerate(self.session.cells):
                if not in_time(run_seconds(cell, options.cell_seconds)):
                    return len(self.session.cells) - done
                self.audience.doing(f"{name}: {cell.name}")
                self.results.append(await self._cell(http, dispatch, watch, cell))
                self.pair.check()
                self.audience.advance(run_seconds(cell, options.cell_seconds))
        return 0

    def _dispatch(self) -> Dispatch:
        make, urls = self.connector.dispatch, self.pair.urls
        style = Style(model=MODEL, extra={"ignore_eos": True})
        return make(urls.get("prefill", ""), urls["decode"], style)

    async def _warm_up(self, http: aiohttp.ClientSession, dispatch: Dispatch) -> None:
        """Let engines meet and touch what they will use, with prompts of every length that comes."""
        await dispatch.prepare(http, self._asks("meet", PROBE_TOKENS, 1)[0])
        lengths = sorted({cell.input_tokens for cell in self.session.cells})
        for turn in range(WARM_ROUNDS):
            for tokens in lengths:
                asks = self._asks(f"warm-{turn}-{tokens}", tokens, 1)
                load = await run_load(
                    http, dispatch, asks, None, LoadLimits(request_seconds_max=REQUEST_SECONDS_MAX)
                )
                if load.failures:
                    raise LegError(f"the engines do not work: {load.failures[0].error}")

    async def _idle(self) -> tuple[dict[Side, float], dict[Side, float]]:
        await asyncio.sleep(SETTLE_SECONDS)
        before = self.pair.cpu_seconds(), self._own_seconds()
        await asyncio.sleep(IDLE_SECONDS)
        after = self.pair.cpu_seconds(), self._own_seconds()
        whole, threads = (
            {side: round(later[side] - sooner[side], 4) for side in sooner}
            for sooner, later in zip(before, after, strict=True)
        )
        return whole, threads

    def _own_seconds(self) -> dict[Side, float]:
        return {side: parts["kvferry"] for side, parts in self.pair.part_seconds().items()}

    async def _cell(
        self, http: aiohttp.ClientSession, dispatch: Dispatch, watch: Watch, cell: Cell
    ) -> CellRun:
        options, repeat = self.results.options, self.session.repeat
        count = requests_in(cell, options.cell_seconds)
        place = (options.seed, repeat, cell.rate, cell.input_tokens)
        asks = self._asks(f"bench-{repeat}-{cell.rate:g}x{cell.input_tokens}", cell.input_tokens, count)
        due = schedule(count, cell.rate, 1.0, seed_of("due", place))
        limits = LoadLimits(request_seconds_max=REQUEST_SECONDS_MAX)
        began = moment(sum(self.pair.cpu_seconds().values()))
        marks = await watch.mark()
        load = await run_load(http, dispatch, asks, due, limits)
        await watch.wait_for(record.request for record in load.records if record.succeeded)
        engines = await watch.costs(marks)
        used = use(began, moment(sum(self.pair.cpu_seconds().values())))
        await asyncio.sleep(SETTLE_SECONDS)
        return CellRun(
            connector=self.connector.name,
            repeat=repeat,
            cell=(cell.rate, cell.input_tokens),
            load=load,
            phases=tuple(self._phases(load, watch)),
            engines=engines,
            machine=used,
        )

    def _asks(self, name: str, tokens: int, count: int) -> list[Ask]:
        """Requests whose prompts follow from their name, the same for every connector."""
        options = self.results.options
        seed = seed_of("prompts", options.seed, name)
        return asks_of(name, token_prompts(count, tokens, options.vocabulary, seed), options.output_tokens)

    def _phases(self, load: Load, watch: Watch) -> list[Phases]:
        prefill, decode = watch.requests("prefill"), watch.requests("decode")
        cut = (
            phases(
                record,
                load.started_ns,
                prefill.get(record.request),
                decode.get(record.request),
                watch.transfers(record.request),
            )
            for record in load.records
            if record.succeeded
        )
        return [one for one in cut if one is not None]
