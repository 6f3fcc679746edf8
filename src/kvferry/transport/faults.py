"""What can go wrong on a memory fabric: by chance per link, or on request."""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, fields
from random import Random
from typing import TypeVar

from kvferry.errors import UsageError

Fault = TypeVar("Fault")


class PostFault(enum.Enum):
    """What happens to a posted transfer."""

    REFUSE = "refuse"
    """The post raises a retryable TransportError and nothing moves."""
    FAIL = "fail"
    """The post raises a TransportError that is not retryable and nothing moves."""
    BREAK = "break"
    """It fails after a part of the bytes landed."""
    STALL = "stall"
    """It does not end, and no byte of it lands, as long as its peer lives and the connection stands."""
    DELAY = "delay"
    """All of it lands `Link.delay_seconds` later than it would have, but within the retry bound."""


class MessageFault(enum.Enum):
    """What happens to a message, a post's notification included."""

    LOSE = "lose"
    DOUBLE = "double"
    DELAY = "delay"


@dataclass(frozen=True, slots=True)
class Link:
    """How one direction between two nodes behaves. Rates are probabilities from 0 to 1."""

    latency_seconds: float = 0.0
    jitter_seconds: float = 0.0
    """Each message and each piece of a transfer takes up to so much longer."""
    delay_seconds: float = 1.0
    """How much longer a delayed message or transfer takes."""
    overtaking: bool = False
    """Messages of this link may overtake each other."""
    refuse_rate: float = 0.0
    break_rate: float = 0.0
    stall_rate: float = 0.0
    fail_rate: float = 0.0
    late_rate: float = 0.0
    """Of transfers; `delay_rate` is of messages."""
    lose_rate: float = 0.0
    double_rate: float = 0.0
    delay_rate: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value < 0 or (field.name.endswith("_rate") and value > 1):
                raise UsageError(f"link.{field.name} is {value}; rates go from 0 to 1, seconds from 0")


class FaultPlan:
    """The faults of one link: those asked for come first and in order, then chance decides."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.posts: deque[PostFault] = deque()
        self.messages: deque[MessageFault] = deque()

    def post_fault(self, random: Random) -> PostFault | None:
        """What shall happen to the next post."""
        if self.posts:
            return self.posts.popleft()
        link = self.link
        return _drawn(
            random,
            (
                (PostFault.REFUSE, link.refuse_rate),
                (PostFault.BREAK, link.break_rate),
                (PostFault.STALL, link.stall_rate),
                (PostFault.FAIL, link.fail_rate),
                (PostFault.DELAY, link.late_rate),
            ),
        )

    def message_fault(self, random: Random) -> MessageFault | None:
        """What shall happen to the next message."""
        if self.messages:
            return self.messages.popleft()
        link = self.link
        return _drawn(
            random,
            (
                (MessageFault.LOSE, link.lose_rate),
                (MessageFault.DOUBLE, link.double_rate),
                (MessageFault.DELAY, link.delay_rate),
            ),
        )


def _drawn(random: Random, rates: tuple[tuple[Fault, float], ...]) -> Fault | None:
    draw = random.random()
    for fault, rate in rates:
        if draw < rate:
            return fault
        draw -= rate
    return None
