"""Runs are joined where both sides continue, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.layout.runs import Barriers, merge
from tests.support.caches import runs_of, triples

Entries = list[tuple[int, int, int]]


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([], []),
        ([(7, 9, 2)], [(7, 9, 2)]),
        ([(0, 100, 4), (4, 104, 4), (8, 108, 2)], [(0, 100, 10)]),
        ([(8, 108, 2), (0, 100, 4), (4, 104, 4)], [(0, 100, 10)]),
        ([(0, 100, 4), (4, 105, 4)], [(0, 100, 4), (4, 105, 4)]),
        ([(0, 100, 4), (5, 104, 4)], [(0, 100, 4), (5, 104, 4)]),
        ([(0, 104, 4), (4, 100, 4)], [(0, 104, 4), (4, 100, 4)]),
        ([(0, 50, 1), (1, 51, 1), (9, 9, 1), (10, 10, 1)], [(0, 50, 2), (9, 9, 2)]),
    ],
)
def test_runs_that_touch_on_both_sides_become_one(entries: Entries, expected: Entries) -> None:
    assert triples(merge(runs_of(entries))) == expected


@pytest.mark.parametrize(("source", "target"), [([8], []), ([], [108]), ([8], [108])])
def test_no_run_passes_a_barrier(source: list[int], target: list[int]) -> None:
    barriers = Barriers(np.array(source, np.uint64), np.array(target, np.uint64))
    entries = [(0, 100, 4), (4, 104, 4), (8, 108, 4), (12, 112, 4)]
    assert triples(merge(runs_of(entries), barriers)) == [(0, 100, 8), (8, 108, 8)]


def test_addresses_near_the_end_of_memory_stay_exact() -> None:
    top = (1 << 63) + 1
    assert triples(merge(runs_of([(top + 4, top, 4), (top, top - 4, 4)]))) == [(top, top - 4, 8)]


def test_bytes_are_those_of_all_runs() -> None:
    runs = runs_of([(0, 0, 3), (9, 9, 4)])
    assert runs.bytes == 7
    assert len(runs) == 2
    assert runs_of([]).bytes == 0
