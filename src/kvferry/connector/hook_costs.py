"""`kvferry bench hooks`: what kvferry's hooks cost an engine's main thread, per step and per request.

A request's cost is that of the hooks that are called for it, plus what the steps with something to tell or to
hear of it cost beyond an idle step. A step's cost is that of both sides' hooks, since on one GPU both run on
one thread. Prefill and decode engine share this process, so two agents compete with the measured thread
where an engine has one: the figures are the upper end.

Limits are on medians of elapsed time. 24 requests that live and finish together may cost `RATIO_MAX` times as
much each as one alone; the excess over 1 is for what two medians on a shared machine differ by.
"""

from __future__ import annotations

import gc
import logging
import os
import secrets
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kvferry.connector.hook_engine import BLOCK_TOKENS, NO_COST, Chunk, Cost, Engine, Shape, engine_pair
from kvferry.errors import KvferryError

STEP_MICROSECONDS_MAX = 200.0
REQUEST_MICROSECONDS_MAX = 300.0
RATIO_MAX = 1.2

CHUNKS = 4
ADVANCING = 16
"""Prefill requests that advance by a chunk in one step."""
WARM_UPS = 3
IDLE_STEPS_PER_REPEAT = 20
TRANSFER_SECONDS_MAX = 60.0


class BenchError(KvferryError):
    """The measurement could not be carried out."""


@dataclass(frozen=True, slots=True)
class Options:
    """How much to measure. `repeats` for one request; groups are repeated a third as often."""

    requests: int = 24
    blocks: int = 128
    repeats: int = 30
    layers: int = 16
    transport: Literal["nixl", "memory"] = "nixl"
    forward_seconds: float = 0.0005


@dataclass(frozen=True, slots=True)
class Figure:
    """Microseconds of something that was measured `count` times."""

    side: str
    name: str
    count: int
    median: float
    p95: float
    cpu_median: float
    cpu_p95: float


@dataclass(frozen=True, slots=True)
class Report:
    """All figures, and the limits that do not hold, in words."""

    figures: tuple[Figure, ...]
    hooks: tuple[Figure, ...]
    ratios: dict[str, float]
    """Per side: cost per request of many together over that of one alone."""
    problems: tuple[str, ...]

    def figure(self, side: str, name: str) -> Figure:
        """The figure of that name."""
        return next(figure for figure in self.figures if (figure.side, figure.name) == (side, name))


@dataclass(slots=True)
class _Side:
    """One engine and what has been measured on it."""

    name: str
    engine: Engine
    samples: dict[str, list[Cost]] = field(default_factory=dict)
    idle: Cost = NO_COST
    life: Cost = NO_COST
    """Of the requests under way."""

    def add(self, name: str, cost: Cost) -> None:
        self.samples.setdefault(name, []).append(cost)

    def charge(self) -> None:
        """Charge the hooks since the last step to the requests under way."""
        self.life += self.engine.meter.take()

    def step(self, chunks: Iterable[Chunk] = ()) -> tuple[Cost, set[str], set[str]]:
        """A step; what it costs beyond an idle one is charged if it has to do with a request."""
        step = self.engine.step(chunks)
        if step.eventful:
            self.life += Cost(step.cost.wall - self.idle.wall, step.cost.cpu - self.idle.cpu)
        else:
            self.add("step, transfers under way, no event", step.cost)
        return step.cost, step.sent, step.received


