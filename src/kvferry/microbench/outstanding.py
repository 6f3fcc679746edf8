"""What transfers cost that only wait: the time of each step of the agent's loop, on both sides.

Here the loop runs on the caller's thread, as the agent's own thread runs it, so that each step can be timed.
Every transfer is one block, registered by its consumer, and its prefill has not got anywhere. In the end they
are all carried out, so that it is sure that they did wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection

from kvferry.agent.directory_client import DirectoryClient
from kvferry.agent.links import Identity
from kvferry.agent.loop import Close, Incoming, Loop
from kvferry.agent.mailbox import Mailbox
from kvferry.agent.stats import Stats
from kvferry.host.settings import Settings
from kvferry.ids import BlockId, ConsumerId, TransferId
from kvferry.microbench.cells import BLOCK_TOKENS
from kvferry.microbench.memory import Cache
from kvferry.microbench.rank import CLOSE_SECONDS, new_identity
from kvferry.microbench.tasks import Outwait, Outwaited, Ready, Steps
from kvferry.protocol import commands, reasons
from kvferry.protocol.commands import (
    Advance,
    Command,
    Expect,
    Finish,
    Received,
    ReceiveFailed,
    Released,
    Result,
)
from kvferry.transport.nixl import NixlTransport

WAIT_SECONDS_MAX = 1.0


class SteppedRank:
    """A rank whose loop the caller steps."""

    def __init__(self, identity: Identity, cache: Cache, settings: Settings) -> None:
        self.identity = identity
        self.results: list[Result] = []
        self._inbox: Mailbox[Incoming] = Mailbox()
        self._resolver = DirectoryClient(deadline_seconds=settings.limits.handshake_seconds)
        self._transport = NixlTransport(identity.peer, backends=settings.backends)
        self._transport.register(cache.spec.regions)
        self.metadata = self._transport.local_metadata()
        self._loop = Loop(
            identity,
            cache.spec,
            self._transport,
            settings.limits,
            self._resolver,
            self._inbox,
            self.results.append,
            Stats(),
            time.monotonic,
        )

    def submit(self, given: Sequence[Command]) -> None:
        """Leave commands for the next step."""
        for command in given:
            self._inbox.put(command)

    def step_until(self, done: Callable[[], bool], seconds_max: float) -> Steps:
        """Run the loop, and time its steps, until something holds or the time is over."""
        steps = Steps()
        begun = time.monotonic()
        deadline = begun + seconds_max
        while not done() and time.monotonic() < deadline:
            cpu, wall = time.thread_time(), time.perf_counter()
            pause = self._loop.step()
            steps.wall_seconds.append(time.perf_counter() - wall)
            steps.cpu_seconds.append(time.thread_time() - cpu)
            self._inbox.wait(min(pause, WAIT_SECONDS_MAX))
        steps.watched_seconds = time.monotonic() - begun
        return steps

    def close(self) -> None:
        """Tell the peer, drain and stop."""
        self._resolver.close()
        self._inbox.put(Close())
        self.step_until(lambda: self._loop.closing and self._loop.quiet, CLOSE_SECONDS)
        if self._loop.quiet:
            self._transport.close()


@contextmanager
def stepped(engine: str, cache: Cache, settings: Settings) -> Iterator[SteppedRank]:
    """A rank that is closed in the end."""
    rank = SteppedRank(new_identity(engine), cache, settings)
    try:
        yield rank
    finally:
        rank.close()


def consume(pipe: Connection, task: Outwait, cache: Cache, settings: Settings, seconds_max: float) -> None:
    """The consumer's part: register, wait, receive, answer with an `Outwaited`."""
    with stepped("microbench-outwaiter", cache, settings) as rank:
        pipe.send(Ready())
        rank.submit([_registration(task, index) for index in range(len(task.transfers))])
        rank.step_until(lambda: False, task.settle_seconds)
        early = len(rank.results)
        steps = rank.step_until(lambda: bool(rank.results), task.seconds)
        early = max(early, len(rank.results))
        rank.step_until(lambda: len(rank.results) >= len(task.transfers), seconds_max)
        problems = [f"{early} transfers ended before their prefill"] if early else []
        problems += [str(one.reason) for one in rank.results if isinstance(one, ReceiveFailed)]
        received = sum(isinstance(one, Received) for one in rank.results)
        if received < len(task.transfers):
            problems.append(f"{received} of {len(task.transfers)} waiting transfers arrived")
        targets = [target_block(index) for index in range(len(task.transfers))]
        wrong = cache.wrong_pages(targets, task.seed)
    pipe.send(Outwaited(steps, wrong, tuple(problems)))


def _registration(task: Outwait, index: int) -> commands.Receive:
    transfer, block = task.transfers[index], target_block(index)
    return commands.Receive(transfer, ConsumerId(transfer), task.source, 0, BLOCK_TOKENS, (((block, 1),),))


def produce(rank: SteppedRank, task: Outwait, seconds_max: float) -> tuple[Steps, tuple[str, ...]]:
    """The producer's part: expect, wait, carry out; its steps while all waited, and what was wrong."""
    rank.submit([Expect(transfer, BLOCK_TOKENS) for transfer in task.transfers])
    rank.step_until(lambda: False, task.settle_seconds)
    steps = rank.step_until(lambda: False, task.seconds)
    # The consumer began to measure a moment later.
    rank.step_until(lambda: False, task.settle_seconds)
    for index, transfer in enumerate(task.transfers):
        blocks = (((source_block(index), 1),),)
        rank.submit([Advance(transfer, BLOCK_TOKENS, 0, blocks), Finish(transfer)])

    def released() -> list[Released]:
        return [result for result in rank.results if isinstance(result, Released)]

    rank.step_until(lambda: len(released()) >= len(task.transfers), seconds_max)
    good = sum(result.outcome == reasons.WRITTEN for result in released())
    missing = len(task.transfers) - good
    problems = [f"{missing} of {len(task.transfers)} waiting transfers were not written"] if missing else []
    return steps, tuple(problems)


def source_block(index: int) -> BlockId:
    """The only block of a transfer, on the producer."""
    return index


def target_block(index: int) -> BlockId:
    """Its block on the consumer: one further, so that nobody can confuse the two sides."""
    return index + 1


def blocks_needed(transfers: int) -> int:
    """The blocks that a cache must have."""
    return transfers + 1


def transfer_names(count: int, prefix: str) -> tuple[TransferId, ...]:
    """So many transfers' ids."""
    return tuple(TransferId(f"{prefix}-{number:06}") for number in range(count))
