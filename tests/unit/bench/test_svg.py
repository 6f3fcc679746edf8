"""A picture in fewer bytes is the same picture."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from kvferry.bench.svg import slim

LINE = '<path d="M 1.23456 2\nL 3.5 4.999999" clip-path="url(#p1)" style="fill: none; stroke: #111111"/>'
LABEL = (
    '<text style="font-size: 10px; font-family: \'A B\', sans-serif; fill: #222222" x="1.1" '
    'transform="rotate(-0 1.1 2)">two  words</text>'
)
TURNED = '<text style="fill: #222222" transform="rotate(-90 1.1 2)">p50</text>'
PICTURE = (
    '<svg role="img" xmlns="http://www.w3.org/2000/svg"><g>\n <g><g/></g>\n'
    f'<g id="kept" clip-path="url(#p1)">{LINE}</g><g>{LINE}\n{LINE}{LABEL}</g>{TURNED}</g></svg>'
)


def attributes(picture: str) -> list[tuple[str, dict[str, str]]]:
    """Every drawn element with what makes its look, classes resolved."""
    root = ElementTree.fromstring(picture)
    rules = dict(re.findall(r"\.([\w-]+)\{([^}]*)\}", picture))
    found = []
    for element in root.iter():
        kind = element.tag.split("}")[1]
        if kind in {"path", "text"}:
            looks = dict(element.attrib)
            looks["style"] = looks.get("style") or rules[looks.pop("class")]
            found.append((kind, looks | {"text": element.text or ""}))
    return found


def test_what_is_drawn_stays_with_its_look() -> None:
    before, after = attributes(PICTURE), attributes(slim(PICTURE, "a"))
    assert [kind for kind, _ in after] == [kind for kind, _ in before]
    line, label, turned = after[0][1], after[3][1], after[4][1]
    assert line == {
        "d": "M 1.23 2 L 3.5 5.00",
        "clip-path": "url(#p1)",
        "style": "fill: none; stroke: #111111",
        "text": "",
    }
    assert label == {"style": "font-size: 10px; fill: #222222", "x": "1.1", "text": "two  words"}
    assert turned["transform"] == "rotate(-90 1.1 2)"


def test_what_is_said_again_and_again_is_said_once() -> None:
    small = slim(PICTURE, "a")
    assert small.count("stroke: #111111") == 1
    assert small.count("<g") == 2, "the group that does something is left, and the one around it"
    assert "font-family" not in small


def test_pictures_of_one_page_do_not_share_styles() -> None:
    names = [set(re.findall(r'class="([^"]*)"', slim(PICTURE, name))) for name in ("a", "b")]
    assert names[0]
    assert not names[0] & names[1]
