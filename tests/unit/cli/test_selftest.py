"""The self-test's command line: options, the skip without a GPU, and the exit code."""

from __future__ import annotations

import pytest

from kvferry.cli import main as cli
from kvferry.connector import selftest
from kvferry.connector.selftest import MOVES, Outcome


def outcomes(*problems: str):
    def run_moves(options):
        yield Outcome(MOVES[0], 2**20, 4, 1.0, ())
        yield Outcome(MOVES[1], 2**20, 4, 1.0, problems)

    return run_moves


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--blocks", "0"], "--blocks must be at least 1, not 0"),
        (["--blocks", "2", "--chunks", "3"], "--chunks must be at most --blocks (2), not 3"),
        (["--delay-ms", "0"], "--delay-ms must be greater than 0, not 0"),
        (["--seconds-max", "-1"], "--seconds-max must be greater than 0, not -1"),
    ],
)
def test_impossible_options_say_what_is_possible(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["selftest", *arguments]) == 2
    assert capsys.readouterr().err == f"kvferry: {said}\n"


def test_without_a_gpu_cuda_is_skipped_and_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(selftest.torch.cuda, "is_available", lambda: False)
    assert cli.main(["selftest", "--device", "cuda"]) == 0
    assert capsys.readouterr().out.startswith("selftest skipped: --device cuda needs a GPU and torch ")


@pytest.mark.parametrize(("available", "device"), [(True, "cuda"), (False, "cpu")])
def test_auto_takes_the_gpu_where_there_is_one(
    available: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selftest.torch.cuda, "is_available", lambda: available)
    assert selftest.resolve_device("auto") == (device, "")


def test_the_exit_code_and_the_last_line_follow_the_moves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(selftest, "run_moves", outcomes())
    assert cli.main(["selftest", "--device", "cpu"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "selftest passed on cpu: 2.0 MiB in 2 moves, 0 bytes wrong, 0 stray"
    monkeypatch.setattr(selftest, "run_moves", outcomes("7 bytes of the target are wrong"))
    assert cli.main(["selftest", "--device", "cpu"]) == 1
    *_, row, last = capsys.readouterr().out.splitlines()
    assert row.endswith("7 bytes of the target are wrong")
    assert last == "selftest FAILED on cpu: 1 of 2 moves are wrong"
