"""`kvferry bench dispatch`: decode legs sent late beside decode legs sent at once, under a prefill queue.

Both routers get the same load, one after the other, before the same engines, which this command starts
itself: one prefill engine that serves a prompt at a time and four decode engines. None computes anything.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from kvferry.bench.late import Load, Measured, measure, problems, table
from kvferry.cli.fleet import Fleet
from kvferry.cli.ports import free_ports
from kvferry.cli.processes import ServerSpec
from kvferry.errors import UsageError

SUMMARY = "what --decode-dispatch late saves decode engines, and what it costs clients"
KINDS = ("eager", "late")
_DECODE_ENGINES = 4
_READY_SECONDS = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to send."""
    add = parser.add_argument
    add("--requests", type=int, default=120, metavar="N", help="of each kind (default: %(default)s)")
    add("--request-rate", type=float, default=4.2, metavar="N", help="per second (default: %(default)g)")
    add("--tokens", type=int, nargs=2, default=[1000, 16_000], metavar="N", help="default: 1000 16000")
    add("--noise", type=float, default=0.1, metavar="S", help="share of a prefill's time (default: 0.1)")
    add("--seed", type=int, default=1, metavar="N", help="default: %(default)s")
    add("--json", type=Path, metavar="FILE", help="write all figures there too")


def run(namespace: argparse.Namespace) -> int:
    """Measure, print the table; 1 if a target is missed."""
    least, most = namespace.tokens
    if namespace.requests < 1 or not 1 <= least <= most:
        raise UsageError("--requests must be at least 1, and --tokens the shortest and the longest prompt")
    load = Load(
        requests=namespace.requests,
        requests_per_second=namespace.request_rate,
        tokens=(least, most),
        seed=namespace.seed,
    )
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as logs, Fleet(report=_told) as fleet:
        routers, decode = _start(fleet, Path(logs), namespace.noise, namespace.seed)
        measured = {kind: asyncio.run(measure(url, decode, load)) for kind, url in routers.items()}
    print("\n".join(table(measured)), end="\n\n")
    if namespace.json is not None:
        _write(namespace.json, measured)
    missed = problems(measured["eager"], measured["late"])
    print("\n".join(missed), end="\n" if missed else "")
    print(f"late dispatch {'MISSES ITS TARGETS' if missed else 'meets its targets'} beside eager")
    return 1 if missed else 0


def _start(fleet: Fleet, logs: Path, noise: float, seed: int) -> tuple[dict[str, str], str]:
    """Start engines, then routers: the routers' URLs by kind, and a decode engine's."""
    prefill, *ports = free_ports(1 + _DECODE_ENGINES + len(KINDS))
    decode, own = ports[:_DECODE_ENGINES], ports[_DECODE_ENGINES:]
    engines = [sys.executable, "-m", "kvferry.bench.queued_engines", "--prefill", str(prefill), "--decode"]
    engines += [*map(str, decode), "--noise", str(noise), "--seed", str(seed)]
    fleet.start([_spec("engines", engines, prefill, logs)])
    fleet.wait_ready(_READY_SECONDS)
    command = [sys.executable, "-m", "kvferry.cli.main", "router", "--prefill", f"http://127.0.0.1:{prefill}"]
    for port in decode:
        command += ["--decode", f"http://127.0.0.1:{port}"]
    # All prompts begin alike, so they would be taken for turns of one conversation.
    command += ["--affinity", "off"]
    specs = {
        kind: _spec(kind, [*command, "--port", str(port), "--decode-dispatch", kind], port, logs)
        for kind, port in zip(KINDS, own, strict=True)
    }
    fleet.start(specs.values())
    fleet.wait_ready(_READY_SECONDS)
    return {kind: spec.url for kind, spec in specs.items()}, f"http://127.0.0.1:{decode[0]}"


def _spec(name: str, command: list[str], port: int, logs: Path) -> ServerSpec:
    return ServerSpec(
        name=name, command=tuple(command), host="127.0.0.1", port=port, log=logs / f"{name}.log"
    )


def _write(file: Path, measured: dict[str, Measured]) -> None:
    file.write_text(json.dumps({kind: asdict(each) for kind, each in measured.items()}, indent=2) + "\n")


def _told(line: str) -> None:
    print(line, file=sys.stderr)
