"""`kvferry bench router`: the router beside another one, in one run, each on one core.

Both get the same loads, one after the other, before the same engines, which this command starts itself: they
answer at once and compute nothing. Engines and clients run on the other cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from kvferry.bench.routing import Contender, cost_of, measure, problems, table
from kvferry.bench.routing_engine import new_loop
from kvferry.cli.fleet import Fleet
from kvferry.cli.ports import free_ports
from kvferry.cli.processes import ServerProcess, ServerSpec
from kvferry.errors import UsageError
from kvferry.router import code_state

SUMMARY = "our router's requests/s, CPU, added TTFT and memory beside another router's"
OURS, PEER = "kvferry", "vllm-router"
_READY_SECONDS = 180.0
_TICKS = os.sysconf("SC_CLK_TCK")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to compare with, and for how long."""
    add = parser.add_argument
    add("--peer", choices=(PEER, "none"), default=PEER, help="the other router (default: %(default)s)")
    add("--peer-command", metavar="FILE", help="its program (default: beside this Python, or in PATH)")
    add("--rounds", type=int, default=3, metavar="N", help="default: %(default)s")
    add("--seconds", type=float, default=5.0, metavar="S", help="of each load (default: %(default)g)")
    add("--router-core", type=int, default=0, metavar="N", help="default: %(default)s")
    add("--json", type=Path, metavar="FILE", help="write all figures there too")


def run(namespace: argparse.Namespace) -> int:
    """Measure, print the table; 1 if a target is missed."""
    if namespace.rounds < 1 or not namespace.seconds > 0:
        raise UsageError("--rounds must be at least 1 and --seconds more than 0")
    peer = None if namespace.peer == "none" else peer_program(namespace.peer_command)
    others = os.sched_getaffinity(0) - {namespace.router_core}
    if not others or namespace.router_core not in os.sched_getaffinity(0):
        raise UsageError("--router-core: needs that core for the router and at least one more for the rest")
    if shutil.which("taskset") is None:
        raise UsageError("this measurement needs `taskset` (util-linux) to keep each router on one core")
    before = os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as logs, Fleet(report=_told) as fleet:
        names = _start(fleet, namespace.router_core, others, peer, Path(logs))
        os.sched_setaffinity(0, others)
        try:
            with asyncio.Runner(loop_factory=new_loop) as runner:
                direct, *routers = [_contender(fleet[name], name) for name in names]
                taken = runner.run(measure(direct, routers, namespace.rounds, namespace.seconds))
        finally:
            os.sched_setaffinity(0, before)
    costs = {each.name: cost_of(taken[each.name], taken[direct.name]) for each in routers}
    print(f"the router's hot path is {code_state()}", end="\n\n")
    print("\n".join(table(costs)), end="\n\n")
    if namespace.json is not None:
        namespace.json.write_text(json.dumps({name: asdict(cost) for name, cost in costs.items()}, indent=2))
    if peer is None:
        return 0
    missed = problems(costs[OURS], costs[PEER])
    print("\n".join(missed), end="\n" if missed else "")
    print(f"router {'MISSES ITS TARGETS' if missed else 'meets its targets'} beside {PEER}")
    return 1 if missed else 0


def _told(line: str) -> None:
    print(line, file=sys.stderr)


def peer_program(named: str | None) -> str:
    """Where the other router is.

    Raises:
        UsageError: nowhere.
    """
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    program = shutil.which(named or PEER, path=beside)
    if program is None:
        raise UsageError(
            f"--peer-command: there is no {named or PEER}; `make setup` installs it, and"
            " anywhere else `pip install vllm-router==0.1.17` into an environment whose bin/vllm-router is"
            " named here; or give --peer none"
        )
    return program


def _start(fleet: Fleet, core: int, others: set[int], peer: str | None, logs: Path) -> list[str]:
    """Start engines, then routers; the names of the decode engine and of the routers."""
    prefill, decode, own, its, metrics = free_ports(5)
    rest = ("taskset", "-c", ",".join(map(str, sorted(others))))
    alone = ("taskset", "-c", str(core))
    engine = (*rest, sys.executable, "-m", "kvferry.bench.routing_engine")
    fleet.start(
        [
            _spec("prefill", (*engine, "--role", "prefill", "--port", str(prefill)), prefill, logs),
            _spec("decode", (*engine, "--role", "decode", "--port", str(decode)), decode, logs),
        ]
    )
    fleet.wait_ready(_READY_SECONDS)
    legs = ("--prefill", f"http://127.0.0.1:{prefill}", "--decode", f"http://127.0.0.1:{decode}")
    at = ("--host", "127.0.0.1", "--policy", "round_robin")
    ours = (sys.executable, "-m", "kvferry.cli.main", "router")
    routers = [_spec(OURS, (*alone, *ours, *legs, *at, "--port", str(own)), own, logs)]
    if peer is not None:
        theirs = (peer, "--vllm-pd-disaggregation", "--prometheus-port", str(metrics))
        routers.append(_spec(PEER, (*alone, *theirs, *legs, *at, "--port", str(its)), its, logs))
    fleet.start(routers)
    fleet.wait_ready(_READY_SECONDS)
    return ["decode", *(spec.name for spec in routers)]


def _spec(name: str, command: tuple[str, ...], port: int, logs: Path) -> ServerSpec:
    return ServerSpec(name=name, command=command, host="127.0.0.1", port=port, log=logs / f"{name}.log")


def _contender(server: ServerProcess, name: str) -> Contender:
    return Contender(name, server.spec.url, lambda: _cpu_seconds(server.members()), server.memory_bytes)


def _cpu_seconds(pids: list[int]) -> float:
    """User and system time of all threads of these processes."""
    ticks = 0
    for pid in pids:
        fields = (
            Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        )
        ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS
