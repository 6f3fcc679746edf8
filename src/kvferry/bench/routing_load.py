"""Streams of a fixed number of clients, each with its next request as soon as its last is answered."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

from kvferry.bench.routing_engine import HEAD_END
from kvferry.errors import KvferryError

_END = b"data: [DONE]\n\n"
_LAST_CHUNK = b"0\r\n\r\n"
_EVENT = b"data: {"


class RoutingError(KvferryError):
    """A router did not answer as it should; the message says what it said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked: `clients` at once, each request of so many tokens, `pace_ms` apart (0: all at once)."""

    clients: int
    tokens: int
    pace_ms: int = 0
    prompt_bytes: int = 2048

    @property
    def stream_seconds(self) -> float:
        """How long a paced stream takes."""
        return self.tokens * self.pace_ms / 1000

    def begins_after(self, client: int) -> float:
        """Seconds until a client's first request: evenly over a stream's time.

        What begins together ends together, and begins anew together: the time to the first token would tell
        how long all clients' requests take at once, and chance would tell when they get out of step.
        """
        return self.stream_seconds * client / self.clients

    @property
    def first_streams_seconds(self) -> float:
        """How long each client's first stream, for which a router makes its connections, takes at most."""
        return 2 * self.stream_seconds


@dataclass(slots=True)
class Seen:
    """What the clients saw, of requests that began and ended inside the measured time."""

    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    """Of the router, by `cpu`."""
    ttfts: list[float] = field(default_factory=list)
    """Seconds from a request to its first event."""


async def drive(
    url: str, load: Load, seconds: float, warm_seconds: float = 1.0, cpu: Callable[[], float] = lambda: 0.0
) -> Seen:
    """Load the endpoint at `url`, first without measuring. `cpu` tells what the router has used so far.

    That is for `warm_seconds`, and in any case until each client's first stream is over.

    Raises:
        RoutingError: a request failed.
    """
    parts = urlsplit(url)
    raw = _request(parts.netloc, load)
    run = _Run(load, asyncio.get_running_loop().create_future())
    loop = asyncio.get_running_loop()
    connections = []
    for _ in range(load.clients):
        _, client = await loop.create_connection(
            lambda: _Client(run, raw), parts.hostname or "127.0.0.1", parts.port or 80
        )
        connections.append(client)
    try:
        for number, client in enumerate(connections):
            loop.call_later(load.begins_after(number), client.begin)
        await run.over(max(warm_seconds, load.first_streams_seconds))
        run.seen = Seen()
        began, used = time.perf_counter(), cpu()
        await run.over(seconds)
        run.seen.seconds, run.seen.cpu_seconds = time.perf_counter() - began, cpu() - used
        return run.seen
    finally:
        run.ending = True
        for client in connections:
            client.close()


class _Run:
    def __init__(self, load: Load, failure: asyncio.Future[None]) -> None:
        self.load = load
        self.seen = Seen()
        self.ending = False
        self._failure = failure

    async def over(self, seconds: float) -> None:
        """Wait for so long, or for the first failure."""
        await asyncio.wait({self._failure}, timeout=seconds)
        if self._failure.done():
            self._failure.result()

    def fail(self, reason: str) -> None:
        if not self.ending and not self._failure.done():
            self._failure.set_exception(RoutingError(reason))


class _Client(asyncio.Protocol):
    """One client on one connection."""

    def __init__(self, run: _Run, raw: bytes) -> None:
        self._run = run
        self._raw = raw
        self._transport: asyncio.Transport | None = None
        self._tail = b""
        self._head = b""
        self._began = 0.0
        self._first = False
        self._tokens = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self._transport = cast("asyncio.Transport", transport)

    def begin(self) -> None:
        """Send the next request."""
        if self._run.ending or self._transport is None:
            return
        self._tail = self._head = b""
        self._first = False
        self._tokens = 0
        self._began = time.perf_counter()
        self._transport.write(self._raw)

    def data_received(self, data: bytes) -> None:
        seen = self._run.seen
        if not self._first:
            self._head += data
            if _EVENT not in self._head:
                if b"HTTP/1.1 200" not in self._head[:12] and HEAD_END in self._head:
                    self._run.fail(self._head[:400].decode("latin-1"))
                return
            self._first = True
            seen.ttfts.append(time.perf_counter() - self._began)
            data = self._head
        joined = self._tail + data
        # An event's beginning may be cut between two reads.
        count = joined.count(_EVENT) - self._tail.count(_EVENT)
        self._tokens += count
        seen.tokens += count
        self._tail = joined[-64:]
        if _END in joined and joined.endswith(_LAST_CHUNK):
            if self._tokens != self._run.load.tokens:
                self._run.fail(f"{self._tokens} tokens arrived, {self._run.load.tokens} were asked for")
            seen.requests += 1
            self.begin()

    def connection_lost(self, error: Exception | None) -> None:
        self._run.fail(f"the connection was closed: {error or 'by the router'}")

    def close(self) -> None:
        """Ask no more."""
        if self._transport is not None:
            self._transport.abort()


def _request(netloc: str, load: Load) -> bytes:
    body = json.dumps(
        {
            "model": "bench",
            "prompt": ("The quick brown fox jumps over the lazy dog. " * load.prompt_bytes)[
                : load.prompt_bytes
            ],
            "max_tokens": load.tokens,
            "stream": True,
            "seed": load.pace_ms,
        }
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {netloc}\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body
