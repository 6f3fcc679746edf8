"""What many histories have visited, as Markdown: transitions of the machines, and the grid stage x fault.

What was not visited is named, and so is what cannot be, with its reason.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.protocol.states import DELIVERY, PART, RECEPTION, SOURCE, Table
from kvferry.simulator.ground.outcome import CellKey, TransitionKey
from kvferry.simulator.watch.coverage import IMPOSSIBLE

MACHINES: Mapping[str, Table[Any, Any]] = {
    "source": SOURCE,
    "delivery": DELIVERY,
    "reception": RECEPTION,
    "part": PART,
}

NAMED_MAX = 24
"""Up to so many of what was not visited are named in one line."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Stages and faults that histories shall combine, and the cells where that cannot be."""

    stages: Sequence[str]
    faults: Sequence[str]
    impossible: Mapping[CellKey, str]
    by_sibling: Mapping[CellKey, str] = field(default_factory=dict)
    """Cells that count for a request whose transfer was hit by way of another of its requests, and why."""

    def of_faults(self, faults: Collection[str]) -> Grid:
        """The part of it that has these faults."""
        return Grid(
            self.stages,
            [fault for fault in self.faults if fault in faults],
            {cell: why for cell, why in self.impossible.items() if cell[1] in faults},
            {cell: why for cell, why in self.by_sibling.items() if cell[1] in faults},
        )

    def unvisited(self, cells: Mapping[CellKey, int]) -> list[CellKey]:
        """Cells that are possible and were not visited, in the grid's order."""
        return [cell for cell in self._all() if cell not in self.impossible and not cells.get(cell)]

    def unvisited_by_fault(self, cells: Mapping[CellKey, int]) -> dict[str, list[str]]:
        """The same, as stages of each fault."""
        stages: dict[str, list[str]] = {fault: [] for fault in self.faults}
        for stage, fault in self.unvisited(cells):
            stages[fault].append(stage)
        return {fault: unvisited for fault, unvisited in stages.items() if unvisited}

    def disproved(self, cells: Mapping[CellKey, int]) -> list[CellKey]:
        """Cells that are called impossible and were visited."""
        return [cell for cell in self._all() if cell in self.impossible and cells.get(cell)]

    def _all(self) -> Iterator[CellKey]:
        return ((stage, fault) for stage in self.stages for fault in self.faults)


def coverage(
    transitions: Mapping[TransitionKey, int], cells: Mapping[CellKey, int], grid: Grid, *, histories: str
) -> str:
    """The whole page. `histories` tells what was run, in words."""
    tables = [_machine_table(name, machine, transitions) for name, machine in MACHINES.items()]
    parts = [f"# Coverage of {histories}", overview(transitions, cells, grid), "## Every transition", *tables]
    return "\n\n".join(parts) + "\n"


def overview(transitions: Mapping[TransitionKey, int], cells: Mapping[CellKey, int], grid: Grid) -> str:
    """How many transitions were visited, and the grid; what was not visited by name."""
    parts = [
        "## Transitions",
        _transition_summary(transitions),
        "## Stages and faults",
        _grid_summary(cells, grid),
        _grid_table(cells, grid),
        _grid_notes(cells, grid),
    ]
    return "\n\n".join(part for part in parts if part)


def summary(transitions: Mapping[TransitionKey, int], cells: Mapping[CellKey, int], grid: Grid) -> str:
    """The page's figures in one line."""
    keys = [key for name in MACHINES for key in listed(name)]
    visited = sum(bool(transitions.get(key)) for key in keys)
    possible = len(grid.stages) * len(grid.faults) - len(grid.impossible)
    missing = len(grid.unvisited(cells))
    return (
        f"coverage: {visited} of {len(keys)} transitions, late events included, "
        f"{possible - missing} of {possible} possible cells ({len(grid.impossible)} impossible)"
    )


def listed(name: str) -> dict[TransitionKey, str]:
    """What a machine can take, in words: its transitions, and late events, which change nothing."""
    machine = MACHINES[name]
    kinds = (("", list(machine.transitions)), (" (late)", _late(machine)))
    return {key: f"{key[1]} + {key[2]}{kind}" for kind, pairs in kinds for key in _possible(name, pairs)}


def missing(transitions: Mapping[TransitionKey, int], cells: Mapping[CellKey, int], grid: Grid) -> list[str]:
    """What was not visited: a line for transitions, one for cells; by name where that is not too much."""
    pairs = [
        f"{name} {words}"
        for name in MACHINES
        for key, words in listed(name).items()
        if not transitions.get(key)
    ]
    named = [f"{fault} at {' / '.join(stages)}" for fault, stages in grid.unvisited_by_fault(cells).items()]
    count = len(grid.unvisited(cells))
    lines = [_left("transitions", len(pairs), pairs), _left("grid's cells", count, named)]
    return [line for line in lines if line]


def _left(what: str, count: int, names: Sequence[str]) -> str:
    if not count:
        return ""
    named = "; ".join(names) if count <= NAMED_MAX else "--verbose names them, and more seeds visit more"
    return f"not visited: {count:,} of the {what}: {named}"


# --- transitions ----------------------------------------------------------------------------------


