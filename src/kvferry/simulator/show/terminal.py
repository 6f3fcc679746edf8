"""What many histories have visited, as tables for a terminal: transitions, and the grid stage x fault."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from kvferry.simulator.ground.outcome import CellKey, TransitionKey
from kvferry.simulator.show.table import MACHINES, Grid, listed

COLUMNS_MAX = 160
"""So wide the tables are at most, as long as counts have nine digits or fewer."""
HEADING_COLUMNS = 12
GAP = "  "
IMPOSSIBLE = "-"
UNBROKEN = "\xa0"
"""Stands for a space where no line may end, until lines are made."""


def tables(transitions: Mapping[TransitionKey, int], cells: Mapping[CellKey, int], grid: Grid) -> list[str]:
    """Both tables as lines; what was not visited is named, and what happened though it cannot."""
    lines = [*_transitions(transitions), "", *_cells(cells, grid)]
    lines += [f"{IMPOSSIBLE}: impossible, --verbose says why"] if grid.impossible else []
    for fault, stages in grid.unvisited_by_fault(cells).items():
        lines.append(f"not visited: {fault} at {_stages(fault, stages, grid)}")
    lines += [f"called impossible, and visited: {fault} at {stage}" for stage, fault in grid.disproved(cells)]
    return lines


def _transitions(transitions: Mapping[TransitionKey, int]) -> list[str]:
    rows = [("machine", "visited", "not visited")]
    for name in MACHINES:
        pairs = listed(name)
        left = [words.replace(" ", UNBROKEN) for key, words in pairs.items() if not transitions.get(key)]
        rows.append((name, f"{len(pairs) - len(left)} of {len(pairs)}", ", ".join(left) or "none"))
    width, visited = (max(len(row[column]) for row in rows) for column in (0, 1))
    lines: list[str] = []
    for name, count, left_words in rows:
        head = f"{name:<{width}}{GAP}{count:>{visited}}{GAP}"
        lines += textwrap.wrap(
            head + left_words, COLUMNS_MAX, subsequent_indent=" " * len(head), break_on_hyphens=False
        )
    return [line.replace(UNBROKEN, " ") for line in lines]


def _cells(cells: Mapping[CellKey, int], grid: Grid) -> list[str]:
    first = max(len("fault"), *map(len, grid.faults))
    headings = [textwrap.wrap(stage, HEADING_COLUMNS, break_long_words=False) for stage in grid.stages]
    shown = {
        (stage, fault): _cell(cells, grid, (stage, fault)) for stage in grid.stages for fault in grid.faults
    }
    widths = [
        max(*map(len, heading), *(len(shown[stage, fault]) for fault in grid.faults))
        for stage, heading in zip(grid.stages, headings, strict=True)
    ]
    height = max(map(len, headings))
    # Headings stand on the row below them.
    padded = [[""] * (height - len(heading)) + heading for heading in headings]
    rows = [["fault" if row == height - 1 else "", *(one[row] for one in padded)] for row in range(height)]
    rows += [[fault, *(shown[stage, fault] for stage in grid.stages)] for fault in grid.faults]
    return [_row(row, first, widths) for row in rows]


def _stages(fault: str, unvisited: Sequence[str], grid: Grid) -> str:
    """Those that were not visited, by name; or, where that is shorter, those that were."""
    visited = [
        stage for stage in grid.stages if stage not in unvisited and (stage, fault) not in grid.impossible
    ]
    if len(visited) >= len(unvisited):
        return " / ".join(unvisited)
    return f"every stage but {' / '.join(visited)}" if visited else "every stage"


def _row(words: Sequence[str], first: int, widths: Sequence[int]) -> str:
    counts = (f"{word:>{width}}" for word, width in zip(words[1:], widths, strict=True))
    return GAP.join((f"{words[0]:<{first}}", *counts)).rstrip()


def _cell(cells: Mapping[CellKey, int], grid: Grid, cell: CellKey) -> str:
    times = cells.get(cell, 0)
    return IMPOSSIBLE if cell in grid.impossible and not times else f"{times:,}"
