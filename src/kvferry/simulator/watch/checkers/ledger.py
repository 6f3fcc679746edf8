"""Who may touch which block, as the engines' hosts and ranks have said: the bookkeeping that checkers share.

It sees each event before the checkers do. On a consumer's rank a `Receive` opens blocks, which `Received`, a
fenced `ReceiveFailed` or `BlocksSafe` closes. On a producer's rank `Advance` makes blocks readable, until
`Released`, or until `Drained` after a preemption, gives them back. An engine's pool takes and returns blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvferry.handoff import TransferMode
from kvferry.ids import ConsumerId, EngineId, PeerName, TransferId
from kvferry.protocol.commands import (
    Advance,
    BlocksSafe,
    Drained,
    Expect,
    Groups,
    Preempt,
    Receive,
    Received,
    ReceiveFailed,
    Released,
)
from kvferry.simulator.ground.arena import GroupShape
from kvferry.simulator.ground.events import (
    BlocksReturned,
    BlocksTaken,
    Commanded,
    EngineCrashed,
    EngineStarted,
    Posted,
    Reported,
)
from kvferry.simulator.watch.checkers.base import Checker, Handlers

OpeningKey = tuple[PeerName, TransferId, ConsumerId]
HoldingKey = tuple[PeerName, TransferId]
Tables = tuple[tuple[int, ...], ...]
"""Block ids by cache group."""


@dataclass(slots=True, eq=False)
class Opening:
    """One destination on one rank."""

    rank: PeerName
    transfer: TransferId
    consumer: ConsumerId
    start: int
    stop: int
    blocks: tuple[int, ...]
    """Of all cache groups."""
    groups: Tables
    """The last blocks before `stop`, by cache group."""
    mode: TransferMode = "push"
    failed: bool = False
    """Its rank has told its end, but not yet that nobody writes."""
    closed: bool = False

    def needed(self, shapes: Sequence[GroupShape], until: int) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """What of the tokens before `until` it is opened for, in each group of which there is any.

        The group, the first of these tokens, and the listed blocks from that token's on; of a window only the
        tokens that the engine looks at when it goes on behind `stop`.
        """
        for index, (shape, blocks) in enumerate(zip(shapes, self.groups, strict=True)):
            first = max(self.start, shape.first_token(self.stop))
            if first < until:
                listed_from = shape.blocks(self.stop) - len(blocks)
                place = first // shape.block_tokens - listed_from
                yield index, first, blocks[place:] if place >= 0 else ()


@dataclass(slots=True, eq=False)
class Lot:
    """Source blocks of one transfer on one rank, from its first block to a preemption or its end."""

    groups: list[list[int]] = field(default_factory=list)
    """By cache group, from the request's first token on; negative where a group has no block."""
    preempted: bool = False
    given_back: bool = False

    @property
    def blocks(self) -> set[int]:
        """Blocks of all groups."""
        return set().union(*self.groups)


@dataclass(slots=True, eq=False)
class Holding:
    """One transfer on one producer rank: the lot that is read now, and preempted ones that drain."""

    rank: PeerName
    transfer: TransferId
    lot: Lot = field(default_factory=Lot)
    draining: list[Lot] = field(default_factory=list)

    def lots(self) -> list[Lot]:
        """Every lot that has not been given back."""
        return [lot for lot in (self.lot, *self.draining) if not lot.given_back]


@dataclass(slots=True, eq=False)
class Write:
    """A posted WRITE or READ, with what was open and held when it was posted."""

    rank: PeerName
    source: PeerName
    target: PeerName
    handle: int
    source_blocks: tuple[int, ...]
    target_blocks: tuple[int, ...]
    opening: Opening | None
    """The destination, None when the blocks are not all of one that is known."""
    lots: tuple[Lot, ...] = ()
    """Where its source blocks were then."""
    source_returns: int = 0
    target_returns: int = 0
    """How often its blocks had gone back to their engine's pool before."""

    @property
    def read(self) -> bool:
        """Whether it is a READ."""
        return self.source != self.rank


