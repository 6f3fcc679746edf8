"""Clients that keep a fleet busy while its engines die, in a thread of their own.

The caller's thread directs: it lets clients start requests or not, adds requests of its own (victims), and
takes what has ended. Every request that got tokens is asked again of the reference engine and judged at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import aiohttp

from kvferry.cli.soak_client import Kind, Reply, Tokens, converse, converse_as, worth
from kvferry.cli.soak_plan import Ask, Mix
from kvferry.errors import KvferryError

CLIENTS = 4
_REFERENCE_SECONDS_MAX = 240.0
_AFTER_FAILURE_SECONDS = 1.5
PATIENCE_SECONDS = 30.0
"""A client whose request failed asks again after so long, though the router says that nobody decodes."""
_PAUSE_SECONDS_MIN, _PAUSE_SECONDS_MAX = 0.5, 4.0
_HEALTH_SECONDS_MAX = 5.0
_CLOSE_SECONDS_MAX = 10.0
_BUFFER_BYTES = 4 << 20
"""The first event of a stream repeats the prompt in one line."""


Result = TypeVar("Result")


class LoadError(KvferryError):
    """The load itself does not work: its thread or the reference engine failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One request that has ended. `began` is monotonic."""

    what: str
    kind: Kind
    began: float
    seconds: float
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where requests go."""

    router: str
    reference: str
    model: str


@dataclass(frozen=True, slots=True)
class _Wire:
    """Sends requests, and judges what comes back."""

    session: aiohttp.ClientSession
    addresses: Addresses
    bound_seconds: float

    async def outcome(
        self, ask: Ask, reply: Reply, what: str, url: str, params: Mapping[str, Any] | None
    ) -> Outcome:
        began = time.monotonic()
        if params is None:
            await converse_as(
                self.session, self.addresses.router, ask, self.addresses.model, reply, self.bound_seconds
            )
        else:
            body = ask.body(self.addresses.model) | {"kv_transfer_params": dict(params)}
            await converse(self.session, url, body, reply, self.bound_seconds)
        seconds = time.monotonic() - began
        expected = await self._expected(ask) if any(reply.tokens) else None
        kind, detail = worth(reply, expected, direct=params is not None)
        shape = f"{what}: {len(ask.prompt)} tokens, n={ask.n}" + (", streamed" if ask.stream else "")
        return Outcome(what=shape, kind=kind, began=began, seconds=seconds, detail=detail)

    async def _expected(self, ask: Ask) -> Tokens:
        """What the engine without a connector answers."""
        reply = Reply()
        body = ask.body(self.addresses.model) | {"stream": False}
        await converse(self.session, self.addresses.reference, body, reply, _REFERENCE_SECONDS_MAX)
        if not reply.whole:
            raise LoadError(f"the reference engine gave no answer: {reply.error or reply.broken or 'late'}")
        return reply.tokens

    async def until_decodable(self) -> None:
        """Return when the router counts a decode engine that is ready, or when patience is over."""
        pause = _PAUSE_SECONDS_MIN
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not await self._is_decodable():
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _PAUSE_SECONDS_MAX)

    async def _is_decodable(self) -> bool:
        timeout = aiohttp.ClientTimeout(total=_HEALTH_SECONDS_MAX)
        try:
            async with self.session.get(self.addresses.router + "/health", timeout=timeout) as response:
                # It is 503 as long as either role has nobody; without P, D computes.
                return bool(json.loads(await response.text())["decode"])
        except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError):
            return False

    async def prefill(self, url: str, ask: Ask, params: Mapping[str, Any]) -> Reply:
        body = ask.body(self.addresses.model) | {
            "kv_transfer_params": dict(params),
            "max_tokens": 1,
            "stream": False,
        }
        reply = Reply()
        await converse(self.session, url, body, reply, self.bound_seconds)
        return reply


