"""Move KV between two processes' memory as two engines would, and verify every byte.

The device fills each chunk late; a write that leaves before the device's event carries stale bytes, and
the self-test fails. With `--device cuda` the memory is a GPU's, the event a CUDA event; where there is no
GPU that is skipped. Needs torch and NIXL, not vLLM.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from typing import TYPE_CHECKING

from kvferry.errors import UsageError

if TYPE_CHECKING:
    from kvferry.connector.selftest import Options, Outcome


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The device, the amount, and the oracle's own test."""
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="whose memory; auto takes cuda where there is a GPU (default: %(default)s)",
    )
    parser.add_argument(
        "--blocks", type=int, default=64, metavar="N", help="blocks per move (default: %(default)s)"
    )
    parser.add_argument(
        "--chunks", type=int, default=4, metavar="N", help="chunks per move (default: %(default)s)"
    )
    parser.add_argument(
        "--delay-ms",
        type=float,
        default=200.0,
        metavar="MS",
        help="how late the device fills each chunk (default: %(default)s)",
    )
    parser.add_argument(
        "--backend",
        action="append",
        metavar="NAME",
        help="a NIXL backend, e.g. UCX or LIBFABRIC; may be repeated (default: UCX)",
    )
    parser.add_argument(
        "--seconds-max", type=float, default=60.0, metavar="S", help="for each move (default: %(default)s)"
    )
    parser.add_argument(
        "--ignore-events",
        action="store_true",
        help="publish chunks without waiting for the device: the self-test must then fail",
    )


def run(namespace: argparse.Namespace) -> int:
    """Run the self-test and print its table."""
    _check(namespace)
    from kvferry.connector.selftest import Options, resolve_device, run_moves  # noqa: PLC0415 - needs torch

    device, obstacle = resolve_device(namespace.device)
    if obstacle:
        print(f"selftest skipped: --device {device} needs a GPU and {obstacle}")
        return 0
    options = Options(
        device=device,
        blocks=namespace.blocks,
        chunks=namespace.chunks,
        delay_seconds=namespace.delay_ms / 1e3,
        backends=tuple(namespace.backend or ("UCX",)),
        seconds_max=namespace.seconds_max,
        ignore_events=namespace.ignore_events,
    )
    print(f"{'from':<7}{'to':<7}{'first':<14}{'MiB':>7}{'late chunks':>13}{'seconds':>9}  result", flush=True)
    outcomes = []
    for outcome in run_moves(options):
        outcomes.append(outcome)
        print(_row(outcome, options), flush=True)
    failed = [outcome for outcome in outcomes if outcome.problems]
    print(_verdict(outcomes, len(failed), options))
    return 1 if failed else 0


def _check(namespace: argparse.Namespace) -> None:
    for name in ("blocks", "chunks"):
        if getattr(namespace, name) < 1:
            raise UsageError(f"--{name} must be at least 1, not {getattr(namespace, name)}")
    if namespace.chunks > namespace.blocks:
        raise UsageError(f"--chunks must be at most --blocks ({namespace.blocks}), not {namespace.chunks}")
    for name in ("delay_ms", "seconds_max"):
        if not getattr(namespace, name) > 0:
            option = name.replace("_", "-")
            raise UsageError(f"--{option} must be greater than 0, not {getattr(namespace, name):g}")
    if importlib.util.find_spec("torch") is None:
        raise UsageError(
            f"the self-test needs torch, which {sys.executable} does not have; run it where vLLM is installed"
        )


def _row(outcome: Outcome, options: Options) -> str:
    move = outcome.move
    first = "registration" if move.registered_first else "KV"
    late = f"{outcome.late_chunks} of {options.chunks}"
    result = "; ".join(outcome.problems) or "every byte right"
    return (
        f"{move.source_order:<7}{move.target_order:<7}{first:<14}{outcome.bytes / 2**20:>7.2f}{late:>13}"
        f"{outcome.seconds:>9.2f}  {result}"
    )


def _verdict(outcomes: list[Outcome], failed: int, options: Options) -> str:
    moved = sum(outcome.bytes for outcome in outcomes) / 2**20
    if failed:
        return f"selftest FAILED on {options.device}: {failed} of {len(outcomes)} moves are wrong"
    amount = f"{moved:.1f} MiB in {len(outcomes)} moves"
    return f"selftest passed on {options.device}: {amount}, 0 bytes wrong, 0 stray"