@dataclass(slots=True)
class Life:
    """One engine from its start to its crash. `owners` of blocks that are not free; `returns` per block."""

    engine: EngineId
    ranks: tuple[PeerName, ...]
    block_count: int
    alive: bool = True
    owners: dict[int, str] = field(default_factory=dict)
    returns: dict[int, int] = field(default_factory=dict)


class Ledger(Checker):
    """The shared bookkeeping; it judges nothing."""

    def __init__(self) -> None:
        self.lives: dict[EngineId, Life] = {}
        self.life_of: dict[PeerName, Life] = {}
        self.openings: dict[OpeningKey, list[Opening]] = {}
        """Those that are not closed; one name may have been used again before its earlier one is."""
        self.opened: dict[PeerName, dict[int, Opening]] = {}
        """Per rank and block the last opening, closed or not."""
        self.holdings: dict[HoldingKey, Holding] = {}
        self.held: dict[PeerName, dict[int, list[Lot]]] = {}
        """Per rank and block the lots that have it; those given back are swept when a block is used again."""
        self.writes: dict[tuple[PeerName, int], Write] = {}
        self.settled: Opening | None = None
        """The opening that the event just seen speaks of, closed or not."""
        self._tickets: dict[tuple[PeerName, int], list[Lot]] = {}
        super().__init__()

    def handlers(self) -> Handlers:
        """What is called for which kind of event."""
        return {
            EngineStarted: self._started,
            EngineCrashed: self._crashed,
            Commanded: self._commanded,
            Reported: self._reported,
            Posted: self._posted,
            BlocksTaken: self._taken,
            BlocksReturned: self._returned,
        }

    def is_alive(self, rank: PeerName) -> bool:
        """Whether a rank's engine lives in the life that the rank belongs to."""
        life = self.life_of.get(rank)
        return life is not None and life.alive

    def lots_with(self, rank: PeerName, block: int) -> list[Lot]:
        """The lots of a rank that have a block and are not given back."""
        return [lot for lot in self.held.get(rank, {}).get(block, ()) if not lot.given_back]

    # --- engines and pools -----------------------------------------------------------------------

    def _started(self, event: EngineStarted) -> None:
        life = Life(event.engine, event.ranks, event.block_count)
        self.lives[event.engine] = life
        for rank in event.ranks:
            self.life_of[rank] = life

    def _crashed(self, event: EngineCrashed) -> None:
        for rank in event.ranks:
            self.life_of[rank].alive = False
            for key in [key for key in self.openings if key[0] == rank]:
                del self.openings[key]
            for holding_key in [key for key in self.holdings if key[0] == rank]:
                del self.holdings[holding_key]

    def _taken(self, event: BlocksTaken) -> None:
        self.lives[event.engine].owners.update(dict.fromkeys(event.blocks, event.owner))

    def _returned(self, event: BlocksReturned) -> None:
        life = self.lives[event.engine]
        for block in event.blocks:
            life.owners.pop(block, None)
            life.returns[block] = life.returns.get(block, 0) + 1

    # --- ranks -----------------------------------------------------------------------------------

    def _commanded(self, event: Commanded) -> None:
        command, rank = event.command, event.rank
        if isinstance(command, Receive):
            self._open(rank, command)
        elif isinstance(command, Expect):
            self.holdings.setdefault((rank, command.transfer), Holding(rank, command.transfer))
        elif isinstance(command, Advance):
            self._advance(rank, command)
        elif isinstance(command, Preempt):
            self._preempt(rank, command)

    def _open(self, rank: PeerName, command: Receive) -> None:
        opening = Opening(
            rank,
            command.transfer,
            command.consumer,
            command.start,
            command.stop,
            expanded(command.groups),
            by_group(command.groups),
            command.mode,
        )
        self.openings.setdefault((rank, command.transfer, command.consumer), []).append(opening)
        self.opened.setdefault(rank, {}).update(dict.fromkeys(opening.blocks, opening))

    def _advance(self, rank: PeerName, command: Advance) -> None:
        holding = self.holdings.get((rank, command.transfer))
        if holding is None:
            return
        lot = holding.lot
        if command.first_block == 0 and lot.preempted:
            holding.draining.append(lot)
            lot = holding.lot = Lot()
        held = self.held.setdefault(rank, {})
        for index, fresh in enumerate(by_group(command.blocks)):
            if index == len(lot.groups):
                lot.groups.append([])
            del lot.groups[index][command.first_of(index) :]
            lot.groups[index].extend(fresh)
            for block in fresh:
                if block >= 0:
                    held[block] = [*self.lots_with(rank, block), lot]

    def _preempt(self, rank: PeerName, command: Preempt) -> None:
        lots: list[Lot] = []
        for transfer in command.transfers:
            holding = self.holdings.get((rank, transfer))
            if holding is not None:
                holding.lot.preempted = True
                lots += holding.lots()
        self._tickets[rank, command.ticket] = lots

    def _reported(self, event: Reported) -> None:
        result, rank = event.result, event.rank
        self.settled = None
        if isinstance(result, Received | ReceiveFailed | BlocksSafe):
            self._settle(rank, result)
        elif isinstance(result, Released):
            holding = self.holdings.pop((rank, result.transfer), None)
            if holding is not None:
                _give_back(holding.lots())
        elif isinstance(result, Drained):
            _give_back(self._tickets.pop((rank, result.ticket), ()))

    def _settle(self, rank: PeerName, result: Received | ReceiveFailed | BlocksSafe) -> None:
        """The oldest opening of the name that waits for such a result has got it."""
        openings = self.openings.get((rank, result.transfer, result.consumer), [])
        failed = isinstance(result, BlocksSafe)
        self.settled = next((opening for opening in openings if opening.failed is failed), None)
        if self.settled is None:
            return
        if isinstance(result, ReceiveFailed) and not result.fenced:
            self.settled.failed = True
            return
        self.settled.closed = True
        openings.remove(self.settled)

    def _posted(self, event: Posted) -> None:
        opened = self.opened.get(event.target, {})
        openings = {id(found): found for block in event.target_blocks if (found := opened.get(block))}
        opening = next(iter(openings.values())) if len(openings) == 1 else None
        if opening is not None and not set(event.target_blocks) <= set(opening.blocks):
            opening = None
        lots: tuple[Lot, ...] = ()
        holding = None if opening is None else self.holdings.get((event.source, opening.transfer))
        if holding is not None:
            lots = _read_from(holding, set(event.source_blocks))
        self.writes[event.rank, event.handle] = Write(
            event.rank,
            event.source,
            event.target,
            event.handle,
            event.source_blocks,
            event.target_blocks,
            opening,
            lots,
            self._returns(event.source, event.source_blocks),
            self._returns(event.target, event.target_blocks),
        )

    def source_came_back(self, write: Write) -> bool:
        """Whether a pool has got source blocks of a write back since it was posted."""
        return self._returns(write.source, write.source_blocks) != write.source_returns

    def target_came_back(self, write: Write) -> bool:
        """Whether a pool has got target blocks of a write back since it was posted."""
        return self._returns(write.target, write.target_blocks) != write.target_returns

    def _returns(self, rank: PeerName, blocks: tuple[int, ...]) -> int:
        life = self.life_of.get(rank)
        return 0 if life is None else sum(life.returns.get(block, 0) for block in blocks)


def _read_from(holding: Holding, blocks: set[int]) -> tuple[Lot, ...]:
    """Whose blocks a write reads: a request that resumes may hit its own old blocks in the prefix cache."""
    if not holding.lot.given_back and blocks <= holding.lot.blocks:
        return (holding.lot,)
    return tuple(lot for lot in holding.lots() if not blocks.isdisjoint(lot.blocks))


def _give_back(lots: Iterable[Lot]) -> None:
    for lot in lots:
        lot.given_back = True


def by_group(groups: Groups) -> Tables:
    """Block ids of each group's spans, in order."""
    return tuple(expanded((spans,)) for spans in groups)


def expanded(groups: Groups) -> tuple[int, ...]:
    """Block ids of all groups' spans, in order."""
    return tuple(block for spans in groups for first, count in spans for block in range(first, first + count))
