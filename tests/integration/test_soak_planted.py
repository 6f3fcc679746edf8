"""`kvferry soak` finds what it claims to look for: the whole command, on stub servers with planted faults."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvferry.cli import main as cli
from kvferry.cli import soak
from kvferry.cli.engines import Deployment, Endpoints
from kvferry.cli.fleet import Fleet
from kvferry.cli.ports import free_ports
from kvferry.cli.processes import ServerSpec
from kvferry.cli.soak_judge import Bounds
from kvferry.cli.soak_plan import Fault, RoundPlan, Stage, Target

STUB = Path(__file__).parents[1] / "support" / "soak_stub.py"
NAMES = ("prefill-0", "decode-0", "reference", "router")
HEALTHY = 5
"""From this request on a plant is at work: the first three come before the first round."""

SHORT = {"request_seconds": 6.0, "pushed_again_seconds": 3.0, "settle_seconds": 2.0}
"""Bounds where they are waited for."""
LONG = dict.fromkeys(SHORT, 100.0)
"""Bounds that a healthy fleet keeps on the busiest machine."""

pytestmark = pytest.mark.timeout(240)

ROUNDS = (
    RoundPlan(number=1, stage=Stage.IDLE, target=Target.PREFILL, fault=Fault.STOP, seconds=0.2),
    RoundPlan(number=2, stage=Stage.IDLE, target=Target.DECODE, fault=Fault.KILL, seconds=0.1),
)

Run = Callable[..., tuple[int, list[str]]]


def specs(directory: Path, planted: str, plant: str, after: int) -> list[ServerSpec]:
    """Four stubs; one of them has the plant."""
    ports = dict(zip(NAMES, free_ports(len(NAMES)), strict=True))
    found = []
    for name, port in ports.items():
        command = [sys.executable, str(STUB), "--port", str(port)]
        if name == "router":
            command += ["--decode", str(ports["decode-0"])]
        if name == planted:
            command += ["--plant", plant, "--after", str(after)]
        log = directory / f"{name}.log"
        found.append(ServerSpec(name=name, command=tuple(command), host="127.0.0.1", port=port, log=log))
    return found


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command on stubs, and gives its exit code and lines."""

    @contextmanager
    def model(namespace: argparse.Namespace) -> Iterator[Path]:
        (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
        yield tmp_path

    monkeypatch.setattr(soak, "_model", model)
    monkeypatch.setattr(soak, "plan_rounds", lambda seed: iter(ROUNDS))

    def call(
        planted: str = "", plant: str = "", after: int = HEALTHY, rounds: int = 1
    ) -> tuple[int, list[str]]:
        def bring_up(fleet: Fleet, deployment: Deployment, *, startup_seconds: float) -> Endpoints:
            servers = specs(tmp_path, planted, plant, after)
            fleet.start(servers)
            fleet.wait_ready(startup_seconds)
            prefill, decode, reference, router = (server.url for server in servers)
            return Endpoints(router, (prefill,), (decode,), reference)

        for name, seconds in (SHORT if plant else LONG).items():
            monkeypatch.setattr(Bounds, name, seconds)
        monkeypatch.setattr(soak, "bring_up", bring_up)
        code = cli.main(["soak", "--rounds", str(rounds)])
        return code, capsys.readouterr().out.splitlines()

    return call


def test_without_a_plant_it_passes(run: Run) -> None:
    code, lines = run(rounds=len(ROUNDS))
    assert code == 0, lines
    found = re.fullmatch(
        r"PASSED: 2 rounds, (\d+) of (\d+) answers equal one engine's; longest request .* s, "
        r"pushed again after .* s \(median\); memory: not judged, 20 rounds needed",
        lines[-1],
    )
    assert found, lines[-1]
    assert found[1] == found[2]
    assert int(found[1]) >= 20


@pytest.mark.parametrize(
    ("planted", "plant", "after", "told"),
    [
        ("decode-0", "wrong answer", HEALTHY, "wrong answer: "),
        ("router", "hang", HEALTHY, "not ended within 6 s: "),
        ("router", "silence", HEALTHY, "no answer and no error: "),
        ("router", "refusal", HEALTHY, "a well-formed request was rejected: "),
        ("router", "failure", HEALTHY, "failed although only P was struck: "),
        ("decode-0", "leak", HEALTHY, "not empty within 2 s: decode-0: receiving 0, sending 0, held 1"),
        # From the first probe on, and at the look at what the round has left.
        ("decode-0", "nothing pushed", 4, "no pushed transfer within 3 s of prefill-0's return"),
        ("prefill-0", "exit", 3, "prefill-0 ended"),
    ],
)
def test_what_is_planted_is_found(run: Run, planted: str, plant: str, after: int, told: str) -> None:
    code, lines = run(planted, plant, after)
    assert code == 1, lines
    assert re.match(r"FAILED: \d+ problems?; [01] rounds?, \d+ of \d+ answers equal", lines[-1]), lines
    assert any(line.startswith("PROBLEM: ") and told in line for line in lines), lines
    if plant == "wrong answer":
        found = re.search(r"(\d+) of (\d+) answers equal", lines[-1])
        assert found
        assert int(found[1]) < int(found[2])


def test_a_fleet_that_is_wrong_from_the_start_is_not_struck(run: Run) -> None:
    code, lines = run("decode-0", "wrong answer", after=1)
    assert code == 1
    assert not any(line.startswith("round ") for line in lines)
    assert lines[-1].startswith("FAILED: 1 problem; 0 rounds, 0 of 0 answers equal one engine's")
    assert any(line.startswith("PROBLEM: before the first round: ") for line in lines)
