"""The desk between an engine's main thread and its agent: a queue each way, and the rules of what goes in.

No thread and no clock of its own: `Agent` puts one between two threads, the simulator between two objects
on virtual time. The admission rule is what bounds the queues; see `Mailbox`.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable

from kvferry.agent.loop import Close, Incoming, Loop
from kvferry.agent.mailbox import Gated, Mailbox
from kvferry.ids import TransferId
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

_ADMISSIONS = (Expect, AnnounceCommand, Receive)
INBOX_SHARE = 4
"""Commands that may wait when a new transfer is admitted, as a multiple of `transfers_max`."""
_DRAIN_NUMBERS = 1 << 32
"""Our own numbers for `Preempt` start here, above those of any host."""


class Desk:
    """What an engine's main thread can do with an agent without waiting, and where results go."""

    def __init__(self, limits: Limits) -> None:
        self.inbox: Mailbox[Incoming] = Mailbox()
        self._outbox: deque[Result] = deque()
        """Nobody sleeps until something is in it: the engine looks once per step."""
        self._waiting_max = INBOX_SHARE * limits.transfers_max
        self._numbers = itertools.count(_DRAIN_NUMBERS)
        self._drains: dict[int, Callable[[], None]] = {}
        self._failure: BaseException | None = None
        self._closed = False

    # --- the engine's main thread ----------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether commands are still carried out."""
        return self._failure is None and not self._closed

    @property
    def failure(self) -> BaseException | None:
        """What has stopped the agent, if anything has."""
        return self._failure

    def submit(self, command: Command, ready: Callable[[], bool] | None = None) -> bool:
        """Hand a command over; False when a new transfer is refused because the agent is full or stopped.

        Only `Expect`, `AnnounceCommand` and `Receive` can be refused: everything else belongs to a transfer
        that was admitted. With `ready` a producer's command counts only once that returns True.
        """
        if isinstance(command, _ADMISSIONS) and (not self.alive or len(self.inbox) >= self._waiting_max):
            return False
        self.inbox.put(command if ready is None else Gated(command, ready))
        return True

    def results(self) -> list[Result]:
        """What has ended since the last call."""
        outbox = self._outbox
        return [outbox.popleft() for _ in range(len(outbox))] if outbox else []

    @property
    def results_waiting(self) -> int:
        """How many results the next `results` brings."""
        return len(self._outbox)

    def ask_drain(self, transfers: tuple[TransferId, ...], done: Callable[[], None]) -> int:
        """Have posting from these transfers' blocks stopped; `done` is called, on the agent's thread, when no
        write reads them. Returns a number for `end_drain`, which has to follow."""
        number = next(self._numbers)
        self._drains[number] = done
        self.inbox.put(Preempt(transfers, number))
        return number

    def end_drain(self, number: int) -> None:
        """Nobody waits for this answer any more."""
        del self._drains[number]

    @property
    def drains_waiting(self) -> int:
        """How many `ask_drain` have not been ended."""
        return len(self._drains)

    def close(self) -> None:
        """Admit nothing more, and have the agent withdraw and fail everything. Idempotent."""
        self._closed = True
        self.inbox.put(Close())

    # --- the agent's thread ----------------------------------------------------------------------

    def deliver(self, result: Result) -> None:
        """Pass a result on to whoever waits for it."""
        if isinstance(result, Drained) and result.ticket >= _DRAIN_NUMBERS:
            # Whoever asked may have stopped waiting; the answer is then nobody's.
            done = self._drains.get(result.ticket)
            if done is not None:
                done()
            return
        self._outbox.append(result)

    def fail(self, error: BaseException) -> None:
        """The agent could not start or has stopped: nothing new is admitted."""
        self._failure = error

    def fail_everything(self, loop: Loop, error: Exception) -> None:
        """Nothing is proven about writes any more, so no block is called safe and no source released."""
        self.fail(error)
        loop.report()
        waiting: list[tuple[Receive | Reception, int]] = [
            (row, row.start)
            for row in loop.consumer.state.rows.values()
            if row.state in (ReceptionState.WAITING, ReceptionState.FAILING)
        ]
        # What was admitted and not yet taken has told nobody of its blocks, but one rule is enough.
        waiting += [(item, item.start) for item in self.inbox.drain() if isinstance(item, Receive)]
        for one, start in waiting:
            reason = because(CLOSED, error)
            self.deliver(ReceiveFailed(one.transfer, one.consumer, reason, start, fenced=False))
