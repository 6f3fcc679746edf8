"""What the host needs to know of its engine."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.host.events import RankIndex
from kvferry.ids import EngineId, Rank


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """An engine's identity, sizes and role. Scheduler and ranks derive equal ones."""

    engine: EngineId
    tp: int
    pp: int
    produces: bool
    consumes: bool
    block_tokens: int
    block_count: int
    group_count: int = 1
    ranks_end_with_engine: bool = True
    """Whether each rank is a process of the engine's own making, which watches it; see `agent.parent`."""

    @property
    def ranks(self) -> frozenset[RankIndex]:
        """All of its ranks."""
        return frozenset(range(self.tp * self.pp))

    def index(self, rank: Rank) -> RankIndex:
        """The rank's number among `ranks`."""
        return rank.pp * self.tp + rank.tp

    def blocks(self, tokens: int) -> int:
        """Blocks that cover so many tokens from the first on."""
        return -(-tokens // self.block_tokens)
