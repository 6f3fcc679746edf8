"""What the worlds are: sizes, limits and paces, drawn from the seed before anything happens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from random import Random

import msgspec

from kvferry.ids import EngineId
from kvferry.protocol.limits import Limits
from kvferry.simulator.engine.facts import EngineFacts, Pace
from kvferry.simulator.ground.arena import CacheShape, GroupShape
from kvferry.simulator.ground.options import Options
from kvferry.transport.memory import FabricLimits, Link

HOST = "127.0.0.1"
PORT = 5600
LAYERS = 2
BLOCK_TOKENS = 4
STAGES = (1, 1, 2)
HEADS = (1, 2, 4)
BLOCK_SIZES = (2, 4, 4, 8)
LARGEST = max(BLOCK_SIZES)
WINDOWS = (1, 2, 3, 5, 6, 8, 9, 12, 17, 24, 33, 64)
"""Of sliding windows in tokens: shorter than a block, shorter and longer than prompts."""
ORDERS = ("LBHNC", "BLHNC", "BHLNC", "LBNHC")
DECODE_TOKENS_MAX = 12
UNHARMED_SHARE = 1 / 6
"""Of all histories, those in which no fault happens."""
TIGHT_SHARE = 1 / 2
"""Of the small world's histories without faults, those in which engines come to lack memory."""
DIFFERING_SHARE = 1 / 3
"""Of all histories with faults, those whose engines have settings of their own."""
SMALL_SHARE = 0.1
"""Of all engines, those whose table of one kind is small."""
PARTS_SHARE = 1 / 6
"""Of all histories, those in which longer messages travel in parts."""
FORGETFUL_SHARE = 0.25
"""Of all engines, those that remember but a few ended transfers."""
HURRIED_SHARE = 1 / 2
"""Of all histories, calm ones too, those whose links are given up as idle while requests still wait."""
IDLE_SECONDS = 0.4
"""How soon that is."""
CROWDED_SHARE = 0.25
"""Of all histories with small tables, those in which a rank may be linked to a few others only."""
MISFIT_SHARE = 0.25
"""Of histories of a model with windows, those with an engine that does not fit."""
PULL_SHARES = (0.0, 0.0, 0.0, 0.5, 1.0)
"""Of a history's consumers, those that read themselves."""
PART_BYTES = 160
"""Room for the notification of any write, and for little more."""


@dataclass(frozen=True, slots=True)
class Ranges:
    """How large a world of one name is; each pair is the least and the most."""

    producers: tuple[int, int]
    consumers: tuple[int, int]
    tp: tuple[int, ...]
    blocks: tuple[int, int]
    transfers: tuple[int, int]
    tokens: tuple[int, int]
    seconds: tuple[float, float]
    both_roles: float = 0.15
    """How likely it is that engines have both roles."""
    any_shape: bool = False
    """Whether each engine has sizes of its own, of one model."""
    groups: bool = False
    """Whether the model has sliding windows, and cache groups."""
    turns: bool = False
    """Whether prompts go on, and engines keep what they have decoded."""


