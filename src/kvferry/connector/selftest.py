"""`kvferry selftest`: KV from this process's memory into another's, by the agent and transport of an engine.

Each move is one transfer between unlike or like stride orders, in several chunks. The device (see
`selftest_memory`) fills each chunk late, and the chunk is published at once with the event that says when, as
the connector does after a forward pass that is still under way. So a write that leaves before its event
carries stale bytes, and the consumer, which compares every byte of its cache, sees them.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from random import Random

import torch

from kvferry.agent.agent import Agent
from kvferry.agent.directory import Directory, RankEntry
from kvferry.agent.directory_server import DirectoryServer
from kvferry.connector.selftest_memory import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    STALE,
    Device,
    Memory,
    Ready,
    content,
    open_device,
    settle,
)
from kvferry.connector.selftest_peer import CLOSE_SECONDS, POLL_SECONDS, Task, Verdict, open_agent, serve
from kvferry.errors import KvferryError
from kvferry.ids import BlockId, TransferId
from kvferry.layout.spans import to_spans
from kvferry.layout.spec import encode_spec
from kvferry.protocol import reasons
from kvferry.protocol.commands import Advance, Expect, Finish, Released, Source

HOST = "127.0.0.1"
CACHE_SHARE = 2
"""A cache has this many times the blocks that are moved; the others must stay untouched."""


class SelftestError(KvferryError):
    """The self-test could not be carried out."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a self-test moves, and how."""

    device: str = "cpu"
    blocks: int = 64
    chunks: int = 4
    delay_seconds: float = 0.2
    backends: tuple[str, ...] = ("UCX",)
    seconds_max: float = 60.0
    """For each move."""
    seed: int = 0
    ignore_events: bool = False
    """The planted fault: publish without the event. The self-test must then fail."""


@dataclass(frozen=True, slots=True)
class Move:
    """One transfer. With `registered_first` its destination is known before any KV exists."""

    source_order: str
    target_order: str
    registered_first: bool


