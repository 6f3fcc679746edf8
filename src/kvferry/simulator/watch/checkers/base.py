"""What every checker is made of. A checker derives what must hold from events alone, never from the tables of
the code under test."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from kvferry.ids import ConsumerId, PeerName, TransferId
from kvferry.protocol.limits import Limits
from kvferry.simulator.ground.arena import GroupShape
from kvferry.simulator.ground.events import Observed
from kvferry.simulator.ground.outcome import Violation

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

VIOLATIONS_MAX = 20
"""Per checker and history; a broken promise tends to break again, and the first break is what matters."""

Handlers = dict[type[Observed], Callable[[Any], None]]


class Oracle(Protocol):
    """What checkers ask of a world: the bytes in its memories and what has been left over."""

    @property
    def is_calm(self) -> bool:
        """Whether no fault of any kind may happen in this history."""
        ...

    @property
    def delay_seconds(self) -> float:
        """The most that one hop takes where nothing goes wrong: the network's way and a thread's lag."""
        ...

    @property
    def retry_bound_seconds(self) -> float:
        """Nothing lands later than so long after it was posted."""
        ...

    def groups_of(self, rank: PeerName) -> Sequence[GroupShape]:
        """The cache groups of a rank, in any life."""
        ...

    def limits_of(self, rank: PeerName) -> Limits:
        """The limits that a rank was started with, of any life."""
        ...

    def clock_rate_of(self, rank: PeerName) -> float:
        """Seconds on a rank's clock per true second."""
        ...

    def fits(self, source: PeerName, target: PeerName) -> bool:
        """Whether the caches of two ranks' engines can be joined, for KV to go from the one to the other."""
        ...

    def content(self, rank: PeerName, group: int, blocks: Sequence[int]) -> npt.NDArray[np.uint32]:
        """What lies in blocks of a cache group of a rank now, token by token."""
        ...

    def mismatch(
        self, rank: PeerName, prompt: int, group: int, start: int, stop: int, blocks: Sequence[int]
    ) -> str | None:
        """How tokens `[start, stop)` in `blocks` of a living rank differ from `prompt`'s content.

        `blocks[0]` is the block of a cache group that has token `start`. None when they are equal.
        """
        ...

    def prompt_of(self, transfer: TransferId, consumer: ConsumerId) -> int | None:
        """The content that a decode request expects, None for a request that the world does not know."""
        ...

    def remains(self) -> Iterable[str]:
        """One text for each thing that living engines and the network still hold."""
        ...


class Checker:
    """An observer that looks for breaks of one promise. `handlers` names the events that it wants."""

    promise: ClassVar[int] = 0

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self._handlers: Handlers = self.handlers()

    def handlers(self) -> Handlers:
        """What is called for which kind of event."""
        return {}

    def observe(self, event: Observed) -> None:
        """Take one event."""
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)

    def taker(self, kind: type[Observed]) -> Callable[[Any], None] | None:
        """What takes events of a kind, for who hands many of them over; None when nothing does."""
        return self._handlers.get(kind)

    def finish(self) -> None:
        """The history is over: judge what must have happened by now."""

    def broken(self, at_seconds: float, what: str) -> None:
        """Note a break of the promise."""
        if len(self.violations) < VIOLATIONS_MAX:
            self.violations.append(Violation(self.promise, at_seconds, what))
