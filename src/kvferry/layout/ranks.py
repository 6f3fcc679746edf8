"""Which ranks of two engines exchange KV.

One rule, `sources`, and its inverse; today it covers engines of equal sizes, whose ranks meet one to one.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.errors import GeometryError
from kvferry.ids import Rank


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """Ranks of one engine: `tp` per pipeline stage, `pp` stages."""

    tp: int
    pp: int

    def __contains__(self, rank: Rank) -> bool:
        return 0 <= rank.tp < self.tp and 0 <= rank.pp < self.pp

    def ranks(self) -> tuple[Rank, ...]:
        """All ranks, stage by stage."""
        return tuple(Rank(pp, tp) for pp in range(self.pp) for tp in range(self.tp))


def sources(rank: Rank, consumer: EngineSizes, producer: EngineSizes) -> tuple[Rank, ...]:
    """The producer's ranks that hold a part of the KV of the consumer's `rank`.

    Raises:
        GeometryError: `rank` is none of the consumer's, or the sizes cannot be joined.
    """
    if rank not in consumer:
        raise GeometryError("rank", consumer, rank, "use a rank of this engine")
    check_sizes(consumer, producer)
    return (rank,)


def sharers(rank: Rank, consumer: EngineSizes, producer: EngineSizes) -> int:
    """How many ranks of the consumer register one transfer with the producer's `rank`.

    Raises:
        GeometryError: `rank` is none of the producer's, or the sizes cannot be joined.
    """
    if rank not in producer:
        raise GeometryError("rank", producer, rank, "use a rank of that engine")
    return sum(rank in sources(reader, consumer, producer) for reader in consumer.ranks())


def check_sizes(ours: EngineSizes, theirs: EngineSizes) -> None:
    """Refuse pairs of engines whose ranks cannot be matched.

    Raises:
        GeometryError: names `tp_size` or `pp_size`.
    """
    for error in size_errors(ours, theirs):
        raise error


def size_errors(ours: EngineSizes, theirs: EngineSizes) -> list[GeometryError]:
    """Each size that keeps two engines from being joined."""
    errors = []
    if ours.tp != theirs.tp:
        errors.append(
            GeometryError(
                "tp_size", ours.tp, theirs.tp, "start both engines with the same --tensor-parallel-size"
            )
        )
    if (ours.pp, theirs.pp) != (1, 1):
        errors.append(
            GeometryError("pp_size", ours.pp, theirs.pp, "start both engines with --pipeline-parallel-size 1")
        )
    return errors
