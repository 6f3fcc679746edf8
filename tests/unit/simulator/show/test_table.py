"""The coverage table: every transition and every cell is in it, and what was not visited is named."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import replace

from kvferry.protocol.states import DELIVERY, PART, RECEPTION, SOURCE
from kvferry.simulator.show.table import Grid, coverage, missing, overview, summary
from kvferry.simulator.watch.coverage import IMPOSSIBLE, PAIRS

GRID = Grid(("sent", "posted"), ("D abort", "late"), {("sent", "late"): "nothing can be late yet"})
ALL_CELLS = {("sent", "D abort"): 1, ("posted", "D abort"): 1, ("posted", "late"): 1234}
ALL_PAIRS = {pair: 2 for pair in PAIRS if pair not in IMPOSSIBLE}
TABLES = (SOURCE, DELIVERY, RECEPTION, PART)
NAMED = tuple(zip(("source", "delivery", "reception", "part"), TABLES, strict=True))


def rows(page: str, first: str) -> list[list[str]]:
    """The table whose first column has this title."""
    lines = page.splitlines()
    at = next(index for index, line in enumerate(lines) if line.startswith(f"| {first} |"))
    table = []
    for line in lines[at + 2 :]:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split("|")])
    return table


def _possible(machine: str, pairs: Iterable[tuple[enum.Enum, enum.Enum]]) -> int:
    return sum((machine, state.value, event.value) not in IMPOSSIBLE for state, event in pairs)


def section(page: str, heading: str) -> str:
    return page.partition(f"\n{heading}\n")[2].partition("\n#")[0]


def test_everything_visited() -> None:
    page = coverage(ALL_PAIRS, ALL_CELLS, GRID, histories="10 seeds")
    assert page.startswith("# Coverage of 10 seeds\n")
    assert "Every one was visited." in page
    assert "Not visited" not in page
    assert "4 cells: 3 visited, 0 not visited, 1 impossible (n/a)." in page
    transitions = sum(_possible(name, {*table.transitions, *table.late}) for name, table in NAMED)
    assert summary(ALL_PAIRS, ALL_CELLS, GRID) == (
        f"coverage: {transitions} of {transitions} transitions, late events included, "
        "3 of 3 possible cells (1 impossible)"
    )


def test_what_is_missing_is_a_line_each_and_nothing_where_there_is_nothing() -> None:
    assert missing(ALL_PAIRS, ALL_CELLS, GRID) == []
    assert missing(ALL_PAIRS, {("sent", "D abort"): 1}, GRID) == [
        "not visited: 2 of the grid's cells: D abort at posted; late at posted"
    ]
    transitions, cells = missing({}, {}, GRID)
    assert re.match(r"not visited: \d+ of the transitions: --verbose names them, ", transitions)
    assert cells == "not visited: 3 of the grid's cells: D abort at sent / posted; late at posted"


def test_a_late_event_counts_and_is_named_the_same_way_everywhere() -> None:
    seen = {pair: times for pair, times in ALL_PAIRS.items() if pair != ("delivery", "stopping", "register")}
    words = "stopping + register (late)"
    assert missing(seen, ALL_CELLS, GRID) == [f"not visited: 1 of the transitions: delivery {words}"]
    assert f"- delivery: {words}\n" in overview(seen, ALL_CELLS, GRID)
    total = len(ALL_PAIRS)
    assert f" {total - 1} of {total} transitions, " in summary(seen, ALL_CELLS, GRID)


def test_a_grid_of_some_faults_has_nothing_of_the_others() -> None:
    part = replace(GRID, by_sibling={("sent", "late"): "x"}).of_faults({"D abort"})
    assert (part.faults, part.impossible, part.by_sibling) == (["D abort"], {}, {})
    assert part.unvisited({}) == [("sent", "D abort"), ("posted", "D abort")]


def test_the_machines_are_counted() -> None:
    table = rows(overview(ALL_PAIRS, ALL_CELLS, GRID), "machine")
    assert table == [
        [name, *[str(_possible(name, machine.transitions))] * 2, *[str(_possible(name, machine.late))] * 2]
        for name, machine in NAMED
    ]


def test_an_unvisited_transition_is_named() -> None:
    seen = {pair: times for pair, times in ALL_PAIRS.items() if pair[1:] != ("queued", "advance")}
    text = overview(seen, ALL_CELLS, GRID)
    assert "Not visited:\n\n- source: queued + advance\n" in text
    possible = _possible("source", SOURCE.transitions)
    assert rows(text, "machine")[0][1:3] == [str(possible), str(possible - 1)]
    late = {pair: times for pair, times in ALL_PAIRS.items() if pair != ("delivery", "stopping", "register")}
    assert "- delivery: stopping + register (late)\n" in overview(late, ALL_CELLS, GRID)


def test_an_impossible_transition_has_its_reason_and_is_told_when_it_happens() -> None:
    text = overview(ALL_PAIRS, ALL_CELLS, GRID)
    for (machine, state, event), reason in IMPOSSIBLE.items():
        [line] = [line for line in text.splitlines() if line.startswith(f"- {reason}: ")]
        assert f"{machine} {state} + {event}" in line
    assert "Called impossible and visited" not in text
    key = next(iter(IMPOSSIBLE))
    text = overview(ALL_PAIRS | {key: 1}, ALL_CELLS, GRID)
    assert f"Called impossible and visited:\n\n- {' '.join(key)}: it happens" in text


def test_a_zero_is_not_a_visit() -> None:
    nothing = dict.fromkeys(PAIRS, 0)
    assert nothing.keys() > ALL_PAIRS.keys()
    assert summary(nothing, dict.fromkeys(ALL_CELLS, 0), GRID).startswith("coverage: 0 of ")
    assert GRID.unvisited(dict.fromkeys(ALL_CELLS, 0)) == list(ALL_CELLS)


def test_every_pair_has_its_row_in_the_page() -> None:
    page = coverage(ALL_PAIRS, ALL_CELLS, GRID, histories="x")
    for name, machine in zip(("source", "delivery", "reception", "part"), TABLES, strict=True):
        table = rows(section(page, f"### {name}"), "state")
        assert {(state, event) for state, event, _, _ in table} == {
            (state.value, event.value) for state, event in {*machine.transitions, *machine.late}
        }
        following = {(state, event): then for state, event, then, _ in table}
        for (state, event), then in machine.transitions.items():
            assert following[state.value, event.value] == then.value
        shown = {(state, event): times for state, event, _, times in table}
        assert {pair for pair, times in shown.items() if times == "2"} == {
            pair[1:] for pair in ALL_PAIRS if pair[0] == name
        }
        assert set(shown.values()) <= {"2", "n/a"}


def test_the_grid_shows_counts_gaps_and_what_cannot_be() -> None:
    text = overview(ALL_PAIRS, {("posted", "late"): 1234}, GRID)
    assert rows(text, "fault") == [["D abort", "**0**", "**0**"], ["late", "n/a", "1,234"]]
    assert "Not visited:\n\n- sent: D abort\n- posted: D abort\n" in text
    assert "Impossible:\n\n- sent, late: nothing can be late yet" in text
    assert "4 cells: 1 visited, 2 not visited, 1 impossible" in text


def test_an_impossible_cell_that_was_visited_is_told() -> None:
    text = overview(ALL_PAIRS, {**ALL_CELLS, ("sent", "late"): 3}, GRID)
    assert rows(text, "fault")[1][1] == "n/a, yet 3"
    assert text.endswith("Called impossible and visited:\n\n- sent: late")


def test_the_order_is_the_same_in_every_run() -> None:
    """Late pairs come from a set, whose order changes from process to process."""
    page = coverage(ALL_PAIRS, ALL_CELLS, GRID, histories="x")
    part = [tuple(row[:2]) for row in rows(section(page, "### part"), "state")][len(PART.transitions) :]
    expected = [
        (state.value, event.value)
        for state in type(next(iter(PART.transitions))[0])
        for event in type(next(iter(PART.transitions))[1])
        if (state, event) in PART.late
    ]
    assert part == expected


def test_cells_that_count_by_way_of_another_request_are_named_with_the_reason() -> None:
    title = "Where the fault hits another consumer request of the same transfer:"
    assert title not in overview(ALL_PAIRS, ALL_CELLS, GRID)
    siblings = {("sent", "D abort"): "not yet", ("posted", "D abort"): "not yet", ("posted", "late"): "over"}
    page = overview(ALL_PAIRS, ALL_CELLS, replace(GRID, by_sibling=siblings))
    assert f"{title}\n\n- not yet: D abort at sent, D abort at posted\n- over: late at posted" in page
