"""This process's part in a hand-over: the producer's rank of each shape, and raw NIXL's posting end."""

from __future__ import annotations

import multiprocessing
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Literal, TypeVar

import numpy as np

from kvferry.errors import KvferryError
from kvferry.host.events import Ended, RequestId
from kvferry.host.orders import Sender, StepOrders
from kvferry.host.settings import Settings
from kvferry.ids import BlockId, TransferId
from kvferry.layout.descriptors import expand
from kvferry.layout.plan import CopyPlan, plan
from kvferry.layout.runs import Runs
from kvferry.layout.spans import to_spans
from kvferry.layout.spec import decode_spec
from kvferry.microbench import outstanding
from kvferry.microbench.cells import Cell, Shape
from kvferry.microbench.consumer import serve
from kvferry.microbench.memory import Cache, Memory
from kvferry.microbench.rank import (
    CLOSE_SECONDS,
    HostCost,
    HostedRank,
    other_threads_cpu_seconds,
    quiet_process,
    served,
)
from kvferry.microbench.raw import RawAgent, raw_transfer
from kvferry.microbench.tasks import (
    Answer,
    Arrived,
    Go,
    IsUp,
    Listen,
    Outwait,
    Outwaited,
    Ready,
    Receive,
    SetUp,
    Steps,
    Targets,
)
from kvferry.protocol.commands import Advance, Expect, Finish, Source

Kind = Literal["ferry", "raw"]
POLL_SECONDS = 0.0005
QUIET_SECONDS = 0.01
"""When registrations have arrived and the agent has heard nothing more for so long, everything is agreed."""
Said = TypeVar("Said", IsUp, Ready, Arrived, Outwaited)


class MicrobenchError(KvferryError):
    """The measurement could not be carried out."""