def measure(options: Options) -> Report:
    """Measure everything and compare it with the limits.

    Raises:
        BenchError: a transfer did not end.
        UsageError, TransportError: an agent could not be started.
    """
    # The directories are for this process alone, of which they would warn; and NIXL greets on standard output.
    logging.getLogger("kvferry.agent.directory_server").setLevel(logging.ERROR)
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    shape = Shape(
        cache_blocks=2 * max(options.requests, ADVANCING) * options.blocks + 1,
        layers=options.layers,
        transport=options.transport,
        forward_seconds=options.forward_seconds,
    )
    with engine_pair(shape) as (prefill, decode):
        sides = _Side("prefill", prefill), _Side("decode", decode)
        bench = _Bench(options, *sides)
        bench.run(WARM_UPS, group_repeats=1)
        for side in sides:
            side.samples.clear()
            side.engine.meter.hooks.clear()
        # As an engine core does once it has started.
        gc.collect()
        gc.freeze()
        try:
            bench.run(options.repeats, group_repeats=max(1, options.repeats // 3))
        finally:
            gc.unfreeze()
    return _report(options, sides)


class _Bench:
    """Runs transfers from one engine to the other and charges their costs."""

    def __init__(self, options: Options, prefill: _Side, decode: _Side) -> None:
        self._options = options
        self._prefill = prefill
        self._decode = decode
        self._coordinates = prefill.engine.coordinates()

    def run(self, repeats: int, group_repeats: int) -> None:
        """Everything, so many times."""
        for _ in range(repeats):
            self._idle()
            self._transfer(1)
        for _ in range(group_repeats):
            self._idle()
            self._transfer(self._options.requests)
            self._transfer(ADVANCING)

    def _idle(self) -> None:
        for side in (self._prefill, self._decode):
            for _ in range(IDLE_STEPS_PER_REPEAT):
                side.add("step, idle", side.engine.step().cost)
            costs = side.samples["step, idle"]
            side.idle = Cost(
                int(statistics.median(cost.wall for cost in costs)),
                int(statistics.median(cost.cpu for cost in costs)),
            )

    def _transfer(self, count: int) -> None:
        """`count` requests from arrival to end, all in step with each other."""
        prefill, decode = self._prefill, self._decode
        prefill.life = decode.life = NO_COST
        transfers = [secrets.token_hex(16) for _ in range(count)]
        decoding = self._arrive_at_decode(transfers)
        prefilling = self._compute(transfers)
        finished = NO_COST
        prefill.engine.meter.take()
        for request in prefilling:
            prefill.engine.finish(request)
        finished += prefill.engine.meter.take()
        prefill.life += finished
        cost, sent, _ = prefill.step()
        finished += Cost(cost.wall - prefill.idle.wall, cost.cpu - prefill.idle.cpu)
        prefill.add(_each("finish, per request", count), _divided(finished, count))
        self._settle(len(sent), count)
        decode.engine.meter.take()
        for request in decoding:
            decode.engine.finish(request)
        decode.charge()
        decode.step()
        for side in (prefill, decode):
            if not side.engine.is_clean:
                raise BenchError(f"the {side.name} engine still holds blocks after its requests have ended")
            side.add(_each("request, whole life", count), _divided(side.life, count))

    def _arrive_at_decode(self, transfers: Sequence[str]) -> list[Any]:
        engine, tokens = self._decode.engine, self._options.blocks * BLOCK_TOKENS
        requests = [
            engine.request(f"d-{transfer}", tokens, self._coordinates | {"transfer_id": transfer})
            for transfer in transfers
        ]
        engine.meter.take()
        for request in requests:
            external = engine.arrive(request)
            engine.allocate(request, self._options.blocks, external)
        self._decode.charge()
        self._decode.step()
        return requests

    def _compute(self, transfers: Sequence[str]) -> list[Any]:
        """Prefill in `CHUNKS` steps."""
        engine, tokens = self._prefill.engine, self._options.blocks * BLOCK_TOKENS
        requests = [
            engine.request(f"p-{transfer}", tokens, {"do_remote_decode": True, "transfer_id": transfer})
            for transfer in transfers
        ]
        engine.meter.take()
        for request in requests:
            engine.arrive(request)
        bounds = [self._options.blocks * chunk // CHUNKS for chunk in range(CHUNKS + 1)]
        for number in range(CHUNKS):
            first, stop = bounds[number], bounds[number + 1]
            chunks = []
            for request in requests:
                # vLLM tells the connector of the first allocation only.
                blocks = engine.allocate(request, stop - first, announced=number == 0)
                size = (stop - first) * BLOCK_TOKENS
                chunks.append(Chunk(request, first * BLOCK_TOKENS, size, blocks))
            self._prefill.charge()
            cost, _, _ = self._prefill.step(chunks)
            if len(requests) == ADVANCING and number:
                self._prefill.add(f"step, {ADVANCING} prefills advance by a chunk", cost)
        return requests

    def _settle(self, sent: int, count: int) -> None:
        """Step both engines until every block of the producer is released and all KV has arrived."""
        deadline = time.monotonic() + TRANSFER_SECONDS_MAX
        received = 0
        while sent < count or received < count:
            if time.monotonic() > deadline:
                raise BenchError(
                    f"{count - received} of {count} transfers did not arrive; is the host overloaded?"
                )
            if sent < count:
                sent += len(self._prefill.step()[1])
            if received < count:
                received += len(self._decode.step()[2])


def _each(name: str, count: int) -> str:
    return f"{name}, {count} at once"


def _divided(cost: Cost, count: int) -> Cost:
    return Cost(cost.wall // count, cost.cpu // count)


def _report(options: Options, sides: Sequence[_Side]) -> Report:
    figures = tuple(
        _figure(side.name, name, costs) for side in sides for name, costs in sorted(side.samples.items())
    )
    hooks = tuple(
        _figure(side.name, name, costs) for side in sides for name, costs in side.engine.meter.hooks.items()
    )
    report = Report(figures, hooks, {}, ())
    one, many = (_each("request, whole life", count) for count in (1, options.requests))
    ratios = {
        side.name: report.figure(side.name, many).median / report.figure(side.name, one).median
        for side in sides
    }
    return Report(figures, hooks, ratios, tuple(_problems(report, ratios, options)))


def _problems(report: Report, ratios: dict[str, float], options: Options) -> Iterator[str]:
    for figure in report.figures:
        step = figure.name in {"step, idle", "step, transfers under way, no event"}
        limit = STEP_MICROSECONDS_MAX if step else REQUEST_MICROSECONDS_MAX
        if (step or figure.name.startswith("request")) and figure.median > limit:
            yield f"{figure.side}, {figure.name}: {figure.median:.0f} us, at most {limit:.0f} are allowed"
    for side, ratio in ratios.items():
        if ratio > RATIO_MAX:
            yield (
                f"{side}, {options.requests} requests at once cost {ratio:.2f} times as much each as one alone, "
                f"at most {RATIO_MAX:g} are allowed"
            )


def _figure(side: str, name: str, costs: Sequence[Cost]) -> Figure:
    wall, cpu = (sorted(getattr(cost, kind) / 1e3 for cost in costs) for kind in ("wall", "cpu"))
    return Figure(
        side,
        name,
        len(costs),
        statistics.median(wall),
        _percentile(wall, 0.95),
        statistics.median(cpu),
        _percentile(cpu, 0.95),
    )


def _percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
