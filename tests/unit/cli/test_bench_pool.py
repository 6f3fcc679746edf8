"""`kvferry bench pool`: one small case through the real router, the table, the last line, the exit code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvferry.bench.pool import CaseResult, PoolRun
from kvferry.bench.pool_cases import CASES
from kvferry.bench.pool_model import DecodeModel
from kvferry.cli import bench_pool, main


def result(name: str, push: float, pull: float, auto: float, failures: tuple[str, ...] = ()) -> CaseResult:
    seconds = {"push": push, "pull": pull, "auto": auto}
    return CaseResult(
        name, tuple(PoolRun(arm, 0, (each,) * 10, 5, failures) for arm, each in seconds.items())
    )


GOOD = result("fine", push=0.1, pull=0.2, auto=0.1)
PULL = result("room is short", push=0.4, pull=0.3, auto=0.31)
BAD = result("bad", push=0.1, pull=0.2, auto=0.15)


def test_a_case_goes_through_the_real_router(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every mode serves every request, pull pulls all of them, and push none."""
    file = tmp_path / "pool.json"
    arguments = ["--cases", "skewed, short", "--seeds", "1", "--requests", "40", "--json", str(file)]
    code = main.main(["bench", "pool", *arguments])
    lines = capsys.readouterr().out.rstrip().splitlines()
    assert lines[-1].startswith("PASSED: 1 cases" if code == 0 else "FAILED: 1 cases")
    (told,) = json.loads(file.read_text())
    runs = {one["arm"]: one for one in told["runs"]}
    assert {arm: len(one["ttft_ms"]) for arm, one in runs.items()} == dict.fromkeys(runs, 40)
    assert (runs["push"]["pulled"], runs["pull"]["pulled"]) == (0, 40)
    assert all(one["failures"] == [] for one in runs.values())


def test_the_table_has_a_line_per_case() -> None:
    told, head, *rows = bench_pool.table([GOOD, PULL])
    assert "median / 95th percentile" in told
    assert head.split() == ["case", "push", "pull", "auto", "pulled", "auto/better"]
    assert [row.split()[-1] for row in rows] == ["1.000", "1.033"]
    assert "100 / 100" in rows[0]
    assert "50%" in rows[0]


def test_the_last_line_says_the_figure_and_where_pull_wins() -> None:
    assert bench_pool.verdict([GOOD, PULL]) == (
        True,
        "PASSED: 2 cases, auto's p95 is at most 1.033 times the better mode's (room is short; 1.05 allowed); "
        "pull wins most in 'room is short', by 25%",
    )
    assert bench_pool.verdict([GOOD])[1].endswith("pull wins nowhere")


@pytest.mark.parametrize(
    "wrong", [BAD, result("fails", 0.1, 0.1, 0.1, failures=("r: no",))], ids=["too slow", "failed"]
)
def test_one_bad_case_is_enough(wrong: CaseResult) -> None:
    passed, line = bench_pool.verdict([GOOD, wrong])
    assert not passed
    assert line.startswith("FAILED")


def test_the_help_and_the_page_explain_each_name_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["bench", "pool", "--help"])
    words = dict(re.findall(r"^  (\S.*?)  +(\S.*)$", capsys.readouterr().out, flags=re.MULTILINE))
    page = (Path(__file__).parents[3] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    _, _, page = page.partition("## Push, pull and auto")
    for case in CASES:
        pool, prompts = case.name.split(", ")
        shortest, longest = case.load.prompt_tokens
        said = f"of {shortest:,} to {longest:,} tokens, {case.load.requests_per_second:g} requests/s"
        assert words[prompts].removeprefix("prompts ") == said
        *_, slow, busy = case.model.decode
        if pool != "alike":
            others = f"{busy.other_requests_per_second:g}"
            assert f" {others} request" in words[pool] or f" {others} a second" in words[pool]
            assert slow.step_seconds == 3 * DecodeModel().step_seconds
        if slow.room != DecodeModel().room:
            assert f"room for {slow.room} requests, not {DecodeModel().room};" in words[pool]
        assert words[pool]
        assert f"| {case.name} |" in page
        assert f"{shortest:,} to {longest:,}".replace(",", "") in page.replace(",", "")
        assert pool in page.lower().partition("measured with")[0]
    modes = {mode for arm in bench_pool._arms() for mode in arm.name.split(", ")}
    assert modes <= {name for column in words for name in column.split(", ")}
    assert {arm.policy for arm in bench_pool._arms()} <= words.keys()
    assert "| case | " + " | ".join(arm.name for arm in bench_pool._arms()) in page.replace("`", "")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--seeds", "0"], "--seeds must be from 1"),
        (["--requests", "0"], "--requests must be from 1"),
        (["--cases", "nothing"], "--cases: 'nothing' is unknown"),
        (["--json", "/nowhere/file"], "--json: there is no directory"),
    ],
)
def test_what_cannot_be_is_refused(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["bench", "pool", *arguments]) == 2
    assert named in capsys.readouterr().err
