"""What a prefill engine's queue will take: measured service times, and when a prefill will end. Pure.

The engine serves prompts in their order. So a prompt's own service began when it was sent, or when the one
before it ended if that was later. These observations are fitted by a line over the computed tokens, older
ones counting less. The queue is what this router has sent and not got back: another router's load shows as
slower service.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from kvferry.router.ground.policy import overlap_seconds

_KEPT = 0.9
"""Of an observation's weight, at each newer one."""
_OBSERVATIONS_MIN = 3
"""Fewer say nothing."""
_LEAD_SECONDS = 0.01
"""What a prediction may be off by before anything was measured."""
_SPREAD_MIN = 0.01
"""Of the lengths' variance to their squared mean, under which a slope is noise."""


@dataclass(slots=True)
class ServiceTimes:
    """Seconds of service over tokens: a line through weighted observations."""

    _count: int = 0
    _weight: float = 0.0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0
    _error: float = 0.0

    def note(self, tokens: int, seconds: float) -> None:
        """A prompt of so many computed tokens took so long."""
        expected = self.seconds(tokens)
        if expected is not None:
            self._error += (1 - _KEPT) * (abs(seconds - expected) - self._error)
        self._count += 1
        self._weight = self._weight * _KEPT + 1
        self._x = self._x * _KEPT + tokens
        self._y = self._y * _KEPT + seconds
        self._xx = self._xx * _KEPT + tokens * tokens
        self._xy = self._xy * _KEPT + tokens * seconds

    def seconds(self, tokens: int) -> float | None:
        """What a prompt is expected to take by itself; None while too little is known."""
        if self._count < _OBSERVATIONS_MIN:
            return None
        x, y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - x * x
        if variance < _SPREAD_MIN * x * x:
            return y
        slope = max((self._xy / self._weight - x * y) / variance, 0.0)
        return max(y + slope * (tokens - x), 0.0)

    @property
    def error_seconds(self) -> float:
        """The mean of how far off an expectation was."""
        return self._error


@dataclass(slots=True, eq=False)
class Ticket:
    """One prompt in the queue."""

    tokens: int
    sent: float


@dataclass(slots=True)
class PrefillQueue:
    """The prompts that one prefill engine has not finished, in the order in which they were sent."""

    times: ServiceTimes = field(default_factory=ServiceTimes)
    _waiting: OrderedDict[Ticket, None] = field(default_factory=OrderedDict)
    _ended: float = 0.0
    """When a prompt ended last."""

    def enter(self, tokens: int, now: float) -> Ticket:
        """A prompt was sent."""
        ticket = Ticket(tokens, now)
        self._waiting[ticket] = None
        return ticket

    def finished(self, ticket: Ticket, cached_tokens: int, now: float) -> None:
        """A prompt has been prefilled, so many of its tokens from the engine's cache."""
        if ticket in self._waiting:
            del self._waiting[ticket]
            self.times.note(max(ticket.tokens - cached_tokens, 1), now - max(ticket.sent, self._ended))
        self._ended = now

    def left(self, ticket: Ticket) -> None:
        """A prompt was given up; nothing is learnt. For one that has finished nothing is done."""
        self._waiting.pop(ticket, None)

    def seconds_left(self, ticket: Ticket, now: float) -> float | None:
        """From now to the expected end of a prompt's prefill; None when nobody knows."""
        seconds = 0.0
        began = self._ended
        for position, ahead in enumerate(self._waiting):
            takes = self.times.seconds(ahead.tokens)
            if takes is None:
                return None
            if position == 0:
                # The first one is being computed.
                takes = max(takes - (now - max(began, ahead.sent)), 0.0)
            seconds += takes
            if ahead is ticket:
                return seconds
        return 0.0

    def lead_seconds(self, tokens: int) -> float:
        """How long before the expected end a decode engine should be told, so that nothing waits for it.

        That is what push needs to overlap, and twice what expectations have been off by lately.
        """
        return overlap_seconds(tokens) + _LEAD_SECONDS + 2 * self.times.error_seconds

    def forget(self) -> None:
        """Another engine is there now."""
        self.times = ServiceTimes()
