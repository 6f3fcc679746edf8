"""`kvferry soak`: its arguments, its exit codes, and what it starts. No engine runs here."""

from __future__ import annotations

import argparse
import itertools
import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli import main as cli
from kvferry.cli import soak
from kvferry.cli.engines import Deployment, Endpoints
from kvferry.cli.fleet import FleetError
from kvferry.cli.soak_judge import MEBIBYTE, Bounds
from kvferry.cli.soak_plan import RoundPlan
from kvferry.cli.soak_rounds import Findings, SoakError
from kvferry.errors import UsageError
from tests.unit.cli.test_soak_judge import GOOD

ENDPOINTS = Endpoints("http://127.0.0.1:1", ("http://127.0.0.1:2",), ("http://127.0.0.1:3",), "http://x:4")


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    soak.add_arguments(parser)
    return parser.parse_args(arguments)


def write_config(directory: Path, **fields: object) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


class Struck:
    """Stands in for the rounds: does what the test says."""

    findings = Findings()
    error: BaseException | None = None
    plans: list[RoundPlan]
    count: int | None

    def __init__(
        self, *arguments: Any, bounds: Bounds, startup_seconds: float, report: Any, count: int | None
    ) -> None:
        self.bounds = bounds
        type(self).count = count
        assert startup_seconds == 300.0
        self.report = report

    def strike_all(self, plans: Iterator[RoundPlan], goes_on: Any) -> None:
        assert goes_on()
        type(self).plans = list(itertools.islice(plans, 5))
        if self.error is not None:
            raise self.error


class NoLoad:
    """Stands in for the clients."""

    def __init__(self, *arguments: Any, bound_seconds: float) -> None:
        assert bound_seconds == 165.0

    def __enter__(self) -> NoLoad:
        return self

    def __exit__(self, *arguments: object) -> None: ...


@pytest.fixture
def struck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[Struck]:
    """A soak whose engines and rounds are not there."""

    @contextmanager
    def model(namespace: argparse.Namespace) -> Iterator[Path]:
        yield write_config(tmp_path / "model")

    class Fresh(Struck):
        findings = Findings()

    monkeypatch.setattr(soak, "_model", model)
    monkeypatch.setattr(soak, "bring_up", lambda fleet, deployment, startup_seconds: ENDPOINTS)
    monkeypatch.setattr(soak, "Load", NoLoad)
    monkeypatch.setattr(soak, "Rounds", Fresh)
    return Fresh


def test_a_good_run_ends_with_the_figure(struck: type[Struck], capsys: pytest.CaptureFixture[str]) -> None:
    struck.findings.rounds.append(GOOD)
    assert cli.main(["soak", "--rounds", "3", "--seed", "9"]) == 0
    out = capsys.readouterr().out
    assert "seed 9; every request ends within 165 s" in out
    assert out.splitlines()[-1] == (
        "PASSED: 1 round, 2 of 2 answers equal one engine's; longest request 2.0 s, pushed again after 3.0 s "
        "(median); memory: not judged, 20 rounds needed"
    )
    assert struck.count == 3
    assert [plan.number for plan in struck.plans] == [1, 2, 3]


