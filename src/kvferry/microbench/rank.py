"""One rank of an engine without the engine: the production agent, and the production host side to drive it.

The thread that makes a rank stands for the engine's main thread. What it spends in calls of the host side is
counted apart from what all other threads of the process spend.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from kvferry.agent.directory import Directory, RankEntry
from kvferry.agent.directory_server import DirectoryServer
from kvferry.agent.links import Identity
from kvferry.host.agents import make_agent
from kvferry.host.settings import Settings
from kvferry.host.worker import FerryWorker
from kvferry.ids import EngineId, Incarnation, Rank
from kvferry.layout.spec import CacheSpec, encode_spec
from kvferry.microbench.cells import BLOCK_TOKENS
from kvferry.microbench.memory import Cache
from kvferry.protocol.commands import Source

HOST = "127.0.0.1"
CLOSE_SECONDS = 5.0
_Result = TypeVar("_Result")


def quiet_process() -> None:
    """Both ends are on this host by intent, which would be warned of; and NIXL greets every agent."""
    logging.getLogger("kvferry").setLevel(logging.ERROR)
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")


def new_identity(engine: str) -> Identity:
    """The only rank of an engine that starts now."""
    return Identity(EngineId(engine), Incarnation(secrets.token_hex(8)), Rank(0, 0))


def other_threads_cpu_seconds() -> float:
    """CPU time of all threads of this process but the one that asks."""
    return time.process_time() - time.thread_time()


@dataclass(slots=True)
class HostCost:
    """What the host side's calls have cost their thread."""

    seconds: float = 0.0

    def of(self, call: Callable[[], _Result]) -> _Result:
        """Make a call and count its time."""
        begun = time.perf_counter()
        result = call()
        self.seconds += time.perf_counter() - begun
        return result


class HostedRank:
    """An agent on its thread, and the worker side of its host."""

    def __init__(self, engine: str, cache: Cache, settings: Settings) -> None:
        self.identity = new_identity(engine)
        self.cache = cache
        self.agent = make_agent(self.identity, cache.spec, settings)
        self.metadata = self.agent.start()
        self.worker = FerryWorker(self.agent, rank=0, block_tokens=BLOCK_TOKENS)

    def close(self) -> bool:
        """Stop; False when it did not within its time."""
        return self.agent.close(CLOSE_SECONDS)


@contextmanager
def served(identity: Identity, metadata: bytes, spec: CacheSpec) -> Iterator[Source]:
    """Serve the directory of an engine with one rank; where consumers find it."""
    entry = RankEntry(pp=0, tp=0, peer=identity.peer, metadata=metadata, cache=encode_spec(spec))
    server = DirectoryServer(HOST, 0)
    try:
        server.publish(
            Directory(
                engine=identity.engine,
                incarnation=identity.incarnation,
                tp_size=1,
                pp_size=1,
                ranks=(entry,),
            )
        )
        yield Source(identity.engine, HOST, server.port, incarnation=identity.incarnation)
    finally:
        server.close()
