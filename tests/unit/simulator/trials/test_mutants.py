"""The planted faults fit today's code, change it, and leave nothing behind."""

from __future__ import annotations

import importlib
from types import FunctionType

import pytest

from kvferry.protocol import fences
from kvferry.protocol.consumer import ConsumerCore
from kvferry.protocol.limits import Limits
from kvferry.protocol.states import PART, PART_ENDED, PartEvent, PartState
from tests.mutants import MUTANTS
from tests.mutants.edits import ABSENT, Constant, DriftError, Edit, Item, Mutant

IDS = [mutant.name for mutant in MUTANTS]


def code_of(target: str) -> object:
    """The code object that a target has now."""
    module, _, path = target.partition(":")
    found: object = importlib.import_module(module)
    for name in path.split("."):
        found = vars(found)[name]
    if isinstance(found, property):
        found = found.fget
    elif isinstance(found, staticmethod | classmethod):
        found = found.__func__
    assert isinstance(found, FunctionType)
    return found.__code__


def value_of(target: str) -> object:
    """What a name stands for now."""
    module, _, path = target.partition(":")
    found: object = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found


def snapshot(mutant: Mutant) -> list[object]:
    """What its changes touch, as it is now."""
    now: list[object] = []
    for change in mutant.changes:
        if isinstance(change, Edit):
            now.append(code_of(change.target))
        elif isinstance(change, Item):
            table = value_of(change.target)
            assert isinstance(table, dict)
            now.append(table.get(change.key, ABSENT))
        else:
            now.append(value_of(change.target))
    return now


@pytest.mark.parametrize("mutant", MUTANTS, ids=IDS)
def test_mutant_applies_changes_code_and_restores_it(mutant: Mutant):
    """Text that has drifted away from the code is an error here, and not a survivor of a long run."""
    before = snapshot(mutant)
    with mutant.apply():
        during = snapshot(mutant)
    after = snapshot(mutant)
    assert len(before) >= 1
    assert all(then is not now for then, now in zip(before, during, strict=True))
    assert all(then is now for then, now in zip(before, after, strict=True))


def test_mutants_have_names_of_their_own_and_say_what_they_break():
    assert len(set(IDS)) == len(IDS)
    for mutant in MUTANTS:
        assert mutant.promise in set("012345678"), mutant.name
        assert mutant.what, mutant.name


def test_at_least_thirty_mutants_are_listed():
    assert sum(not mutant.blind for mutant in MUTANTS) >= 30


def mutant_of(*changes: Edit | Item | Constant) -> Mutant:
    return Mutant("sample", "1", "a sample", changes)


def test_edit_is_seen_through_a_bound_method():
    core = ConsumerCore(Limits(), 1.0, (4,))
    bound = core.next_due
    core.state.lapse_timers.set(("transfer", "consumer"), 1.0)
    sample = mutant_of(
        Edit(
            "kvferry.protocol.consumer:ConsumerCore.next_due",
            old="state.lapse_timers.next_due()",
            new="state.lapse_timers.next_due() and 2.0",
        )
    )
    with sample.apply():
        assert bound() == 2.0
    assert bound() == 1.0


def test_edit_of_a_property_is_planted():
    core = ConsumerCore(Limits(), 1.0, (4,))
    sample = mutant_of(
        Edit("kvferry.protocol.consumer:ConsumerCore.expecting", old="bool(self.state.rows)", new="True")
    )
    with sample.apply():
        assert core.expecting
    assert not core.expecting


def test_item_changes_one_entry_and_takes_it_out_again():
    key = (PartState.WRITTEN, PartEvent.TELL)
    with mutant_of(Item("kvferry.protocol.states:PART.transitions", key, PartState.TOLD)).apply():
        assert PART.next(*key) is PartState.TOLD
    assert key not in PART.transitions


def test_item_can_take_an_entry_out():
    key = (PartState.TOLD, PartEvent.WRITTEN)
    with mutant_of(Item("kvferry.protocol.states:PART.transitions", key, ABSENT)).apply():
        assert key not in PART.transitions
    assert PART.transitions[key] is PartState.WRITTEN


def test_constant_changes_where_it_was_imported_too():
    from kvferry.protocol import receptions, states

    with mutant_of(Constant("kvferry.protocol.states:PART_ENDED", lambda _: frozenset())).apply():
        assert states.PART_ENDED == receptions.PART_ENDED == frozenset()
    assert states.PART_ENDED is receptions.PART_ENDED is PART_ENDED


def test_constant_changes_an_attribute_of_an_object():
    before = PART.late
    with mutant_of(Constant("kvferry.protocol.states:PART.late", lambda _: frozenset())).apply():
        assert PART.late == frozenset()
    assert PART.late is before


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (Edit("kvferry.protocol.fences:fail", "no such text", ""), "0 times"),
        (Edit("kvferry.protocol.fences:fail", "row.state", ""), "3 times"),
        (Edit("kvferry.protocol.fences:flail", "row", ""), "has no flail"),
        (Edit("kvferry.protocol.fence:fail", "row", ""), "No module"),
        (Edit("kvferry.protocol.fences:CLOCK_DRIFT_MAX", "0.01", "0"), "is no function"),
        (
            Edit("kvferry.protocol.fences:fail", "_cancel_parts(state, row, now)", "_(state, row, now)"),
            "_ is not known",
        ),
        (
            Edit("kvferry.protocol.fences:fail", "_cancel_parts(state, row, now)", "_cancel_parts("),
            "never closed",
        ),
        (
            Edit(
                "kvferry.protocol.fences:fail",
                "_cancel_parts(state, row, now)",
                "_cancel_parts(state, row,  now)",
            ),
            "changes nothing",
        ),
        (Item("kvferry.protocol.states:PART.transitions", "nothing", ABSENT), "already"),
        (Constant("kvferry.protocol.fences:CLOCK_DRIFT_MAX", lambda drift: drift), "already"),
        (Constant("kvferry.protocol.fences:CLOCK_DRIFT", lambda drift: drift), "has no CLOCK_DRIFT"),
    ],
)
def test_drift_is_an_error_that_names_the_mutant(change: Edit | Item | Constant, text: str):
    with pytest.raises(DriftError, match=rf"mutant 'sample' .*{text}"), mutant_of(change).apply():
        pass


def test_two_edits_of_one_function_are_refused():
    """The second one is compiled from the file and would undo the first."""
    target = "kvferry.protocol.fences:fail"
    two = mutant_of(
        Edit(target, "check(state, row, now)", "None"), Edit(target, "max(granted)", "min(granted)")
    )
    with pytest.raises(DriftError, match="two edits of one function"), two.apply():
        pass


def test_what_was_planted_before_an_error_is_put_back():
    before = fences.fail.__code__
    sample = mutant_of(
        Edit("kvferry.protocol.fences:fail", "max(granted)", "min(granted)"),
        Edit("kvferry.protocol.fences:check", "no such text", ""),
    )
    with pytest.raises(DriftError), sample.apply():
        pass
    assert fences.fail.__code__ is before
