"""Whose turn it is among the transfers that one peer is written to for, or read from."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, TypeVar

SHARED_EVERY = 4
"""Each fourth slice goes to who has waited longest, however much is left of it."""
CONSIDERED_MAX = 64
"""Of those that wait only so many are looked at for the one with least left, so that a turn costs little."""


Name = TypeVar("Name", bound=Hashable)


@dataclass(slots=True)
class Turns(Generic[Name]):
    """Who may have a slice, and how many are in flight.

    The one with the fewest tokens left comes first. Where the way is full, several that take equal turns all
    end late, each as late as the last of them; one after another all but the last end sooner, and a short one
    does not wait for the whole of a long one either. So that nobody waits for ever behind others that have
    less left, each fourth turn is that of the one who has waited longest.
    """

    ready: OrderedDict[Name, None] = field(default_factory=OrderedDict)
    in_flight: int = 0
    taken: int = 0
    """Slices so far."""

    def choose(self, left: Callable[[Name], int]) -> Name:
        """Who comes next of those that are ready, at least one; `left` says how many tokens one has left."""
        first = next(iter(self.ready))
        if len(self.ready) == 1:
            return first
        if self.taken % SHARED_EVERY == SHARED_EVERY - 1:
            self.ready.move_to_end(first)
            return first
        return min(islice(self.ready, CONSIDERED_MAX), key=left)

    def take(self) -> None:
        """The chosen one has posted a slice."""
        self.taken += 1
        self.in_flight += 1
