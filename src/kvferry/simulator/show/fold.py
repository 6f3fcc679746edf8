"""A story without what only repeats itself: long runs of renewals and their answers become one bar each."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.protocol import messages as msg
from kvferry.simulator.show.story import NETWORK, Arrow, Kind, Story, Stretch

ROUTINE = frozenset({msg.Renew.__name__, msg.Status.__name__})
RUN_MAX = 12
"""So many renewals and answers one after the other are drawn."""
SHOWN = 4
"""Of a longer run: so many at its beginning, and as many at its end."""


def fold(story: Story) -> None:
    """Take the middle of each long run out of a story."""
    out: list[Arrow] = []
    for run in _runs(story):
        middle = run[SHOWN:-SHOWN]
        start, stop = middle[0].start_seconds, middle[-1].start_seconds
        words = f"{len(middle):,} renewals and answers left out"
        story.stretches.append(Stretch(NETWORK, start, stop, Kind.LEFT_OUT, words, words))
        out += middle
        for stretch in story.stretches:
            if stretch.kind is Kind.PERMISSION:
                stretch.ticks = [at for at in stretch.ticks if not start < at < stop]
    gone = {id(arrow) for arrow in out}
    story.arrows = [arrow for arrow in story.arrows if id(arrow) not in gone]


def _runs(story: Story) -> Iterator[list[Arrow]]:
    """Renewals and answers that arrive, as long as nothing else happens to the transfer."""
    rest = Story(story.transfer, story.lanes, story.marks)
    rest.arrows = [arrow for arrow in story.arrows if not _is_routine(arrow)]
    rest.stretches = [stretch for stretch in story.stretches if stretch.kind is not Kind.PERMISSION]
    breaks = rest.instants()
    run: list[Arrow] = []
    for arrow in sorted(filter(_is_routine, story.arrows), key=lambda one: one.start_seconds):
        while breaks and breaks[0] <= arrow.start_seconds:
            breaks.pop(0)
            if len(run) > RUN_MAX:
                yield run
            run = []
        run.append(arrow)
    if len(run) > RUN_MAX:
        yield run


def _is_routine(arrow: Arrow) -> bool:
    return arrow.label in ROUTINE and arrow.stop_seconds is not None
