"""The command line of `kvferry bench compare`: options, resume, report, exit code and last line."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("vllm", reason="the emulator's options are vLLM's")

from kvferry.bench import compare, report
from kvferry.bench.enough import REPEATS_MIN, requests_needed
from kvferry.bench.machine import OTHERS_SHARE_MAX
from kvferry.cli import bench_compare, bench_engines
from kvferry.cli import main as cli
from tests.support.bench_pair import StubLauncher, StubPair
from tests.support.bench_results import World, made_up, options

SMALL = ["--cells", "40x30,80x60", "--repeats", "1", "--minutes", "60", "--cell-seconds", "3"]


def chosen(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench_compare.add_arguments(parser)
    return parser.parse_args(["--output", "out", *arguments])


def read(*arguments: str) -> tuple[Any, Any]:
    namespace = chosen(*arguments)
    return bench_compare.read_options(namespace, bench_compare.minutes_max(namespace))


def test_the_help_has_the_numbers_by_which_it_judges(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "compare", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert REPEATS_MIN == 2
    assert f"a median from fewer than {requests_needed(0.5)} requests" in said
    assert f"a 95th percentile from fewer than {requests_needed(0.95)};" in said
    assert f"more than {OTHERS_SHARE_MAX * 100:g} % of the machine" in said


def test_the_quick_grid_is_the_default_and_fits_into_its_time() -> None:
    made, emulation = read()
    assert made.connectors == ("ferry-push", "ferry-pull", "vllm-push", "vllm-pull")
    assert (len(made.cells), made.repeats, made.baseline) == (4, 2, True)
    assert made.cell_seconds >= 3.5
    assert (emulation.preset, emulation.step_tokens) == ("qwen3-32b-unsaturated", 2048)
    assert made.engines["step_tokens"] == 2048
    assert made.versions["kvferry"]


def test_the_same_command_makes_the_same_options() -> None:
    assert read("--grid", "published")[0] == read("--grid", "published")[0]


def test_emulator_options_are_part_of_what_is_measured() -> None:
    made, emulation = read("--emulator", '{"fragmentation": "none"}', "--kv-cache-mib", "512")
    assert emulation.options == {"fragmentation": "none"}
    assert emulation.cache_bytes == 512 << 20
    assert made.engines["emulator.fragmentation"] == "none"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--connectors", "nixl"], "--connectors must be some of "),
        (["--cells", "8"], "--cells must be RATExTOKENS,..., such as 1x1024,8x16k, not '8'"),
        (["--repeats", "0"], "--repeats must be at least 1, not 0"),
        (["--minutes", "0"], "--minutes must be above 0, not 0"),
        (["--minutes", "1"], "this takes at least "),
        (["--cell-seconds", "1"], "--cell-seconds must be at least 3, not 1"),
        (["--cell-seconds", "300"], "--cell-seconds 300 makes about "),
        (["--emulator", "x"], "--emulator is not JSON: "),
        (["--preset", "nope"], "preset 'nope' is unknown; choose one of "),
        (["--content-scale", "3"], "content_scale 3 does not divide heads of "),
        (["--chunk-tokens", "0"], "--chunk-tokens must be at least 1, not 0"),
        (["--report-only"], "out holds no comparison: there is no plan.json"),
    ],
)
def test_impossible_options_say_what_is_possible(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", "compare", "--output", "out", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"kvferry: {said}")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def stubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StubLauncher:
    """Stub engines in place of emulated ones."""
    launcher = StubLauncher(tmp_path / "engines")
    monkeypatch.setattr(bench_engines, "launcher", lambda *arguments: launcher)
    monkeypatch.setattr(compare, "IDLE_SECONDS", 0.01)
    monkeypatch.setattr(compare, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(compare, "requests_in", lambda cell, seconds: 4)
    return launcher


@pytest.fixture(autouse=True)
def _without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are drawn by the report's own tests, and take seconds."""
    monkeypatch.setattr(report, "draw", lambda comparison, directory: {})


def command(output: Path, *more: str) -> list[str]:
    return ["bench", "compare", "--output", str(output), *SMALL, *more]


def test_a_comparison_ends_with_its_figures_and_resumes_for_free(
    stubs: StubLauncher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    more = ["--connectors", "ferry-push,vllm-push", "--no-baseline"]
    assert cli.main(command(output, *more)) == 0
    *_, report, last = capsys.readouterr().out.splitlines()
    assert report == f"report: {output / 'report.html'}"
    assert last.startswith("kvferry push at 80 x 60: TTFT p50 ")
    assert "x vLLM push" in last
    assert len(stubs.started) == 2
    assert cli.main(command(output, *more)) == 0
    assert len(stubs.started) == 2
    assert cli.main(command(output, *more, "--seed", "5")) == 2
    *_, seed, advice = capsys.readouterr().err.splitlines()
    assert seed == "  --seed  there 0, now 5"
    # What is advised is taken.
    assert cli.main(command(output, *more, *shlex.split(advice.rpartition(": ")[2]))) == 0
    assert len(stubs.started) == 2


def test_wrong_pages_fail_the_command(
    stubs: StubLauncher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stubs.prepare = lambda pair: setattr(pair.engines["decode"], "mismatches", 3)
    assert cli.main(command(tmp_path / "out", "--connectors", "ferry-push", "--no-baseline")) == 1
    assert "WRONG: 3 pages arrived with other content than was sent" in capsys.readouterr().out


def test_an_interrupted_run_keeps_and_reports_what_it_has(
    stubs: StubLauncher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(pair: StubPair) -> None:
        if len(stubs.started) == 2:
            raise KeyboardInterrupt

    stubs.prepare = interrupt
    output = tmp_path / "out"
    assert cli.main(command(output, "--connectors", "ferry-push,vllm-push")) == 130
    assert "stopped; what is done stands in " in capsys.readouterr().out
    assert (output / "report.html").is_file()
    stubs.prepare = lambda pair: None
    assert cli.main(command(output, "--connectors", "ferry-push,vllm-push")) == 0
    assert [name for name, _ in stubs.started] == ["ferry-push", "vllm-push", "vllm-push", "decode-alone"]


def test_a_report_is_written_again_without_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made_up(tmp_path / "out", World(failing="vllm-push"), options(cells=((1, 1024),), repeats=1))
    assert cli.main(["bench", "compare", "--output", str(tmp_path / "out"), "--report-only"]) == 1
    out = capsys.readouterr().out
    assert "WRONG: 1 requests failed, the first under vllm-push: answered 500: unwell" in out
    assert "not measured TTFT p50 at 8 x 16k" in out
    assert "NOTE: too few to judge medians at every cell: 7 requests, at least 12 are needed\n" in out
    assert "not judged   idle CPU of kvferry's threads, prefill" in out
