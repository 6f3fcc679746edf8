"""`kvferry bench handover` on real agents and NIXL: every page right, and a planted wrong one is found."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from kvferry.microbench import handover
from kvferry.microbench.cells import make_grid
from kvferry.microbench.figures import figures_of
from kvferry.microbench.handover import Options, measure

SECONDS_MAX = 120


class Watcher:
    """Nobody watches."""

    def doing(self, what: str) -> None:
        """Not looked at."""

    def advance(self, amount: float) -> None:
        """Not looked at."""


def options() -> Options:
    grid = make_grid(
        blocks=(32,),
        pages=(2048,),
        layers=8,
        layouts=("LBHNC", "BLHNC"),
        fragmentations=("scattered", "churned"),
        concurrencies=(2,),
        cache_bytes=16 << 20,
    )
    return Options(grid=grid, cache_bytes=16 << 20, repeats=1, seconds=1.0, outstanding=0)


def test_a_small_run_moves_every_page_and_writes_its_figures(tmp_path: Path) -> None:
    file = tmp_path / "handover.json"
    command = [sys.executable, "-m", "kvferry.cli.main", "bench", "handover", "--output", str(file)]
    command += [
        "--blocks",
        "16",
        "--pages",
        "2048",
        "--layers",
        "8",
        "--concurrency",
        "1,2",
        "--repeats",
        "1",
    ]
    command += ["--cache-mib", "16", "--outstanding", "100"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS_MAX)
    assert result.returncode == 0, result.stdout + result.stderr
    last = result.stdout.splitlines()[-1]
    assert last.startswith("handover: contiguous, 16 blocks, ")
    assert last.endswith("; 4,608 pages looked at, 0 wrong")
    figures = json.loads(file.read_text())["figures"]
    assert len(figures["cells"]) == 12
    assert all(cell["gib_per_second"] > 0 for cell in figures["cells"])
    assert all(cell["consumer_cpu_per_gib"] > 0 for cell in figures["cells"])
    steps = [(one["side"], one["transfers"]) for one in figures["steps"]]
    assert steps == [("producer", 1), ("consumer", 1), ("producer", 100), ("consumer", 100)]
    by_name = {
        (cell["cell"]["shape"]["order"], cell["cell"]["fragmentation"]): cell for cell in figures["cells"]
    }
    for fragmentation, descriptors in (("contiguous", 8), ("scattered", 128)):
        one = by_name["LBHNC", fragmentation]
        assert one["ferry_descriptors"] == one["raw_descriptors"] == one["cell"]["concurrency"] * descriptors
    assert by_name["BLHNC", "scattered"]["ferry_descriptors"] == 2 * 16


def test_a_damaged_block_is_found_in_each_of_kvferrys_transfers(monkeypatch) -> None:
    """The planted fault: one page of one block is changed before it is published."""
    monkeypatch.setattr(handover, "SETTLE_SECONDS", 0.5)
    figures = figures_of(measure(replace(options(), corrupt_block=3), Watcher()))
    assert figures.wrong_pages == 4 * 2
    assert len(figures.problems) == 4
    assert all(problem.endswith("ferry: 2 pages are wrong") for problem in figures.problems)