RANGES = {
    "small": Ranges((1, 1), (1, 2), (1, 1, 2), (24, 48), (4, 10), (1, 40), (2.0, 12.0)),
    "both": Ranges((2, 3), (0, 0), (1, 2), (24, 48), (6, 14), (1, 40), (2.0, 12.0), 1.0),
    "wide": Ranges((1, 8), (1, 8), (1, 2), (32, 64), (12, 40), (1, 60), (5.0, 20.0)),
    "tall": Ranges((1, 2), (1, 2), (4,), (24, 48), (4, 10), (1, 40), (2.0, 12.0)),
    "mixed": Ranges((1, 2), (1, 2), (1, 2, 4), (24, 48), (4, 10), (1, 40), (2.0, 12.0), any_shape=True),
    "groups": Ranges(
        (1, 2), (1, 2), (1, 1, 2, 4), (24, 48), (4, 10), (1, 40), (2.0, 12.0), any_shape=True, groups=True
    ),
    "turns": Ranges((2, 3), (0, 0), (1, 2), (32, 64), (4, 10), (1, 40), (2.0, 12.0), 1.0, turns=True),
    "long": Ranges((1, 3), (1, 3), (1, 2), (32, 64), (30, 60), (1, 60), (30.0, 90.0)),
    "calm": Ranges((1, 2), (1, 2), (1, 1, 2), (24, 48), (4, 10), (1, 40), (2.0, 8.0)),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """One drawn world."""

    engines: tuple[EngineFacts, ...]
    limits: Limits
    """The most patient of all engines'."""
    fabric: FabricLimits
    link: Link
    transfers: int
    tokens: tuple[int, int]
    tokens_max: int
    """Of a prompt and what is decoded behind it."""
    safety_seconds: float
    faults: frozenset[str]
    """Kinds of faults that may happen. In some histories none do, and every request must succeed."""
    clocks_differ: bool
    pull_share: float
    """How likely it is that a consumer reads itself."""
    turn_tokens_max: int = 0
    """Of a prompt that goes on; 0 where none does."""

    @property
    def windows(self) -> tuple[int, ...]:
        """Lengths of sliding windows in tokens."""
        groups = (group for facts in self.engines for group in facts.cache.groups)
        return tuple(sorted({group.window_tokens for group in groups if group.window_tokens}))

    @property
    def layers(self) -> int:
        """Layers of all models."""
        caches = [facts.cache for facts in self.engines]
        return max((cache.model + 1) * cache.layers * len(cache.tables) for cache in caches)


def draw(options: Options, random: Random, own: Random) -> Shape:
    """The world of one seed; `own` decides in what engines differ that need not."""
    ranges = RANGES[options.world]
    faults = options.faults
    if random.random() < UNHARMED_SHARE or options.world == "calm":
        faults = frozenset()
    link = _link(faults, random)
    slow = link.latency_seconds + link.jitter_seconds > 0.1
    limits = _limits(options.world, faults, random, slow=slow)
    both = random.random() < ranges.both_roles
    tp = random.choice(ranges.tp)
    producers, consumers = random.randint(*ranges.producers), random.randint(*ranges.consumers)
    differ = own.random() < DIFFERING_SHARE and "limits" in faults
    engines = tuple(
        _engine(
            random,
            ranges,
            tp,
            index,
            produces=both or index < producers,
            consumes=both or index >= producers,
            limits=_own_limits(limits, faults, own, differ=differ, slow=slow),
        )
        for index in range(producers + consumers)
    )
    parts = own.random() < PARTS_SHARE and "parts" in options.faults
    if own.random() < HURRIED_SHARE:
        engines = tuple(_with(facts, idle_seconds=IDLE_SECONDS) for facts in engines)
    links_max, hellos_max = own.choice((1, 1, 2)), own.choice((1, 1024))
    if ranges.any_shape:
        # One rank may be linked to every rank of an engine, and has no room for another one then. Once it has
        # given these links up it must know all of them again, or each would be found out by a failure.
        links_max, hellos_max = links_max * _ranks_max(ranges), hellos_max * _ranks_max(ranges)
    if own.random() < CROWDED_SHARE and "table" in faults:
        engines = tuple(_with(facts, links_max=links_max, hellos_max=hellos_max) for facts in engines)
    engines = _shaped(engines, ranges, faults, random)
    if ranges.turns and faults:
        engines = tuple(_keeping(facts, own) for facts in engines)
    smallest = min(facts.cache.token_count for facts in engines)
    turn_tokens_max = smallest - 40 if ranges.turns and faults else 0
    seconds = random.uniform(*ranges.seconds)
    longer = random.random() < 0.1
    fabric = FabricLimits(
        retry_bound_seconds=random.choice((1.0, 5.0, 30.0)), pieces_max=3, afterlife_seconds=0.5
    )
    shape = Shape(
        engines=engines,
        limits=most_patient([facts.limits for facts in engines]),
        fabric=replace(fabric, notification_bytes_max=PART_BYTES) if parts else fabric,
        link=link,
        transfers=random.randint(*ranges.transfers),
        tokens=(ranges.tokens[0], min(ranges.tokens[1], smallest - 40)),
        tokens_max=-(-(max(ranges.tokens[1], turn_tokens_max) + 8 + DECODE_TOKENS_MAX) // LARGEST) * LARGEST,
        safety_seconds=60.0 if longer and options.world != "calm" else seconds,
        faults=faults,
        clocks_differ="clock" in options.faults,
        pull_share=own.choice(PULL_SHARES),
        turn_tokens_max=turn_tokens_max,
    )
    return _tightened(shape, own) if options.world == "small" and not faults else shape


def _tightened(shape: Shape, own: Random) -> Shape:
    """Half of them: requests all at once, little memory, prefills of many steps: some begin and stand still.

    A decode engine computes what it resumes in one step. In several, it could preempt what it has just
    resumed, for ever: vLLM admits what fits as a whole, and the engine here what fits for a step.
    """
    if own.random() >= TIGHT_SHARE:
        return shape
    engines = tuple(
        replace(
            facts,
            cache=replace(facts.cache, block_count=own.randint(20, 28)),
            pace=replace(facts.pace, token_budget=64 if facts.consumes else 5),
        )
        for facts in shape.engines
    )
    return replace(shape, engines=engines, transfers=8, safety_seconds=2.0)


def _engine(
    random: Random, ranges: Ranges, tp: int, index: int, *, produces: bool, consumes: bool, limits: Limits
) -> EngineFacts:
    blocks = random.randint(*ranges.blocks)
    pace = Pace(
        token_budget=random.choice((5, 8, 16, 24, 64)),
        running_max=random.choice((2, 4, 8)),
        depth=random.choice((1, 2, 2)),
        step_seconds=random.choice((0.003, 0.01, 0.03, 0.1)),
        token_seconds=random.choice((0.0001, 0.0005, 0.002)),
        device_lag_seconds=random.choice((0.0, 0.0, 0.02)),
    )
    role = "E" if produces and consumes else "P" if produces else "D"
    return EngineFacts(
        engine=EngineId(f"{role}{index}"),
        host=HOST,
        port=PORT + index,
        produces=produces,
        consumes=consumes,
        cache=CacheShape(random.choice(ORDERS), LAYERS, blocks, BLOCK_TOKENS, tp),
        pace=pace,
        limits=limits,
        waiting_blocks_share=random.choice((0.5, 0.5, 0.8)),
        quarantine_share=0.25,
        agent_lag_seconds=random.choice((0.0, 0.0, 0.002, 0.02)),
        start_seconds=random.choice((0.0, 0.5, 3.0)),
    )


def _keeping(facts: EngineFacts, own: Random) -> EngineFacts:
    """An engine that keeps what it has decoded."""
    seconds, share = own.choice((0.5, 3.0, 15.0)), own.choice((0.1, 0.25, 0.6))
    return replace(facts, hold_seconds=seconds, held_blocks_share=share)


def _ranks_max(ranges: Ranges) -> int:
    """Ranks of the largest engine."""
    return max(ranges.tp) * (max(STAGES) if ranges.any_shape else 1)


def _shaped(
    engines: tuple[EngineFacts, ...], ranges: Ranges, faults: frozenset[str], random: Random
) -> tuple[EngineFacts, ...]:
    """The engines, unlike each other where the world has such."""
    if ranges.any_shape:
        engines = _of_any_shape(engines, ranges, random)
    if ranges.groups:
        engines = _with_groups(engines, random)
        if random.random() < MISFIT_SHARE and "misfit" in faults:
            engines = _with_a_misfit(engines, random)
    return engines


def _of_any_shape(
    engines: tuple[EngineFacts, ...], ranges: Ranges, random: Random
) -> tuple[EngineFacts, ...]:
    """The engines with parallel sizes and block sizes of their own."""
    heads = random.choice(HEADS)
    return tuple(
        replace(
            # Every rank of a consumer may have a delivery at one of ours.
            _with(facts, consumers_max=facts.limits.consumers_max * _ranks_max(ranges)),
            cache=replace(
                facts.cache,
                tp_size=random.choice(ranges.tp),
                pp_size=random.choice(STAGES),
                heads=heads,
                block_tokens=random.choice(BLOCK_SIZES),
            ),
        )
        for facts in engines
    )


def _with_groups(engines: tuple[EngineFacts, ...], random: Random) -> tuple[EngineFacts, ...]:
    """The engines with the cache groups of one model; a window of 0 tokens looks at every one."""
    one, other = random.sample(WINDOWS, 2)
    windows = random.choice(((0, one), (0, one), (one, 0), (0, one, other), (one,), (one, other)))
    common = random.choice(BLOCK_SIZES)
    return tuple(_grouped(facts, windows, common, random) for facts in engines)


def _grouped(facts: EngineFacts, windows: tuple[int, ...], common: int, random: Random) -> EngineFacts:
    """The engine with these cache groups, and memory for as many tokens as it had.

    Who hands windows over has blocks that are whole blocks of who receives them.
    """
    cache = facts.cache
    sizes = (common,) if facts.produces and facts.consumes else (4, 8) if facts.produces else (2, 4)
    groups = tuple(GroupShape(random.choice(sizes if window else BLOCK_SIZES), window) for window in windows)
    tokens = cache.block_count * BLOCK_TOKENS
    blocks = 1 + math.ceil(tokens * sum(Fraction(1, group.block_tokens) for group in groups))
    cache = replace(cache, groups=groups, block_tokens=groups[0].block_tokens, block_count=blocks)
    return replace(facts, cache=cache)


def _with_a_misfit(engines: tuple[EngineFacts, ...], random: Random) -> tuple[EngineFacts, ...]:
    """One of the engines has a cache that does not fit, to some of the others at least."""
    index = random.randrange(len(engines))
    cache = engines[index].cache
    groups = list(cache.groups)
    place = random.choice([place for place, group in enumerate(groups) if group.window_tokens])
    size, window = groups[place].block_tokens, groups[place].window_tokens
    kind = random.choice(("model", "heads", "window", "blocks"))
    if kind == "model":
        cache = replace(cache, model=1)
    elif kind == "heads":
        cache = replace(cache, heads=1 if cache.heads == 2 else 2)
    else:
        longer = window + random.choice((1, 3, 16))
        sizes = (size, longer) if kind == "window" else (8 if size < 8 else 4, window)
        groups[place] = GroupShape(*sizes)
        cache = replace(cache, groups=tuple(groups), block_tokens=groups[0].block_tokens)
    misfit = replace(engines[index], cache=cache)
    return (*engines[:index], misfit, *engines[index + 1 :])


def _limits(world: str, faults: frozenset[str], random: Random, *, slow: bool) -> Limits:
    chosen: dict[str, float | int] = {
        "slice_bytes": random.choice((1, 64, 128, 256)),
        "in_flight_per_peer": random.choice((1, 2, 4)),
    }
    short = random.random() < 0.5
    times = _short_times(random, slow=slow)
    small_table, most = random.random() < 0.15, random.choice((1, 2, 3))
    if short and faults:
        chosen |= times
    elif short and world != "calm":
        # Shorter than requests wait here, so that each has to be renewed; but nobody gives a late leg up.
        chosen |= {"lease_seconds": 4.0, "renew_seconds": 1.0, "write_seconds": 4.0, "silence_seconds": 4.0}
    if small_table and "table" in faults:
        chosen["transfers_max"] = most
    return Limits(**chosen)  # type: ignore[arg-type]


def _short_times(random: Random, *, slow: bool) -> dict[str, float]:
    """Times that run out within a history."""
    lease, write, silence = (
        random.choice((2.0, 6.0)),
        random.choice((1.0, 2.0, 4.0)),
        random.choice((1.0, 3.0)),
    )
    unknown, late = random.choice((2.0, 6.0)), random.choice((2.0, 6.0))
    if slow:
        # A limit shorter than an answer takes is an operator's mistake.
        write, silence = 4.0, 3.0
    return {
        "lease_seconds": lease,
        "renew_seconds": 0.5,
        "write_seconds": write,
        "silence_seconds": silence,
        "handshake_seconds": 2.0,
        "unknown_seconds": unknown,
        "slice_seconds": late,
        "tombstone_seconds": 10.0,
    }


def _own_limits(limits: Limits, faults: frozenset[str], own: Random, *, differ: bool, slow: bool) -> Limits:
    """One engine's limits: those of all, but for what it has to itself."""
    times = _short_times(own, slow=slow)
    keeps, slice_bytes, in_flight = own.random() < 0.5, own.choice((1, 64, 256)), own.choice((1, 2, 4))
    few, fewer, least = own.choice((1, 2, 3)), own.choice((1, 1, 2)), own.choice((1, 2, 3))
    small = [own.random() < share for share in (SMALL_SHARE, FORGETFUL_SHARE, SMALL_SHARE)]
    idle = own.choice((1.0, 4.0, limits.idle_seconds))
    changes: dict[str, float | int] = {}
    if differ:
        changes = {"slice_bytes": slice_bytes, "in_flight_per_peer": in_flight, "idle_seconds": idle}
        changes |= {} if keeps else times
    if "table" in faults:
        tables = (("consumers_max", few), ("tombstones_max", fewer), ("transfers_max", least))
        changes |= {name: most for (name, most), is_small in zip(tables, small, strict=True) if is_small}
    return msgspec.structs.replace(limits, **changes)


def _with(facts: EngineFacts, **changes: float) -> EngineFacts:
    """An engine with other limits."""
    return replace(facts, limits=msgspec.structs.replace(facts.limits, **changes))


def most_patient(limits: Sequence[Limits]) -> Limits:
    """With the longest of each time: nobody waits longer."""
    names = [name for name in Limits.__struct_fields__ if name.endswith("_seconds")]
    return msgspec.structs.replace(
        limits[0], **{name: max(getattr(one, name) for one in limits) for name in names}
    )


def _link(faults: frozenset[str], random: Random) -> Link:
    rates = {
        name: random.choice((0.0, 0.0, rate)) if random.random() < 0.5 else 0.0
        for name, rate in (
            ("lose_rate", 0.05),
            ("double_rate", 0.1),
            ("delay_rate", 0.1),
            ("refuse_rate", 0.1),
            ("break_rate", 0.1),
            ("stall_rate", 0.03),
            ("fail_rate", 0.03),
            ("late_rate", 0.1),
        )
    }
    overtaking = random.random() < 0.3
    latency = random.choice((5e-5, 1e-3, 2e-2, 0.2))
    jitter = random.choice((0.0, 1e-3, 2e-2, 0.5))
    delay = random.choice((0.1, 1.0, 5.0))
    return Link(
        latency_seconds=latency,
        jitter_seconds=jitter,
        delay_seconds=delay,
        overtaking=overtaking and "message_late" in faults,
        **{name: rate for name, rate in rates.items() if FAULT_OF_RATE[name] in faults},
    )


FAULT_OF_RATE = {
    "lose_rate": "message_lost",
    "double_rate": "message_doubled",
    "delay_rate": "message_late",
    "refuse_rate": "post_refused",
    "break_rate": "post_broken",
    "stall_rate": "post_stalled",
    "fail_rate": "post_failed",
    "late_rate": "post_late",
}
