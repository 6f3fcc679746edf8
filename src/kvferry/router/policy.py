"""Which worker serves next: pure choices over their loads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

Policy = Callable[[Sequence[int], int, Random], int]
"""`(loads, turn, chance)` -> index into loads.

`loads` are legs in flight and never empty; `turn` counts choices.
"""


def round_robin(loads: Sequence[int], turn: int, chance: Random) -> int:
    """One after the other."""
    del chance
    return turn % len(loads)


def at_random(loads: Sequence[int], turn: int, chance: Random) -> int:
    """Any, each as likely."""
    del turn
    return chance.randrange(len(loads))


def least_load(loads: Sequence[int], turn: int, chance: Random) -> int:
    """The one with the fewest requests in flight; equals take turns."""
    del chance
    least = min(loads)
    equals = [index for index, load in enumerate(loads) if load == least]
    return equals[turn % len(equals)]


def power_of_two(loads: Sequence[int], turn: int, chance: Random) -> int:
    """The less loaded of two picked at random."""
    del turn
    if len(loads) == 1:
        return 0
    first, second = chance.sample(range(len(loads)), 2)
    return first if loads[first] <= loads[second] else second


POLICIES: dict[str, Policy] = {
    "round_robin": round_robin,
    "random": at_random,
    "least_load": least_load,
    "power_of_two": power_of_two,
}