@dataclass(frozen=True, slots=True)
class Placed:
    """The blocks of each transfer on both sides, and what is written into them."""

    sources: tuple[tuple[BlockId, ...], ...]
    targets: Targets
    seed: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement. Seconds from "the KV is there" to what the consumer's host has learnt.

    `seconds` to the last transfer's end, `transfer_seconds` the median of all. CPU times are of kvferry's
    threads, for raw NIXL of the one that posts; host times of the calls that an engine's main thread makes.
    """

    kind: Kind
    seconds: float
    transfer_seconds: float
    producer_cpu_seconds: float
    consumer_cpu_seconds: float = 0.0
    producer_host_seconds: float = 0.0
    consumer_host_seconds: float = 0.0
    descriptors: int = 0
    wrong_pages: int = 0
    problems: tuple[str, ...] = ()


class Producer:
    """Everything that stays open while a benchmark runs."""

    def __init__(
        self,
        pipe: Connection,
        memory: Memory,
        shapes: Sequence[Shape],
        settings: Settings,
        set_up: SetUp,
        stack: ExitStack,
    ) -> None:
        self._pipe, self._settings, self._seconds_max = pipe, settings, set_up.seconds_max
        pipe.send(set_up)
        self._ranks: dict[Shape, HostedRank] = {}
        self._sources: dict[Shape, Source] = {}
        for number, shape in enumerate(shapes):
            rank = HostedRank(f"microbench-producer-{number}", Cache(memory, shape), settings)
            stack.callback(rank.close)
            self._ranks[shape] = rank
            self._sources[shape] = stack.enter_context(served(rank.identity, rank.metadata, rank.cache.spec))
        self._raw = RawAgent("kvferry-raw-producer", memory.region)
        stack.callback(self._raw.close)
        up = self._answer(IsUp)
        self._raw.connect(up.raw_metadata)
        self._plans = {
            shape: plan(rank.cache.spec, decode_spec(up.caches[shape])) for shape, rank in self._ranks.items()
        }

    def blocks(self, shape: Shape) -> int:
        """Blocks of a cache of this shape, the same on both sides."""
        return self._ranks[shape].cache.blocks

    def corrupt(self, block: int | None) -> None:
        """The planted fault: damage this block of each of kvferry's transfers before it is published."""
        if block is not None:
            for rank in self._ranks.values():
                rank.worker.damage_block(block, rank.cache.damage)

    def ferry(self, cell: Cell, placed: Placed) -> Sample:
        """Hand over by kvferry."""
        rank, cost = self._ranks[cell.shape], HostCost()
        transfers = tuple(TransferId(secrets.token_hex(16)) for _ in placed.sources)
        self._stamp(rank.cache, placed)
        before = rank.agent.snapshot()
        senders = [Sender(transfer, RequestId(transfer)) for transfer in transfers]
        expects = StepOrders(senders=senders, commands=[Expect(one, cell.tokens) for one in transfers])
        cost.of(lambda: rank.worker.begin(expects))
        source = self._sources[cell.shape]
        self._pipe.send(Receive(cell.shape, source, transfers, placed.targets, placed.seed))
        self._answer(Ready)
        self._await_agreement(rank, int(before["messages_received"]) + len(transfers))
        advances = StepOrders(
            advances=[
                Advance(transfer, cell.tokens, 0, (to_spans(blocks),))
                for transfer, blocks in zip(transfers, placed.sources, strict=True)
            ]
        )
        finishes = StepOrders(commands=[Finish(one) for one in transfers])
        self._pipe.send(Go())
        cpu, begun = other_threads_cpu_seconds(), time.monotonic()
        cost.of(lambda: rank.worker.save(advances, succeeded=True))
        cost.of(lambda: rank.worker.begin(finishes))
        problems = self._release(rank, transfers, cost)
        cpu = other_threads_cpu_seconds() - cpu
        posted = int(rank.agent.snapshot()["posted_descriptors"]) - int(before["posted_descriptors"])
        return _sample("ferry", begun, cpu, self._answer(Arrived), cost.seconds, posted, problems)

    def raw(self, cell: Cell, placed: Placed) -> Sample:
        """Hand over by NIXL alone: one post per transfer."""
        rank = self._ranks[cell.shape]
        self._stamp(rank.cache, placed)
        transfers = [
            raw_transfer(_runs(self._plans[cell.shape], source, target), b"%d" % number)
            for number, (source, target) in enumerate(zip(placed.sources, placed.targets, strict=True))
        ]
        self._pipe.send(Listen(cell.shape, placed.targets, placed.seed))
        self._answer(Ready)
        self._pipe.send(Go())
        cpu, begun = time.thread_time(), time.monotonic()
        self._raw.write(transfers, self._seconds_max)
        cpu = time.thread_time() - cpu
        posted = sum(len(transfer.local) for transfer in transfers)
        return _sample("raw", begun, cpu, self._answer(Arrived), 0.0, posted, ())

    def outwait(
        self, shape: Shape, count: int, settle_seconds: float, seconds: float, seed: int
    ) -> tuple[Steps, Outwaited]:
        """Let so many transfers wait; the producer's steps, and the consumer's with what was wrong."""
        cache = self._ranks[shape].cache
        cache.stamp([outstanding.source_block(index) for index in range(count)], seed)
        names = outstanding.transfer_names(count, secrets.token_hex(8))
        with (
            outstanding.stepped("microbench-outwaited", cache, self._settings) as rank,
            served(rank.identity, rank.metadata, cache.spec) as source,
        ):
            task = Outwait(shape, source, names, settle_seconds, seconds, seed)
            self._pipe.send(task)
            self._answer(Ready)
            steps, problems = outstanding.produce(rank, task, self._seconds_max)
            answer = self._answer(Outwaited)
        return steps, Outwaited(answer.steps, answer.wrong_pages, problems + answer.problems)

    # --- inside ------------------------------------------------------------------------------------

    def _stamp(self, cache: Cache, placed: Placed) -> None:
        for index, blocks in enumerate(placed.sources):
            cache.stamp(blocks, placed.seed + index)

    def _await_agreement(self, rank: HostedRank, messages: int) -> None:
        """Until the registrations have come, and what follows them: the permissions to write."""
        heard, since = -1, time.monotonic()

        def quiet() -> bool:
            nonlocal heard, since
            now, count = time.monotonic(), int(rank.agent.snapshot()["messages_received"])
            if count != heard:
                heard, since = count, now
            return count >= messages and now - since >= QUIET_SECONDS

        self._await("the registrations did not arrive", quiet)

    def _release(self, rank: HostedRank, transfers: Sequence[TransferId], cost: HostCost) -> tuple[str, ...]:
        """Until the producer's host may free the source blocks."""
        waiting = {RequestId(transfer) for transfer in transfers}
        ended = list(waiting)

        def released() -> bool:
            looked = HostCost()
            reported = looked.of(lambda: rank.worker.collect(ended))
            ended.clear()
            if reported.finished.sending:
                cost.seconds += looked.seconds
                waiting.difference_update(reported.finished.sending)
            return not waiting

        self._await("the source blocks were not released", released)
        events = rank.worker.take_events()
        return tuple(event.reason for event in events if isinstance(event, Ended) and event.failed)

    def _await(self, otherwise: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self._seconds_max
        while not condition():
            if time.monotonic() > deadline:
                raise MicrobenchError(f"{otherwise} within {self._seconds_max:g} s")
            time.sleep(POLL_SECONDS)

    def _answer(self, kind: type[Said]) -> Said:
        return await_answer(self._pipe, kind, 2 * self._seconds_max)


def await_answer(pipe: Connection, kind: type[Said], seconds_max: float) -> Said:
    """What the consumer process says next.

    Raises:
        MicrobenchError: it has ended, or says nothing for so long, which is longer than its own bounds.
    """
    if not pipe.poll(seconds_max):
        raise MicrobenchError("the consumer process does not answer")
    try:
        answer: Answer = pipe.recv()
    except EOFError as error:
        raise MicrobenchError("the consumer process has ended; its messages are above") from error
    assert isinstance(answer, kind), "each task has its answers in order"
    return answer


@contextmanager
def opened(memory: Memory, shapes: Sequence[Shape], settings: Settings, set_up: SetUp) -> Iterator[Producer]:
    """A producer and its second process, which ends with it."""
    quiet_process()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), name="kvferry-microbench-consumer", daemon=True)
    process.start()
    theirs.close()
    try:
        with ExitStack() as stack:
            yield Producer(ours, memory, shapes, settings, set_up, stack)
            # It says goodbye to agents that still listen.
            ours.close()
            process.join(CLOSE_SECONDS)
    finally:
        ours.close()
        process.join(CLOSE_SECONDS)
        if process.is_alive():
            process.kill()
            process.join()
        process.close()


def _runs(joint: CopyPlan, sources: Sequence[BlockId], targets: Sequence[BlockId]) -> Runs:
    return expand(joint, 0, np.array(sources, np.int64), np.array(targets, np.int64))


def _sample(
    kind: Kind,
    begun: float,
    cpu_seconds: float,
    arrived: Arrived,
    host_seconds: float,
    descriptors: int,
    problems: tuple[str, ...],
) -> Sample:
    ends = np.array(arrived.finished_at or (begun,)) - begun
    return Sample(
        kind,
        seconds=float(ends.max()),
        transfer_seconds=float(np.median(ends)),
        producer_cpu_seconds=cpu_seconds,
        consumer_cpu_seconds=arrived.cpu_seconds,
        producer_host_seconds=host_seconds,
        consumer_host_seconds=arrived.host_seconds,
        descriptors=descriptors,
        wrong_pages=arrived.wrong_pages,
        problems=problems + arrived.problems,
    )
