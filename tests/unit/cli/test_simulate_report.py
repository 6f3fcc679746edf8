"""What `kvferry simulate` says while it runs: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import io
import shlex

import pytest

from kvferry.cli import simulate
from kvferry.cli.main import main
from kvferry.cli.simulate_report import Progress, failure_lines, number_words, replay_command
from kvferry.simulator.ground.options import Options
from kvferry.simulator.ground.outcome import Outcome, Violation


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
    progress = Progress(2000, "seeds", stream=stream, clock=clock)
    clock.now += 20.0
    progress.update(500, "0 violations")
    assert "500 of 2,000 seeds, 0 violations, 20 s, 60 s left" in stream.getvalue()


def test_without_a_terminal_there_is_a_line_every_ten_seconds() -> None:
    clock, stream = Clock(), io.StringIO()
    progress = Progress(100, "seeds", stream=stream, clock=clock)
    for second in range(1, 26):
        clock.now = 100.0 + second
        progress.update(second, "x")
    progress.clear()
    assert stream.getvalue().splitlines() == [
        "10 of 100 seeds, x, 10 s, 90 s left",
        "20 of 100 seeds, x, 20 s, 80 s left",
    ]


def test_on_a_terminal_the_bar_grows_in_place_and_can_be_taken_away() -> None:
    clock, stream = Clock(), Terminal()
    progress = Progress(4, "seeds", stream=stream, clock=clock)
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
    progress = Progress(1000, "seeds", stream=stream, clock=clock)
    for done in range(1000):
        clock.now += 0.001
        progress.update(done, "x")
    assert stream.getvalue().count("\r") <= 11


def test_a_shorter_bar_leaves_nothing_of_the_longer_one() -> None:
    clock, stream = Clock(), Terminal()
    progress = Progress(10, "seeds", stream=stream, clock=clock)
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

    monkeypatch.setattr(simulate, "_replay", replay)
    assert main(shlex.split(words)[1:]) == 0
    assert asked == [(7, options)]


def test_numbers_are_short() -> None:
    assert number_words([]) == ""
    assert number_words({11, 1, 2, 3, 7, 10}) == "1-3,7,10-11"


def test_what_is_missing_at_the_end_is_told_so() -> None:
    outcome = Outcome(4, (Violation(7, float("inf"), "a block is missing"),), "", 1, 1.0, 1)
    assert failure_lines(outcome, Options())[0] == "seed 4: promise 7 at the end: a block is missing"


def test_many_violations_of_one_seed_are_counted() -> None:
    outcome = Outcome(4, tuple(Violation(number, 1.0, "x") for number in range(6)), "", 1, 1.0, 1)
    lines = failure_lines(outcome, Options())
    assert len(lines) == 5
    assert lines[3:] == ["seed 4: and 3 more violations", "    kvferry simulate --replay 4 --world small"]
