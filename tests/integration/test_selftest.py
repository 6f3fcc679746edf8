"""`kvferry selftest` on the CPU: two processes, real agents, NIXL, and a device that fills blocks late."""

from __future__ import annotations

import subprocess
import sys

BLOCKS = 24
MOVES = 4


def selftest(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvferry.cli.main", "selftest", "--device", "cpu"]
    return subprocess.run(
        [*command, "--blocks", str(BLOCKS), "--chunks", "3", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_every_byte_arrives_although_the_device_fills_late() -> None:
    """P41: each chunk is published before it is filled, and none leaves before its event."""
    result = selftest("--delay-ms", "150")
    assert result.returncode == 0, result.stdout + result.stderr
    *rows, last = result.stdout.strip().splitlines()[1:]
    assert len(rows) == MOVES
    assert all("3 of 3" in row and row.endswith("every byte right") for row in rows)
    assert last == "selftest passed on cpu: 3.0 MiB in 4 moves, 0 bytes wrong, 0 stray"


def test_a_transport_that_does_not_wait_for_the_event_is_found_out() -> None:
    """P41: the planted fault. Stale bytes are counted in each move whose destination was known in time."""
    result = selftest("--delay-ms", "150", "--ignore-events")
    assert result.returncode == 1, result.stdout + result.stderr
    lines = result.stdout.strip().splitlines()
    assert sum("bytes of the target are wrong" in line for line in lines) == 3
    assert lines[-1] == "selftest FAILED on cpu: 3 of 4 moves are wrong"
