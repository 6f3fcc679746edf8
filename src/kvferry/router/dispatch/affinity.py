"""The turns that the router remembers: which engines served a conversation last, and what they keep of it.

A turn is known by its client's session and by the end of its prompt's hashes, each for a bounded time and in
a bounded table. What a decode engine keeps is offered once, and only to a prompt that continues the turn's
own: the tokens themselves are compared by the engines.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec

from kvferry.errors import HandoffError
from kvferry.handoff import parse_held
from kvferry.router.api.conversation import Fingerprint
from kvferry.router.api.openai import Body
from kvferry.router.dispatch.prompt import Route
from kvferry.router.engines.pool import Role, Worker
from kvferry.router.record.metrics import RouterMetrics

HELD_BYTES_MAX = 32 << 10
"""Longer coordinates than these (about 4,000 block ids) are not kept."""


@dataclass(slots=True)
class Held:
    """What a decode engine keeps after a turn, as it told it."""

    params: bytes
    until: float


@dataclass(slots=True, eq=False)
class Turn:
    """A served prompt: its engines, and what is kept of it."""

    prefill: Worker | None
    decode: Worker
    end: bytes | None
    until: float
    held: Held | None = None
    losses: int = field(init=False)
    """How often the decode engine had been lost before: what it kept does not outlive it."""

    def __post_init__(self) -> None:
        self.losses = self.decode.losses

    def worker(self, role: Role) -> Worker | None:
        """Who served it in this role."""
        return self.prefill if role is Role.PREFILL else self.decode

    def keep(self, held: Body | None, now: float) -> None:
        """The decode engine has told what it keeps of the prompt."""
        self.held = _kept(held, now, max(self.until - now, 0.0))

    def take_held(self, now: float) -> Body | None:
        """What is kept, which nobody gets a second time; None when it has ended.

        It is for a prompt that continues this turn's, which the caller has looked at.
        """
        held, self.held = self.held, None
        if held is None:
            return None
        if now >= held.until or not self.decode.ready or self.decode.losses != self.losses:
            return None
        params: Body = msgspec.json.decode(held.params)
        return params


class Turns:
    """A bounded table of turns, the oldest first."""

    def __init__(self, turns_max: int, seconds: float) -> None:
        self._turns_max = turns_max
        self._seconds = seconds
        self._by_key: OrderedDict[bytes, Turn] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_key)

    def recall(self, prompt: Fingerprint, now: float) -> Turn | None:
        """The turn before: its session's last one, else the one with the longest common beginning."""
        for key in prompt.known_by():
            turn = self._by_key.get(key)
            if turn is not None and now < turn.until:
                return turn
        return None

    def remember(self, prompt: Fingerprint, route: Route, held: Body | None, now: float) -> Turn:
        """A prompt was served, and its decode engine has told that it keeps `held` of it."""
        turn = Turn(route.prefill, route.decode, prompt.end, now + self._seconds)
        turn.keep(held, now)
        for key in (prompt.session, prompt.end):
            if key is not None:
                self._by_key[key] = turn
                self._by_key.move_to_end(key)
        self._expire(now)
        return turn

    def _expire(self, now: float) -> None:
        """Every entry lives equally long, so those that have ended stand first."""
        while self._by_key:
            key, turn = next(iter(self._by_key.items()))
            if now < turn.until and len(self._by_key) <= self._turns_max:
                return
            del self._by_key[key]


class Continuation:
    """One prompt, and the turn that it continues if one is known."""

    def __init__(self, prompt: Fingerprint, turn: Turn | None, metrics: RouterMetrics) -> None:
        self._prompt = prompt
        self._turn = turn
        self._metrics = metrics
        self._told = False

    def worker(self, role: Role) -> Worker | None:
        """Who served the turn before in this role."""
        return None if self._turn is None else self._turn.worker(role)

    def tell(self, decode: Worker | None) -> None:
        """Count, once, where the conversation goes on."""
        if self._told:
            return
        self._told = True
        kept = "kept" if self.worker(Role.DECODE) is decode else "moved"
        self._metrics.turns.labels("new" if self._turn is None else kept).inc()

    def take_held(self, now: float) -> Body:
        """What is kept for the prompt, which nobody gets a second time; empty when there is nothing."""
        turn = self._turn
        if turn is None or turn.held is None or not self._prompt.continues(turn.end):
            return {}
        params = turn.take_held(now)
        self._metrics.histories.labels("expired" if params is None else "sent").inc()
        return params or {}


def _kept(params: Body | None, now: float, seconds: float) -> Held | None:
    """What the answer's params say is kept; None when they say nothing that we can read."""
    if not params:
        return None
    try:
        held = parse_held(params)
    except HandoffError:
        return None
    encoded = msgspec.json.encode(params)
    if held is None or len(encoded) > HELD_BYTES_MAX:
        return None
    return Held(encoded, now + min(seconds, held.lease_seconds or seconds))
