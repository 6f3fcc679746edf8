"""One engine that serves requests, as the router knows it. All of it belongs to the event loop's thread."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvferry.handoff import SourceParams
from kvferry.router.engines.breaker import Breaker
from kvferry.router.engines.pace import Pace
from kvferry.router.engines.queueing import PrefillQueue
from kvferry.router.ground.roles import Role

RANK_HEADER = "X-data-parallel-rank"


class Origin(enum.StrEnum):
    """Who named a worker, and so who may take it away."""

    CONFIGURED = "configured"
    """A flag or the configuration file."""
    ADMIN = "admin"
    """`POST /workers`."""


@dataclass(frozen=True, slots=True)
class Model:
    """What an engine says of a model that it serves."""

    name: str
    length_max: int | None = None
    """Tokens of prompt and answer together; None when it does not tell."""


class OpenStream(Protocol):
    """A streamed answer under way."""

    reads: int
    """How often something has come."""

    def abort(self) -> None:
        """End it as if its connection were lost."""


@dataclass(slots=True, eq=False)
class Leg:
    """One request that is open at an engine."""

    tokens: int
    """What it is expected to make the engine hold or compute."""
    stream: OpenStream | None = None
    """Its answer, once that has begun to come."""
    reads_seen: int = 0
    """How often something had come when the engine was first found silent."""


class Waiting(Protocol):
    """A leg that has no answer yet."""

    def lose(self) -> None:
        """No answer will come."""


@dataclass(slots=True, eq=False)
class Answering:
    """A task of its own that waits for an engine's answer and for nothing else."""

    task: asyncio.Task[Any]
    lost: bool = False
    """Whether it was cancelled because the engine is gone."""

    def lose(self) -> None:
        """No answer will come."""
        self.lost = True
        self.task.cancel()


@dataclass(slots=True, eq=False)
class Worker:
    """One engine at one address, or one data-parallel rank of an engine."""

    url: str
    role: Role
    rank: int | None = None
    """Of several behind one address; None when there is one."""
    origin: Origin = Origin.CONFIGURED
    up: bool = False
    draining: bool = False
    """Whether it gets nothing new; what is open goes on."""
    gone: bool = False
    """Whether it was taken out of the pool."""
    source: SourceParams | None = None
    """Where its KV can be had; None until a probe or an answer told, and again after a sign of a restart."""
    models: tuple[Model, ...] = ()
    """Empty until asked."""
    version: str = ""
    """vLLM's; empty when it has not told."""
    problem: str = "not checked yet"
    """Why it is not ready; empty when it is."""
    legs: set[Leg] = field(default_factory=set)
    tokens: int = 0
    """Of all open legs, and of those that are about to be sent."""
    waits: set[Waiting] = field(default_factory=set)
    """Those legs that have no answer yet."""
    transfers: int = 0
    """A prefill engine's: hand-overs that have not ended, those included whose prefill has."""
    pace: Pace = field(default_factory=Pace)
    """A decode engine's: what it adds to the first token by itself."""
    holds: bool | None = None
    """A decode engine's: whether it keeps anything after a turn; None until it was asked."""
    queue: PrefillQueue = field(default_factory=PrefillQueue)
    """A prefill engine's."""
    breaker: Breaker = field(default_factory=Breaker)
    losses: int = 0
    """How often it was found to be down: another may have come back each time."""
    hanging: bool = False
    """Its last check got no answer in time: no request waits for the next one."""

    @property
    def name(self) -> str:
        """How it is called in labels, logs and `/workers`."""
        return self.url if self.rank is None else f"{self.url}@{self.rank}"

    @property
    def headers(self) -> Mapping[str, str]:
        """What a request carries so that it reaches this one of several behind the address."""
        return {} if self.rank is None else {RANK_HEADER: str(self.rank)}

    @property
    def header_lines(self) -> bytes:
        """The same as bytes."""
        return b"" if self.rank is None else b"%b: %d\r\n" % (RANK_HEADER.encode(), self.rank)

    @property
    def in_flight(self) -> int:
        """How many legs are open to it."""
        return len(self.legs)

    @property
    def ready(self) -> bool:
        """Whether a request can be sent to it."""
        return self.up and not self.draining and (self.role is Role.DECODE or self.source is not None)

    def commit(self, tokens: int) -> Commitment:
        """Count tokens of a leg that is about to be sent, so that who chooses meanwhile knows of it."""
        self.tokens += tokens
        return Commitment(self, tokens)

    def forget(self) -> None:
        """What was measured, or told, says nothing of who comes next."""
        self.holds = None
        self.pace.forget()
        self.queue.forget()

    def leg(self, tokens: int = 0) -> Opened:
        """Count one leg for as long as it is open."""
        return Opened(self, Leg(max(tokens, 1)))

    @property
    def drained(self) -> bool:
        """Whether it can be stopped without anybody noticing."""
        return self.draining and not self.legs and not self.transfers

    def transferring(self) -> Transferring:
        """A hand-over from it is under way as long as the block runs."""
        return Transferring(self)

    def end(self) -> None:
        """End everything that is open to it."""
        for answering in tuple(self.waits):
            answering.lose()
        for leg in tuple(self.legs):
            if leg.stream is not None:
                leg.stream.abort()

    def found_silent(self) -> None:
        """Its health check gets no answer: note how far its streams have come."""
        for leg in self.legs:
            leg.reads_seen = 0 if leg.stream is None else leg.stream.reads

    def cut(self) -> None:
        """It has been silent for too long: end what waits for it, and the streams that have stood still."""
        for answering in tuple(self.waits):
            answering.lose()
        for leg in tuple(self.legs):
            if leg.stream is not None and leg.stream.reads == leg.reads_seen:
                leg.stream.abort()
        self.found_silent()


@dataclass(slots=True, eq=False)
class Commitment:
    """Tokens that a worker has been chosen for, until its leg is open."""

    worker: Worker
    tokens: int

    def end(self) -> None:
        """The leg is open, or will not be. Can be called again."""
        self.worker.tokens -= self.tokens
        self.tokens = 0


@dataclass(slots=True, eq=False)
class Opened:
    """A context manager: in its block a leg is open at the worker."""

    worker: Worker
    leg: Leg

    def __enter__(self) -> Leg:
        """Open it."""
        self.worker.legs.add(self.leg)
        self.worker.tokens += self.leg.tokens
        return self.leg

    def __exit__(self, *raised: object) -> None:
        """Close it."""
        self.worker.legs.discard(self.leg)
        self.worker.tokens -= self.leg.tokens


@dataclass(slots=True, eq=False)
class Transferring:
    """A context manager: in its block a hand-over from the worker is under way."""

    worker: Worker

    def __enter__(self) -> None:
        """It begins."""
        self.worker.transfers += 1

    def __exit__(self, *raised: object) -> None:
        """It is over."""
        self.worker.transfers -= 1
