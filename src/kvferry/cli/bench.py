"""Measure one part of kvferry.

hooks    what kvferry's hooks cost an engine's main thread, per step and per request; needs vLLM, no GPU
serve    load one OpenAI-compatible endpoint and report TTFT, TPOT and goodput; needs no vLLM
layout   descriptors, planning time and memory of copies between two cache layouts; needs numpy
compare  kvferry against vLLM's own connectors on emulated engines, with a report; needs vLLM, no GPU
dispatch what a router saves decode engines by asking them late; needs no vLLM
router   the router's requests/s, CPU and added TTFT beside another router; needs no vLLM
handover one hand-over from agent to agent, beside raw NIXL; needs NIXL and numpy, no vLLM, no GPU
pool     push, pull and auto in front of decode engines that differ, modelled; needs no vLLM, no GPU
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry.cli import (
    bench_compare,
    bench_dispatch,
    bench_handover,
    bench_layout,
    bench_pool,
    bench_router,
    bench_serve,
)
from kvferry.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvferry.connector.hook_costs import Figure, Options, Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One sub-command per measurement."""
    commands = parser.add_subparsers(
        dest="measurement", required=True, metavar="WHAT", help="what to measure"
    )
    hooks = commands.add_parser("hooks", help="what the hooks cost an engine's main thread")
    hooks.set_defaults(measure=_hooks)
    hooks.add_argument(
        "--requests",
        type=int,
        default=24,
        metavar="N",
        help="requests that finish together (default: %(default)s)",
    )
    hooks.add_argument(
        "--blocks", type=int, default=128, metavar="N", help="blocks per request (default: %(default)s)"
    )
    hooks.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=[64, 1024, 4096],
        metavar="N",
        help="blocks of requests that come alone (default: 64 1024 4096)",
    )
    hooks.add_argument(
        "--repeats",
        type=int,
        default=30,
        metavar="N",
        help="at most, fewer where time is short (default: %(default)s)",
    )
    hooks.add_argument("--json", type=Path, metavar="FILE", help="write all figures there too")
    for name, module in (
        ("serve", bench_serve),
        ("compare", bench_compare),
        ("handover", bench_handover),
        ("layout", bench_layout),
        ("pool", bench_pool),
        ("router", bench_router),
        ("dispatch", bench_dispatch),
    ):
        parser_of_one = commands.add_parser(name, help=module.SUMMARY, description=module.__doc__)
        parser_of_one.set_defaults(measure=module.run)
        module.add_arguments(parser_of_one)


def run(namespace: argparse.Namespace) -> int:
    """Run the measurement that was named."""
    return int(namespace.measure(namespace))


def _hooks(namespace: argparse.Namespace) -> int:
    least = {"requests": 2, "blocks": 4, "repeats": 1}
    given = [(name, getattr(namespace, name), bound) for name, bound in least.items()]
    for name, value, bound in (*given, *(("sizes", size, 4) for size in namespace.sizes)):
        if value < bound:
            raise UsageError(f"--{name} must be at least {bound}, not {value}")
    if namespace.json is not None and not namespace.json.parent.is_dir():
        raise UsageError(f"--json: there is no directory {namespace.json.parent}; make it first")
    if importlib.util.find_spec("vllm") is None:
        raise UsageError("the hooks are vLLM's and vLLM is not installed here; run it where the engines run")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from kvferry.connector.hook_costs import Options, measure  # noqa: PLC0415 - needs vLLM

    options = Options(namespace.requests, namespace.blocks, namespace.repeats, tuple(namespace.sizes))
    report = measure(options, progress=_say)
    if namespace.json is not None:
        namespace.json.write_text(json.dumps({"options": asdict(options), **asdict(report)}, indent=2) + "\n")
    for title, figures in (
        ("per hook, all calls", report.hooks),
        ("per hook, in an idle step", report.idle_hooks),
        ("per step and request", report.figures),
        ("besides, per turn, KV both ways", report.turns),
    ):
        if not figures:
            continue
        print("\n".join(_table(title, figures)), end="\n\n")
    if report.repeats < options.repeats:
        print(f"time was short: {report.repeats} of {options.repeats} repeats")
    for problem in report.problems:
        print(problem)
    print(_verdict(report, options))
    return 1 if report.problems else 0


def _table(title: str, figures: Sequence[Figure]) -> list[str]:
    width = max(len(title) + 4, *(len(figure.name) for figure in figures))
    head = f"{'side':<9}{title + ', us':<{width}}{'median':>9}{'p95':>9}{'cpu':>9}{'cpu p95':>9}{'times':>8}"
    return [head] + [
        f"{one.side:<9}{one.name:<{width}}{one.median:>9.1f}{one.p95:>9.1f}"
        f"{one.cpu_median:>9.1f}{one.cpu_p95:>9.1f}{one.count:>8}"
        for one in figures
    ]


def _verdict(report: Report, options: Options) -> str:
    medians = {(figure.side, figure.name): figure.median for figure in report.figures}
    many = options.requests
    parts = [
        f"{side} {medians[side, 'step, idle']:.0f} us per idle step, "
        f"{medians[side, 'request, whole life, 1 at once']:.0f} us per request, "
        f"{report.pull_ratios[side]:.2f} times that when it is pulled, "
        f"{medians[side, f'request, whole life, {many} at once']:.0f} us each with {many} at once"
        for side in ("prefill", "decode")
    ]
    return f"hooks {'OVER THEIR LIMITS' if report.problems else 'within limits'}: {'; '.join(parts)}"


def _say(progress: str) -> None:
    print(progress, file=sys.stderr, flush=True)
