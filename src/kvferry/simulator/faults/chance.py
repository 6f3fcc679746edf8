"""What goes wrong by chance: each fault has a number, a time and a random source of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from kvferry.simulator.engine.engine import Engine
from kvferry.simulator.engine.rank import RankProcess
from kvferry.simulator.faults import plots, reading
from kvferry.simulator.faults.breakages import Breakages
from kvferry.simulator.faults.levers import Levers
from kvferry.simulator.faults.partners import partner
from kvferry.simulator.world.world import World
from kvferry.transport.memory import MessageFault, PostFault

LINGER_SECONDS = (0.0, 0.0, 0.05, 0.4)
"""How long the ranks' processes outlive their core: vLLM's learn of its end and then exit by themselves."""
NUMBER_FIRST = 1000
"""Below it are the numbers of workload items."""
LATE = ("late_read", "late_write")
LATE_TIMES = 8
"""So much more often than other kinds."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong."""

    number: int
    at_seconds: float
    kind: str
    random: Random

    def __str__(self) -> str:
        return f"{self.kind} at {self.at_seconds:.3f} s"


def draw(world: World, random: Random) -> list[Fault]:
    """The faults of a history."""
    kinds = sorted(kind for kind in world.faults if kind in _INJECT)
    # What needs a coincidence is tried more often.
    wanted = {"late_read": world.shape.pull_share > 0, "late_write": world.shape.pull_share < 1}
    kinds += [kind for kind in LATE if kind in kinds and wanted[kind]] * LATE_TIMES
    count = random.choice((0, 1, 2, 3, 5, 8))
    if world.options.world in ("wide", "long"):
        count *= 4
    drawn = [(random.random(), random.random()) for _ in range(count)]
    if not kinds:
        return []
    found = []
    for index, (when, which) in enumerate(drawn):
        kind = kinds[int(which * len(kinds))]
        # Most requests come early, and this one waits for the next.
        share = when**3 if kind in LATE else when
        random_source = Random(world.seed * 131071 + index)
        found.append(Fault(NUMBER_FIRST + index, share * world.shape.safety_seconds, kind, random_source))
    return found


def inject(levers: Levers, fault: Fault) -> None:
    """Let it happen."""
    _INJECT[fault.kind](levers, fault.random)


def _engine(world: World, random: Random) -> Engine | None:
    living = [engine for engine in world.engines.values() if engine is not None]
    return random.choice(living) if living else None


def _rank(world: World, random: Random) -> RankProcess | None:
    engine = _engine(world, random)
    return None if engine is None else random.choice(engine.ranks)


def _pair(world: World, random: Random) -> tuple[Engine, Engine] | None:
    """Two living engines, what produces first."""
    living = [engine for engine in world.engines.values() if engine is not None]
    producers = [engine for engine in living if engine.facts.produces]
    if not producers:
        return None
    producer = random.choice(producers)
    consumers = [engine for engine in living if engine.facts.consumes and engine is not producer]
    return (producer, random.choice(consumers)) if consumers else None


def _ranks(world: World, random: Random) -> tuple[RankProcess, RankProcess] | None:
    """Ranks of two engines that meet."""
    pair = _pair(world, random)
    if pair is None:
        return None
    tp = random.randrange(len(pair[0].ranks))
    return pair[0].ranks[tp], partner(pair[0], tp, pair[1])


def _abort(levers: Levers, random: Random) -> None:
    dispatches = list(levers.world.router.dispatches.values())
    if not dispatches:
        return
    dispatch = random.choice(dispatches[-4:])
    legs = [leg for leg in (*dispatch.prefills, *dispatch.decodes) if not leg.ended]
    if legs:
        leg = random.choice(legs)
        levers.abort(leg.request)


def _connection(levers: Levers, random: Random) -> None:
    pair = _ranks(levers.world, random)
    if pair is None:
        return
    ends = random.choice(((pair,), (pair[::-1],), (pair, pair[::-1])))
    for source, target in ends:
        levers.break_connection(source.name, target.name)


def _crash(levers: Levers, random: Random) -> None:
    engine = _engine(levers.world, random)
    if engine is not None:
        noticed, lingers = random.choice((0.0, 0.0, 0.5, 2.0)), random.choice(LINGER_SECONDS)
        breaks = random.random() < 0.3 and "connection" in levers.world.faults
        levers.crash(engine.facts.engine, noticed, lingers)
        if breaks:
            # Whoever asks now is refused by an engine whose ranks may still write.
            _break_connections_to(levers, engine)
        levers.restart(engine.facts.engine, random.choice((0.0, 0.3, 2.0, 15.0)))


def _break_connections_to(levers: Levers, engine: Engine) -> None:
    for other in levers.world.engines.values():
        for ours, theirs in zip(other.ranks, engine.ranks, strict=False) if other is not None else ():
            levers.break_connection(ours.name, theirs.name)


