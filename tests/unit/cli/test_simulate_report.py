"""What `kvferry simulate` says while it runs: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import io
import shlex

import pytest

from kvferry.cli import simulate_replay
from kvferry.cli.main import main
from kvferry.cli.simulate_report import (
    Progress,
    count_words,
    failure_lines,
    finding_lines,
    last_line,
    number_words,
    ordinal,
    range_words,
    replay_command,
    shrunk_lines,
)
from kvferry.simulator.ground.options import Options
from kvferry.simulator.ground.outcome import Outcome, Violation, findings
from kvferry.simulator.trials.shrink import Shrunk


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["pipe", "terminal"])
def test_it_tells_how_far_it_is_and_how_long_it_takes(stream: io.StringIO) -> None:
    clock = Clock()
    progress = Progress(2000, "seed", stream=stream, clock=clock)
    clock.now += 20.0
    progress.update(500, "0 violations")
    assert "500 of 2,000 seeds, 0 violations, 20 s, 60 s left" in stream.getvalue()


def test_without_a_terminal_there_is_a_line_every_ten_seconds() -> None:
    clock, stream = Clock(), io.StringIO()
    progress = Progress(100, "seed", stream=stream, clock=clock)
    for second in range(1, 26):
        clock.now = 100.0 + second
        progress.update(second, "x")
    progress.clear()
    assert stream.getvalue().splitlines() == [
        "10 of 100 seeds, x, 10 s, 90 s left",
        "20 of 100 seeds, x, 20 s, 80 s left",
    ]


def test_what_is_left_is_not_told_before_the_pace_says_something() -> None:
    clock, stream = Clock(), Terminal()
    progress = Progress(1, "mutant", stream=stream, clock=clock)
    clock.now += 1.0
    progress.update(1, "x")
    assert stream.getvalue().endswith("] 1 of 1 mutant, x, 1 s")
    progress = Progress(100, "seed", stream=stream, clock=clock)
    clock.now += 1.0
    progress.update(19, "x")
    assert stream.getvalue().endswith("] 19 of 100 seeds, x, 1 s")
    clock.now += 1.0
    progress.update(20, "x")
    assert stream.getvalue().endswith("] 20 of 100 seeds, x, 2 s, 8 s left")
    clock.now += 10.0
    progress.update(1, "x")
    assert " s left" in stream.getvalue().rpartition("1 of 100")[2]
    clock.now += 10.0
    progress.update(100, "x")
    assert stream.getvalue().rstrip().endswith("] 100 of 100 seeds, x, 22 s")


def test_places_have_their_endings() -> None:
    numbers = (1, 2, 3, 4, 10, 11, 12, 13, 21, 22, 101, 111, 1012, 1023)
    assert [ordinal(number) for number in numbers] == [
        *("1st", "2nd", "3rd", "4th", "10th", "11th", "12th", "13th", "21st", "22nd", "101st", "111th"),
        *("1,012th", "1,023rd"),
    ]


def test_on_a_terminal_the_bar_grows_in_place_and_can_be_taken_away() -> None:
    clock, stream = Clock(), Terminal()
    progress = Progress(4, "seed", stream=stream, clock=clock)
    for done in range(5):
        progress.update(done, "x")
        clock.now += 1.0
    text = stream.getvalue()
    assert "\n" not in text
    bars = [part.partition("]")[0].strip("[") for part in text.split("\r") if part]
    assert [bar.count("#") for bar in bars] == [0, 6, 12, 18, 24]
    progress.clear()
    assert stream.getvalue()[len(text) :].strip() == ""
    assert stream.getvalue().endswith("\r")


def test_a_terminal_is_not_redrawn_too_often() -> None:
    clock, stream = Clock(), Terminal()
    progress = Progress(1000, "seed", stream=stream, clock=clock)
    for done in range(1000):
        clock.now += 0.001
        progress.update(done, "x")
    assert stream.getvalue().count("\r") <= 11


def test_a_shorter_bar_leaves_nothing_of_the_longer_one() -> None:
    clock, stream = Clock(), Terminal()
    progress = Progress(10, "seed", stream=stream, clock=clock)
    progress.update(1, "a very long text")
    clock.now += 1.0
    progress.update(2, "x")
    first, second = stream.getvalue().split("\r")[1:]
    assert len(second) >= len(first)


# --- commands -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (Options(), "kvferry simulate --replay 7 --world small"),
        (Options(world="tall", faults=frozenset()), "kvferry simulate --replay 7 --world tall --faults none"),
        (
            Options(faults=frozenset({"crash", "abort"}), drop=frozenset({5, 3, 4, 9})),
            "kvferry simulate --replay 7 --world small --faults abort,crash --drop 3-5,9",
        ),
    ],
)
def test_a_replay_command_means_the_same_options(
    monkeypatch: pytest.MonkeyPatch, options: Options, words: str
) -> None:
    assert replay_command(7, options) == words
    asked: list[tuple[int, Options]] = []

    def replay(namespace: object, chosen: Options) -> int:
        asked.append((namespace.replay, chosen))
        return 0

    monkeypatch.setattr(simulate_replay, "replay", replay)
    assert main(shlex.split(words)[1:]) == 0
    assert asked == [(7, options)]


def test_numbers_are_short() -> None:
    assert number_words([]) == ""
    assert number_words({11, 1, 2, 3, 7, 10}) == "1-3,7,10-11"


def test_what_is_missing_at_the_end_is_told_so() -> None:
    outcome = Outcome(4, (Violation(7, float("inf"), "a block is missing"),), "", 1, 1.0, 1)
    assert failure_lines(outcome, Options())[0] == "seed 4: promise 7 at the end: a block is missing"


def test_one_hang_is_one_finding_and_what_follows_is_counted() -> None:
    hang = Violation(6, 3.0, "kvferry/P0/i1/pp0/tp0 never reported", unfinished=True)
    left = [Violation(7, float("inf"), f"left over: {number}", unfinished=True) for number in range(8)]
    outcome = Outcome(4, (hang, Violation(6, 4.0, "x", unfinished=True), *left), "", 1, 1.0, 1)
    assert failure_lines(outcome, Options()) == [
        "seed 4: promise 6 from 3.000000 s to the end: P0/i1/tp0 never reported",
        "    and what else is unfinished then: 1 of promise 6, 8 of promise 7",
        "    kvferry simulate --replay 4 --world small",
    ]
    (finding,) = findings(outcome.violations)
    lines = finding_lines(finding, "", consequences_max=2)
    assert lines[2:] == [
        "        promise 6 from 4.000000 s to the end: x",
        "        promise 7 at the end: left over: 0",
        "        and 7 more; --verbose names them",
    ]
    assert len(finding_lines(finding, "", consequences_max=9)) == 11


@pytest.mark.parametrize(
    ("before", "items", "told"),
    [
        (0, (), "seed 4: it broke before its first request or fault, so there is nothing to leave out"),
        (
            12,
            (),
            "seed 4: it still breaks with all 12 requests and faults left out. What remains always happens",
        ),
        (12, ((3, "x"),), "seed 4: 1 of its 12 requests and faults are enough (5 runs)"),
    ],
)
def test_what_could_be_left_out_is_told_in_words(
    before: int, items: tuple[tuple[int, str], ...], told: str
) -> None:
    outcome = Outcome(4, (Violation(2, 1.0, "x"),), "", 1, 1.0, 1, items=items)
    shrunk = Shrunk(
        outcome, Options(drop=frozenset(range(before)) - {3} if items else frozenset()), before, 5
    )
    lines = shrunk_lines(shrunk)
    assert lines[0].startswith(told)
    if before:
        assert lines[-1].startswith("    kvferry simulate --replay 4 --world small")


def test_ranges_and_counts_are_readable() -> None:
    assert range_words([range(4), range(5, 6), range(8, 10)]) == "0-3,5,8-9"
    assert (count_words(1, "seed"), count_words(1234, "seed")) == ("1 seed", "1,234 seeds")
    assert (
        last_line("PASSED", "6 seeds", "", "0 violations", seconds=1.25)
        == "PASSED: 6 seeds, 0 violations, 1.2 s"
    )


def test_many_violations_of_one_seed_are_counted() -> None:
    outcome = Outcome(4, tuple(Violation(number, 1.0, "x") for number in range(6)), "", 1, 1.0, 1)
    lines = failure_lines(outcome, Options())
    assert len(lines) == 5
    assert lines[3:] == ["seed 4: and 3 more violations", "    kvferry simulate --replay 4 --world small"]
