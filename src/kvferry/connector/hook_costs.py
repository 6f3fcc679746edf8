"""`kvferry bench hooks`: what kvferry's hooks cost an engine's main thread, per step and per request.

A request's cost is that of the hooks that are called for it, plus what the steps with something to tell or to
hear of it cost beyond an idle step. A step's cost is that of both sides' hooks, since on one GPU both run on
one thread. Prefill and decode engine share this process, so two agents compete with the measured thread
where an engine has one: the figures are the upper end. Steps follow each other after a short sleep, where an
engine's main thread computes and the caches forget: there, the same hooks cost about twice as much.

Every repeat has a request that is pulled, too: its prefill ends before it reaches the decode engine, whose
agent reads the KV. It may cost `RATIO_MAX` times as much as a pushed one on either side.

What engines with KV both ways pay per turn besides is measured alone, see `turn_costs`; it has no limit.

Limits are on medians of elapsed time. Requests that live and finish together may cost `RATIO_MAX` times as
much each as one alone; the excess over 1 is for what two medians on a shared machine differ by. A request of
`SIZED_BLOCKS` blocks or fewer may cost `SIZED_MICROSECONDS_MAX`, a larger one in proportion.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import secrets
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvferry.connector.hook_engine import (
    BLOCK_TOKENS,
    NO_COST,
    Chunk,
    Cost,
    Engine,
    MakeAgent,
    engine_pair,
)
from kvferry.connector.launch import make_agent
from kvferry.connector.turn_costs import turn_costs
from kvferry.errors import KvferryError

STEP_MICROSECONDS_MAX = 200.0
REQUEST_MICROSECONDS_MAX = 300.0
SIZED_MICROSECONDS_MAX = 500.0
SIZED_BLOCKS = 1024
RATIO_MAX = 1.2

CHUNKS = 4
ADVANCING = 16
"""Prefill requests that advance by a chunk in one step."""
LEAST_MICROSECONDS = 1.0
"""What can be told from nothing."""
WARM_UPS = 3
ONE_GROUP_IN = 3
"""One repeat in so many runs groups of requests too."""
IDLE_STEPS_PER_REPEAT = 20
WARM_UP_SECONDS_MAX = 8.0
MEASURE_SECONDS_MAX = 35.0
"""No repeat begins after this; with the start and one repeat more, a run stays under a minute."""
TRANSFER_SECONDS_MAX = 30.0

Progress = Callable[[str], None]


class BenchError(KvferryError):
    """The measurement could not be carried out."""


@dataclass(frozen=True, slots=True)
class Options:
    """How much to measure: at most so many `repeats`, of `requests` that live and finish together.

    `sizes`: the blocks of requests that come alone.
    """

    requests: int = 24
    blocks: int = 128
    repeats: int = 30
    sizes: tuple[int, ...] = (64, 1024, 4096)


@dataclass(frozen=True, slots=True)
class Figure:
    """Microseconds of something that was measured `count` times. A `limit` is one on the median."""

    side: str
    name: str
    count: int
    median: float
    p95: float
    cpu_median: float
    cpu_p95: float
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """All figures, and the limits that do not hold, in words."""

    figures: tuple[Figure, ...]
    hooks: tuple[Figure, ...]
    idle_hooks: tuple[Figure, ...]
    """Hook by hook, what an idle step costs."""
    ratios: dict[str, float]
    """Cost per request of many together over that of one alone, of whole lives and of ends."""
    pull_ratios: dict[str, float]
    """Cost of a pulled request over that of a pushed one, side by side."""
    problems: tuple[str, ...]
    repeats: int
    """Fewer than were asked for where time was short."""
    turns: tuple[Figure, ...] = ()
    """What a turn of a conversation costs besides, where KV flows both ways."""


@dataclass(slots=True)
class _Side:
    """One engine and what has been measured on it."""

    name: str
    engine: Engine
    samples: dict[str, list[Cost]] = field(default_factory=dict)
    idle_hooks: dict[str, list[Cost]] = field(default_factory=dict)
    idle: Cost = NO_COST
    life: Cost = NO_COST
    """Of the requests under way."""

    def add(self, name: str, cost: Cost) -> None:
        self.samples.setdefault(name, []).append(cost)

    def charge(self) -> None:
        """Charge the hooks since the last step to the requests under way."""
        self.life += self.engine.meter.take()

    def clear(self) -> None:
        """Forget what has been measured."""
        self.samples.clear()
        self.idle_hooks.clear()
        self.engine.meter.hooks.clear()

    def step_idly(self) -> None:
        """A step without anything to do, hook by hook."""
        hooks = self.engine.meter.hooks
        before = {name: len(costs) for name, costs in hooks.items()}
        self.add(IDLE, self.engine.step().cost)
        for name, costs in hooks.items():
            called = costs[before.get(name, 0) :]
            if called:
                self.idle_hooks.setdefault(name, []).extend(called)

    def step(self, chunks: Iterable[Chunk] = ()) -> tuple[Cost, set[str], set[str]]:
        """A step; what it costs beyond an idle one is charged if it has to do with a request."""
        step = self.engine.step(chunks)
        if step.failed:
            raise BenchError(f"the {self.name} engine has not received what it waited for")
        if step.eventful:
            self.life += step.cost - self.idle
        else:
            self.add(WAITING, step.cost)
        return step.cost, step.sent, step.received


IDLE = "step, idle"
WAITING = "step, transfers under way, no event"
ADVANCE = f"step, {ADVANCING} prefills advance by a chunk"
LIFE = "request, whole life"
FINISH = "request, end of prefill"
PULLED = "pulled request, whole life"
SIZED = "request"


def measure(
    options: Options, progress: Progress = lambda _: None, make_agent: MakeAgent = make_agent
) -> Report:
    """Measure everything and compare it with the limits.

    Raises:
        BenchError: a transfer did not end.
        UsageError, TransportError: an agent could not be started.
    """
    # The directories would warn that they serve this host alone; and NIXL greets on standard output.
    logging.getLogger("kvferry.agent.directory_server").setLevel(logging.ERROR)
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    progress("starting a prefill and a decode engine's hooks and agents")
    cache_blocks = 2 * max(max(options.requests, ADVANCING) * options.blocks, *options.sizes) + 1
    with engine_pair(cache_blocks, make_agent) as engines:
        sides = _Side("prefill", engines[0]), _Side("decode", engines[1])
        bench = _Bench(options, *sides)
        progress("warming up")
        bench.run(WARM_UPS, WARM_UP_SECONDS_MAX)
        for side in sides:
            side.clear()
        # As an engine core does once it has started.
        gc.collect()
        gc.freeze()
        try:
            repeats = bench.run(options.repeats, MEASURE_SECONDS_MAX, progress)
            turns = turn_costs(options.sizes, repeats)
        finally:
            gc.unfreeze()
    return replace(_report(options, sides, repeats), turns=_by_hook_and_side(turns))


class _Bench:
    """Runs transfers from one engine to the other and charges their costs."""

    def __init__(self, options: Options, prefill: _Side, decode: _Side) -> None:
        self._options = options
        self._prefill = prefill
        self._decode = decode
        self._coordinates = prefill.engine.coordinates()

    def run(self, repeats: int, seconds_max: float, progress: Progress = lambda _: None) -> int:
        """Everything, so many times or until time is up, at least once; returns how many times."""
        deadline = time.monotonic() + seconds_max
        for repeat in range(repeats):
            if repeat and time.monotonic() > deadline:
                return repeat
            self._idle()
            self._transfer(1)
            self._pull()
            for blocks in self._options.sizes:
                self._transfer(1, blocks)
            if repeat % ONE_GROUP_IN == 0:
                progress(f"repeat {repeat + 1} of {repeats}")
                for count in dict.fromkeys((self._options.requests, ADVANCING)):
                    self._transfer(count)
        return repeats

    def _idle(self) -> None:
        for side in (self._prefill, self._decode):
            for _ in range(IDLE_STEPS_PER_REPEAT):
                side.step_idly()
            costs = side.samples[IDLE]
            side.idle = Cost(
                int(statistics.median(cost.wall for cost in costs)),
                int(statistics.median(cost.cpu for cost in costs)),
            )

    def _transfer(self, count: int, sized: int | None = None) -> None:
        """`count` requests from arrival to end, all in step with each other; `sized`: their blocks."""
        prefill, decode = self._prefill, self._decode
        blocks = sized or self._options.blocks
        prefill.life = decode.life = NO_COST
        transfers = [secrets.token_hex(16) for _ in range(count)]
        decoding, _ = self._arrive_at_decode(transfers, blocks, self._coordinates)
        prefilling = self._compute(transfers, blocks)
        finished = NO_COST
        prefill.engine.meter.take()
        for request in prefilling:
            prefill.engine.finish(request)
        finished += prefill.engine.meter.take()
        prefill.life += finished
        cost, sent, _ = prefill.step()
        finished += cost - prefill.idle
        if sized is None:
            prefill.add(_each(FINISH, count), finished // count)
        self._settle(count, sent=len(sent))
        self._end_decode(decoding, _each(LIFE, count) if sized is None else _sized(sized))

    def _pull(self) -> None:
        """One request whose decode leg follows the end of its prefill."""
        prefill, decode = self._prefill, self._decode
        prefill.life = decode.life = NO_COST
        transfers = [secrets.token_hex(16)]
        (prefilling,) = self._compute(transfers, self._options.blocks, {"transfer_mode": "pull"})
        prefill.engine.meter.take()
        answer = prefill.engine.finish(prefilling)
        prefill.charge()
        prefill.step()
        # All KV is there, so that it may have come when the decode engine's step ends.
        decoding, received = self._arrive_at_decode(transfers, self._options.blocks, answer)
        self._settle(1, received=received)
        self._end_decode(decoding, _each(PULLED, 1))

    def _end_decode(self, decoding: Sequence[Any], name: str) -> None:
        """The decode requests end; what the requests under way have cost is known then."""
        self._decode.engine.meter.take()
        for request in decoding:
            self._decode.engine.finish(request)
        self._decode.charge()
        self._decode.step()
        for side in (self._prefill, self._decode):
            if not side.engine.is_clean:
                raise BenchError(f"the {side.name} engine still holds blocks after its requests have ended")
            side.add(name, side.life // len(decoding))

    def _arrive_at_decode(
        self, transfers: Sequence[str], blocks: int, source: Mapping[str, Any]
    ) -> tuple[list[Any], int]:
        """The decode requests, and how many of them have their KV already."""
        engine, tokens = self._decode.engine, blocks * BLOCK_TOKENS
        requests = [
            engine.request(f"d-{transfer}", tokens, {**source, "transfer_id": transfer})
            for transfer in transfers
        ]
        engine.meter.take()
        for request in requests:
            external = engine.arrive(request)
            engine.allocate(request, blocks, external)
        self._decode.charge()
        _, _, received = self._decode.step()
        return requests, len(received)

    def _compute(
        self, transfers: Sequence[str], size: int, more: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Prefill in `CHUNKS` steps."""
        engine, tokens = self._prefill.engine, size * BLOCK_TOKENS
        requests = [
            engine.request(
                f"p-{transfer}", tokens, {"do_remote_decode": True, "transfer_id": transfer, **(more or {})}
            )
            for transfer in transfers
        ]
        engine.meter.take()
        for request in requests:
            engine.arrive(request)
        bounds = [size * chunk // CHUNKS for chunk in range(CHUNKS + 1)]
        for number in range(CHUNKS):
            first, stop = bounds[number], bounds[number + 1]
            chunks = []
            for request in requests:
                # vLLM tells the connector of the first allocation only.
                blocks = engine.allocate(request, stop - first, announced=number == 0)
                computed, scheduled = first * BLOCK_TOKENS, (stop - first) * BLOCK_TOKENS
                chunks.append(Chunk(request, computed, scheduled, blocks))
            self._prefill.charge()
            cost, _, _ = self._prefill.step(chunks)
            if len(requests) == ADVANCING and number:
                self._prefill.add(ADVANCE, cost)
        return requests

    def _settle(self, count: int, *, sent: int = 0, received: int = 0) -> None:
        """Step both engines until every block of the producer is released and all KV has arrived."""
        deadline = time.monotonic() + TRANSFER_SECONDS_MAX
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


def _sized(blocks: int) -> str:
    return f"{SIZED}, {blocks} blocks"


def _report(options: Options, sides: Sequence[_Side], repeats: int) -> Report:
    limits = {
        _sized(blocks): SIZED_MICROSECONDS_MAX * max(1.0, blocks / SIZED_BLOCKS) for blocks in options.sizes
    }
    figures = tuple(
        _figure(side.name, name, costs, limits.get(name, _limit(name)))
        for side in sides
        for name, costs in sorted(side.samples.items(), key=lambda sample: _natural(sample[0]))
    )
    hooks = _by_hook({side.name: side.engine.meter.hooks for side in sides})
    idle_hooks = _by_hook({side.name: side.idle_hooks for side in sides})
    medians = {(figure.side, figure.name): figure.median for figure in figures}
    ratios = {
        # On a disturbed machine an idle step may cost more than the one with a request's end.
        f"{side}, {name}": medians[side, _each(name, options.requests)]
        / max(medians[side, _each(name, 1)], LEAST_MICROSECONDS)
        for side, name in (("prefill", LIFE), ("prefill", FINISH), ("decode", LIFE))
    }
    pull_ratios = {
        side: medians[side, _each(PULLED, 1)] / max(medians[side, _each(LIFE, 1)], LEAST_MICROSECONDS)
        for side in ("prefill", "decode")
    }
    problems = *_problems(figures, ratios, options), *_pull_problems(pull_ratios)
    return Report(figures, hooks, idle_hooks, ratios, pull_ratios, problems, repeats)


def _by_hook(sides: Mapping[str, Mapping[str, Sequence[Cost]]]) -> tuple[Figure, ...]:
    return tuple(_figure(side, name, costs) for side, hooks in sides.items() for name, costs in hooks.items())


def _by_hook_and_side(costs: Mapping[tuple[str, str], Sequence[Cost]]) -> tuple[Figure, ...]:
    return tuple(_figure(side, name, measured) for (side, name), measured in costs.items())


def _natural(name: str) -> str:
    """By which smaller numbers come first."""
    return re.sub(r"\d+", lambda number: number.group().zfill(9), name)


def _limit(name: str) -> float:
    return STEP_MICROSECONDS_MAX if name.startswith("step") else REQUEST_MICROSECONDS_MAX


def _problems(figures: Iterable[Figure], ratios: dict[str, float], options: Options) -> Iterator[str]:
    for figure in figures:
        if figure.limit is not None and figure.median > figure.limit:
            yield (
                f"{figure.side}, {figure.name}: {figure.median:.0f} us, {figure.cpu_median:.0f} of CPU time; "
                f"at most {figure.limit:.0f} are allowed"
            )
    for name, ratio in ratios.items():
        if ratio > RATIO_MAX:
            yield (
                f"{name}: {options.requests} at once cost {ratio:.2f} times as much each as one alone, "
                f"at most {RATIO_MAX:g} are allowed"
            )


def _pull_problems(ratios: Mapping[str, float]) -> Iterator[str]:
    for side, ratio in ratios.items():
        if ratio > RATIO_MAX:
            yield (
                f"{side}: a pulled request costs {ratio:.2f} times as much as a pushed one, "
                f"at most {RATIO_MAX:g} are allowed"
            )


def _figure(side: str, name: str, costs: Sequence[Cost], limit: float | None = None) -> Figure:
    wall, cpu = (sorted(getattr(cost, kind) / 1e3 for cost in costs) for kind in ("wall", "cpu"))
    return Figure(
        side,
        name,
        len(costs),
        statistics.median(wall),
        _percentile(wall, 0.95),
        statistics.median(cpu),
        _percentile(cpu, 0.95),
        limit,
    )


def _percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
