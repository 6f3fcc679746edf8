"""Planted faults: tried in processes of their own, counted as they are found."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import kvferry
from kvferry.errors import UsageError
from kvferry.simulator.ground.options import Options
from kvferry.simulator.ground.outcome import Outcome, Violation
from kvferry.simulator.trials import mutation
from kvferry.simulator.trials.batch import ENDLESS
from kvferry.simulator.trials.mutation import (
    Trial,
    Verdict,
    chosen,
    find_checkout,
    load,
    planted,
    run_trials,
    try_mutant,
)
from tests.support import fake_simulation as fake

pytestmark = pytest.mark.timeout(120)
"""Processes: so long only where something hangs; a loaded machine is slow."""

MUTANTS = '''
"""Planted into the fake simulation."""
import contextlib
from dataclasses import dataclass
from tests.support import fake_simulation as fake

@contextlib.contextmanager
def plant():
    fake.PLANTED.append("a planted fault")
    try:
        yield
    finally:
        fake.PLANTED.clear()

@contextlib.contextmanager
def nothing():
    yield

@dataclass(frozen=True)
class Mutant:
    name: str
    promise: str
    what: str
    blind: bool
    apply: object

MUTANTS = (
    Mutant("planted", "4", "two writes at once", False, plant),
    Mutant("harmless", "2", "changes nothing", True, nothing),
)
'''
ROOT = Path(__file__).parents[4]


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Path]:
    """A checkout with two mutants; the modules and the path are as before afterwards."""
    (tmp_path / "src" / "kvferry").mkdir(parents=True)
    (tmp_path / "tests" / "mutants").mkdir(parents=True)
    (tmp_path / "tests" / "mutants" / "__init__.py").write_text(MUTANTS)
    before = {name: module for name, module in sys.modules.items() if name.startswith("tests.mutants")}
    path = list(sys.path)
    for name in before:
        del sys.modules[name]
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("tests.mutants")]:
        del sys.modules[name]
    sys.modules.update(before)
    sys.path[:] = path


def trial(checkout: Path, mutant: str, count: int = 12, **changes: object) -> Trial:
    plain = Trial(checkout, mutant, 0, count, Options(), fake.simulate, seed_seconds_max=None)
    return replace(plain, **changes)


def test_a_mutant_is_found_by_the_first_seed_that_breaks(checkout: Path) -> None:
    verdict = try_mutant(trial(checkout, "planted"))
    assert (verdict.tried, verdict.found, verdict.first_seed) == (6, 1, 5)
    assert (verdict.promises, verdict.example) == ({4: 1}, "found a planted fault")
    assert not verdict.survived
    assert fake.PLANTED == []


def test_every_seed_is_tried_when_asked(checkout: Path) -> None:
    verdict = try_mutant(trial(checkout, "planted", found_enough=None))
    assert (verdict.tried, verdict.found, verdict.first_seed) == (12, 6, 5)


def failing_anyway(seed: int, options: Options, **keywords: object) -> Outcome:
    """Seed 6 breaks promise 1 with and without a mutant."""
    if seed == 6:
        return Outcome(seed, (Violation(1, 0.0, "always"),), "", 1, 1.0, 1)
    return fake.simulate(seed, options, **keywords)


def test_a_seed_that_fails_without_the_mutant_has_not_found_it(checkout: Path) -> None:
    harmless = try_mutant(trial(checkout, "harmless", 7, simulate=failing_anyway))
    assert (harmless.tried, harmless.found, harmless.unsound, harmless.survived) == (7, 0, 1, True)
    planted = trial(checkout, "planted", 9, simulate=failing_anyway, found_enough=2)
    verdict = try_mutant(replace(planted, first=5, count=7))
    # Seed 7 fails without it, too: it is the fake's own.
    assert (verdict.tried, verdict.found, verdict.unsound) == (4, 2, 2)
    assert verdict.first_seed == 5


def test_a_mutant_that_makes_histories_endless_does_not_take_for_ever(checkout: Path) -> None:
    verdict = try_mutant(trial(checkout, "planted", found_enough=None, simulate=endless))
    assert (verdict.tried, verdict.found, verdict.first_seed) == (5, 3, 0)


def endless(seed: int, options: Options, **_: object) -> Outcome:
    """Every second seed is said not to have ended."""
    violation = Violation(0, 0.0, f"{ENDLESS} 20 s of CPU time")
    return Outcome(seed, (violation,) if fake.PLANTED and not seed % 2 else (), "", 1, 1.0, 1)


def test_a_history_that_ends_on_a_second_try_has_found_nothing(checkout: Path) -> None:
    TRIES.clear()
    verdict = try_mutant(trial(checkout, "planted", 4, simulate=endless_once))
    assert (verdict.tried, verdict.found, verdict.survived) == (4, 0, True)
    assert TRIES == {0: 2, 1: 2, 2: 2, 3: 2}


TRIES: Counter[int] = Counter()
"""How often each seed ran with a mutant."""


def endless_once(seed: int, options: Options, **_: object) -> Outcome:
    """Each seed is said not to have ended, the first time."""
    TRIES[seed] += bool(fake.PLANTED)
    violation = Violation(0, 0.0, f"{ENDLESS} 20 s of CPU time")
    once = fake.PLANTED and TRIES[seed] == 1
    return Outcome(seed, (violation,) if once else (), "", 1, 1.0, 1)


def test_a_mutant_that_no_seed_finds_survives(checkout: Path) -> None:
    verdict = try_mutant(trial(checkout, "harmless", 7))
    assert (verdict.tried, verdict.found, verdict.first_seed, verdict.survived) == (7, 0, None, True)


def test_each_mutant_has_a_process_of_its_own(checkout: Path) -> None:
    """One after the other: a fault that stayed planted would be found for the next one too."""
    trials = [trial(checkout, name, 7) for name in ("planted", "harmless", "planted")]
    verdicts = list(run_trials(trials, jobs=1))
    assert [(verdict.mutant, verdict.found) for verdict in verdicts] == [
        ("planted", 1),
        ("harmless", 0),
        ("planted", 1),
    ]
    assert fake.PLANTED == []


def test_a_mutant_whose_process_dies_has_no_verdict_and_the_others_have(checkout: Path) -> None:
    """One that does not fit the code raises, which is told with it."""
    unknown = trial(checkout, "gone", 7)
    dying = replace(trial(checkout, "harmless", 7), simulate=fake.dying)
    verdicts = {
        one.mutant: one for one in run_trials([dying, unknown, trial(checkout, "planted", 7)], jobs=1)
    }
    assert verdicts["harmless"].lost == "a worker process ended with exit code 9"
    assert "UsageError: --mutants: unknown gone" in verdicts["gone"].lost
    assert verdicts["planted"].found == 1
    assert [one.survived for one in verdicts.values()] == [False, False, False]


def test_a_mutant_can_be_planted_here_to_look_at_a_history(checkout: Path) -> None:
    (mutant,) = chosen(load(checkout), ("planted",))
    with planted(mutant):
        assert fake.simulate(6, Options()).violations[0].what == "found a planted fault"
    with planted(None):
        assert fake.simulate(6, Options()).violations == ()


def test_the_checkout_is_found_from_the_package_and_then_from_below(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_checkout(tmp_path.parent) == ROOT
    # Mutants fit the code that they are planted into: the package's own come first.
    assert find_checkout(checkout / "src" / "kvferry") == ROOT
    monkeypatch.setattr(kvferry, "__file__", str(tmp_path / "site-packages" / "kvferry" / "__init__.py"))
    assert find_checkout(checkout / "src" / "kvferry") == checkout


def test_without_a_checkout_it_says_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvferry, "__file__", str(tmp_path / "site-packages" / "kvferry" / "__init__.py"))
    with pytest.raises(UsageError, match=r"needs a checkout of kvferry: .* clone the repository"):
        find_checkout(tmp_path)


def test_mutants_of_another_place_are_refused(checkout: Path, tmp_path: Path) -> None:
    load(checkout)
    elsewhere = tmp_path / "elsewhere"
    with pytest.raises(UsageError, match=r"tests\.mutants is .*, not the one of .*elsewhere"):
        load(elsewhere)


@pytest.mark.parametrize("listed", ["MUTANTS = ()", "MUTANTS = MUTANTS * 2"])
def test_mutants_need_names_of_their_own(checkout: Path, listed: str) -> None:
    with (checkout / "tests" / "mutants" / "__init__.py").open("a") as file:
        file.write(listed)
    with pytest.raises(UsageError, match="must hold mutants with names of their own"):
        load(checkout)


def test_mutants_are_chosen_by_name(checkout: Path) -> None:
    mutants = load(checkout)
    assert [one.name for one in chosen(mutants, ())] == ["planted", "harmless"]
    assert [one.name for one in chosen(mutants, ("harmless", "harmless"))] == ["harmless"]
    with pytest.raises(UsageError, match=r"unknown x; .* Known are\n  harmless, planted"):
        chosen(mutants, ("planted", "x"))


def test_a_verdict_without_a_find_is_a_survivor() -> None:
    assert Verdict("x", 3, 0, None).survived
    assert not Verdict("x", 3, 1, 0).survived
    assert mutation.MODULE == "tests.mutants"
