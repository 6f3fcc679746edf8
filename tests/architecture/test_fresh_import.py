"""Importing kvferry, its router or its command line loads nothing heavy: a router host has none of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROBE = """
import importlib, sys
importlib.import_module({module!r})
heavy = sorted({{"vllm", "torch", "nixl", "nixl_cu12", "nixl_cu13", "numpy"}} & set(sys.modules))
print(" ".join(heavy))
"""


@pytest.mark.parametrize("module", ["kvferry", "kvferry.router", "kvferry.router.server", "kvferry.cli.main"])
def test_a_fresh_interpreter_loads_nothing_heavy(module: str) -> None:
    command = [sys.executable, "-c", PROBE.format(module=module)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == ""


def test_the_probe_sees_what_is_heavy() -> None:
    command = [sys.executable, "-c", PROBE.format(module="numpy")]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    assert result.stdout.strip() == "numpy"