def _close(levers: Levers, random: Random) -> None:
    engine = _engine(levers.world, random)
    if engine is not None:
        back_after_seconds = random.choice((0.0, 0.3, 2.0, 15.0, None))
        Breakages(levers).close(engine.facts.engine, back_after_seconds)


def _directory(levers: Levers, random: Random) -> None:
    resolver, now = levers.world.resolver, levers.world.now
    seconds = random.choice((1.0, 5.0, 20.0))
    kind = random.choice(("slow", "slow", "slow", "unready", "unready", "misled"))
    engine = _engine(levers.world, random)
    if kind == "slow":
        resolver.slow_until = now + seconds
        resolver.slow_seconds = random.choice((0.5, 5.0))
    elif engine is not None:
        until = resolver.unready_until if kind == "unready" else resolver.misled_until
        until[engine.facts.engine] = now + seconds


def _agent_breaks(levers: Levers, random: Random) -> None:
    process = _rank(levers.world, random)
    if process is not None:
        Breakages(levers).break_agent(process, random)


def _forward_fails(levers: Levers, random: Random) -> None:
    pair = _pair(levers.world, random)
    if pair is not None:
        rank = random.randrange(len(pair[0].ranks))
        lingers, back = random.choice((0.05, 0.2, 0.4)), random.choice((0.0, 0.3, 2.0, 15.0))
        Breakages(levers).fail_forward(pair[0].facts.engine, rank, lingers, back)


def _hello_refused(levers: Levers, random: Random) -> None:
    pair = _ranks(levers.world, random)
    if pair is not None:
        Breakages(levers).refuse_hellos(pair[0], random.choice((0.2, 2.0, 10.0)) * random.random())


def _message(fault: MessageFault) -> Callable[[Levers, Random], None]:
    def injected(levers: Levers, random: Random) -> None:
        pair = _ranks(levers.world, random)
        if pair is not None:
            source, target = pair if random.random() < 0.5 else pair[::-1]
            levers.message_fault(source.name, target.name, fault, random.choice((1, 1, 2, 5)))

    return injected


def _partition(levers: Levers, random: Random) -> None:
    pair = _pair(levers.world, random)
    if pair is None:
        return
    one, other = pair[0].facts.engine, pair[1].facts.engine
    seconds = random.choice((0.05, 0.5, 3.0, 12.0, 40.0)) * (0.5 + random.random())
    for source, target in random.choice((((one, other),), ((other, one),), ((one, other), (other, one)))):
        levers.cut(source, target, seconds)


def _post(fault: PostFault, counts: tuple[int, ...]) -> Callable[[Levers, Random], None]:
    def injected(levers: Levers, random: Random) -> None:
        pair = _ranks(levers.world, random)
        if pair is not None:
            count = random.choice(counts)
            # A consumer that reads posts itself.
            poster, other = pair[::-1] if random.random() < levers.world.shape.pull_share else pair
            levers.post_fault(poster.name, other.name, fault, count)

    return injected


def _preempt(levers: Levers, random: Random) -> None:
    engine = _engine(levers.world, random)
    if engine is not None and engine.scheduler.requests:
        levers.preempt(random.choice(list(engine.scheduler.requests)))


def _replay(levers: Levers, random: Random) -> None:
    transfers = list(levers.world.router.dispatches)
    if transfers:
        levers.replay(random.choice(transfers[-3:]))


def _stall_agent(levers: Levers, random: Random) -> None:
    process = _rank(levers.world, random)
    if process is not None:
        seconds = random.choice((0.1, 1.0, 3.0, 11.0, 35.0, 100.0)) * random.random()
        levers.stall_agent(process.name, seconds)


def _stall_engine(levers: Levers, random: Random) -> None:
    engine = _engine(levers.world, random)
    if engine is not None:
        seconds = random.choice((0.1, 1.0, 5.0, 20.0)) * random.random()
        rank = random.choice((None, 0, len(engine.ranks) - 1))
        levers.stall_engine(engine.facts.engine, seconds, rank=rank)


_INJECT: dict[str, Callable[[Levers, Random], None]] = {
    "abort": _abort,
    "agent_breaks": _agent_breaks,
    "close": _close,
    "connection": _connection,
    "crash": _crash,
    "directory": _directory,
    "forward_fails": _forward_fails,
    "hello_refused": _hello_refused,
    "late_read": reading.late_read,
    "late_write": plots.late_write,
    "mailbox": _stall_agent,
    "message_doubled": _message(MessageFault.DOUBLE),
    "message_late": _message(MessageFault.DELAY),
    "message_lost": _message(MessageFault.LOSE),
    "partition": _partition,
    "post_broken": _post(PostFault.BREAK, (1, 2, 8)),
    "post_failed": _post(PostFault.FAIL, (1, 2, 40)),
    "post_late": _post(PostFault.DELAY, (1, 2)),
    "post_refused": _post(PostFault.REFUSE, (1, 3, 20)),
    "post_stalled": _post(PostFault.STALL, (1, 2)),
    "preempt": _preempt,
    "replay": _replay,
    "stall_agent": _stall_agent,
    "stall_engine": _stall_engine,
}