MOVES = (
    Move("LBHNC", "LBHNC", registered_first=True),
    Move("LBHNC", "BLHNC", registered_first=True),
    Move("BHLNC", "LBHNC", registered_first=True),
    Move("BLHNC", "BLHNC", registered_first=False),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a move came to. `late_chunks` were published while the device had not filled them."""

    move: Move
    bytes: int
    late_chunks: int
    seconds: float
    problems: tuple[str, ...]


def resolve_device(wanted: str) -> tuple[str, str]:
    """The device for "auto", "cpu" or "cuda", and why it cannot be had, if so."""
    available = torch.cuda.is_available()
    if wanted == "auto":
        return ("cuda" if available else "cpu"), ""
    if wanted == "cuda" and not available:
        built = "sees no GPU" if torch.version.cuda else "is built without CUDA"
        return wanted, f"torch {torch.__version__} {built}"
    return wanted, ""


def run_moves(options: Options, moves: Sequence[Move] = MOVES) -> Iterator[Outcome]:
    """Carry the moves out one by one, all with the same second process.

    Raises:
        SelftestError: the second process could not be started, or has ended or hangs.
        UsageError, TransportError: an agent could not be started.
    """
    # Both ends are on this host by intent, which the directory would otherwise warn of; and NIXL greets every
    # agent on the standard output.
    logging.getLogger("kvferry.agent.directory_server").setLevel(logging.ERROR)
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    with _consumer() as pipe:
        for number, move in enumerate(moves):
            yield _carry_out(move, options, pipe, seed=options.seed + number)


@contextmanager
def _consumer() -> Iterator[Connection]:
    """The second process's pipe. The process ends with it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), name="kvferry-selftest-consumer", daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join(CLOSE_SECONDS)
        if process.is_alive():
            process.kill()
            process.join()
        process.close()


def _carry_out(move: Move, options: Options, pipe: Connection, seed: int) -> Outcome:
    cache_blocks = CACHE_SHARE * options.blocks
    memory = Memory(move.source_order, cache_blocks, options.device, STALE)
    settle(options.device)
    extra: dict[str, object] = {"backends": list(options.backends)}
    agent, identity, metadata = open_agent("selftest-producer", memory, extra)
    server = DirectoryServer(HOST, 0)
    try:
        entry = RankEntry(
            pp=0, tp=0, peer=identity.peer, metadata=metadata, cache=encode_spec(memory.describe())
        )
        server.publish(
            Directory(
                engine=identity.engine,
                incarnation=identity.incarnation,
                tp_size=1,
                pp_size=1,
                ranks=(entry,),
            )
        )
        random = Random(seed)
        sources, targets = (random.sample(range(cache_blocks), options.blocks) for _ in range(2))
        task = Task(
            transfer=TransferId(secrets.token_hex(16)),
            source=Source(identity.engine, HOST, server.port, incarnation=identity.incarnation),
            order=move.target_order,
            device=options.device,
            cache_blocks=cache_blocks,
            targets=tuple(targets),
            seed=seed,
            extra=extra,
            seconds_max=options.seconds_max,
        )
        producer = _Producer(agent, memory, options, task, sources)
        return producer.carry_out(move, pipe)
    finally:
        server.close()
        agent.close(CLOSE_SECONDS)


class _Producer:
    """This process's part in one move."""

    def __init__(
        self, agent: Agent, memory: Memory, options: Options, task: Task, sources: list[BlockId]
    ) -> None:
        self._agent = agent
        self._memory = memory
        self._options = options
        self._task = task
        self._sources = sources
        self._late_chunks = 0

    def carry_out(self, move: Move, pipe: Connection) -> Outcome:
        """Publish late KV before or after its registration, and judge what has come of it."""
        device = open_device(self._options.device, self._options.delay_seconds)
        begun = time.monotonic()
        try:
            if move.registered_first:
                pipe.send(self._task)
                self._await("the registration did not arrive", self._is_registered)
            events = self._publish(device)
            if not move.registered_first:
                self._await("the device did not fill the blocks", lambda: all(ready() for ready in events))
                pipe.send(self._task)
            verdict = self._verdict(pipe)
        finally:
            device.close()
        return Outcome(
            move,
            bytes=len(self._sources) * BLOCK_BYTES,
            late_chunks=self._late_chunks,
            seconds=time.monotonic() - begun,
            problems=tuple(self._problems(verdict)),
        )

    def _is_registered(self) -> bool:
        """The consumer's registration waits for a prefill that nobody has announced yet."""
        return self._agent.snapshot().get("producer_unknown", 0) > 0

    def _publish(self, device: Device) -> list[Ready]:
        transfer, blocks, chunks = self._task.transfer, len(self._sources), self._options.chunks
        values = content(self._task.seed, blocks)
        self._agent.submit(Expect(transfer, blocks * BLOCK_TOKENS))
        bounds = [blocks * chunk // chunks for chunk in range(chunks + 1)]
        events = []
        for first, stop in pairwise(bounds):
            part = self._sources[first:stop]
            ready = device.fill(self._memory, part, values[:, first:stop])
            self._agent.submit(
                Advance(transfer, stop * BLOCK_TOKENS, first, (to_spans(part),)),
                None if self._options.ignore_events else ready,
            )
            self._late_chunks += not ready()
            events.append(ready)
        self._agent.submit(Finish(transfer))
        return events

    def _verdict(self, pipe: Connection) -> Verdict:
        # The consumer has its own bound, and says so; ours is for a process that hangs.
        if not pipe.poll(2 * self._options.seconds_max):
            raise SelftestError("the consumer process does not answer")
        try:
            verdict: Verdict = pipe.recv()
        except EOFError as error:
            raise SelftestError("the consumer process has ended; its messages are above") from error
        return verdict

    def _problems(self, verdict: Verdict) -> Iterator[str]:
        if verdict.problem:
            yield verdict.problem
        elif verdict.reported_bytes != len(self._sources) * BLOCK_BYTES:
            yield f"{verdict.reported_bytes} bytes were reported as received"
        if verdict.wrong_bytes:
            yield f"{verdict.wrong_bytes} bytes of the target are wrong"
        if verdict.stray_bytes:
            yield f"{verdict.stray_bytes} bytes outside of the target were changed"
        if self._late_chunks < self._options.chunks:
            early = self._options.chunks - self._late_chunks
            yield f"{early} chunks were filled before they were published; the delay is too short to tell"
        if not verdict.problem:
            yield from self._release()

    def _release(self) -> Iterator[str]:
        """The producer's own end of a transfer that has arrived."""
        found: list[Released] = []

        def released() -> bool:
            found.extend(result for result in self._agent.results() if isinstance(result, Released))
            return bool(found)

        self._await("the source blocks were not released", released)
        if found[0] != Released(self._task.transfer, reasons.WRITTEN):
            yield f"the producer's transfer ended as {found[0].outcome!r}"

    def _await(self, otherwise: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self._options.seconds_max
        while not condition():
            if time.monotonic() > deadline:
                raise SelftestError(f"{otherwise} within {self._options.seconds_max:g} s")
            time.sleep(POLL_SECONDS)
