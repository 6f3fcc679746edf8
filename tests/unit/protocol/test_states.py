"""The transition tables: the full product of states and events, stated a second time as pictures.

Goal: no transition appears, disappears or changes its target unnoticed. Method: each table is written here
as a grid, one row per state and one column per event, and compared cell by cell. A cell is the next state,
`-` for a late event that changes nothing, or `!` for what only a broken peer (or host) can cause.
"""

from __future__ import annotations

import enum
import itertools
from typing import Any

import pytest

from kvferry.errors import PeerError
from kvferry.protocol.states import (
    DELIVERY,
    DELIVERY_ENDED,
    PART,
    PART_ENDED,
    RECEPTION,
    SOURCE,
    DeliveryEvent,
    DeliveryState,
    PartEvent,
    PartState,
    ReceptionEvent,
    ReceptionState,
    SourceEvent,
    SourceState,
    Table,
)

SOURCE_GRID = """
            expect    advance     finish  abandon    end
unknown     queued    !           !       !          ended
queued      !         computing   held    abandoned  !
computing   !         computing   held    abandoned  !
held        !         -           !       abandoned  ended
abandoned   !         -           !       !          ended
ended       !         !           !       !          !
"""
DELIVERY_GRID = """
            register    complete  ask    offer  fetched  lapse   cancel     stop      drained_failed
announced   registered  !         asked  !      !        !       stopping   stopping  !
registered  -           written   !      !      !        !       stopping   stopping  !
asked       !           !         -      lent   !        !       stopping   stopping  !
lent        !           !         -      !      fetched  !       cancelled  recalled  !
recalled    !           !         -      !      fetched  failed  failed     -         !
stopping    -           written   !      !      !        !       stopping   -         failed
written     !           !         !      !      !        !       !          !         !
failed      !           !         !      !      !        !       !          !         !
cancelled   !           !         !      !      !        !       !          !         !
fetched     !           !         !      !      !        !       !          !         !

            drained_cancelled
announced   !
registered  !
asked       !
lent        !
recalled    !
stopping    cancelled
written     !
failed      !
cancelled   !
fetched     !
"""
RECEPTION_GRID = """
             receive  complete  fail     fenced  give_up      end
announced    waiting  !         !        !       !            ended
waiting      !        ended     failing  !       !            !
failing      !        !         -        ended   quarantined  !
quarantined  !        !         -        ended   !            !
ended        !        !         !        !       !            !
"""
PART_GRID = """
           tell  ask    offer    fetched  stop       drained    written  failed    cancelled  lost
untold     told  asked  !        !        !          !          !        failed    cancelled  !
told       told  !      !        !        !          !          written  failed    cancelled  lost
asked      !     asked  offered  !        cancelled  !          !        failed    cancelled  !
offered    !     !      -        fetched  draining   !          !        draining  draining   !
draining   !     !      -        !        -          cancelled  !        -         -          !
written    !     !      !        !        !          !          -        -         -          !
fetched    !     !      -        !        !          !          !        -         -          !
failed     !     !      -        !        !          !          -        -         -          !
cancelled  !     !      -        !        !          !          -        -         -          !
lost       !     !      !        !        !          !          -        -         -          !
"""
MACHINES = {
    "source": (SOURCE, SourceState, SourceEvent, SOURCE_GRID, SourceState.UNKNOWN),
    "delivery": (DELIVERY, DeliveryState, DeliveryEvent, DELIVERY_GRID, DeliveryState.ANNOUNCED),
    "reception": (RECEPTION, ReceptionState, ReceptionEvent, RECEPTION_GRID, ReceptionState.ANNOUNCED),
    "part": (PART, PartState, PartEvent, PART_GRID, PartState.UNTOLD),
}
Grid = dict[tuple[str, str], str]


def read_grid(text: str) -> Grid:
    """A grid that is too wide for a line goes on below, after an empty one."""
    grid: Grid = {}
    for piece in text.strip("\n").split("\n\n"):
        header, *rows = piece.splitlines()
        events = header.split()
        for row in rows:
            state, *cells = row.split()
            assert len(cells) == len(events), row
            grid.update({(state, event): cell for event, cell in zip(events, cells, strict=True)})
    return grid


def cell(table: Table[Any, Any], state: enum.Enum, event: enum.Enum) -> str:
    try:
        following = table.next(state, event)
    except PeerError:
        return "!"
    return "-" if (state, event) in table.late else str(following.value)


@pytest.mark.parametrize("name", MACHINES)
def test_every_pair_of_state_and_event(name: str) -> None:
    """G08: whatever arrives in whatever state has a defined outcome."""
    table, states, events, text, _ = MACHINES[name]
    found = {
        (state.value, event.value): cell(table, state, event)
        for state, event in itertools.product(states, events)
    }
    assert found == read_grid(text)


@pytest.mark.parametrize("name", MACHINES)
def test_a_pair_is_a_transition_or_late_not_both(name: str) -> None:
    table = MACHINES[name][0]
    assert not table.late & table.transitions.keys()
    for state, event in table.late:
        assert table.next(state, event) is state


@pytest.mark.parametrize("name", MACHINES)
def test_every_state_can_be_reached_and_every_end_from_every_state(name: str) -> None:
    table, states, _, _, first = MACHINES[name]
    following: dict[Any, set[Any]] = {state: set() for state in states}
    for (state, _), after in table.transitions.items():
        following[state].add(after)

    def reachable(start: Any) -> set[Any]:
        found, todo = {start}, [start]
        while todo:
            todo += fresh if (fresh := list(following[todo.pop()] - found)) else []
            found.update(fresh)
        return found

    assert reachable(first) == set(states)
    ends = {state for state in states if not following[state]}
    assert ends
    for state in states:
        assert reachable(state) & ends, f"{state} never ends"


def test_ended_sets_are_the_states_without_a_way_on() -> None:
    assert {state for (state, _) in DELIVERY.transitions} == set(DeliveryState) - DELIVERY_ENDED
    assert {state for (state, _) in PART.transitions} == set(PartState) - PART_ENDED


def test_an_impossible_pair_is_named() -> None:
    with pytest.raises(PeerError, match="complete is not possible in state announced"):
        DELIVERY.next(DeliveryState.ANNOUNCED, DeliveryEvent.COMPLETE)
