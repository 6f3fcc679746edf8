"""What the host needs to know of its engine."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.host.events import RankIndex
from kvferry.ids import EngineId, Rank

NULL_BLOCK = 0
"""The id that vLLM's block tables have where a window has moved on: nobody's block."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share a block table. `window_tokens` is 0 where every token is kept."""

    block_tokens: int
    window_tokens: int = 0

    def blocks(self, tokens: int) -> int:
        """Blocks that cover so many tokens from the first on."""
        return -(-tokens // self.block_tokens)

    def first_needed(self, stop: int) -> int:
        """The first block that whoever computes token `stop` next looks at."""
        if not self.window_tokens:
            return 0
        return max(stop + 1 - self.window_tokens, 0) // self.block_tokens


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """An engine's identity, sizes and role. Scheduler and ranks derive equal ones.

    `block_tokens` are those of the first cache group; `groups` may be left out where it is the only one.
    """

    engine: EngineId
    tp: int
    pp: int
    produces: bool
    consumes: bool
    block_tokens: int
    block_count: int
    groups: tuple[CacheGroup, ...] = ()
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
        """Blocks of the first group that cover so many tokens from the first on."""
        return -(-tokens // self.block_tokens)

    @property
    def tables(self) -> tuple[CacheGroup, ...]:
        """Every cache group."""
        return self.groups or (CacheGroup(self.block_tokens),)

    def needed_blocks(self, start: int, stop: int) -> list[range]:
        """Of each cache group the blocks of `[start, stop)` that are needed; of a window the last ones."""
        return [
            range(max(start // group.block_tokens, group.first_needed(stop)), group.blocks(stop))
            for group in self.tables
        ]

    @property
    def has_windows(self) -> bool:
        """Whether some layers keep their newest tokens only."""
        return any(group.window_tokens for group in self.groups)

    @property
    def keeps_good_prefixes(self) -> bool:
        """Whether the engine can go on behind what has come of a failed receive.

        Of several groups it cannot be told which blocks are bad, and of a window that ends earlier nothing
        has come.
        """
        return len(self.groups) <= 1 and not self.has_windows

    @property
    def keeps_turns(self) -> bool:
        """Whether what is kept of a turn is of use to the next one, wherever that parts from it.

        Of a window the newest tokens are there, and a prompt that parts from the turn earlier needs others.
        """
        return len(self.groups) <= 1 and not self.has_windows

    def received_stop(self, prompt_tokens: int) -> int:
        """The end of what a decode request receives of its prompt.

        The engine computes the last token in any case. Where it holds all of a prompt, its windows are those
        of the token behind, and begin too late for the last one by a token.
        """
        return max(prompt_tokens - self.has_windows, 1)