def _keys(
    name: str, pairs: Mapping[tuple[Any, Any], object] | Sequence[tuple[Any, Any]]
) -> Iterator[TransitionKey]:
    return ((name, state.value, event.value) for state, event in pairs)


def _possible(
    name: str, pairs: Mapping[tuple[Any, Any], object] | Sequence[tuple[Any, Any]]
) -> Iterator[TransitionKey]:
    return (key for key in _keys(name, pairs) if key not in IMPOSSIBLE)


def _late(machine: Table[Any, Any]) -> list[tuple[Any, Any]]:
    """A set has no order of its own."""
    return sorted(machine.late, key=lambda pair: (_place(pair[0]), _place(pair[1])))


def _place(member: enum.Enum) -> int:
    return list(type(member)).index(member)


def _transition_summary(transitions: Mapping[TransitionKey, int]) -> str:
    rows = ["| machine | transitions | visited | late events | visited |", "| --- | --- | --- | --- | --- |"]
    missing: dict[str, list[str]] = {}
    for name, machine in MACHINES.items():
        cells: list[str] = []
        for kind, pairs in (("", list(machine.transitions)), (" (late)", _late(machine))):
            keys = list(_possible(name, pairs))
            unvisited = [key for key in keys if not transitions.get(key)]
            cells += [str(len(keys)), str(len(keys) - len(unvisited))]
            if unvisited:
                missing.setdefault(name, []).extend(
                    f"{state} + {event}{kind}" for _, state, event in unvisited
                )
        rows.append(f"| {name} | {' | '.join(cells)} |")
    named = _named("Not visited:", missing) or "Every one was visited."
    disproved = [" ".join(key) for key in IMPOSSIBLE if transitions.get(key)]
    parts = (
        "\n".join(rows),
        named,
        _named("Impossible, and not counted above:", _impossible()),
        _named("Called impossible and visited:", {key: ["it happens"] for key in disproved}),
    )
    return "\n\n".join(part for part in parts if part)


def _impossible() -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for (machine, state, event), reason in IMPOSSIBLE.items():
        groups.setdefault(reason, []).append(f"{machine} {state} + {event}")
    return groups


def _named(title: str, groups: Mapping[str, Sequence[str]]) -> str:
    """A list with a line per group; nothing when there is none."""
    lines = [f"- {group}: {', '.join(members)}" for group, members in groups.items()]
    return "\n".join([title, "", *lines]) if lines else ""


def _machine_table(name: str, machine: Table[Any, Any], transitions: Mapping[TransitionKey, int]) -> str:
    rows = [f"### {name}", "", "| state | event | next | times |", "| --- | --- | --- | --- |"]
    late = [(pair, pair[0]) for pair in _late(machine)]
    for (state, event), following in [*machine.transitions.items(), *late]:
        key = name, state.value, event.value
        times = transitions.get(key, 0)
        shown = "n/a" if key in IMPOSSIBLE and not times else f"{times:,}"
        then = "late: stays" if machine.transitions.get((state, event)) is None else following.value
        rows.append(f"| {state.value} | {event.value} | {then} | {shown} |")
    return "\n".join(rows)


# --- the grid -------------------------------------------------------------------------------------


def _grid_summary(cells: Mapping[CellKey, int], grid: Grid) -> str:
    total = len(grid.stages) * len(grid.faults)
    unvisited = len(grid.unvisited(cells))
    impossible = len(grid.impossible)
    return (
        f"{total} cells: {total - unvisited - impossible} visited, {unvisited} not visited, "
        f"{impossible} impossible (n/a)."
    )


def _grid_table(cells: Mapping[CellKey, int], grid: Grid) -> str:
    rows = [
        f"| fault | {' | '.join(grid.stages)} |",
        f"| --- |{' --- |' * len(grid.stages)}",
    ]
    for fault in grid.faults:
        row = [_cell(cells, grid, (stage, fault)) for stage in grid.stages]
        rows.append(f"| {fault} | {' | '.join(row)} |")
    return "\n".join(rows)


def _cell(cells: Mapping[CellKey, int], grid: Grid, cell: CellKey) -> str:
    times = cells.get(cell, 0)
    if cell in grid.impossible:
        return f"n/a, yet {times:,}" if times else "n/a"
    return f"{times:,}" if times else "**0**"


def _grid_notes(cells: Mapping[CellKey, int], grid: Grid) -> str:
    reasons = [f"- {stage}, {fault}: {why}" for (stage, fault), why in grid.impossible.items()]
    parts = [
        _named("Not visited:", _by_stage(grid.unvisited(cells))),
        "\n".join(["Impossible:", "", *reasons]) if reasons else "",
        _named("Where the fault hits another consumer request of the same transfer:", _by_reason(grid)),
        _named("Called impossible and visited:", _by_stage(grid.disproved(cells))),
    ]
    return "\n\n".join(part for part in parts if part)


def _by_reason(grid: Grid) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for (stage, fault), why in grid.by_sibling.items():
        groups.setdefault(why, []).append(f"{fault} at {stage}")
    return groups


def _by_stage(cells: Sequence[CellKey]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for stage, fault in cells:
        groups.setdefault(stage, []).append(fault)
    return groups
