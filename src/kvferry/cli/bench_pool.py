"""`kvferry bench pool`: push, pull and auto in front of decode engines that differ; what auto is worth.

The router is the real one, and its engines answer over HTTP on loopback. What they compute is modelled: one
prefill engine, four decode engines, of which one is slow and one serves others, too. All of it runs on
virtual time, which moves only when nobody has anything to do: the machine's speed is not in the figures, and
a run of minutes takes seconds. Each mode meets the same requests at the same moments.

The command fails when in a case auto's 95th percentile of the time to the first token is more than 1.05 times
that of the better of push and pull, under either policy, or when a request failed.

cases, each named POOL, PROMPTS:
  skewed      one decode engine's steps take three times as long, another serves 25 requests/s of others, too
  bursts      as skewed, but those others come 50 a second for five seconds out of ten
  full        decode engines have room for 6 requests, not 64; one is slow, one serves 1 request/s of others
  alike       the decode engines are equal
  short       prompts of 100 to 500 tokens, 50 requests/s
  long        of 4,000 to 16,000 tokens, 3 requests/s
  mixed       of 100 to 16,000 tokens, 3.8 requests/s
  medium      of 1,500 to 7,500 tokens, 7.2 requests/s

columns, each a way to run the router:
  push, pull  that mode for every request, with the policy least_wait
  least_load  the same modes with that policy
  auto        the router decides for each request, with least_wait
  pulled      how many of auto's requests were pulled
  auto/better auto's 95th percentile over that of the best of the four fixed ways

policies, which choose the decode engine:
  least_wait  the one that is expected to add least to the first token, by what it has added lately
  least_load  the one with the fewest tokens of this router's requests; it sees nothing of what others send

  kvferry bench pool
  kvferry bench pool --seeds 20 --from 100 --cases 'full, medium'
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry.cli.fleet import termination_interrupts
from kvferry.cli.progress import Progress
from kvferry.errors import UsageError

if TYPE_CHECKING:
    from kvferry.bench.pool import Arm, CaseResult
    from kvferry.bench.pool_cases import PoolCase
    from kvferry.bench.pool_engines import PoolUrls
    from kvferry.router.server import RouterServer

SUMMARY = "push, pull and auto in front of decode engines that differ, modelled; needs no vLLM, no GPU"
SEEDS_MAX = 1000
REQUESTS_MAX = 100_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How much, and where the figures go."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--seeds", type=int, default=3, metavar="N", help="runs per case and mode (default: %(default)s)")
    add("--from", type=int, default=0, dest="first", metavar="S", help="the first seed (default: 0)")
    add("--requests", type=int, metavar="N", help="per run (default: a case's own, 400 to 1500)")
    add("--cases", nargs="+", metavar="NAME", help="only these, such as 'skewed, long' (default: all)")
    add("--json", type=Path, metavar="FILE", help="write all figures there too")


def run(namespace: argparse.Namespace) -> int:
    """Run all cases and judge them."""
    from kvferry.bench.pool import measure  # noqa: PLC0415 - the router and its HTTP, wanted only here
    from kvferry.bench.virtual_time import run_virtually  # noqa: PLC0415

    cases = _read_cases(namespace)
    seeds = range(namespace.first, namespace.first + namespace.seeds)
    results: list[CaseResult] = []
    arms = _arms()
    with termination_interrupts(), Progress(len(cases) * len(seeds) * len(arms), "runs") as progress:
        for case in cases:
            work = measure(
                case, arms, seeds, namespace.requests or case.load.requests, _start, progress.advance
            )
            results.append(run_virtually(work))
    if namespace.json is not None:
        namespace.json.write_text(json.dumps(document(results), indent=1) + "\n", encoding="utf-8")
    print("\n".join(table(results)), end="\n\n")
    for failure in [failure for result in results for failure in result.failures]:
        print(failure)
    passed, line = verdict(results)
    print(line)
    return 0 if passed else 1


def table(results: Sequence[CaseResult]) -> list[str]:
    """One line per case: median and 95th percentile of each mode in milliseconds."""
    arms = results[0].arms
    width = max(len(result.name) for result in results)
    lines = [
        "time to the first token in ms, median / 95th percentile",
        f"{'case':<{width}}" + "".join(f"{arm:>18}" for arm in arms) + f"{'pulled':>8}{'auto/better':>13}",
    ]
    for result in results:
        cells = [
            f"{result.quantile(arm, 0.5) * 1e3:.0f} / {result.quantile(arm, 0.95) * 1e3:.0f}" for arm in arms
        ]
        lines.append(
            f"{result.name:<{width}}"
            + "".join(f"{cell:>18}" for cell in cells)
            + f"{result.pulled_share:>8.0%}{result.ratio:>13.3f}"
        )
    return lines


def verdict(results: Sequence[CaseResult]) -> tuple[bool, str]:
    """Whether auto is good enough everywhere, and the line that says so."""
    from kvferry.bench.pool import RATIO_MAX  # noqa: PLC0415

    worst = max(results, key=lambda result: result.ratio)
    passed = worst.ratio <= RATIO_MAX and not any(result.failures for result in results)
    wins = [result for result in results if _pull_gain(result) > 0]
    pulls = max(wins, key=_pull_gain, default=None)
    word = "PASSED" if passed else "FAILED"
    auto = (
        f"auto's p95 is at most {worst.ratio:.3f} times the better mode's ({worst.name}; {RATIO_MAX} allowed)"
    )
    pull = "wins nowhere" if pulls is None else f"wins most in {pulls.name!r}, by {_pull_gain(pulls):.0%}"
    return passed, f"{word}: {len(results)} cases, {auto}; pull {pull}"


def document(results: Sequence[CaseResult]) -> object:
    """Everything for a file."""
    return [
        {
            "case": result.name,
            "ratio": result.ratio,
            "better": result.better,
            "pulled_share": result.pulled_share,
            "runs": [
                {
                    "arm": one.arm,
                    "seed": one.seed,
                    "pulled": one.pulled,
                    "failures": one.failures,
                    "ttft_ms": [round(seconds * 1e3, 3) for seconds in one.ttft_seconds],
                }
                for one in result.runs
            ],
        }
        for result in results
    ]


def _pull_gain(result: CaseResult) -> float:
    """By how much the 95th percentile of pull is below that of push."""
    return 1 - result.quantile("pull", 0.95) / result.quantile("push", 0.95)


def _arms() -> tuple[Arm, ...]:
    from kvferry.bench.pool import AUTO, Arm  # noqa: PLC0415

    # The policy that goes with auto, so that the modes are compared; and the one that goes with the others.
    return (
        Arm("push", "push", "least_wait"),
        Arm("pull", "pull", "least_wait"),
        Arm("push, least_load", "push", "least_load"),
        Arm("pull, least_load", "pull", "least_load"),
        Arm(AUTO, "auto", "least_wait"),
    )


def _read_cases(namespace: argparse.Namespace) -> list[PoolCase]:
    from kvferry.bench.pool_cases import CASES  # noqa: PLC0415

    for option, value, most in (
        ("--seeds", namespace.seeds, SEEDS_MAX),
        ("--requests", namespace.requests, REQUESTS_MAX),
    ):
        if value is not None and not 1 <= value <= most:
            raise UsageError(f"{option} must be from 1 to {most}, not {value}")
    if namespace.json is not None and not namespace.json.parent.is_dir():
        raise UsageError(f"--json: there is no directory {namespace.json.parent}; make it first")
    by_name = {case.name: case for case in CASES}
    for name in namespace.cases or ():
        if name not in by_name:
            raise UsageError(f"--cases: {name!r} is unknown; choose of {', '.join(map(repr, by_name))}")
    return [by_name[name] for name in namespace.cases or by_name]


class _Running:
    """The real router, in this process."""

    def __init__(self, server: RouterServer) -> None:
        self._server = server

    @property
    def url(self) -> str:
        """Where it answers."""
        return self._server.url

    def transfers(self) -> Mapping[str, int]:
        """How many prompts it has dispatched by each mode."""
        counts: dict[str, int] = {}
        for metric in self._server.metrics.transfers.collect():
            for sample in metric.samples:
                if sample.name.endswith("_total"):
                    mode = sample.labels["mode"]
                    counts[mode] = counts.get(mode, 0) + int(sample.value)
        return counts


@asynccontextmanager
async def _start(urls: PoolUrls, arm: Arm) -> AsyncIterator[_Running]:
    from kvferry.router.ground.settings import RouterSettings  # noqa: PLC0415
    from kvferry.router.server import RouterServer  # noqa: PLC0415

    settings = RouterSettings(
        prefill=urls.prefill,
        decode=urls.decode,
        transfer_mode=arm.mode,
        decode_policy=arm.policy,
        # Every request stands alone here, and nobody dies.
        affinity="off",
        health_interval_seconds=3600.0,
    )
    server = RouterServer(settings)
    server.pool.clock = asyncio.get_running_loop().time
    async with server:
        for worker in server.pool.workers():
            await server.monitor.check(worker)
        yield _Running(server)
