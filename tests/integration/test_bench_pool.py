"""`kvferry bench pool` on two of its cases: auto holds its bound, and each mode wins somewhere.

Virtual time and one seed: every run finds the same figures.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli import main

ROOM, FULL = "skewed, long", "full, medium"


def p95(milliseconds: list[float]) -> float:
    return sorted(milliseconds)[len(milliseconds) * 95 // 100]


def test_auto_is_about_as_good_as_the_better_mode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where engines have room, push is the better one; where they are full, pull."""
    file = tmp_path / "pool.json"
    code = main.main(["bench", "pool", "--seeds", "1", "--cases", ROOM, FULL, "--json", str(file)])
    assert code == 0, capsys.readouterr().out
    assert capsys.readouterr().out.rstrip().splitlines()[-1].startswith("PASSED: 2 cases")
    cases: dict[str, Any] = {case["case"]: case for case in json.loads(file.read_text())}
    tails = {name: {run["arm"]: p95(run["ttft_ms"]) for run in case["runs"]} for name, case in cases.items()}
    assert tails[ROOM]["push"] < tails[ROOM]["pull"]
    assert tails[FULL]["pull"] < 0.9 * tails[FULL]["push"]
    assert cases[ROOM]["pulled_share"] < 0.2
    assert cases[FULL]["pulled_share"] > 0.8
