"""The self-test's other process: a consumer with its own memory, agent and directory client.

It takes a `Task` from its pipe, receives one transfer and answers with a `Verdict`. The end of the pipe is
its own end, so that it does not outlive the process that started it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import msgspec

from kvferry.agent.agent import Agent
from kvferry.agent.links import Identity
from kvferry.connector.launch import make_agent
from kvferry.connector.selftest_memory import BLOCK_TOKENS, UNTOUCHED, Memory, compare_target, settle
from kvferry.errors import KvferryError
from kvferry.host.settings import read_settings
from kvferry.ids import BlockId, ConsumerId, EngineId, Incarnation, Rank, TransferId
from kvferry.layout.spans import to_spans
from kvferry.protocol.commands import Receive, Received, ReceiveFailed, Source

CLOSE_SECONDS = 5.0
POLL_SECONDS = 0.001


@dataclass(frozen=True, slots=True)
class Task:
    """One transfer to receive: into which blocks of a cache of which order, from whom, and what is right."""

    transfer: TransferId
    source: Source
    order: str
    device: str
    cache_blocks: int
    targets: tuple[BlockId, ...]
    seed: int
    extra: dict[str, object]
    """`kv_connector_extra_config`, as an engine would be given it."""
    seconds_max: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of it. `problem` is empty when the transfer completed; bytes are judged in any case."""

    problem: str
    reported_bytes: int
    wrong_bytes: int
    stray_bytes: int


def serve(pipe: Connection) -> None:
    """Carry tasks out until the pipe ends."""
    logging.getLogger("kvferry").setLevel(logging.ERROR)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            task: Task = pipe.recv()
            pipe.send(_carry_out(task))


def open_agent(name: str, memory: Memory, extra: dict[str, object]) -> tuple[Agent, Identity, bytes]:
    """Start an agent over a memory as an engine's rank does; it, who it is, and its transport's metadata."""
    identity = Identity(EngineId(name), Incarnation(secrets.token_hex(8)), Rank(0, 0))
    agent = make_agent(identity, memory.describe(), read_settings(extra, environment={}))
    return agent, identity, agent.start()


def _carry_out(task: Task) -> Verdict:
    try:
        return _receive(task)
    except KvferryError as error:
        return Verdict(str(error), 0, 0, 0)


def _receive(task: Task) -> Verdict:
    memory = Memory(task.order, task.cache_blocks, task.device, UNTOUCHED)
    settle(task.device)
    agent, _, _ = open_agent(f"selftest-consumer-{os.getpid()}", memory, task.extra)
    try:
        agent.submit(
            Receive(
                task.transfer,
                ConsumerId("selftest"),
                task.source,
                0,
                len(task.targets) * BLOCK_TOKENS,
                (to_spans(task.targets),),
            )
        )
        problem, reported = _result(agent, task.seconds_max)
        settle(task.device)
        difference = compare_target(memory, task.targets, task.seed)
    finally:
        closed = agent.close(CLOSE_SECONDS)
    if not closed:
        problem = problem or f"the consumer's agent did not stop within {CLOSE_SECONDS:g} s"
    return Verdict(problem, reported, difference.wrong_bytes, difference.stray_bytes)


def _result(agent: Agent, seconds_max: float) -> tuple[str, int]:
    """How the transfer ended, and the bytes that the agent says have come."""
    deadline = time.monotonic() + seconds_max
    while time.monotonic() < deadline:
        for result in agent.results():
            if isinstance(result, Received):
                return "", result.bytes
            if isinstance(result, ReceiveFailed):
                return f"the transfer failed: {msgspec.structs.asdict(result)['reason']}", 0
        time.sleep(POLL_SECONDS)
    return f"the transfer did not end within {seconds_max:g} s", 0
