"""Which rank of a consumer a producer rank writes to, where engines may be of unlike shape."""

from __future__ import annotations

from kvferry.layout.ranks import meetings, shape_of, turn_of
from kvferry.simulator.engine.engine import Engine
from kvferry.simulator.engine.rank import RankProcess


def partner(producer: Engine, index: int, consumer: Engine) -> RankProcess:
    """The first rank of the consumer that gets something of this producer rank, or hears of it at all."""
    source = producer.ranks[index].slot.cache
    shape, turn = shape_of(source), turn_of(consumer.facts.engine)

    def nearness(process: RankProcess) -> int:
        target = process.slot.cache
        met = meetings(target.rank, shape_of(target), shape, turn)
        return max((1 + one.writes for one in met if one.rank == source.rank), default=0)

    return max(consumer.ranks, key=nearness)
