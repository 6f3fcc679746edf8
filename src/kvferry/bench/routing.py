"""Two routers under the same loads, one after the other, round by round: what each costs.

TTFT is reported as what a router adds: its quantile less that of the same load sent to the decode engine.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvferry.bench.routing_load import Load, RoutingError, Seen, drive

THROUGHPUT = Load(clients=64, tokens=8)
ONE = Load(clients=1, tokens=4, pace_ms=5)
MANY = Load(clients=128, tokens=64, pace_ms=20)
LOADS: Mapping[str, Load] = {"throughput": THROUGHPUT, "one": ONE, "many": MANY}

REQUESTS_RATIO_MIN = 1.5
CPU_RATIO_MAX = 0.5
_MICROSECONDS = 1e6


@dataclass(frozen=True, slots=True)
class Contender:
    """A running router, or the bare engine that it is compared with."""

    name: str
    url: str
    cpu: Callable[[], float] = lambda: 0.0
    """CPU seconds that it has used so far."""
    memory: Callable[[], int] = lambda: 0
    """Bytes that are resident."""


@dataclass(slots=True)
class Taken:
    """What was seen of one contender, by load, one for each round."""

    seen: dict[str, list[Seen]] = field(default_factory=dict)
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Cost:
    """What one router costs: medians over the rounds."""

    requests_per_second: float
    cpu_us_per_request: float
    cpu_us_per_token: float
    one_p50_us: float
    one_p99_us: float
    many_p50_us: float
    many_p99_us: float
    memory_mib: float


async def measure(
    direct: Contender,
    routers: Sequence[Contender],
    rounds: int,
    seconds: float,
    loads: Mapping[str, Load] = LOADS,
    warm_seconds: float = 1.0,
) -> dict[str, Taken]:
    """Load each router in turn; in every other round the other way round.

    Raises:
        RoutingError: one of them did not answer as it should.
    """
    taken = {each.name: Taken() for each in (direct, *routers)}
    for number in range(rounds):
        order = [direct, *(routers if number % 2 == 0 else reversed(routers))]
        for name, load in loads.items():
            for each in order:
                seen = await drive(each.url, load, seconds, warm_seconds, each.cpu)
                if not seen.tokens or not seen.ttfts:
                    raise RoutingError(
                        f"{each.name}: nothing was answered in {seconds:g} s of the load {name!r}"
                    )
                taken[each.name].seen.setdefault(name, []).append(seen)
                taken[each.name].memory_bytes = max(taken[each.name].memory_bytes, each.memory())
    return taken


def cost_of(router: Taken, direct: Taken) -> Cost:
    """The figures of one router."""
    busy = router.seen["throughput"]

    def added(load: str, share: float) -> float:
        pairs = zip(router.seen[load], direct.seen[load], strict=True)
        return _MICROSECONDS * statistics.median(
            quantile(one.ttfts, share) - quantile(other.ttfts, share) for one, other in pairs
        )

    return Cost(
        requests_per_second=statistics.median(each.requests / each.seconds for each in busy),
        cpu_us_per_request=_MICROSECONDS * statistics.median(_per(each, each.requests) for each in busy),
        cpu_us_per_token=_MICROSECONDS
        * statistics.median(_per(each, each.tokens) for each in router.seen["many"]),
        one_p50_us=added("one", 0.5),
        one_p99_us=added("one", 0.99),
        many_p50_us=added("many", 0.5),
        many_p99_us=added("many", 0.99),
        memory_mib=router.memory_bytes / (1 << 20),
    )


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that this share of all does not exceed."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


def table(costs: Mapping[str, Cost]) -> list[str]:
    """The figures as a Markdown table."""
    lines = [f"| one core | {' | '.join(costs)} |", "| --- |" + " ---: |" * len(costs)]
    for title, shown in _ROWS:
        lines.append(f"| {title} | " + " | ".join(shown(cost) for cost in costs.values()) + " |")
    return lines


def problems(ours: Cost, peer: Cost) -> list[str]:
    """Which targets our router misses, one line each."""
    ratio = ours.requests_per_second / peer.requests_per_second
    told = []
    if ratio < REQUESTS_RATIO_MIN:
        told.append(f"requests/s: {ratio:.2f} times the peer's, at least {REQUESTS_RATIO_MIN:g}")
    # CPU time is counted in ticks; a short load may have cost none.
    share = ours.cpu_us_per_token / max(peer.cpu_us_per_token, 1e-3)
    if share > CPU_RATIO_MAX:
        told.append(f"CPU per token: {share:.2f} times the peer's, at most {CPU_RATIO_MAX:g}")
    for title, name in _TTFTS:
        own, other = getattr(ours, name), getattr(peer, name)
        if own > other:
            told.append(f"added TTFT, {title}: {own:.0f} us, the peer's is {other:.0f} us")
    return told


def _per(seen: Seen, count: int) -> float:
    return seen.cpu_seconds / max(count, 1)


_TTFTS = (
    ("1 stream, p50", "one_p50_us"),
    ("1 stream, p99", "one_p99_us"),
    ("128 streams, p50", "many_p50_us"),
    ("128 streams, p99", "many_p99_us"),
)


def _shown(name: str, form: str) -> Callable[[Cost], str]:
    return lambda cost: format(getattr(cost, name), form)


_ROWS: tuple[tuple[str, Callable[[Cost], str]], ...] = (
    ("requests/s, 64 clients, 8 tokens each", _shown("requests_per_second", ",.0f")),
    ("CPU per request, us", _shown("cpu_us_per_request", ".0f")),
    ("CPU per forwarded token at 128 paced streams, us", _shown("cpu_us_per_token", ".1f")),
    *((f"added TTFT, {title}, us", _shown(name, ".0f")) for title, name in _TTFTS),
    ("resident memory, MiB", _shown("memory_mib", ".0f")),
)
