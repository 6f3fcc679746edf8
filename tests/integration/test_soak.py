"""Engines are killed and stopped under load, and nothing is lost: three rounds, more in `make test-long`."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvferry.cli.soak import default_bounds
from kvferry.cli.soak_client import Kind
from kvferry.cli.soak_load import Addresses, Load
from kvferry.cli.soak_plan import Fault, Mix, RoundPlan, Stage, Target, plan_rounds
from kvferry.cli.soak_rounds import Rounds
from tests.support.live import MODEL, STARTUP_SECONDS, Live
from tests.support.stub_fleet import ends, eventually

pytestmark = pytest.mark.engines

CONTEXT_TOKENS = 8192
COMPUTE_SECONDS = 240.0
INTERRUPTED = 130


def plan(number: int, fault: Fault, target: Target, stage: Stage, seconds: float) -> RoundPlan:
    return RoundPlan(number=number, stage=stage, target=target, fault=fault, seconds=seconds)


THREE_ROUNDS = (
    plan(1, Fault.KILL, Target.PREFILL, Stage.HALF, 0.5),
    plan(2, Fault.STOP, Target.DECODE, Stage.WAITING, 3.0),
    plan(3, Fault.KILL, Target.DECODE, Stage.DECODING, 0.5),
)


@pytest.mark.timeout(1200)
def test_three_rounds(engines: Live) -> None:
    """P04, P11, P47, A02, A21: killed in the middle of a prefill, stopped while waiting, killed decoding."""
    endpoints = engines.endpoints
    # How fast this machine computes is not what is tried, and others may use it.
    bounds = replace(default_bounds(endpoints), compute_seconds=COMPUTE_SECONDS)
    addresses = Addresses(endpoints.router, engines.reference, MODEL)
    clients, victims = Mix("three rounds", CONTEXT_TOKENS), Mix("their victims", CONTEXT_TOKENS)
    with Load(addresses, clients, bound_seconds=bounds.request_seconds) as load:
        rounds = Rounds(
            engines.fleet,
            endpoints,
            load,
            victims,
            bounds=bounds,
            startup_seconds=STARTUP_SECONDS,
            report=print,
        )
        rounds.strike_all(THREE_ROUNDS, lambda: True)
    assert rounds.findings.problems == [], engines.state()
    results = rounds.findings.rounds
    assert [result.server for result in results] == ["prefill-0", "decode-0", "decode-0"]
    right = sum(result.count(Kind.RIGHT) for result in results)
    assert right >= 15
    # Whoever is refused while D is away waits, so most requests are real ones.
    assert right > 2 * sum(result.excused for result in results)
    # On a busy machine a stage may pass unseen, and is struck in passing; not all of them do.
    assert sum(result.seen for result in results) >= 2
    engines.assert_empty()


# A shell starts what it runs in the background with SIGINT ignored, and our tests may be that.
PROGRAM = """
import signal, sys
from kvferry.cli.main import main
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main(sys.argv[1:]))
"""


def soak(directory: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-c", PROGRAM, "soak", "--log-dir", str(directory), *arguments]


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "arguments", [("--rounds", "20", "--seed", "1"), ("--minutes", "20", "--seed", "2")], ids=" ".join
)
def test_the_command_passes(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """Every stage, side and fault once; and 20 minutes of it."""
    done = subprocess.run(
        soak(tmp_path, *arguments), capture_output=True, text=True, timeout=3500, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    *_, verdict = done.stdout.strip().splitlines()
    assert verdict.startswith("PASSED: ")
    assert verdict.startswith("PASSED: 20 rounds") or "--minutes" in arguments
    judged = verdict.partition("memory: judged for ")[2].partition(", not for ")[0]
    assert {"prefill-0", "decode-0", "router"} <= set(judged.split(", ")) or "--minutes" in arguments


def first_stops(seed: int) -> bool:
    """Whether the first round of a seed is a long stop."""
    first = next(plan_rounds(seed))
    return first.fault is Fault.STOP and first.seconds > 15.0 and first.stage is not Stage.IDLE


@contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def fields_of(pid: str) -> list[str]:
    """State, parent and group of a process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:3]
    except (FileNotFoundError, ProcessLookupError):
        return ["X", "0", "0"]


def members(soak_pid: int) -> dict[int, str]:
    """Every process below the soak, its guards included, and its state."""
    table = {path.name: fields_of(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()}
    guards = {pid for pid, (_, parent, _) in table.items() if parent == str(soak_pid)}
    return {int(pid): state for pid, (state, _, group) in table.items() if group in guards}


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name
)
def test_an_end_while_an_engine_is_stopped_leaves_nothing_behind(
    tmp_path: Path, number: signal.Signals
) -> None:
    seed = next(seed for seed in range(1000) if first_stops(seed))
    with running(soak(tmp_path, "--rounds", "3", "--seed", str(seed))) as process:
        assert eventually(lambda: "T" in members(process.pid).values(), 600.0)
        left = list(members(process.pid))
        process.send_signal(number)
        output, _ = process.communicate(timeout=120)
        assert len(left) > 8
        assert all(ends(pid, 60.0) for pid in left)
    if number is not signal.SIGKILL:
        assert process.returncode == INTERRUPTED, output
        assert output.splitlines()[-1].startswith("INTERRUPTED: 0 rounds, 0 of 0 answers equal")
