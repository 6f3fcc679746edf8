"""The tables of many seeds on a terminal: nothing is missing in them, and they fit."""

from __future__ import annotations

from kvferry.simulator.show.table import Grid, listed
from kvferry.simulator.show.terminal import COLUMNS_MAX, tables
from kvferry.simulator.watch import grid, stages
from kvferry.simulator.watch.coverage import IMPOSSIBLE, PAIRS

GRID = Grid(
    ("sent", "matched, handshake pending", "posted"), ("D abort", "late"), {("sent", "late"): "not yet"}
)
ALL_PAIRS = {pair: 1 for pair in PAIRS if pair not in IMPOSSIBLE}
ALL_CELLS = {(stage, fault): 1234567 for stage in GRID.stages for fault in GRID.faults}
WHOLE = Grid(stages.STAGES, grid.FAULTS, grid.IMPOSSIBLE, grid.BY_SIBLING)


def test_every_count_stands_below_its_stage() -> None:
    lines = tables(
        ALL_PAIRS, {("posted", "late"): 1234567, ("matched, handshake pending", "D abort"): 5}, GRID
    )
    at = next(number for number, line in enumerate(lines) if line.startswith("fault"))
    assert lines[at - 2 : at + 3] == [
        "                matched,",
        "               handshake",
        "fault    sent    pending     posted",
        "D abort     0          5          0",
        "late        -          0  1,234,567",
    ]
    assert lines[at + 3 :] == [
        "-: impossible, --verbose says why",
        "not visited: D abort at every stage but matched, handshake pending",
        "not visited: late at matched, handshake pending",
    ]


def test_machines_are_counted_late_events_too_and_gaps_named() -> None:
    seen = {
        pair: 1 for pair in ALL_PAIRS if pair[1:] not in {("queued", "advance"), ("stopping", "register")}
    }
    source, delivery = (len(listed(name)) for name in ("source", "delivery"))
    lines = tables(seen, ALL_CELLS, GRID)
    assert lines[1] == f"source     {source - 1:2} of {source}  queued + advance"
    assert lines[2] == f"delivery   {delivery - 1:2} of {delivery}  stopping + register (late)"
    assert lines[3].endswith("  none")


def test_what_is_called_impossible_and_happens_is_told() -> None:
    lines = tables(ALL_PAIRS, ALL_CELLS, GRID)
    assert lines[-1] == "called impossible, and visited: late at sent"
    assert not any(line.startswith("not visited") for line in lines)


def test_the_tables_fit_whatever_was_visited() -> None:
    many = {(stage, fault): 99_999_999 for stage in WHOLE.stages for fault in WHOLE.faults}
    half = {cell: times for number, (cell, times) in enumerate(many.items()) if number % 2}
    for cells in ({}, many, half):
        assert max(map(len, tables({}, cells, WHOLE))) <= COLUMNS_MAX
        assert max(map(len, tables(ALL_PAIRS, cells, WHOLE))) <= COLUMNS_MAX
