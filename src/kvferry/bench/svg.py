"""Makes matplotlib's SVG small enough for a page with many plots: a third of it, and nothing to see of that.

The page gives all text its font. Half of what matplotlib writes repeats a style, names a font for each
label, or says more digits than a screen has.
"""

from __future__ import annotations

import re
from collections import Counter

_LONG_NUMBER = re.compile(r"\d+\.\d{3,}")
_FONT = re.compile(r" ?font-family: [^;\"]*;?")
_NO_ROTATION = re.compile(r' transform="rotate\(-0 [^)]*\)"')
_EMPTY_GROUP = re.compile(r"<g/>|<g></g>")
_PLAIN_GROUP = re.compile(r"<g>((?:(?!</?g\b).)*)</g>", re.DOTALL)
_STYLE = re.compile(r' style="([^"]*)"')
_REPEATED_MIN = 3


def slim(element: str, name: str) -> str:
    """The same picture in fewer bytes; `name` keeps its styles apart from those of other pictures."""
    text = _LONG_NUMBER.sub(lambda found: f"{float(found[0]):.2f}", element)
    text = _NO_ROTATION.sub("", _FONT.sub("", text))
    text = re.sub(r">\s+<", "><", text)
    before = ""
    while text != before:
        before = text
        text = _PLAIN_GROUP.sub(r"\1", _EMPTY_GROUP.sub("", text))
    return _with_classes(text, name)


def _with_classes(text: str, name: str) -> str:
    """Styles that are used several times, as classes."""
    counted = Counter(_STYLE.findall(text))
    classes = {
        style: f"{name}-{number}"
        for number, (style, count) in enumerate(counted.items())
        if count >= _REPEATED_MIN
    }
    if not classes:
        return text
    text = _STYLE.sub(
        lambda found: f' class="{classes[found[1]]}"' if found[1] in classes else found[0], text
    )
    rules = "".join(f".{label}{{{style}}}" for style, label in classes.items())
    return re.sub(r"(<svg\b[^>]*>)", rf"\1<style>{rules}</style>", text, count=1)
