"""Whose turn it is."""

from __future__ import annotations

from kvferry.protocol.turns import CONSIDERED_MAX, SHARED_EVERY, Turns


def served(turns: Turns[str], left: dict[str, int], slices: int) -> list[str]:
    """Who gets the next slices, when each takes one token of what is left of its transfer."""
    order = []
    for _ in range(slices):
        if not turns.ready:
            break
        name = turns.choose(left.__getitem__)
        turns.take()
        order.append(name)
        left[name] -= 1
        if not left[name]:
            del turns.ready[name]
    return order


def test_the_one_with_least_left_comes_first() -> None:
    turns: Turns[str] = Turns()
    turns.ready.update(dict.fromkeys(["long", "short"]))
    assert served(turns, {"long": 8, "short": 2}, 3) == ["short", "short", "long"]


def test_of_two_alike_the_older_one_ends_first() -> None:
    turns: Turns[str] = Turns()
    turns.ready.update(dict.fromkeys(["older", "newer"]))
    order = served(turns, {"older": 3, "newer": 3}, 6)
    assert order[:3] == ["older"] * 3


def test_who_waits_behind_ever_new_short_ones_gets_each_fourth_slice() -> None:
    turns: Turns[str] = Turns()
    left = {"long": 100}
    turns.ready["long"] = None
    order: list[str] = []
    for number in range(40):
        left[f"short {number}"] = 1
        turns.ready[f"short {number}"] = None
        order += served(turns, left, 1)
    assert order[SHARED_EVERY - 1] == "long"
    assert order.count("long") > 2


def test_no_more_than_a_bounded_number_is_looked_at() -> None:
    turns: Turns[int] = Turns()
    turns.ready.update(dict.fromkeys(range(10 * CONSIDERED_MAX)))
    looked_at: list[int] = []

    def left(name: int) -> int:
        looked_at.append(name)
        return -name

    assert turns.choose(left) == CONSIDERED_MAX - 1
    assert len(looked_at) == CONSIDERED_MAX


def test_slices_are_counted() -> None:
    turns: Turns[int] = Turns(in_flight=2)
    turns.take()
    assert (turns.in_flight, turns.taken) == (3, 1)