def test_a_problem_is_exit_code_1(struck: type[Struck], capsys: pytest.CaptureFixture[str]) -> None:
    struck.findings.rounds.append(GOOD)
    struck.findings.problems.append("round 1: a wrong answer")
    assert cli.main(["soak", "--rounds", "1"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("FAILED: 1 problem; 1 round, ")


@pytest.mark.parametrize(("step_mebibytes", "code"), [(5, 0), (30, 1)])
def test_growing_memory_is_exit_code_1(
    struck: type[Struck], capsys: pytest.CaptureFixture[str], step_mebibytes: int, code: int
) -> None:
    for number in range(9):
        size = (900 + step_mebibytes * number) * MEBIBYTE
        struck.findings.rounds.append(replace(GOOD, memory_bytes={("decode-0", 1): size}))
    assert cli.main(["soak", "--rounds", "9"]) == code
    out = capsys.readouterr().out
    assert ("PROBLEM: decode-0 grew by 150 MiB over 9 rounds" in out) == bool(code)
    assert out.splitlines()[-1].startswith("FAILED: 1 problem; 9 rounds" if code else "PASSED: 9 rounds")
    assert out.splitlines()[-1].endswith("memory: judged for decode-0")


def test_no_round_at_all_is_exit_code_1(struck: type[Struck], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["soak", "--rounds", "1"]) == 1
    assert "PROBLEM: no round was finished" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("problems", "code", "word"),
    [([], 130, "INTERRUPTED: "), (["round 1: lost"], 1, "FAILED: 1 problem; ")],
)
def test_an_interrupt_shows_what_was_found_so_far(
    struck: type[Struck], capsys: pytest.CaptureFixture[str], problems: list[str], code: int, word: str
) -> None:
    struck.findings.rounds.append(GOOD)
    struck.findings.problems += problems
    struck.error = KeyboardInterrupt()
    assert cli.main(["soak"]) == code
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith(word + "1 round, 2 of 2 answers equal")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_engines_start_has_a_last_line(
    struck: type[Struck],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
) -> None:
    def bring_up(*arguments: object, startup_seconds: float) -> Endpoints:
        signal.raise_signal(number)
        pytest.fail("the signal did not interrupt")

    monkeypatch.setattr(soak, "bring_up", bring_up)
    assert cli.main(["soak"]) == 130
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "INTERRUPTED: before the first round, while the servers were started"


def test_an_interrupt_while_servers_stop_does_not_hide_the_verdict(
    struck: type[Struck], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(fleet: soak.Fleet) -> None:
        raise KeyboardInterrupt

    struck.findings.rounds.append(GOOD)
    monkeypatch.setattr(soak.Fleet, "stop", stop)
    assert cli.main(["soak", "--rounds", "1"]) == 130
    verdict, last = capsys.readouterr().out.splitlines()[-2:]
    assert verdict.startswith("PASSED: 1 round, ")
    assert last == "INTERRUPTED: while the servers were stopped; the verdict on the rounds is above"


def test_what_cannot_go_on_is_one_line(struck: type[Struck], capsys: pytest.CaptureFixture[str]) -> None:
    struck.error = SoakError("the healthy fleet has pushed nothing")
    assert cli.main(["soak"]) == 1
    assert capsys.readouterr().err == "kvferry: the healthy fleet has pushed nothing\n"


def test_a_fleet_that_does_not_start_is_one_line(
    struck: type[Struck], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object, startup_seconds: float) -> Endpoints:
        raise FleetError("decode-0 ended with exit code 1")

    monkeypatch.setattr(soak, "bring_up", fail)
    assert cli.main(["soak"]) == 1
    assert "decode-0 ended" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--minutes", "0"], "--minutes must be greater than 0, not 0"),
        (["--minutes", "-3"], "--minutes must be greater than 0, not -3"),
        (["--minutes", "nan"], "--minutes must be greater than 0, not nan"),
        (["--rounds", "0"], "--rounds must be at least 1, not 0"),
        (["--model", "/no/such/model"], "--model /no/such/model: there is no such directory"),
        (["--model", "org/name"], "--model org/name must be a directory with a model"),
    ],
)
def test_wrong_use_is_told_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    monkeypatch.setattr(soak, "bring_up", lambda *a, **k: pytest.fail("something was started"))
    assert cli.main(["soak", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_engines_need_time_to_load(capsys: pytest.CaptureFixture[str], seconds: str) -> None:
    assert cli.main(["soak", "--rounds", "1", "--startup-seconds", seconds]) == 2
    assert "--startup-seconds must be greater than 0, and have an end, not" in capsys.readouterr().err


def test_a_directory_for_logs_that_takes_none_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert cli.main(["soak", "--rounds", "1", "--log-dir", str(tmp_path / "file" / "logs")]) == 2
    assert capsys.readouterr().err == (
        f"kvferry: --log-dir {tmp_path}/file/logs takes no files: Not a directory; name another directory\n"
    )


def test_rounds_begin_until_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(soak.time, "monotonic", lambda: now[0])

    def moments(*arguments: str) -> list[bool]:
        now[0] = 100.0
        goes_on = soak.duration(parse(*arguments))()
        found = []
        for now[0] in (100.0, 159.0, 161.0, 1299.0, 1301.0, 1e9):
            found.append(goes_on())
        return found

    assert moments("--minutes", "1") == [True, True, False, False, False, False]
    assert moments() == [True, True, True, True, False, False]
    assert moments("--rounds", "3") == [True] * 6
    assert moments("--rounds", "3", "--minutes", "20") == [True, True, True, True, False, False]


def test_the_bounds_are_those_of_the_defaults() -> None:
    bounds = soak.default_bounds(ENDPOINTS)
    assert (bounds.limits.write_seconds, bounds.limits.silence_seconds) == (10.0, 10.0)
    assert (bounds.request_seconds, bounds.pushed_again_seconds) == (165, 134)
    assert bounds.settle_seconds == pytest.approx(40.4 + 45)


def test_the_deployment_has_small_chunks_a_small_cache_and_a_reference(tmp_path: Path) -> None:
    namespace = parse("--prefill", "2", "--decode", "3", "--log-dir", str(tmp_path))
    deployment: Deployment = soak.soak_deployment(namespace, tmp_path / "m", 8192)
    assert (deployment.prefill, deployment.decode, deployment.reference) == (2, 3, True)
    assert deployment.prefill_arguments == deployment.decode_arguments
    text = " ".join(deployment.prefill_arguments)
    assert "--max-model-len 8192" in text
    assert "--dtype float32" in text
    assert "--num-gpu-blocks-override" in text
    assert deployment.prefill_config == {}, "the connector's settings are the defaults"


def test_the_context_is_the_models_within_limits(tmp_path: Path) -> None:
    assert soak.context_tokens(write_config(tmp_path / "a", max_position_embeddings=9000)) == 9000
    assert soak.context_tokens(write_config(tmp_path / "b", max_position_embeddings=10**6)) == 16384
    assert soak.context_tokens(write_config(tmp_path / "c")) == 16384
    with pytest.raises(UsageError, match="context of 2048 tokens; the soak needs 4096"):
        soak.context_tokens(write_config(tmp_path / "d", max_position_embeddings=2048))


def test_help_says_what_is_done_and_how_to_call_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["soak", "--help"])
    out = capsys.readouterr().out
    for part in ("waiting", "half", "held", "decoding", "idle", "kvferry soak --minutes 20 --seed 7"):
        assert part in out
