"""The command line of `kvferry bench`: options, tables, exit code and last line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvferry.cli import main as cli
from kvferry.connector import hook_costs
from kvferry.connector.hook_costs import Figure, Report


def figure(side: str, name: str, median: float) -> Figure:
    return Figure(side, name, 3, median, 2 * median, median, median, 300.0)


def plant(monkeypatch: pytest.MonkeyPatch, problems: tuple[str, ...] = (), repeats: int = 30) -> None:
    figures = tuple(
        figure(side, name, median)
        for side in ("prefill", "decode")
        for name, median in (
            ("step, idle", 31.0),
            ("request, whole life, 1 at once", 250.0),
            ("request, whole life, 24 at once", 90.0),
        )
    )
    hooks, idle = figure("prefill", "wait_for_save", 1.0), figure("decode", "wait_for_save", 0.25)
    turns = (figure("decode", "turn kept, 64 blocks", 40.0),)
    report = Report(
        figures, (hooks,), (idle,), {}, {"prefill": 1.0, "decode": 0.75}, problems, repeats, turns
    )
    monkeypatch.setattr(hook_costs, "measure", lambda options, progress: report)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--requests", "1"], "--requests must be at least 2, not 1"),
        (["--blocks", "3"], "--blocks must be at least 4, not 3"),
        (["--sizes", "64", "3"], "--sizes must be at least 4, not 3"),
        (["--repeats", "0"], "--repeats must be at least 1, not 0"),
        (["--json", "/nowhere/hooks.json"], "--json: there is no directory /nowhere; make it first"),
    ],
)
def test_impossible_options_say_what_is_possible(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "hooks", *arguments]) == 2
    assert capsys.readouterr().err == f"kvferry: {said}\n"


def test_within_limits_the_last_line_has_the_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(monkeypatch)
    assert cli.main(["bench", "hooks"]) == 0
    side = (
        "31 us per idle step, 250 us per request, {} times that when it is pulled, 90 us each with 24 at once"
    )
    told = f"hooks within limits: prefill {side.format('1.00')}; decode {side.format('0.75')}"
    assert capsys.readouterr().out.splitlines()[-1] == told


def test_an_idle_steps_hooks_stand_in_a_table_of_their_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(monkeypatch)
    assert cli.main(["bench", "hooks"]) == 0
    lines = capsys.readouterr().out.splitlines()
    title = next(place for place, line in enumerate(lines) if "per hook, in an idle step, us" in line)
    assert lines[title + 1].split()[:3] == ["decode", "wait_for_save", "0.2"]


def test_a_turns_cost_stands_in_a_table_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(monkeypatch)
    assert cli.main(["bench", "hooks"]) == 0
    lines = capsys.readouterr().out.splitlines()
    title = next(place for place, line in enumerate(lines) if "besides, per turn, KV both ways, us" in line)
    row = lines[title + 1].split()
    assert row == ["decode", "turn", "kept,", "64", "blocks", "40.0", "80.0", "40.0", "40.0", "3"]
    assert len(lines[title]) == len(lines[title + 1])


def test_a_limit_that_does_not_hold_is_said_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(monkeypatch, problems=("prefill, step, idle: 300 us",), repeats=4)
    assert cli.main(["bench", "hooks"]) == 1
    *_, short, problem, last = capsys.readouterr().out.splitlines()
    assert short == "time was short: 4 of 30 repeats"
    assert problem == "prefill, step, idle: 300 us"
    assert last.startswith("hooks OVER THEIR LIMITS: ")


def test_the_file_holds_options_figures_and_hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    file = tmp_path / "hooks.json"
    assert cli.main(["bench", "hooks", "--blocks", "64", "--json", str(file)]) == 0
    written = json.loads(file.read_text())
    assert written["options"] == {
        "requests": 24,
        "blocks": 64,
        "repeats": 30,
        "sizes": [64, 1024, 4096],
    }
    assert written["hooks"][0]["name"] == "wait_for_save"
    assert (written["idle_hooks"][0]["side"], written["idle_hooks"][0]["median"]) == ("decode", 0.25)
    assert {row["side"] for row in written["figures"]} == {"prefill", "decode"}
