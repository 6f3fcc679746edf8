"""The picture: well-formed, everything of the story in it, time to scale but for what is marked as cut."""

from __future__ import annotations

import re
from itertools import combinations, pairwise
from xml.etree import ElementTree

import pytest

from kvferry.simulator.ground.outcome import Violation
from kvferry.simulator.show.picture import GUTTER, MARGIN, NOTES_MAX, QUIET_SHARE_MAX, WIDTH, Scale, draw
from kvferry.simulator.show.story import Kind, Lane, Mark, Story
from kvferry.simulator.show.timeline import story
from tests.support.sample_history import OURS, RENEWALS, hanging, one_transfer

NAMESPACE = "{http://www.w3.org/2000/svg}"
BAD = story(
    one_transfer(fails=True), OURS, [Violation(2, 29.0, "transfer-1 landed in <freed> blocks & more")]
)

HANGING = story(hanging(), OURS)


def parsed(told: Story) -> ElementTree.Element:
    return ElementTree.fromstring(draw(told, "seed 7 of the small world"))


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{NAMESPACE}text")]


def notes(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{NAMESPACE}title")]


def test_it_names_its_lanes_its_transfer_and_its_signs() -> None:
    shown = texts(parsed(BAD))
    assert {lane.title for lane in BAD.lanes} <= set(shown)
    assert {kind.value for kind in Kind} <= set(shown)
    assert "seed 7 of the small world" in shown
    assert any(text.startswith("transfer transfer-1; 0 ms is 2.000000 s") for text in shown)


def test_everything_of_the_story_is_in_it() -> None:
    shown = "\n".join(notes(parsed(BAD)))
    things = [*BAD.marks, *BAD.stretches, *BAD.arrows]
    missing = {thing.note for thing in things if thing.note not in shown}
    # They were there long before the transfer.
    assert missing == {"P0 starts", "D0 starts"}


def test_faults_and_violations_are_numbered_and_explained() -> None:
    root = parsed(BAD)
    shown = texts(root)
    listed = [text for text in shown if text.startswith(("error on one rank", "message_lost", "promise"))]
    assert listed == [
        "error on one rank: post 2 breaks",
        "message_lost: Failed, P0/0 to D0/0",
        "promise 2: transfer-1 landed in <freed> blocks & more",
    ]
    assert {"1", "2", "3"} <= set(shown)


def test_it_says_how_many_notes_are_left_out() -> None:
    marks = [Mark(None, 1.0 + number, Kind.FAULT, "", f"fault {number}") for number in range(NOTES_MAX + 3)]
    shown = texts(parsed(Story(OURS, [Lane("router", "router")], marks=marks)))
    assert "and 3 more" in shown
    assert f"fault {NOTES_MAX - 1}" in shown
    assert f"fault {NOTES_MAX}" not in shown


def test_nothing_is_drawn_outside() -> None:
    root = parsed(BAD)
    height = float(root.attrib["height"])
    for element in root.iter():
        for name, most in (("x", WIDTH), ("x1", WIDTH), ("x2", WIDTH), ("y", height), ("y1", height)):
            value = float(element.attrib.get(name, 0))
            assert 0 <= value <= most, element.attrib


@pytest.mark.parametrize("told", [BAD, HANGING], ids=["bad", "hanging"])
def test_labels_do_not_cover_each_other(told: Story) -> None:
    """Of marks, arrows and bars alike; letters of this size are about 4.5 wide and 7 high."""
    boxes = [
        (float(element.attrib["x"]), float(element.attrib["y"]), element.text or "")
        for element in parsed(told).iter(f"{NAMESPACE}text")
        if element.attrib["font-size"] == "9" and element.attrib["text-anchor"] == "start"
    ]
    assert len(boxes) > 20
    for (x, y, text), (other_x, other_y, other) in combinations(boxes, 2):
        beside = x + 4.5 * len(text) <= other_x or other_x + 4.5 * len(other) <= x
        assert beside or abs(y - other_y) >= 7, (text, other)


def test_no_line_goes_over_a_label_of_an_arrow() -> None:
    order = [element.tag.removeprefix(NAMESPACE) for element in parsed(HANGING).iter()]
    haloed = [
        index
        for index, element in enumerate(parsed(HANGING).iter())
        if element.tag == f"{NAMESPACE}text" and element.attrib.get("paint-order")
    ]
    lines = [index for index, tag in enumerate(order) if tag == "circle"]
    assert max(lines) < min(haloed)


def test_what_was_left_out_is_written_beside_its_bar() -> None:
    assert f"{2 * RENEWALS - 8} renewals and answers left out" in texts(parsed(HANGING))


def test_a_violation_keeps_its_number_where_a_fault_is_close() -> None:
    marks = [Mark(None, 1.0, Kind.FAULT, "", "fault"), Mark(None, 1.0, Kind.VIOLATION, "", "violation")]
    ticks = [Mark("router", at, Kind.COMMAND, "", "x") for at in (0.0, 2.0)]
    root = parsed(Story(OURS, [Lane("router", "router")], marks=[*marks, *ticks]))
    numbers = [
        element.text
        for element in root.iter(f"{NAMESPACE}text")
        if element.attrib["font-weight"] == "700" and element.attrib["text-anchor"] == "middle"
    ]
    assert numbers == ["2"]


def test_a_story_without_an_instant_is_a_picture_too() -> None:
    assert "router" in texts(parsed(Story(OURS, [Lane("router", "router")])))


# --- the scale ------------------------------------------------------------------------------------

LEFT, RIGHT = GUTTER, WIDTH - MARGIN


def test_even_times_are_to_scale() -> None:
    scale = Scale([1.0, 1.01, 1.03, 1.04], LEFT, RIGHT)
    assert scale.cuts == []
    assert [scale(at) for at in (1.0, 1.01, 1.02, 1.04)] == pytest.approx(
        [LEFT, LEFT + (RIGHT - LEFT) / 4, LEFT + (RIGHT - LEFT) / 2, RIGHT]
    )


def test_quiet_times_are_cut_and_marked() -> None:
    lively = [number / 1000 for number in range(20)]
    scale = Scale([*lively, *(30 + at for at in lively), 90.0], LEFT, RIGHT)
    assert [start for start, _, _ in scale.cuts] == [0.019, 30.019]
    cut = sum(right - left for _, left, right in scale.cuts)
    assert cut == pytest.approx((RIGHT - LEFT) * QUIET_SHARE_MAX)
    assert scale(90.0) == pytest.approx(RIGHT)


def test_time_never_runs_back() -> None:
    times = [0.0, 0.001, 0.0011, 0.5, 7.0, 7.0001, 40.0]
    scale = Scale(times, LEFT, RIGHT)
    places = [scale(number / 100) for number in range(-10, 4100)]
    assert places == sorted(places)
    assert (places[0], places[-1]) == pytest.approx((LEFT, RIGHT))


def test_ticks_leave_room_for_their_labels() -> None:
    places = [x for _, x in Scale([number / 1000 for number in range(500)], LEFT, RIGHT).ticks()]
    assert len(places) > 10
    assert min(after - before for before, after in pairwise(places)) >= 62


def test_only_what_is_between_the_ends_is_covered() -> None:
    scale = Scale([1.0, 2.0], LEFT, RIGHT)
    assert [scale.covers(at) for at in (0.9, 1.0, 2.0, 2.1)] == [False, True, True, False]


def test_times_are_told_in_milliseconds_from_the_first_event() -> None:
    ticks = [
        (float(element.attrib["x"]), float((element.text or "").replace(",", "")))
        for element in parsed(BAD).iter(f"{NAMESPACE}text")
        if element.attrib["fill"] == "#555" and re.fullmatch(r"[\d,.]+", element.text or "")
    ]
    assert ticks == sorted(ticks)
    assert ticks[0] == (pytest.approx(GUTTER + 8), 0.0)
    seconds = BAD.instants()[-1] - BAD.instants()[0]
    assert 0.5 * seconds < ticks[-1][1] / 1e3 <= seconds + 0.001


def test_a_fault_within_a_quiet_time_has_its_number_too() -> None:
    """What was left out is written close to where the numbers stand."""
    marks = [Mark("router", at, Kind.COMMAND, "", "x") for at in (0.0, 0.002, 0.004, 9.0, 9.002)]
    marks.append(Mark(None, 4.502, Kind.FAULT, "", "crash", ours=False))
    told = Story(OURS, [Lane("router", "router")], marks=marks)
    assert Scale(told.instants(), LEFT, RIGHT).cuts != []
    bold = [
        element.text
        for element in parsed(told).iter(f"{NAMESPACE}text")
        if element.attrib["font-weight"] == "700" and element.attrib["text-anchor"] == "middle"
    ]
    assert bold == ["1"]
