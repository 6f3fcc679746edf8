"""Which ranks of two engines exchange KV, and who serves whom where several hold the same.

Tensor-parallel ranks hold equal runs of the model's KV heads; with more ranks than heads each head is held
by equally many ranks, its replicas. MLA is the case of one head. Pipeline stages hold layers, by name. So a
consumer rank needs something of every producer rank that holds one of its heads in one of its layers.

Replicas of the producer share the consumer's ranks of a head evenly: of R producer replicas and C consumer
ranks, consumer number k has the replicas `[k * R / C, (k + 1) * R / C)`, or the one at `k * R / C` where that
is less than one. One of these serves it; which one turns with the consumer engine's name, so that many small
consumers use all of the producer's network cards. The others of its share hold nothing that it needs, and it
tells them so, or they would keep the blocks for nobody.

Both sides find the same answer from two descriptions: `meetings` is all that a consumer rank registers with
and waits for, `sent_heads` is what one rank sends another.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from kvferry.errors import GeometryError
from kvferry.ids import EngineId, Rank
from kvferry.layout.spec import CacheSpec

Layer = tuple[int, str]
"""Block table and name."""
Stage = Mapping[int, frozenset[Layer]]
"""The layers of one pipeline stage, by their number of KV heads."""


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What ranks of other engines must know of an engine as a whole."""

    tp: int
    stages: tuple[Stage, ...]

    @property
    def pp(self) -> int:
        """Its pipeline stages."""
        return len(self.stages)

    def __contains__(self, rank: Rank) -> bool:
        return 0 <= rank.tp < self.tp and 0 <= rank.pp < self.pp


@dataclass(frozen=True, slots=True, order=True)
class Meeting:
    """A producer rank that a consumer rank registers with."""

    rank: Rank
    writes: bool
    """Whether it holds something for us; else it only hears that it need not send."""
    sharers: int
    """Ranks of the consumer that register one transfer with it."""


@dataclass(frozen=True, slots=True)
class Duties:
    """Producer tensor-parallel ranks that serve a consumer's, and replicas that it tells they need not."""

    serving: tuple[int, ...]
    spared: tuple[int, ...]


def turn_of(consumer: EngineId) -> int:
    """Where the choice among equal replicas starts for a consumer engine."""
    return zlib.crc32(consumer.encode())


def shape_of(spec: CacheSpec) -> EngineShape:
    """The engine that a rank belongs to.

    Raises:
        GeometryError: it has several pipeline stages and does not say what they hold.
    """
    stages: list[dict[int, set[Layer]]] = [{} for _ in range(spec.pp_size)]
    for table, groups in enumerate(spec.tables):
        for group in groups:
            if spec.pp_size > 1 and not group.stages:
                raise GeometryError("stages", "unknown", spec.pp_size, "state the layers of every stage")
            for stage, names in enumerate(group.stages or (tuple(group.layers),)):
                layers = stages[stage].setdefault(group.heads_total, set())
                layers.update((table, name) for name in names)
    return EngineShape(
        spec.tp_size,
        tuple({heads: frozenset(layers) for heads, layers in stage.items()} for stage in stages),
    )


def splits(tp: int, heads: int) -> bool:
    """Whether so many ranks can hold so many heads evenly, whole or as replicas."""
    return heads % tp == 0 or tp % heads == 0


def heads_of(rank: int, tp: int, heads: int) -> range:
    """The KV heads of one of `tp` tensor-parallel ranks.

    Raises:
        GeometryError: they cannot be split evenly.
    """
    if not splits(tp, heads):
        raise GeometryError("tp_size", tp, f"{heads} KV heads", "use a divisor or a multiple of the KV heads")
    first = rank * heads // tp
    return range(first, first + max(heads // tp, 1))


@lru_cache(maxsize=4096)
def duties(receiver: int, receivers: int, senders: int, heads: int, turn: int = 0) -> Duties:
    """Who of `senders` ranks serves one of `receivers` ranks, in layers of `heads` KV heads.

    Raises:
        GeometryError: a side cannot split the heads evenly.
    """
    wanted = heads_of(receiver, receivers, heads)
    heads_of(0, senders, heads)
    if senders <= heads:
        per_sender = heads // senders
        return Duties(tuple(range(wanted[0] // per_sender, wanted[-1] // per_sender + 1)), ())
    replicas = senders // heads
    rivals = max(receivers // heads, 1)
    number = receiver % rivals
    first = number * replicas // rivals
    share = max((number + 1) * replicas // rivals - first, 1)
    chosen = first + turn % share
    return Duties(
        serving=tuple(head * replicas + chosen for head in wanted),
        spared=tuple(
            head * replicas + other
            for head in wanted
            for other in range(first, first + share)
            if other != chosen
        ),
    )


def sent_heads(sender: int, senders: int, receiver: int, receivers: int, heads: int, turn: int = 0) -> range:
    """The KV heads that one producer rank writes for one consumer rank; none where another one serves it.

    Raises:
        GeometryError: a side cannot split the heads evenly.
    """
    if sender not in duties(receiver, receivers, senders, heads, turn).serving:
        return range(0)
    ours, theirs = heads_of(sender, senders, heads), heads_of(receiver, receivers, heads)
    return range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))


def meetings(rank: Rank, consumer: EngineShape, producer: EngineShape, turn: int = 0) -> tuple[Meeting, ...]:
    """The producer's ranks that the consumer's `rank` registers with, in their order.

    Raises:
        GeometryError: `rank` is none of the consumer's, or a side cannot split the heads evenly.
    """
    if rank not in consumer:
        raise GeometryError("rank", f"{consumer.pp} x {consumer.tp} ranks", rank, "use a rank of this engine")
    found = _met(rank, consumer, producer, turn)
    return tuple(
        Meeting(sender, writes, _sharers(sender, consumer, producer, turn))
        for sender, writes in sorted(found.items())
    )


def _met(rank: Rank, consumer: EngineShape, producer: EngineShape, turn: int) -> dict[Rank, bool]:
    """Producer ranks, and whether each has something to send."""
    found: dict[Rank, bool] = {}
    for pp, heads in _common_stages(consumer.stages[rank.pp], producer):
        duty = duties(rank.tp, consumer.tp, producer.tp, heads, turn)
        for tp in duty.spared:
            found.setdefault(Rank(pp, tp), False)
        for tp in duty.serving:
            found[Rank(pp, tp)] = True
    return found


def _common_stages(stage: Stage, other: EngineShape) -> list[tuple[int, int]]:
    """Stages of another engine that share layers with one of ours, once per number of heads."""
    return [
        (number, heads)
        for number, theirs in enumerate(other.stages)
        for heads, layers in stage.items()
        if not layers.isdisjoint(theirs.get(heads, ()))
    ]


def _sharers(sender: Rank, consumer: EngineShape, producer: EngineShape, turn: int) -> int:
    """Consumer ranks that register with one of the producer's ranks."""
    count = 0
    for stage in consumer.stages:
        kinds = [heads for pp, heads in _common_stages(stage, producer) if pp == sender.pp]
        every = [
            [duties(tp, consumer.tp, producer.tp, heads, turn) for heads in kinds]
            for tp in range(consumer.tp if kinds else 0)
        ]
        count += sum(
            any(sender.tp in duty.serving or sender.tp in duty.spared for duty in many) for many in every
        )
    return count
