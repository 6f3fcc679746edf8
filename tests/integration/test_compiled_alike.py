"""The router's compiled modules do what their sources say, also with what nobody should send."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvferry.router import code_state

ROOT = Path(__file__).parents[2]


def started(interpreted: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.support.odd_traffic"]
    environment = os.environ | {"KVFERRY_INTERPRETED": interpreted}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def test_odd_traffic_has_the_same_answers_compiled_and_interpreted() -> None:
    if code_state() != "compiled" and not os.environ.get("KVFERRY_DEMANDS_COMPILED"):
        pytest.skip("nothing fits that was compiled")
    runs = [started(interpreted) for interpreted in ("", "1")]
    compiled, interpreted = (json.loads(run.communicate(timeout=200)[0]) for run in runs)
    assert compiled["code"] == "compiled"
    assert interpreted["code"].startswith("interpreted")
    assert len(compiled["got"]) > 1500
    different: list[Any] = [
        pair for pair in zip(compiled["got"], interpreted["got"], strict=True) if pair[0] != pair[1]
    ]
    assert different == []
    faults = [text for _, status, text in compiled["got"] if status == 500]
    assert not [text for text in faults if '"kvferry":"internal"' in text]
