"""Counts the transitions of the protocol's four state machines while a history runs."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvferry.protocol.states import DELIVERY, PART, RECEPTION, SOURCE, Table
from kvferry.simulator.ground.outcome import TransitionKey

MACHINES: tuple[tuple[str, Table[Any, Any]], ...] = (
    ("source", SOURCE),
    ("delivery", DELIVERY),
    ("reception", RECEPTION),
    ("part", PART),
)


def _pairs() -> tuple[TransitionKey, ...]:
    listed: list[TransitionKey] = []
    for machine, table in MACHINES:
        pairs = {*table.transitions, *table.late}
        listed += sorted((machine, state.value, event.value) for state, event in pairs)
    return tuple(listed)


PAIRS = _pairs()
"""Every pair that the tables list, the late ones that change nothing included."""


_ONE_RANK = "needs several producer ranks for one consumer rank, as in the worlds `mixed` and `groups`"
_UNASKED = "a producer fences nothing that it was not asked to"
_HOST_ORDER = "a host computes nothing for a request that it has ended"
_REASONS: dict[str, tuple[str, ...]] = {
    _HOST_ORDER: ("source abandoned advance", "source held advance"),
    "a prompt has a token at least, and without an advance its end is an abandonment": (
        "source queued finish",
    ),
    _UNASKED: ("part asked cancelled", "part offered cancelled"),
    _ONE_RANK: (
        *(
            f"part {state} {event}"
            for state in ("written", "failed", "cancelled", "lost")
            for event in ("written", "failed", "cancelled")
            if (state, event) != ("failed", "failed")
        ),
        *(f"part {state} offer" for state in ("fetched", "failed", "cancelled")),
        *(f"part fetched {event}" for event in ("failed", "cancelled")),
    ),
}
_REASON_OF = {pair: reason for reason, pairs in _REASONS.items() for pair in pairs}
IMPOSSIBLE: dict[TransitionKey, str] = {
    pair: _REASON_OF[" ".join(pair)] for pair in PAIRS if " ".join(pair) in _REASON_OF
}
"""Listed pairs that no history of these worlds can take, each with its reason."""


@contextmanager
def recording() -> Iterator[dict[TransitionKey, int]]:
    """Count every transition from here on, by machine, state and event.

    A pair that no table lists is an error of a peer and is not counted. May be nested.
    """
    counts: dict[TransitionKey, int] = {}
    before: list[Any] = []
    for machine, table in MACHINES:
        before.append(vars(table).get("next"))
        # The instance's own attribute goes before the method; the product's modules all hold the instance.
        vars(table)["next"] = _counted(machine, table.next, counts)
    try:
        yield counts
    finally:
        for (_, table), earlier in zip(MACHINES, before, strict=True):
            if earlier is None:
                del vars(table)["next"]
            else:
                vars(table)["next"] = earlier


def _counted(
    machine: str, following: Callable[[Any, Any], Any], counts: dict[TransitionKey, int]
) -> Callable[[enum.Enum, enum.Enum], Any]:
    def next_state(state: enum.Enum, event: enum.Enum) -> Any:
        after = following(state, event)
        key = (machine, state._value_, event._value_)
        counts[key] = counts.get(key, 0) + 1
        return after

    return next_state


def unvisited(counts: dict[TransitionKey, int]) -> tuple[TransitionKey, ...]:
    """The listed pairs that could be taken and never were, in the tables' order."""
    return tuple(pair for pair in PAIRS if pair not in counts and pair not in IMPOSSIBLE)
