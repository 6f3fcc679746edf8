"""What is said of the circumstances of a run, and when nothing is."""

from __future__ import annotations

import msgspec

from kvferry.bench.analysis import Comparison
from kvferry.bench.circumstances import machine_section, machines, others_share, remarks
from kvferry.bench.results import Results, SessionRun
from tests.support.bench_results import MACHINE, World, imagined, options

ENOUGH = options(cells=((8, 16384),), cell_seconds=8.0)


def test_nothing_is_said_of_enough_requests_on_a_quiet_machine() -> None:
    assert remarks(Comparison(imagined(World(), ENOUGH))) == []


def test_cells_that_lack_the_same_are_told_together() -> None:
    said = remarks(
        Comparison(imagined(World(), options(cells=((1, 1024), (1, 4096), (8, 1024)), cell_seconds=4.0)))
    )
    assert said == [
        "too few to judge medians at 1 x 1k, 1 x 4k: 8 requests, at least 12 are needed",
        "too few to judge 95th percentiles at 1 x 1k, 1 x 4k: 8 requests, at least 120 are needed",
        "too few to judge 95th percentiles at 8 x 1k: 64 requests, at least 120 are needed",
    ]
    once = remarks(Comparison(imagined(World(), options(cell_seconds=30.0, cells=((8, 16384),), repeats=1))))
    assert [one.partition(":")[2].split(";")[0] for one in once] == [" 1 repeat, at least 2 are needed"] * 2
    assert "at every cell:" in once[0]


def test_failed_requests_do_not_count() -> None:
    made = options(cells=((1, 1024),), cell_seconds=6.0)
    few = remarks(Comparison(imagined(World(failing="vllm-pull"), made)))
    assert "10 requests, at least 12" in few[0]


def test_a_share_at_the_limit_is_quiet_and_one_above_is_not() -> None:
    quiet = Comparison(imagined(World(others={("vllm-push", 8): 0.05}), ENOUGH))
    assert remarks(quiet) == []
    busy = Comparison(imagined(World(others={("vllm-push", 8): 0.051}), ENOUGH))
    assert remarks(busy)[0].startswith("the machine was not quiet: others took more than 5%")


def test_another_machine_in_the_same_directory_is_told() -> None:
    results = imagined(World(), ENOUGH)
    other = msgspec.structs.replace(MACHINE, cores=64)
    lines = [*results.runs, *results.sessions]
    moved = [
        msgspec.structs.replace(one, machine=other) if isinstance(one, SessionRun) and one.repeat else one
        for one in lines
    ]
    view = Comparison(Results(results.directory, results.options, moved))
    assert machines(view) == [MACHINE, other]
    assert remarks(view)[-1].startswith("measured on 2 machines: 2 cores of Imagined 9000, 24 GiB")


def test_an_older_run_says_that_nobody_noted_it() -> None:
    view = Comparison(imagined(World(others=None), ENOUGH))
    assert remarks(view) == []
    assert "Not noted" in machine_section(view)
    assert others_share(view.runs) is None
