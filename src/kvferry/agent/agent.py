"""The agent as an engine's main thread sees it: submit commands, drain results, close.

Every method returns at once, but for `drain` and `close`, which wait within a bound that the caller gives.
The agent's thread makes the transport, so that it owns it from the first call on. What needs no thread is
the `Desk`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from kvferry.agent.desk import Desk
from kvferry.agent.links import Identity, Resolver
from kvferry.agent.loop import Loop
from kvferry.agent.parent import LOOK_SECONDS, ParentWatch
from kvferry.agent.stats import Stats
from kvferry.agent.threads import show_name
from kvferry.errors import TransportError
from kvferry.ids import PeerName, TransferId
from kvferry.layout.spec import CacheSpec
from kvferry.protocol.commands import Command, Result
from kvferry.protocol.limits import Limits
from kvferry.transport.base import Transport

logger = logging.getLogger(__name__)

START_SECONDS_MAX = 120.0
"""Registering a large cache takes seconds; beyond this the start has failed."""
THREAD_NAME = "kvferry-transfer"


class Agent:
    """One rank's agent. `start` before anything else; `close` once, from the thread that started it."""

    def __init__(
        self,
        identity: Identity,
        cache: CacheSpec,
        make_transport: Callable[[PeerName], Transport],
        limits: Limits,
        resolver: Resolver,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._identity, self._cache, self._limits = identity, cache, limits
        self._make_transport, self._resolver, self._clock = make_transport, resolver, clock
        self._desk = Desk(limits)
        self._stats = Stats()
        self._ready = threading.Event()
        self._metadata: bytes = b""
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)

    def start(self) -> bytes:
        """Start the thread, register the cache; returns the transport's metadata for the directory.

        Raises:
            TransportError: the transport could not be made or the memory not be registered.
        """
        self._thread.start()
        if not self._ready.wait(START_SECONDS_MAX):
            raise TransportError(f"the transfer agent did not start within {START_SECONDS_MAX:g} s")
        if self._desk.failure is not None:
            raise self._desk.failure
        return self._metadata

    @property
    def alive(self) -> bool:
        """Whether commands are still carried out."""
        return self._desk.alive

    @property
    def drains_waiting(self) -> int:
        """How many calls of `drain` wait now."""
        return self._desk.drains_waiting

    def submit(self, command: Command, ready: Callable[[], bool] | None = None) -> bool:
        """Hand a command over, as `Desk.submit` says."""
        return self._desk.submit(command, ready)

    def results(self) -> list[Result]:
        """What has ended since the last call."""
        return self._desk.results()

    def drain(self, transfers: tuple[TransferId, ...], timeout_seconds: float) -> bool:
        """Stop posting from these transfers' blocks and wait until no write reads them.

        False when the time is over first: the blocks must stay untouched until their transfers are
        `Released`.
        """
        if not transfers:
            return True
        if not self.alive:
            return False
        done = threading.Event()
        number = self._desk.ask_drain(transfers, done.set)
        drained = done.wait(timeout_seconds)
        self._desk.end_drain(number)
        return drained

    def moved(self) -> tuple[int, int]:
        """Bytes posted, and those of them before their prefill's end, since the start.

        The same object while nothing was posted, so that asking in every step costs next to nothing.
        """
        return self._stats.moved

    def snapshot(self) -> dict[str, int]:
        """Counters since the start, and gauges, as `Stats` names them."""
        return self._stats.snapshot()

    def close(self, timeout_seconds: float) -> bool:
        """Tell every peer, wait for what is in flight, stop the thread. Idempotent.

        False when the time was over first: the transport then stays open, because freeing memory that a
        write still reads is worse than leaving it to the end of the process.
        """
        self._resolver.close()
        self._desk.close()
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    # --- the agent's thread ----------------------------------------------------------------------

    def _run(self) -> None:
        show_name()
        parent = ParentWatch()
        try:
            transport = self._make_transport(self._identity.peer)
            transport.register(self._cache.regions)
            self._metadata = transport.local_metadata()
            loop = Loop(
                self._identity,
                self._cache,
                transport,
                self._limits,
                self._resolver,
                self._desk.inbox,
                self._desk.deliver,
                self._stats,
                self._clock,
                parent.check_now,
            )
        except Exception as error:  # noqa: BLE001 - handed to the thread that called start
            self._desk.fail(error)
            self._ready.set()
            return
        self._ready.set()
        try:
            while not (loop.closing and loop.quiet):
                # What is in flight then is left to the end of the process; nothing new may follow it.
                parent.check()
                self._desk.inbox.wait(min(loop.step(), LOOK_SECONDS))
            transport.close()
        except Exception as error:
            logger.exception("the transfer agent has stopped; its transfers fail")
            self._desk.fail_everything(loop, error)
