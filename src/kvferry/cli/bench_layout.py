"""`kvferry bench layout`: what it takes to copy a request's KV between two layouts, with limits."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry.errors import UsageError

if TYPE_CHECKING:
    from kvferry.cli.layout_costs import Figure, Options

SUMMARY = "descriptors and time of copies between two cache layouts; needs numpy"
EXPAND_MS_MAX = 8.0
"""For `STATED` scattered blocks and layers, layers outermost on both sides."""
STATED = (1024, 64)
TEMPORARIES_MAX = 3.0
"""Times the memory of the result, where nothing can be merged."""
SIZES = (("blocks", 1024), ("layers", 64), ("heads", 8), ("block-tokens", 16), ("repeats", 15))
IN_ORDER, SCATTERED = "in order", "scattered"
BLOCKS_OUTERMOST, LAYERS_OUTERMOST = "blocks outermost, equal", "layers outermost, equal"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The request's and the model's sizes."""
    for name, default in SIZES:
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there too")


def run(namespace: argparse.Namespace) -> int:
    """Measure, print the table; 1 if a limit does not hold."""
    for name, _ in SIZES:
        value = getattr(namespace, name.replace("-", "_"))
        if value < 1:
            raise UsageError(f"--{name} must be at least 1, not {value}")
    if namespace.json is not None and not namespace.json.parent.is_dir():
        raise UsageError(f"--json: there is no directory {namespace.json.parent}; make it first")
    from kvferry.cli.layout_costs import Options, measure  # noqa: PLC0415 - needs numpy

    options = Options(
        namespace.blocks, namespace.layers, namespace.heads, namespace.block_tokens, namespace.repeats
    )
    figures = list(measure(options))
    if namespace.json is not None:
        report = {"options": asdict(options), "figures": [asdict(figure) for figure in figures]}
        namespace.json.write_text(json.dumps(report, indent=2) + "\n")
    print("\n".join(table(figures)), end="\n\n")
    problems = over_limits(figures, options)
    for problem in problems:
        print(problem)
    print(f"layout {'OVER ITS LIMITS' if problems else 'within limits'}: {_verdict(figures, options)}")
    return 1 if problems else 0


def table(figures: Sequence[Figure]) -> list[str]:
    """The figures as lines."""
    width = max(len(figure.title) for figure in figures)
    head = f"{'layouts':<{width}}  {'blocks':<9}{'descriptors':>12}{'plan, ms':>10}{'expand, ms':>12}"
    return [f"{head}{'temporaries':>13}"] + [
        f"{one.title:<{width}}  {one.blocks:<9}{one.descriptors:>12,}{one.plan_ms:>10.2f}"
        f"{one.expand_ms:>12.2f}{_times(one):>13}"
        for one in figures
    ]


def _times(figure: Figure) -> str:
    return f"{figure.temporaries:.1f} x" if figure.blocks == SCATTERED else "-"


def over_limits(figures: Sequence[Figure], options: Options) -> list[str]:
    """Which limits do not hold, one line each."""
    problems = []
    found = {(figure.title, figure.blocks): figure for figure in figures}
    for title, most in ((BLOCKS_OUTERMOST, 1), (LAYERS_OUTERMOST, options.layers)):
        if (count := found[title, IN_ORDER].descriptors) > most:
            problems.append(f"{title}, in order: {count} descriptors, at most {most}")
    took = found[LAYERS_OUTERMOST, SCATTERED].expand_ms
    if (options.blocks, options.layers) == STATED and took > EXPAND_MS_MAX:
        problems.append(f"{LAYERS_OUTERMOST}, scattered: {took:.1f} ms, at most {EXPAND_MS_MAX:g}")
    for one in figures:
        # Where blocks are in order the result is next to nothing, and so is what it takes.
        if one.blocks == SCATTERED and one.temporaries > TEMPORARIES_MAX:
            times = f"{one.temporaries:.1f} times the result, at most {TEMPORARIES_MAX:g}"
            problems.append(f"{one.title}, scattered: temporaries of {times}")
    return problems


def _verdict(figures: Sequence[Figure], options: Options) -> str:
    (one,) = (one for one in figures if (one.title, one.blocks) == (LAYERS_OUTERMOST, SCATTERED))
    return (
        f"{options.blocks:,} blocks x {options.layers} layers scattered, {one.descriptors:,} descriptors "
        f"in {one.expand_ms:.1f} ms, temporaries {one.temporaries:.1f} times the result"
    )
