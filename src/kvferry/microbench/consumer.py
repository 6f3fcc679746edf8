"""The second process: the consumer's rank of each shape, and the listening end of raw NIXL.

It carries out tasks from its pipe, one at a time. The end of the pipe is its own end, so that it does not
outlive the process that started it.
"""

from __future__ import annotations

import contextlib
import time
from multiprocessing.connection import Connection

from kvferry.host.events import Ended
from kvferry.host.orders import StepOrders
from kvferry.host.settings import read_settings
from kvferry.ids import ConsumerId
from kvferry.layout.spans import to_spans
from kvferry.layout.spec import encode_spec
from kvferry.microbench import outstanding
from kvferry.microbench.cells import BLOCK_TOKENS
from kvferry.microbench.memory import Cache, Memory
from kvferry.microbench.rank import HostCost, HostedRank, other_threads_cpu_seconds, quiet_process
from kvferry.microbench.raw import RawAgent
from kvferry.microbench.tasks import Arrived, Go, IsUp, Listen, Outwait, Ready, Receive, SetUp, Targets
from kvferry.protocol import commands

HOST_PAUSE_SECONDS = 50e-6
"""The host looks for results so often; an engine does once per step."""


def serve(pipe: Connection) -> None:
    """Carry tasks out until the pipe ends."""
    quiet_process()
    with contextlib.suppress(EOFError, ConnectionError):
        consumer = _Consumer(pipe, pipe.recv())
        try:
            while True:
                consumer.carry_out(pipe.recv())
        finally:
            consumer.close()


class _Consumer:
    def __init__(self, pipe: Connection, task: SetUp) -> None:
        self._pipe = pipe
        self._seconds_max = task.seconds_max
        self._settings = read_settings(task.extra, environment={})
        memory = Memory(task.memory_bytes)
        self._ranks = {
            shape: HostedRank(f"microbench-consumer-{number}", Cache(memory, shape), self._settings)
            for number, shape in enumerate(task.shapes)
        }
        self._raw = RawAgent("kvferry-raw-consumer", memory.region)
        caches = {shape: encode_spec(rank.cache.spec) for shape, rank in self._ranks.items()}
        pipe.send(IsUp(self._raw.metadata(), caches))

    def carry_out(self, task: Receive | Listen | Outwait) -> None:
        """Do it and answer."""
        if isinstance(task, Receive):
            self._pipe.send(self._receive(task))
        elif isinstance(task, Listen):
            self._pipe.send(self._listen(task))
        else:
            cache = self._ranks[task.shape].cache
            outstanding.consume(self._pipe, task, cache, self._settings, self._seconds_max)

    def close(self) -> None:
        """Stop all agents."""
        for rank in self._ranks.values():
            rank.close()
        self._raw.close()

    def _receive(self, task: Receive) -> Arrived:
        rank, cost = self._ranks[task.shape], HostCost()
        orders = StepOrders(
            commands=[
                commands.Receive(
                    transfer,
                    ConsumerId(transfer),
                    task.source,
                    0,
                    len(blocks) * BLOCK_TOKENS,
                    (to_spans(blocks),),
                )
                for transfer, blocks in zip(task.transfers, task.targets, strict=True)
            ]
        )
        cost.of(lambda: rank.worker.begin(orders))
        self._await_go()
        cpu = other_threads_cpu_seconds()
        finished, problems = _finish(rank, task, cost, self._seconds_max)
        cpu = other_threads_cpu_seconds() - cpu
        wrong = _wrong_pages(rank.cache, task.targets, task.seed)
        return Arrived(finished, wrong, cpu, cost.seconds, problems)

    def _listen(self, task: Listen) -> Arrived:
        self._await_go()
        finished: list[float] = []
        deadline = time.monotonic() + self._seconds_max
        while len(finished) < len(task.targets) and time.monotonic() < deadline:
            finished += [time.monotonic() for _ in self._raw.heard()]
            # As kvferry's host does: a spin would take a core that the posting thread could use.
            time.sleep(HOST_PAUSE_SECONDS)
        missing = len(task.targets) - len(finished)
        problems = (f"raw NIXL: {missing} notifications did not come",) if missing else ()
        cache = self._ranks[task.shape].cache
        return Arrived(tuple(finished), _wrong_pages(cache, task.targets, task.seed), problems=problems)

    def _await_go(self) -> None:
        self._pipe.send(Ready())
        go = self._pipe.recv()
        assert isinstance(go, Go), "nothing else follows Ready"


def _finish(
    rank: HostedRank, task: Receive, cost: HostCost, seconds_max: float
) -> tuple[tuple[float, ...], tuple[str, ...]]:
    """When the host learnt of each transfer's end, and what was wrong."""
    worker = rank.worker
    expected_bytes = len(task.targets[0]) * rank.cache.spec.groups[0].block_bytes
    finished: list[float] = []
    problems: list[str] = []
    deadline = time.monotonic() + seconds_max
    while len(finished) < len(task.transfers) and time.monotonic() < deadline:
        looked = HostCost()
        reported = looked.of(lambda: worker.collect(()))
        if not reported.finished.receiving:
            time.sleep(HOST_PAUSE_SECONDS)
            continue
        finished += [time.monotonic()] * len(reported.finished.receiving)
        cost.seconds += looked.seconds
        problems += [
            f"{event.reason}, {event.bytes} of {expected_bytes} bytes"
            for event in worker.take_events()
            if isinstance(event, Ended) and (event.failed or event.bytes != expected_bytes)
        ]
        worker.take_bad_blocks()
    if len(finished) < len(task.transfers):
        problems.append(f"{len(task.transfers) - len(finished)} transfers did not end in {seconds_max:g} s")
    return tuple(finished), tuple(problems)


def _wrong_pages(cache: Cache, targets: Targets, seed: int) -> int:
    return sum(cache.wrong_pages(blocks, seed + index) for index, blocks in enumerate(targets))
