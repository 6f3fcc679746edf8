"""Scheduler side, after a turn: whose KV is kept for the conversation's next one, and for how long.

What is kept is pinned in the block pool: the engine itself has ended the request and frees its blocks as
ever, and nobody has to step it for as long as something is kept. To the ranks a hold is a transfer like any
other: expected, computed and finished in one step, with a lease of its own. It ends when the next turn's
prefill engine has the KV or says that it needs none, when its time is over, or when this engine wants the
memory back, the oldest first. Its blocks come back once every rank has let go of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from kvferry.handoff import DecodeParams, HeldParams, SourceParams, paired_by_request_id
from kvferry.host.events import Ended, RankIndex, RequestId
from kvferry.host.facts import EngineFacts
from kvferry.host.metrics import HOLDS, Counts
from kvferry.host.orders import Sender, StepOrders
from kvferry.host.pins import Pins
from kvferry.host.prefixes import TokenRequest, salt_of, told_prefixes
from kvferry.host.requests import ended_normally
from kvferry.ids import BlockId, TransferId
from kvferry.layout.spans import to_spans
from kvferry.protocol import reasons
from kvferry.protocol.commands import Advance, Command, Expect, Finish, Reclaim

GIVE_BACK_SECONDS_MAX = 1.0
"""Ranks answer a `Reclaim` within a few steps, unless somebody has come for the KV."""
NO_ROOM = "no_room"
"""How a turn is counted that was not kept."""
_OUTCOMES = {
    reasons.WRITTEN: "used",
    reasons.FETCHED: "used",
    reasons.CANCELLED: "unused",
    reasons.LEASE_EXPIRED: "expired",
    reasons.STARVED: "reclaimed",
}


class HoldLimits(msgspec.Struct, frozen=True):
    """What an engine keeps after a turn, at most."""

    seconds: float
    blocks_max: int
    """Together. What is being given back is counted apart, and nothing is added while that is as much."""
    tokens_min: int
    """Of a turn that is kept: fewer are computed again sooner than they are carried."""


@dataclass(slots=True)
class _Hold:
    """One turn's KV. `ranks` have not let go of it."""

    name: RequestId
    params: HeldParams
    origin: TransferId
    """The transfer by which the turn's prompt came; whoever dispatched it may ask by it."""
    blocks: int
    ranks: set[RankIndex]
    outcome: str = "used"
    """By what the ranks have reported so far; one that did not go well speaks for all."""
    given_back_at: float | None = None


