"""Planted faults, and whether the simulator finds them.

The faults live beside the tests, in `tests/mutants` of a checkout. Each is tried in a worker process of its
own; only who wants to look at one history plants one in this process (`planted`). A mutant that no seed finds
is a hole in the checkers or the world.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import kvferry
from kvferry.errors import UsageError
from kvferry.simulator.ground.options import Options
from kvferry.simulator.ground.outcome import Outcome
from kvferry.simulator.trials.batch import ENDLESS, Simulate, guarded
from kvferry.simulator.trials.processes import Lost, spread

MODULE = "tests.mutants"
SEED_SECONDS_MAX = 20.0
"""CPU time; some mutants make a history endless."""
ALIKE_MAX = 3
LIST_COLUMNS = 118
ENDLESS_MAX = 3
"""So many endless histories of one mutant are enough, even where all seeds were asked for."""


class Mutant(Protocol):
    """What `tests.mutants.MUTANTS` holds: a fault that can be planted."""

    @property
    def name(self) -> str:
        """Unique, for the command line."""
        ...

    @property
    def promise(self) -> str:
        """The promise that it breaks."""
        ...

    @property
    def what(self) -> str:
        """The fault, for people."""
        ...

    @property
    def blind(self) -> bool:
        """Planted without looking at the checkers."""
        ...

    @property
    def world(self) -> str:
        """The world whose histories can show it; empty: any."""
        ...

    @property
    def apply(self) -> Callable[[], AbstractContextManager[None]]:
        """Plants the fault into the code of this process for as long as the context lasts."""
        ...


@dataclass(frozen=True, slots=True)
class Trial:
    """One mutant, and the seeds that may find it. Pickles."""

    checkout: Path
    mutant: str
    first: int
    count: int
    options: Options
    simulate: Simulate
    found_enough: int | None = 1
    """Stop when so many seeds have found it; None runs all."""
    seed_seconds_max: float | None = SEED_SECONDS_MAX

    def __str__(self) -> str:
        """For errors."""
        return f"mutant {self.mutant}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a trial. Pickles."""

    mutant: str
    tried: int
    found: int
    first_seed: int | None
    promises: Counter[int] = field(default_factory=Counter)
    """Of how many seeds each number was the first promise broken."""
    example: str = ""
    """The first violation, in words."""
    unsound: int = 0
    """Seeds that break a promise without the mutant too; they count as not found."""
    seconds: float = 0.0
    """How long the trial took."""
    lost: str = ""
    """Why there is no verdict: the process died, or the mutant does not fit the code."""

    @property
    def survived(self) -> bool:
        """Whether it was tried, and no seed found it."""
        return self.found == 0 and not self.lost


def find_checkout(*starts: Path) -> Path:
    """The checkout that this package lies in, or else one of `starts`.

    Raises:
        UsageError: there is none, as where kvferry was installed from a wheel.
    """
    for start in (_package(), *starts):
        if place := _checkout_around(start):
            return place
    raise UsageError(
        "--mutants needs a checkout of kvferry: the planted faults live in tests/mutants beside src, which "
        "an installed kvferry does not have; clone the repository and run it there"
    )


def _checkout_around(start: Path) -> Path | None:
    for place in (start, *start.parents):
        if (place / "tests" / "mutants").is_dir() and (place / "src" / "kvferry").is_dir():
            return place
    return None


def _package() -> Path:
    return Path(kvferry.__file__).resolve().parent


def doubt_of(checkout: Path, here: Path) -> str:
    """Why mutants of this checkout may not be what somebody at `here` means, and what to do; or nothing."""
    package, around = _package(), _checkout_around(here.resolve())
    if not package.is_relative_to(checkout.resolve() / "src"):
        return (
            f"the planted faults are those of {checkout}, the kvferry that runs is {package}, "
            f"which they may not fit; set PYTHONPATH={checkout / 'src'}"
        )
    if around is not None and around != checkout.resolve():
        return (
            f"this plants faults into the kvferry of {checkout}, not of {around}, where you are; "
            f"set PYTHONPATH={around / 'src'} if you mean that"
        )
    return ""


