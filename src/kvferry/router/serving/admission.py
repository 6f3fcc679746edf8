"""Who may be served now, who waits for a turn, and who is refused.

So many requests are served at once; more of them wait, a bounded number for a bounded time. Requests get
their turns in the order in which they came; with `fair`, one API key after the other, and each key's in their
order, so that one client's burst is not everybody's wait. When the queue is full, a key that has more than
its share of it gives up its newest request for one of a key that has less.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from kvferry.router.ground.errors import Cause, RequestError

_EVERYBODY = b""
_RETRY_AFTER_SECONDS_MAX = 60


@dataclass(slots=True, eq=False)
class _Waiting:
    key: bytes
    turn: asyncio.Future[None]


@dataclass(slots=True)
class Admission:
    """The gate of one router."""

    serving_max: int
    queue_max: int
    queue_seconds: float
    fair: bool = False
    changed: Callable[[int, int], None] = field(default=lambda serving, waiting: None)
    """Told how many are being served and how many wait, after each change."""
    serving: int = 0
    waiting: int = 0
    closed: bool = False
    _queues: OrderedDict[bytes, deque[_Waiting]] = field(default_factory=OrderedDict)
    """Never an empty one; the first key's turn is next."""
    _idle: asyncio.Event = field(default_factory=asyncio.Event)
    _seconds: float = 1.0
    """A moving mean of how long a turn has taken to come."""

    def __post_init__(self) -> None:
        self._idle.set()

    @asynccontextmanager
    async def enter(self, key: bytes = _EVERYBODY, *, entered: bool = False) -> AsyncIterator[None]:
        """Be served for as long as the block runs; the caller bounds the request's whole time.

        `entered` says that it was let in by `enter_now`.

        Raises:
            RequestError: 429 when too many wait, 503 when no turn has come in time or none will.
        """
        if not entered:
            if self.closed:
                raise _closed()
            if self.free:
                self.enter_now()
            else:
                await self._turn(key if self.fair else _EVERYBODY)
        try:
            yield
        finally:
            self.leave()

    @property
    def free(self) -> bool:
        """Whether one that comes now need not wait."""
        return not self.closed and self.serving < self.serving_max and not self._queues

    def enter_now(self) -> None:
        """Be served from now until `leave`; only when `free`."""
        self.serving += 1
        self._idle.clear()
        self._tell()

    def leave(self) -> None:
        """One is served no more."""
        self.serving -= 1
        self._next()
        if not self.serving:
            self._idle.set()
        self._tell()

    def close(self) -> None:
        """Refuse whoever comes or waits; those that are being served go on."""
        self.closed = True
        for waiting in [each for queue in self._queues.values() for each in queue]:
            self._leave(waiting)
            _refuse(waiting, _closed())
        self._tell()

    async def idle(self) -> None:
        """Wait until nobody is being served."""
        await self._idle.wait()

    async def _turn(self, key: bytes) -> None:
        """Wait for a turn; when it comes its place has been taken for the caller."""
        if self.waiting >= self.queue_max and not self._displaced(key):
            raise self._full()
        loop = asyncio.get_running_loop()
        waiting = _Waiting(key, loop.create_future())
        self._queues.setdefault(key, deque()).append(waiting)
        self.waiting += 1
        self._tell()
        since = loop.time()
        try:
            async with asyncio.timeout(self.queue_seconds):
                await waiting.turn
        except TimeoutError as error:
            self._give_back(waiting)
            message = f"no turn within {self.queue_seconds:g} seconds (--queue-timeout-secs)"
            raise RequestError(
                503, Cause.QUEUE_TIMEOUT, message, retry_after_seconds=self._retry_after()
            ) from error
        except BaseException:
            self._give_back(waiting)
            raise
        self._seconds += 0.1 * (loop.time() - since - self._seconds)

    def _next(self) -> None:
        """Give free places to those that wait."""
        while self._queues and self.serving < self.serving_max:
            key, queue = next(iter(self._queues.items()))
            waiting = queue[0]
            self._leave(waiting)
            if key in self._queues:
                self._queues.move_to_end(key)
            if not waiting.turn.done():
                self.enter_now()
                waiting.turn.set_result(None)

    def _displaced(self, key: bytes) -> bool:
        """Whether the newest request of a key that waits for more than it needs has made room."""
        longest = max(self._queues.values(), key=len, default=None)
        if not self.fair or longest is None or len(longest) <= len(self._queues.get(key, ())) + 1:
            return False
        waiting = longest[-1]
        self._leave(waiting)
        _refuse(waiting, self._full())
        return True

    def _leave(self, waiting: _Waiting) -> None:
        queue = self._queues[waiting.key]
        queue.remove(waiting)
        if not queue:
            del self._queues[waiting.key]
        self.waiting -= 1

    def _give_back(self, waiting: _Waiting) -> None:
        """One that does not wait any more, though its turn may have come in the same moment."""
        turn = waiting.turn
        if turn.done() and not turn.cancelled() and turn.exception() is None:
            self.leave()
            return
        if waiting in self._queues.get(waiting.key, ()):
            self._leave(waiting)
        self._tell()

    def _full(self) -> RequestError:
        message = (
            f"{self.serving} requests are being served and {self.waiting} wait, as many as"
            " --max-concurrent-requests and --queue-size allow"
        )
        return RequestError(429, Cause.OVERLOADED, message, retry_after_seconds=self._retry_after())

    def _retry_after(self) -> int:
        return max(1, min(round(self._seconds), _RETRY_AFTER_SECONDS_MAX))

    def _tell(self) -> None:
        self.changed(self.serving, self.waiting)


def _refuse(waiting: _Waiting, error: RequestError) -> None:
    if not waiting.turn.done():
        waiting.turn.set_exception(error)


def _closed() -> RequestError:
    return RequestError(503, Cause.SHUTTING_DOWN, "the router is shutting down", retry_after_seconds=1)
