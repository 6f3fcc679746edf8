"""`kvferry bench handover`: from agent to agent, without an engine, beside NIXL driven by hand.

Two processes with the agents, protocol and layout code of two engines, over NIXL and this machine's memory.
Each hand-over is timed from the moment when the KV is marked ready to the one when the consumer's host has
learnt that it is there, and compared with one post of the same blocks by raw NIXL, measured in turn with it.
Every page that arrives is looked at: the command fails when one is wrong, never because something took long.
The tables fit into 100 columns; --csv has every column, --output every sample besides.

  kvferry bench handover --quick
  kvferry bench handover --blocks 1024 --fragmentation scattered --concurrency 1,4 --output handover.json
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import io
import json
import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvferry
from kvferry.cli.bench_serve import read_object
from kvferry.cli.fleet import termination_interrupts
from kvferry.cli.progress import Progress
from kvferry.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvferry.microbench.figures import CellFigures, Figures, StepFigures
    from kvferry.microbench.handover import Measured, Options

SUMMARY = "one hand-over from agent to agent, beside raw NIXL; needs NIXL and numpy, no vLLM, no GPU"
MINUTES_DEFAULT = 10.0
_FULL = {
    "blocks": "16,64,256,1024",
    "pages": "2048,8192",
    "fragmentation": "contiguous,scattered,churned",
    "layouts": "LBHNC,BLHNC",
    "concurrency": "1,4,16",
    "repeats": 5,
}
_QUICK = _FULL | {
    "blocks": "64,1024",
    "pages": "2048",
    "fragmentation": "contiguous,scattered",
    "concurrency": "1,4",
    "repeats": 3,
}
_VERSIONS = ("nixl", "numpy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is handed over, how often, and where the figures go."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--output", type=Path, metavar="FILE", help="write all figures and samples there, as JSON")
    add("--csv", type=Path, metavar="FILE", help="write every column of the table there")
    add("--quick", action="store_true", help="fewer cells and repeats, about half a minute")
    add("--blocks", metavar="N,...", help=f"blocks per transfer (default: {_FULL['blocks']})")
    add("--pages", metavar="BYTES,...", help=f"per block and layer (default: {_FULL['pages']})")
    add("--layers", type=int, default=64, metavar="N", help="default: %(default)s")
    add("--fragmentation", metavar="KINDS", help=f"default: {_FULL['fragmentation']}")
    add(
        "--layouts",
        metavar="ORDERS",
        help="LBHNC has each layer apart, BLHNC a block of all layers in one piece "
        f"(default: {_FULL['layouts']})",
    )
    add("--concurrency", metavar="N,...", help=f"transfers at once (default: {_FULL['concurrency']})")
    add("--repeats", type=int, metavar="N", help=f"of everything, interleaved (default: {_FULL['repeats']})")
    add(
        "--outstanding",
        type=int,
        default=1000,
        metavar="N",
        help="transfers that only wait while the loop's steps are timed; 0: none (default: %(default)s)",
    )
    add("--cache-mib", type=int, default=1024, metavar="MIB", help="on each side (default: %(default)s)")
    add(
        "--minutes",
        type=float,
        default=MINUTES_DEFAULT,
        metavar="M",
        help="after so long no further repeat begins (default: %(default)s)",
    )
    add("--seed", type=int, default=0, metavar="N", help="of block tables (default: %(default)s)")
    add(
        "--extra-config",
        default="{}",
        metavar="JSON",
        help="kv_connector_extra_config of both sides, such as '{\"slice_bytes\": 8388608}'",
    )


def run(namespace: argparse.Namespace) -> int:
    """Measure and show; 1 when a page was wrong or a transfer failed."""
    options = read_options(namespace)
    for option, file in (("--output", namespace.output), ("--csv", namespace.csv)):
        if file is not None and not file.parent.is_dir():
            raise UsageError(f"{option}: there is no directory {file.parent}; make it first")
    from kvferry.microbench.figures import figures_of  # noqa: PLC0415 - needs numpy
    from kvferry.microbench.handover import hand_overs, measure  # noqa: PLC0415 - needs NIXL

    if options.grid.left_out:
        print(f"{options.grid.left_out} cells are left out: they do not fit into --cache-mib")
    with termination_interrupts(), Progress(hand_overs(options), "hand-overs") as progress:
        measured = measure(options, progress)
    figures = figures_of(measured)
    if namespace.output is not None:
        namespace.output.write_text(json.dumps(as_json(options, measured, figures), indent=1) + "\n")
    if namespace.csv is not None:
        namespace.csv.write_text(as_csv(figures), encoding="utf-8")
    print("\n".join(lines(options, figures)))
    return 1 if figures.problems else 0


def read_options(namespace: argparse.Namespace) -> Options:
    """Validate the arguments.

    Raises:
        UsageError: names the argument and what to do.
    """
    from kvferry.microbench.cells import FRAGMENTATIONS, LAYOUTS, make_grid  # noqa: PLC0415
    from kvferry.microbench.handover import Options  # noqa: PLC0415

    defaults = _QUICK if namespace.quick else _FULL

    def given(name: str) -> Any:
        value = getattr(namespace, name)
        return defaults[name] if value is None else value

    for name, least in (("repeats", 1), ("cache_mib", 1), ("outstanding", 0)):
        value = given(name) if name in defaults else getattr(namespace, name)
        if value < least:
            raise UsageError(f"--{name.replace('_', '-')} must be at least {least}, not {value}")
    if not namespace.minutes > 0:
        raise UsageError(f"--minutes must be above 0, not {namespace.minutes:g}")
    grid = make_grid(
        blocks=_numbers("blocks", given("blocks")),
        pages=_numbers("pages", given("pages")),
        layers=namespace.layers,
        layouts=_names("layouts", given("layouts"), LAYOUTS),
        fragmentations=_names("fragmentation", given("fragmentation"), FRAGMENTATIONS),
        concurrencies=_numbers("concurrency", given("concurrency")),
        cache_bytes=namespace.cache_mib << 20,
    )
    return Options(
        grid=grid,
        cache_bytes=namespace.cache_mib << 20,
        repeats=given("repeats"),
        seconds=namespace.minutes * 60,
        outstanding=namespace.outstanding,
        seed=namespace.seed,
        extra=read_object("--extra-config", namespace.extra_config),
    )


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise UsageError(f"--{option} must be whole numbers, such as 16,1024, not {text!r}") from None


def _names(option: str, text: str, known: Sequence[Any]) -> tuple[Any, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in known:
            raise UsageError(f"--{option} must be some of {', '.join(known)}, not {name!r}")
    return names


# --- what is said --------------------------------------------------------------------------------------


def as_json(options: Options, measured: Measured, figures: Figures) -> dict[str, Any]:
    """Options, versions, figures and every sample, for a file."""
    return {
        "options": {name: value for name, value in asdict(options).items() if name != "grid"},
        "versions": versions(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "figures": asdict(figures),
        "samples": [
            {"cell": asdict(cell), "samples": [asdict(one) for many in kinds.values() for one in many]}
            for cell, kinds in measured.samples.items()
        ],
    }


def versions() -> dict[str, str]:
    """Of what is measured."""
    return {"kvferry": kvferry.__version__} | {name: importlib.metadata.version(name) for name in _VERSIONS}


# Tables fit into 100 columns of a terminal; what does not is in the files.
_HEAD = (
    f"{'CPU ms per GiB':>100}",
    f"{'layout':<6}{'page':>6} {'blocks are':<11}{'blocks':>6}{'at once':>8}{'ms':>9}{'raw ms':>9}"
    f"{'ratio':>7}{'quarters':>12}{'GiB/s':>7}{'P':>6}{'D':>6}{'raw':>6}",
)
_STEP_HEAD = (
    f"{'steps of the loop':<18}{'waiting':>8}{'steps':>8}{'ms':>8}{'p99':>8}{'longest':>9}"
    f"{'CPU ms':>8}{'longest':>9}{'of a core':>11}"
)


def lines(options: Options, figures: Figures) -> list[str]:
    """Tables, targets, what was wrong, and the last line."""
    found = [*_HEAD, *map(_row, figures.cells), ""]
    found.append(f"copy in memory by one thread: {figures.copy_gib_per_second:.1f} GiB/s")
    if figures.repeats < options.repeats:
        found.append(f"time was short: {figures.repeats} of {options.repeats} repeats")
    found += ["", _STEP_HEAD, *map(_step_row, figures.steps), ""] if figures.steps else []
    verdicts = {True: "met", False: "missed", None: "-"}
    found += [f"{verdicts[one.met]:<8}{one.name}, {one.wanted}: {one.figure}" for one in figures.targets]
    found += [f"WRONG: {problem}" for problem in figures.problems]
    return [*found, verdict(figures)]


def verdict(figures: Figures) -> str:
    """The last line."""
    if figures.problems:
        return f"handover FAILED: {len(figures.problems)} problems, {figures.wrong_pages} pages wrong"
    pages = sum(2 * one.cell.pages for one in figures.cells) * figures.repeats
    parts = [f"{one.name} {one.figure}" for one in figures.targets if one.met is not None]
    return f"handover: {'; '.join(parts)}; {pages:,} pages looked at, 0 wrong"


def _row(one: CellFigures) -> str:
    cell = one.cell
    quarters = f"{one.ratio.low:.2f}-{one.ratio.high:.2f}"
    return (
        f"{cell.shape.order:<6}{cell.shape.page_bytes:>6} {cell.fragmentation:<11}{cell.blocks:>6}"
        f"{cell.concurrency:>8}{one.ferry_seconds.median * 1e3:>9.2f}"
        f"{one.raw_seconds.median * 1e3:>9.2f}{one.ratio.median:>7.2f}{quarters:>12}"
        f"{one.gib_per_second:>7.2f}{one.producer_cpu_per_gib * 1e3:>6.0f}"
        f"{one.consumer_cpu_per_gib * 1e3:>6.0f}{one.raw_cpu_per_gib * 1e3:>6.0f}"
    )


def _step_row(one: StepFigures) -> str:
    return (
        f"{one.side:<18}{one.transfers:>8}{one.steps:>8}{one.median * 1e3:>8.3f}{one.p99 * 1e3:>8.3f}"
        f"{one.longest * 1e3:>9.2f}{one.cpu_median * 1e3:>8.3f}{one.cpu_longest * 1e3:>9.2f}"
        f"{one.share_of_core:>11.1%}"
    )


def as_csv(figures: Figures) -> str:
    """Every column of every cell; times in milliseconds, those of the hosts in microseconds."""
    rows = [_full_row(one) for one in figures.cells]
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def _full_row(one: CellFigures) -> dict[str, Any]:
    cell = one.cell
    return {
        "layout": cell.shape.order,
        "page_bytes": cell.shape.page_bytes,
        "layers": cell.shape.layers,
        "fragmentation": cell.fragmentation,
        "blocks": cell.blocks,
        "concurrency": cell.concurrency,
        "bytes": cell.bytes,
        "ms": round(one.ferry_seconds.median * 1e3, 4),
        "raw_ms": round(one.raw_seconds.median * 1e3, 4),
        "transfer_ms": round(one.transfer_seconds * 1e3, 4),
        "ratio": round(one.ratio.median, 4),
        "ratio_low": round(one.ratio.low, 4),
        "ratio_high": round(one.ratio.high, 4),
        "gib_per_second": round(one.gib_per_second, 4),
        "raw_gib_per_second": round(one.raw_gib_per_second, 4),
        "share_of_copy": round(one.copy_share, 4),
        "producer_cpu_ms_per_gib": round(one.producer_cpu_per_gib * 1e3, 3),
        "consumer_cpu_ms_per_gib": round(one.consumer_cpu_per_gib * 1e3, 3),
        "raw_cpu_ms_per_gib": round(one.raw_cpu_per_gib * 1e3, 3),
        "cpu_ms_per_transfer": round(one.cpu_per_transfer * 1e3, 4),
        "producer_host_us_per_transfer": round(one.producer_host_per_transfer * 1e6, 2),
        "consumer_host_us_per_transfer": round(one.consumer_host_per_transfer * 1e6, 2),
        "descriptors": one.ferry_descriptors,
        "raw_descriptors": one.raw_descriptors,
    }