def load(checkout: Path) -> Sequence[Mutant]:
    """All mutants of a checkout.

    Raises:
        UsageError: `tests.mutants` of another place is found first, or it holds no mutants.
    """
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    module = importlib.import_module(MODULE)
    place = Path(module.__file__ or "").resolve()
    if not place.is_relative_to(checkout.resolve()):
        raise UsageError(
            f"{MODULE} is {place}, not the one of {checkout}; remove the other one from sys.path"
        )
    mutants: Sequence[Mutant] = module.MUTANTS
    names = [mutant.name for mutant in mutants]
    if not names or len(set(names)) != len(names):
        raise UsageError(f"MUTANTS of {place} must hold mutants with names of their own")
    return mutants


def chosen(mutants: Sequence[Mutant], names: Sequence[str]) -> list[Mutant]:
    """Those with these names, in their order; all when there are no names.

    Raises:
        UsageError: a name is unknown.
    """
    known = {mutant.name: mutant for mutant in mutants}
    unknown = sorted(set(names) - set(known))
    if unknown:
        alike = difflib.get_close_matches(unknown[0], known, ALIKE_MAX)
        listed = textwrap.wrap(", ".join(sorted(known)), LIST_COLUMNS, break_on_hyphens=False)
        raise UsageError(
            f"--mutants: unknown {', '.join(unknown)}"
            + (f"; did you mean {' or '.join(alike)}? " if alike else "; ")
            + "\n  ".join(["--mutants --list says what each is. Known are", *listed])
        )
    return [known[name] for name in dict.fromkeys(names)] if names else list(mutants)


def run_trials(trials: Sequence[Trial], *, jobs: int) -> Generator[Verdict, None, None]:
    """Try each mutant in a process of its own; verdicts come as they are done. Close it to stop early."""
    with contextlib.closing(spread(try_mutant, trials, jobs=jobs, fresh=True)) as answers:
        for trial, verdict in answers:
            if isinstance(verdict, Lost):
                yield Verdict(trial.mutant, 0, 0, None, lost=verdict.why)
            else:
                yield verdict


@contextlib.contextmanager
def planted(mutant: Mutant | None) -> Iterator[None]:
    """Plant a mutant into this process, for as long as the context lasts; None plants nothing."""
    with contextlib.nullcontext() if mutant is None else mutant.apply():
        yield


def try_mutant(trial: Trial) -> Verdict:
    """Plant a mutant and run seeds until enough of them found it.

    A seed that breaks a promise without the mutant too has found nothing. Nor has one whose history did not
    end once and ends well when it is tried again.
    """
    started = time.monotonic()
    (mutant,) = chosen(load(trial.checkout), (trial.mutant,))
    promises: Counter[int] = Counter()
    first: tuple[int, str] | None = None
    seeds = iter(range(trial.first, trial.first + trial.count))
    tried = endless = unsound = 0
    while failing := _next_failing(trial, mutant, seeds):
        tried = failing.seed - trial.first + 1
        if _run(trial, failing.seed).violations:
            unsound += 1
            continue
        violation = failing.violations[0]
        promises[violation.promise] += 1
        first = first or (failing.seed, violation.what)
        endless += _is_endless(failing)
        if promises.total() == trial.found_enough or endless >= ENDLESS_MAX:
            break
    else:
        tried = trial.count
    seed, example = first or (None, "")
    seconds = time.monotonic() - started
    return Verdict(trial.mutant, tried, promises.total(), seed, promises, example, unsound, seconds)


def _next_failing(trial: Trial, mutant: Mutant, seeds: Iterator[int]) -> Outcome | None:
    with mutant.apply():
        for seed in seeds:
            outcome = _run(trial, seed)
            if _is_endless(outcome):
                outcome = _run(trial, seed)
            if outcome.violations:
                return outcome
    return None


def _is_endless(outcome: Outcome) -> bool:
    return any(violation.what.startswith(ENDLESS) for violation in outcome.violations)


def _run(trial: Trial, seed: int) -> Outcome:
    return guarded(trial.simulate, seed, trial.options, seconds_max=trial.seed_seconds_max)
