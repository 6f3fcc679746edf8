"""The progress bar, on a terminal and elsewhere."""

from __future__ import annotations

import io

from kvferry.cli.progress import Progress


class Clock:
    """Time that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_time_left_follows_from_the_pace() -> None:
    clock = Clock()
    progress = Progress(10, "cells", stream=io.StringIO(), clock=clock)
    assert progress.seconds_left() is None
    clock.now += 30
    progress.advance(2)
    assert progress.seconds_left() == 120
    assert progress.line() == "[######........................] 2 of 10 cells, 2 min 00 s left"


def test_before_there_is_a_pace_the_estimate_counts_down() -> None:
    clock = Clock()
    progress = Progress(10, "cells", estimate_seconds=50.0, stream=io.StringIO(), clock=clock)
    clock.now += 20
    assert progress.seconds_left() == 30
    clock.now += 100
    assert progress.seconds_left() == 0


def test_the_bar_is_full_at_the_end_and_not_longer() -> None:
    progress = Progress(2, "cells", stream=io.StringIO(), clock=Clock())
    progress.advance(3)
    assert progress.line().startswith(f"[{'#' * 30}] 3 of 2 cells, 0 s left")
    assert Progress(0, "cells", stream=io.StringIO()).line().startswith(f"[{'#' * 30}]")


def test_a_terminal_has_one_line_that_rewrites_itself() -> None:
    stream, clock = Terminal(), Clock()
    with Progress(2, "cells", stream=stream, clock=clock) as progress:
        progress.doing("warming up")
        for _ in range(5):
            clock.now += 0.01
            progress.advance(0.1)
        progress.say("an engine was slow")
    text = stream.getvalue()
    # Updates that come faster than anybody reads are left out.
    assert text.count("\r\x1b[K[") == 2
    assert "warming up" in text
    assert "\r\x1b[Kan engine was slow\n" in text
    assert text.endswith("\n")


def test_elsewhere_lines_come_seldom() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress(100, "cells", stream=stream, clock=clock) as progress:
        for _ in range(61):
            clock.now += 1
            progress.advance()
    lines = stream.getvalue().splitlines()
    assert [line.partition("]")[2].partition(" of")[0].strip() for line in lines] == ["1", "31", "61", "61"]
    assert "\r" not in stream.getvalue()
