"""Faults to plant into the protocol and the agent, each of which the simulator must find.

`kvferry simulate --mutants` runs them; see `edits` for how one is planted. Run nothing else in a process in
which one is planted.
"""

from __future__ import annotations

import importlib
import importlib.util

from tests.mutants.breaker import BREAKER
from tests.mutants.breaker_watch import BREAKER_WATCH
from tests.mutants.edits import Mutant
from tests.mutants.listed import LISTED

__all__ = ["MUTANTS", "Mutant"]


def _blind() -> tuple[Mutant, ...]:
    if importlib.util.find_spec("tests.mutants.blind") is None:
        return ()
    found: tuple[Mutant, ...] = importlib.import_module("tests.mutants.blind").BLIND
    return found


MUTANTS: tuple[Mutant, ...] = (*LISTED, *BREAKER, *BREAKER_WATCH, *_blind())
