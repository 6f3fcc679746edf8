"""The agent as an engine's main thread sees it: submit commands, drain results, close.

Every method returns at once, but for `drain` and `close`, which wait within a bound that the caller gives.
The agent's thread makes the transport, so that it owns it from the first call on.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from kvferry.agent.links import Identity, Resolver
from kvferry.agent.loop import Close, Incoming, Loop
from kvferry.agent.mailbox import Gated, Mailbox
from kvferry.agent.stats import Stats
from kvferry.errors import TransportError
from kvferry.ids import PeerName, TransferId
from kvferry.layout.spec import CacheSpec
from kvferry.protocol.commands import (
    AnnounceCommand,
    Command,
    Drained,
    Expect,
    Preempt,
    Receive,
    ReceiveFailed,
    Result,
)
from kvferry.protocol.limits import Limits
from kvferry.protocol.reasons import CLOSED, because
from kvferry.protocol.receptions import Reception
from kvferry.protocol.states import ReceptionState
from kvferry.transport.base import Transport

logger = logging.getLogger(__name__)

_ADMISSIONS = (Expect, AnnounceCommand, Receive)
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
        self._inbox: Mailbox[Incoming] = Mailbox()
        self._outbox: Mailbox[Result] = Mailbox()
        self._stats = Stats()
        self._numbers = itertools.count(1 << 32)
        self._tickets: dict[int, threading.Event] = {}
        self._ready = threading.Event()
        self._metadata: bytes = b""
        self._failure: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)

    def start(self) -> bytes:
        """Start the thread, register the cache; returns the transport's metadata for the directory.

        Raises:
            TransportError: the transport could not be made or the memory not be registered.
        """
        self._thread.start()
        if not self._ready.wait(START_SECONDS_MAX):
            raise TransportError(f"the transfer agent did not start within {START_SECONDS_MAX:g} s")
        if self._failure is not None:
            raise self._failure
        return self._metadata

    @property
    def alive(self) -> bool:
        """Whether commands are still carried out."""
        return self._failure is None and not self._closed

    def submit(self, command: Command, ready: Callable[[], bool] | None = None) -> bool:
        """Hand a command over; False when a new transfer is refused because the agent is full or stopped.

        Only `Expect`, `AnnounceCommand` and `Receive` can be refused: everything else belongs to a transfer
        that was admitted. With `ready` a producer's command counts only once that returns True.
        """
        if isinstance(command, _ADMISSIONS) and (
            not self.alive or len(self._inbox) >= 4 * self._limits.transfers_max
        ):
            return False
        self._inbox.put(command if ready is None else Gated(command, ready))
        return True

    def results(self) -> list[Result]:
        """What has ended since the last call."""
        return self._outbox.drain() if len(self._outbox) else []

    def drain(self, transfers: tuple[TransferId, ...], timeout_seconds: float) -> bool:
        """Stop posting from these transfers' blocks and wait until no write reads them.

        False when the time is over first: the blocks must stay untouched until their transfers are
        `Released`.
        """
        if not transfers:
            return True
        if not self.alive:
            return False
        number = next(self._numbers)
        done = self._tickets[number] = threading.Event()
        self._inbox.put(Preempt(transfers, number))
        drained = done.wait(timeout_seconds)
        del self._tickets[number]
        return drained

    def snapshot(self) -> dict[str, int]:
        """Counters since the start, and gauges, as `Stats` names them."""
        return self._stats.snapshot()

    def close(self, timeout_seconds: float) -> bool:
        """Tell every peer, wait for what is in flight, stop the thread. Idempotent.

        False when the time was over first: the transport then stays open, because freeing memory that a
        write still reads is worse than leaving it to the end of the process.
        """
        self._closed = True
        self._resolver.close()
        self._inbox.put(Close())
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    # --- the agent's thread ----------------------------------------------------------------------

    def _run(self) -> None:
        _name_thread()
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
                self._inbox,
                self._deliver,
                self._stats,
                self._clock,
            )
        except Exception as error:  # noqa: BLE001 - handed to the thread that called start
            self._failure = error
            self._ready.set()
            return
        self._ready.set()
        try:
            while not (loop.closing and loop.quiet):
                self._inbox.wait(loop.step())
            transport.close()
        except Exception as error:
            logger.exception("the transfer agent has stopped; its transfers fail")
            self._failure = error
            self._fail_everything(loop, error)

    def _deliver(self, result: Result) -> None:
        if isinstance(result, Drained):
            done = self._tickets.get(result.ticket)
            if done is not None:
                done.set()
                return
        self._outbox.put(result)

    def _fail_everything(self, loop: Loop, error: Exception) -> None:
        """Nothing is proven about writes any more, so no block is called safe and no source released."""
        loop.report()
        waiting: list[tuple[Receive | Reception, int]] = [
            (row, row.start)
            for row in loop.consumer.state.rows.values()
            if row.state in (ReceptionState.WAITING, ReceptionState.FAILING)
        ]
        # What was admitted and not yet taken has told nobody of its blocks, but one rule is enough.
        waiting += [(item, item.start) for item in self._inbox.drain() if isinstance(item, Receive)]
        for one, start in waiting:
            reason = because(CLOSED, error)
            self._outbox.put(ReceiveFailed(one.transfer, one.consumer, reason, start, fenced=False))


def _name_thread() -> None:
    """Show the thread's name in `top -H`, where the system lets us; Python itself does not before 3.14."""
    with contextlib.suppress(OSError):
        comm = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
        comm.write_text(THREAD_NAME[:15], encoding="ascii")
