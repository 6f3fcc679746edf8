"""What a history came to, in words and as findings."""

from __future__ import annotations

import math

from kvferry.simulator.ground.outcome import Finding, Violation, broken_words, findings, plain

OWED = Violation(6, 3.0, "P0 never reported, owed since 3", unfinished=True)
LATER = Violation(6, 4.0, "D0 never reported, owed since 4", unfinished=True)
ENDS = Violation(6, 1.0, "a request has never ended", unfinished=True)
LEFT = Violation(7, math.inf, "left over", unfinished=True)
WRITE = Violation(2, 5.0, "a late write")


def test_what_is_unfinished_is_one_finding_told_by_what_is_owed_for_longest() -> None:
    """A request began before anything was owed to it, and says less."""
    assert findings((WRITE, LEFT, LATER, ENDS, OWED)) == (Finding(WRITE), Finding(OWED, (LATER, ENDS, LEFT)))


def test_where_nothing_is_owed_the_first_that_has_not_ended_tells_it() -> None:
    assert findings((LEFT, ENDS)) == (Finding(ENDS, (LEFT,)),)
    assert findings((LEFT,)) == (Finding(LEFT),)


def test_other_violations_are_findings_of_their_own() -> None:
    assert findings((WRITE, WRITE)) == (Finding(WRITE), Finding(WRITE))
    assert findings(()) == ()


def test_names_of_ranks_are_short_for_people() -> None:
    told = "kvferry/P0/i1/pp0/tp1 wrote to kvferry/D1/i2/pp0/tp0, not to kvferry"
    assert plain(told) == "P0/i1/tp1 wrote to D1/i2/tp0, not to kvferry"


def test_an_error_is_no_promise() -> None:
    assert [broken_words(number) for number in (0, 6)] == ["an error", "promise 6"]