class Load:
    """The clients. Use it as a context; none starts a request before `open`."""

    def __init__(
        self, addresses: Addresses, mix: Mix, *, bound_seconds: float, clients: int = CLIENTS
    ) -> None:
        self._addresses = addresses
        self._mix = mix
        self._bound_seconds = bound_seconds
        self.seconds_max = bound_seconds + 2 * _REFERENCE_SECONDS_MAX
        """From a request to its judgement, at most: its bound, and the reference engine's with room."""
        self._clients = clients
        self._loop = asyncio.new_event_loop()
        self._wire: _Wire | None = None
        self._gate = asyncio.Event()
        self._lock = threading.Lock()
        self._outcomes: list[Outcome] = []
        self._in_flight: set[object] = set()
        self._failure: BaseException | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._thread = threading.Thread(target=self._run, name="kvferry-soak-load", daemon=True)

    def __enter__(self) -> Load:
        self._thread.start()
        self.submit(self._begin()).result(_CLOSE_SECONDS_MAX)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_SECONDS_MAX)

    def open(self) -> None:
        """Let clients start requests."""
        self._loop.call_soon_threadsafe(self._gate.set)

    def shut(self) -> None:
        """Let no client start another request; those that run go on."""
        self._loop.call_soon_threadsafe(self._gate.clear)

    def is_idle(self) -> bool:
        """Whether no request runs.

        Raises:
            LoadError: a client has failed for a reason of its own.
        """
        if self._failure is not None:
            raise LoadError(f"a client of the soak failed: {self._failure!r}") from self._failure
        with self._lock:
            return not self._in_flight

    def take(self) -> list[Outcome]:
        """What has ended since the last call."""
        with self._lock:
            taken, self._outcomes = self._outcomes, []
        return taken

    def count_right_since(self, moment: float) -> int:
        """Requests that began after `moment` and have been answered right, of those not yet taken."""
        with self._lock:
            return sum(outcome.kind is Kind.RIGHT and outcome.began >= moment for outcome in self._outcomes)

    def ask(self, ask: Ask, reply: Reply, what: str) -> Future[Outcome]:
        """Send one request to the router beside the clients'."""
        return self.submit(self._judged(ask, reply, what))

    def decode_leg(self, url: str, ask: Ask, params: Mapping[str, Any], reply: Reply) -> Future[Outcome]:
        """Send a decode leg to an engine, and judge its answer."""
        return self.submit(self._judged(ask, reply, "decode leg", url, params))

    def prefill_leg(self, url: str, ask: Ask, params: Mapping[str, Any]) -> Future[Reply]:
        """Send a prefill leg to an engine; its answer has no tokens worth judging, but must have an end."""
        return self.submit(self._prefilled(url, ask, params))

    def wait(self, asked: Future[Result]) -> Result:
        """The result of a request of one's own.

        Raises:
            LoadError: it has none, long after its bound.
        """
        try:
            return asked.result(self.seconds_max)
        except TimeoutError as error:
            raise LoadError(f"a request of the soak did not end within {self.seconds_max:.0f} s") from error

    def submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run a coroutine beside the clients."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _begin(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=None)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        session = aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=_BUFFER_BYTES)
        self._wire = _Wire(session, self._addresses, self._bound_seconds)
        self._tasks = [asyncio.create_task(self._client()) for _ in range(self._clients)]
        for task in self._tasks:
            task.add_done_callback(self._ended)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(_end(self._wire))
            self._loop.close()

    def _begun(self) -> _Wire:
        assert self._wire is not None, "the load is used as a context"
        return self._wire

    async def _client(self) -> None:
        while True:
            await self._gate.wait()
            outcome = await self._judged(self._mix.draw(), Reply(), "load")
            if outcome.kind in (Kind.RIGHT, Kind.LEFT):
                await asyncio.sleep(self._mix.pause_seconds())
            else:
                # A request to a fleet whose only D is away is refused at once and shows nothing new.
                await asyncio.sleep(_AFTER_FAILURE_SECONDS)
                await self._begun().until_decodable()

    def _ended(self, client: asyncio.Task[None]) -> None:
        """A client goes on for ever, unless it fails or is cancelled."""
        if not client.cancelled():
            self._failure = client.exception()

    async def _prefilled(self, url: str, ask: Ask, params: Mapping[str, Any]) -> Reply:
        began = time.monotonic()
        reply = await self._begun().prefill(url, ask, params)
        if reply.late:
            what, seconds = f"prefill leg: {len(ask.prompt)} tokens", time.monotonic() - began
            with self._lock:
                self._outcomes.append(Outcome(what=what, kind=Kind.LATE, began=began, seconds=seconds))
        return reply

    async def _judged(
        self, ask: Ask, reply: Reply, what: str, url: str = "", params: Mapping[str, Any] | None = None
    ) -> Outcome:
        token = object()
        with self._lock:
            self._in_flight.add(token)
        try:
            outcome = await self._begun().outcome(ask, reply, what, url, params)
        finally:
            with self._lock:
                self._in_flight.remove(token)
        with self._lock:
            self._outcomes.append(outcome)
        return outcome


async def _end(wire: _Wire | None) -> None:
    """Cancel all that runs, and close the connections."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    if wire is not None:
        await wire.session.close()