@dataclass(slots=True)
class Holding:
    """All that one engine keeps of requests which it has decoded."""

    facts: EngineFacts
    pins: Pins
    counts: Counts
    limits: HoldLimits
    clock: Callable[[], float]
    mint: Callable[[], str]
    """A new transfer id, which nobody can guess."""
    _origins: dict[RequestId, TransferId] = field(default_factory=dict)
    """Of requests that run and may be kept."""
    _holds: dict[RequestId, _Hold] = field(default_factory=dict)
    """In the order in which they were made."""
    _by_origin: dict[TransferId, _Hold] = field(default_factory=dict)
    _senders: list[Sender] = field(default_factory=list)
    _commands: list[Command] = field(default_factory=list)
    _made: int = 0
    _kept_blocks: int = 0
    _returning_blocks: int = 0
    _asked_back_at: float = -math.inf
    """When anything was last asked back."""

    def note(self, request: TokenRequest, params: DecodeParams) -> None:
        """A decode request has arrived. The children of one prompt end apart, so none of them is kept."""
        if params.consumers == 1:
            origin = params.transfer or paired_by_request_id(request.request_id)
            self._origins[request.request_id] = origin

    def finish(
        self, request: TokenRequest, blocks: list[BlockId], source: SourceParams | None
    ) -> HeldParams | None:
        """The engine ends a request: what is kept of it, None for nothing.

        `blocks` are its own, from the first token on.
        """
        origin = self._origins.pop(request.request_id, None)
        if origin is None or source is None or not ended_normally(request):
            return None
        # The newest token has been sampled and not been computed.
        tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        wanted = self.facts.blocks(tokens)
        salt = salt_of(request)
        if salt is None or tokens < self.limits.tokens_min or wanted > len(blocks):
            return None
        if not self._make_room(wanted):
            self.counts.count(HOLDS, labels=(NO_ROOM,))
            return None
        told = told_prefixes(
            request.all_token_ids[:tokens], request.num_prompt_tokens, self.facts.block_tokens, salt
        )
        params = HeldParams(
            source=msgspec.structs.replace(source, mode=None),
            transfer=TransferId(self.mint()),
            tokens=tokens,
            lease_seconds=self.limits.seconds,
            prefixes=told,
        )
        self._add(params, origin, blocks[:wanted])
        return params

    def kept_of(self, origin: TransferId) -> HeldParams | None:
        """What is kept of the request that got its prompt by a transfer."""
        hold = self._by_origin.get(origin)
        return None if hold is None or hold.given_back_at is not None else hold.params

    def make_way(self, blocks: int) -> None:
        """A request needs so many blocks: give back what the pool lacks, the oldest first."""
        if not self._kept_blocks:
            return
        lacking = blocks - self.pins.free_blocks - self._returning_blocks
        for hold in self._kept():
            if lacking <= 0:
                return
            lacking -= hold.blocks
            self._give_back(hold)

    def is_giving_back(self) -> bool:
        """Whether blocks come back soon, so that waiting beats preempting; gives some back if none do."""
        now = self.clock()
        for hold in self._holds.values():
            if hold.given_back_at is None:
                self._give_back(hold)
                return True
            if now < hold.given_back_at + GIVE_BACK_SECONDS_MAX:
                return True
        return False

    def give_all_back(self) -> bool:
        """Nothing that is kept is worth anything any more; False when nothing was kept."""
        kept = list(self._kept())
        for hold in kept:
            self._give_back(hold)
        return bool(kept)

    @property
    def has_orders(self) -> bool:
        """Whether the ranks have to be told something."""
        return bool(self._senders or self._commands)

    @property
    def needs_steps(self) -> bool:
        """Whether the ranks must be told or heard although the engine has no request to run.

        Not for what is only kept: its end is heard with the next step that has a reason.
        """
        if self.has_orders:
            return True
        return bool(self._returning_blocks) and self.clock() < self._asked_back_at + GIVE_BACK_SECONDS_MAX

    def plan(self, orders: StepOrders) -> None:
        """Add what the ranks have to hear to a step's orders."""
        orders.senders += self._senders
        orders.commands += self._commands
        self._senders, self._commands = [], []

    def rank_ended(self, event: Ended) -> None:
        """A rank has let go of something that is kept."""
        hold = self._holds.get(event.request)
        if hold is None:
            return
        hold.ranks.discard(event.rank)
        if hold.outcome == "used":
            hold.outcome = _OUTCOMES.get(reasons.code_of(event.reason), "failed")
        if hold.ranks:
            return
        del self._holds[hold.name]
        if self._by_origin.get(hold.origin) is hold:
            del self._by_origin[hold.origin]
        if hold.given_back_at is None:
            self._kept_blocks -= hold.blocks
        else:
            self._returning_blocks -= hold.blocks
        self.pins.drop(hold.name)
        self.counts.count(HOLDS, labels=(hold.outcome,))

    def __len__(self) -> int:
        return len(self._holds)

    @property
    def newest(self) -> RequestId:
        """The name of what was kept last."""
        return _name(self._made)

    @property
    def blocks(self) -> int:
        """Blocks that are kept, or are on their way back."""
        return self._kept_blocks + self._returning_blocks

    def _add(self, params: HeldParams, origin: TransferId, blocks: list[BlockId]) -> None:
        self._made += 1
        name = self.newest
        hold = _Hold(name, params, origin, len(blocks), set(self.facts.ranks))
        self._holds[name] = self._by_origin[origin] = hold
        self._kept_blocks += len(blocks)
        self.pins.add(name, blocks)
        transfer = params.transfer
        self._senders.append(Sender(transfer, name, held=True))
        self._commands += [
            Expect(transfer, params.tokens),
            Advance(transfer, params.tokens, 0, (to_spans(blocks),)),
            Finish(transfer, keep_seconds=self.limits.seconds),
        ]

    def _make_room(self, wanted: int) -> bool:
        """Give back the oldest until so many more may be kept; False when that is in vain."""
        if wanted > self.limits.blocks_max:
            return False
        for hold in self._kept():
            if self._kept_blocks + wanted <= self.limits.blocks_max:
                break
            self._give_back(hold)
        return self._returning_blocks <= self.limits.blocks_max

    def _kept(self) -> Iterator[_Hold]:
        """The oldest first."""
        return (hold for hold in list(self._holds.values()) if hold.given_back_at is None)

    def _give_back(self, hold: _Hold) -> None:
        self._asked_back_at = hold.given_back_at = self.clock()
        self._kept_blocks -= hold.blocks
        self._returning_blocks += hold.blocks
        reason = reasons.because(reasons.STARVED, "its engine needs the memory")
        self._commands.append(Reclaim(hold.params.transfer, reason))


def _name(number: int) -> RequestId:
    """As no request of the engine is called."""
    return RequestId(f"held {number}")
