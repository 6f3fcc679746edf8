"""A story as a picture: SVG, without a library.

Time runs to the right, in milliseconds from the transfer's first event. Quiet times are cut short: a band
tells how much was left out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from kvferry.simulator.show.story import Arrow, Kind, Mark, Story, Stretch

WIDTH = 1400
GUTTER, MARGIN = 110, 24
TOP = 122
LABEL_ROWS, LABEL_HEIGHT = 3, 12
BAR_HEIGHT, BAR_ROWS_MAX = 13, 24
QUIET_GAPS = 8
"""A time without an event is quiet when it is so many times longer than is usual in the story."""
QUIET_SHARE_MAX = 0.4
"""All quiet times together get at most this share of the width."""
NOTES_MAX = 30

COLOURS = {
    Kind.REQUEST: "#8796a8",
    Kind.COMMAND: "#444444",
    Kind.RESULT: "#0b7a75",
    Kind.LEASE: "#a9cf8f",
    Kind.PERMISSION: "#e3d26f",
    Kind.REGISTRATION: "#9cc4e8",
    Kind.QUARANTINE: "#f0a868",
    Kind.POST: "#3b6fb5",
    Kind.BROKEN_POST: "#d98880",
    Kind.ASKS: "#6a3fa0",
    Kind.ANSWERS: "#2e7d32",
    Kind.LEFT_OUT: "#c9ccd1",
    Kind.DEADLINE: "#1f4fd2",
    Kind.FAULT: "#d21f1f",
    Kind.VIOLATION: "#8b0000",
}


class Scale:
    """Seconds to pixels, with quiet times cut short."""

    def __init__(self, instants: Sequence[float], left: float, right: float) -> None:
        self.times = list(instants) or [0.0]
        gaps = [later - sooner for sooner, later in zip(self.times, self.times[1:], strict=False)]
        most = _longest_gap(gaps)
        self.cuts: list[tuple[float, float, float]] = []
        """Start in seconds, and both ends in pixels, of each time that was cut short."""
        total = sum(min(gap, most) for gap in gaps) or 1.0
        self._places = [left]
        for at, gap in zip(self.times, gaps, strict=False):
            self._places.append(self._places[-1] + (right - left) * min(gap, most) / total)
            if gap > most:
                self.cuts.append((at, self._places[-2], self._places[-1]))

    def __call__(self, at: float) -> float:
        """The place of an instant; beyond the ends it stays at the end."""
        index = bisect_right(self.times, at) - 1
        if index < 0 or index >= len(self.times) - 1:
            return self._places[0 if index < 0 else -1]
        start, stop = self.times[index], self.times[index + 1]
        share = (at - start) / (stop - start)
        return self._places[index] + share * (self._places[index + 1] - self._places[index])

    def after(self, at: float) -> float:
        """The next instant after one of them."""
        return self.times[bisect_right(self.times, at)]

    def covers(self, at: float) -> bool:
        """Whether an instant is between the ends."""
        return self.times[0] <= at <= self.times[-1]

    def ticks(self) -> Iterator[tuple[float, float]]:
        """Instants worth a label, and their places, not too close to each other."""
        last = -1e9
        for at in self.times:
            if self(at) - last >= 62:
                last = self(at)
                yield at, last


def _longest_gap(gaps: Sequence[float]) -> float:
    """The length above which a gap is cut, such that quiet times leave room for the others."""
    telling = sorted(gap for gap in gaps if gap > 1e-3)
    usual = telling[len(telling) // 3] if telling else 0.0
    quiet = [gap for gap in gaps if gap > QUIET_GAPS * usual]
    lively = sum(gaps) - sum(quiet)
    room = lively * QUIET_SHARE_MAX / (1 - QUIET_SHARE_MAX)
    if not quiet or sum(quiet) <= room:
        return max(gaps, default=0.0)
    return max(room / len(quiet), 4 * usual)


@dataclass(slots=True)
class _Row:
    """Where a lane lies."""

    top: float
    line: float
    """The height at which marks stand and arrows end."""
    bottom: float


class _Space:
    """Room for labels: what would cover another one is left out, its tooltip stays."""

    def __init__(self) -> None:
        self._taken: list[tuple[float, float, float, float]] = []

    def take(self, x: float, y: float, text: str) -> bool:
        """Whether a text that starts at `x` above `y` fits."""
        box = (x - 2, y - 9, x + 5.7 * len(text) + 3, y + 2)
        if box[2] > WIDTH - 2:
            return False
        for left, top, right, bottom in self._taken:
            if left < box[2] and box[0] < right and top < box[3] and box[1] < bottom:
                return False
        self._taken.append(box)
        return True


def draw(story: Story, title: str) -> str:
    """The SVG text."""
    return _Picture(story, title).text()


class _Picture:
    def __init__(self, story: Story, title: str) -> None:
        self._story = story
        self._title = title
        self._scale = Scale(story.instants(), GUTTER + 8, WIDTH - MARGIN)
        self._space = _Space()
        self._parts: list[str] = []
        self._rows: dict[str, _Row] = {}
        self._bars: list[tuple[Stretch, float]] = []
        noted = (mark for mark in story.marks if mark.lane is None and self._scale.covers(mark.at_seconds))
        self._notes = sorted(noted, key=lambda mark: mark.at_seconds)
        self._bottom = self._lay_out()

    def text(self) -> str:
        self._lanes()
        self._axis()
        for bar, y in self._bars:
            self._bar(bar, y)
        self._through()
        for arrow in self._story.arrows:
            self._arrow(arrow)
        for mark in self._story.marks:
            if mark.lane is not None and self._scale.covers(mark.at_seconds):
                self._mark(mark, self._rows[mark.lane])
        # Last, so that no line goes over a label, and marks have the first choice of places.
        for arrow in self._story.arrows:
            self._arrow_label(arrow)
        height = self._legend_and_notes()
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
            f'height="{height:.0f}" font-family="system-ui, DejaVu Sans, sans-serif" font-size="10">'
        )
        return "\n".join([head, _box(0, 0, WIDTH, height, "#ffffff"), *self._parts, "</svg>"]) + "\n"

    # --- where things are ------------------------------------------------------------------------

    def _lay_out(self) -> float:
        y = float(TOP)
        for lane in self._story.lanes:
            bars = [bar for bar in self._story.stretches if bar.lane == lane.name]
            rows = _rows_of(bars, self._scale)
            line = y + 4 + LABEL_ROWS * LABEL_HEIGHT
            if not any(mark.lane == lane.name for mark in self._story.marks):
                line = y + 10
            first = line + 8
            self._bars += [(bar, first + BAR_HEIGHT * row) for bar, row in zip(bars, rows, strict=True)]
            bottom = first + BAR_HEIGHT * (max(rows, default=-1) + 1) + 4
            self._rows[lane.name] = _Row(y, line, bottom)
            y = bottom
        return y

    def _lanes(self) -> None:
        for index, lane in enumerate(self._story.lanes):
            row = self._rows[lane.name]
            shade = "#f5f6f8" if index % 2 else "#fcfcfd"
            self._parts += [
                _box(0, row.top, WIDTH, row.bottom - row.top, shade),
                _text(8, row.line + 4, lane.title, size=12, weight="600"),
                _line(GUTTER, row.line, WIDTH - MARGIN, row.line, "#c5cad1"),
            ]

    def _axis(self) -> None:
        zero = self._scale.times[0]
        for start, left, right in sorted(
            self._scale.cuts, key=lambda cut: cut[0] - self._scale.after(cut[0])
        ):
            after = self._scale.after(start)
            self._parts.append(_box(left, TOP, right - left, self._bottom - TOP, "#e4e6ea", opacity=0.7))
            left_out = f"{_milliseconds(after - start)} ms"
            if self._space.take((left + right) / 2 - 2.9 * len(left_out), TOP - 18, left_out):
                middle = _text((left + right) / 2, TOP - 18, left_out, fill="#888", anchor="middle")
                self._parts.append(middle)
        for at, x in self._scale.ticks():
            label = _milliseconds(at - zero)
            self._parts += [
                _line(x, TOP - 4, x, self._bottom, "#dde0e5"),
                _text(x, TOP - 6, label, fill="#555", anchor="middle"),
            ]
        self._parts.append(_text(8, TOP - 6, "ms", fill="#555"))

    # --- what is in it ---------------------------------------------------------------------------

    def _bar(self, bar: Stretch, y: float) -> None:
        left = self._scale(bar.start_seconds)
        stop = self._scale.times[-1] if bar.stop_seconds is None else bar.stop_seconds
        right = max(self._scale(stop), left + 2)
        parts = [_box(left, y, right - left, BAR_HEIGHT - 3, COLOURS[bar.kind], radius=2)]
        if bar.stop_seconds is None:
            parts.append(_text(right - 4, y + 8, "→", fill="#222", anchor="end"))
        for tick in bar.ticks:
            x = self._scale(tick)
            parts.append(_line(x, y, x, y + BAR_HEIGHT - 3, "#ffffff", width=1.4))
        dark = bar.kind is Kind.POST
        if right - left > 6 * len(bar.label) + 6:
            self._space.take(left + 4, y + 8, bar.label)
            parts.append(_text(left + 4, y + 8, bar.label, fill="#fff" if dark else "#222", size=9))
        elif bar.kind is Kind.LEFT_OUT and self._space.take(right + 4, y + 8, bar.label):
            parts.append(_text(right + 4, y + 8, bar.label, fill="#222", size=9))
        self._group(parts, f"{bar.kind.value}: {bar.note}", bar.start_seconds, bar.stop_seconds)

    def _ends(self, arrow: Arrow) -> tuple[float, float, float, float]:
        """Where it begins and ends; one that is lost ends halfway."""
        end = arrow.start_seconds if arrow.ends_seconds is None else arrow.ends_seconds
        x1, x2 = self._scale(arrow.start_seconds), self._scale(end)
        y1, y2 = self._rows[arrow.source].line, self._rows[arrow.target].line
        if arrow.stop_seconds is None:
            x2, y2 = (x1 + x2) / 2, (y1 + y2) / 2
        return x1, y1, x2, y2

    def _arrow(self, arrow: Arrow) -> None:
        (x1, y1, x2, y2), lost = self._ends(arrow), arrow.stop_seconds is None
        colour = COLOURS[arrow.kind]
        parts = [
            _line(x1, y1, x2, y2, colour, width=1.3, dashes="4 3" if lost else ""),
            f'<circle cx="{x1:.1f}" cy="{y1:.1f}" r="1.8" fill="{colour}"/>',
            _cross(x2, y2) if lost else _head(x1, y1, x2, y2, colour),
        ]
        self._group(parts, arrow.note, arrow.start_seconds, arrow.ends_seconds)

    def _arrow_label(self, arrow: Arrow) -> None:
        """Beside its middle, or where there is room; nowhere where there is none."""
        x1, y1, x2, y2 = self._ends(arrow)
        for share in (0.3, 0.5, 0.7, 0.15, 0.85) if arrow.label else ():
            x, y = x1 + share * (x2 - x1) + 4, y1 + share * (y2 - y1) + 3
            if self._space.take(x, y, arrow.label):
                label = _text(x, y, arrow.label, fill=COLOURS[arrow.kind], size=9, halo=True)
                self._group([label], arrow.note, arrow.start_seconds, arrow.ends_seconds)
                return

    def _mark(self, mark: Mark, row: _Row) -> None:
        x, colour = self._scale(mark.at_seconds), COLOURS[mark.kind]
        parts = [_line(x, row.line - 5, x, row.line + 5, colour, width=1.8)]
        start = min(x + 1, WIDTH - 8 - 5.7 * len(mark.label))
        for level in range(LABEL_ROWS):
            y = row.line - 6 - level * LABEL_HEIGHT
            if self._space.take(start, y, mark.label):
                parts.append(_text(start, y, mark.label, fill=colour, size=9))
                if level:
                    parts.append(_line(x, y - 6, x, row.line - 5, colour, width=0.5))
                break
        self._group(parts, mark.note, mark.at_seconds, None)

    def _through(self) -> None:
        """Faults and violations go through all lanes; faults elsewhere are ticks on the axis."""
        numbered = list(enumerate(self._notes, 1))
        # Where numbers would cover each other, a violation's is the one to see.
        for number, mark in sorted(numbered, key=lambda one: one[1].kind is not Kind.VIOLATION):
            x, colour = self._scale(mark.at_seconds), COLOURS[mark.kind]
            foot = self._bottom if mark.ours else TOP + 6
            violation = mark.kind is Kind.VIOLATION
            width = 2.2 if violation or not mark.ours else 1.2
            dashes = "" if violation or not mark.ours else "5 3"
            parts = [_line(x, TOP - 4, x, foot, colour, width=width, dashes=dashes)]
            if number <= NOTES_MAX and self._space.take(x - 4, TOP - 31, "00"):
                parts.append(_text(x, TOP - 31, str(number), fill=colour, anchor="middle", weight="700"))
            self._group(parts, f"{mark.kind.value}: {mark.note}", mark.at_seconds, None)

    def _legend_and_notes(self) -> float:
        self._parts.append(_text(8, 22, self._title, size=15, weight="600"))
        first = self._scale.times[0]
        what = (
            f"transfer {self._story.transfer}; 0 ms is {first:.6f} s of the history; grey bands are cut short"
        )
        self._parts.append(_text(8, 38, what, fill="#555", size=11))
        x, y = 8.0, 53.0
        for kind, colour in COLOURS.items():
            if x > WIDTH - 170:
                x, y = 8.0, y + 14
            sign = _line(x, y, x + 14, y, colour, width=1.6)
            if kind in _AS_BARS:
                sign = _box(x, y - 5, 14, 9, colour, radius=2)
            elif kind in _AS_TICKS:
                sign = _line(x + 7, y - 5, x + 7, y + 5, colour, width=2)
            self._parts += [sign, _text(x + 18, y + 3, kind.value, size=9)]
            x += 30 + 5.0 * len(kind.value)
        y = self._bottom + 20
        for number, mark in enumerate(self._notes[:NOTES_MAX], 1):
            colour = COLOURS[mark.kind]
            note = mark.note if len(mark.note) <= 190 else mark.note[:189] + "…"
            since = f"{_milliseconds(mark.at_seconds - first)} ms"
            self._parts += [
                _text(28, y, str(number), fill=colour, size=11, anchor="end", weight="700"),
                _text(GUTTER, y, since, fill=colour, size=11, anchor="end"),
                _text(GUTTER + 10, y, note, fill=colour, size=11),
            ]
            y += 15
        if len(self._notes) > NOTES_MAX:
            self._parts.append(_text(8, y, f"and {len(self._notes) - NOTES_MAX} more", size=11))
            y += 15
        return y + 4

    def _group(self, parts: Sequence[str], note: str, start: float, stop: float | None) -> None:
        zero = self._scale.times[0]
        when = f"{_milliseconds(start - zero)} ms"
        if stop is not None:
            when += f" to {_milliseconds(stop - zero)} ms"
        self._parts.append(f"<g><title>{escape(when)}: {escape(note)}</title>{''.join(parts)}</g>")


_AS_BARS = {
    Kind.REQUEST,
    Kind.LEASE,
    Kind.PERMISSION,
    Kind.REGISTRATION,
    Kind.QUARANTINE,
    Kind.POST,
    Kind.BROKEN_POST,
    Kind.LEFT_OUT,
}
_AS_TICKS = {Kind.COMMAND, Kind.RESULT, Kind.DEADLINE, Kind.FAULT, Kind.VIOLATION}


def _rows_of(bars: Sequence[Stretch], scale: Scale) -> list[int]:
    """A row for each bar, so that bars of one row do not overlap; the last row takes what is left."""
    ends: list[float] = []
    rows: list[int] = []
    for bar in bars:
        left = scale(bar.start_seconds)
        right = scale(scale.times[-1] if bar.stop_seconds is None else bar.stop_seconds)
        row = next((index for index, end in enumerate(ends) if end <= left), len(ends))
        row = min(row, BAR_ROWS_MAX - 1)
        if row == len(ends):
            ends.append(0.0)
        ends[row] = max(right, left + 3)
        rows.append(row)
    return rows


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}" if abs(seconds) < 1 else f"{seconds * 1e3:,.0f}"


def _box(
    x: float, y: float, width: float, height: float, fill: str, *, radius: float = 0, opacity: float = 1
) -> str:
    shape = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius:g}"'
    return f'<rect {shape} fill="{fill}" fill-opacity="{opacity:g}"/>'


def _line(
    x1: float, y1: float, x2: float, y2: float, colour: str, *, width: float = 1, dashes: str = ""
) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<line {ends} stroke="{colour}" stroke-width="{width:g}"{dashed}/>'


def _text(
    x: float,
    y: float,
    text: str,
    *,
    fill: str = "#222",
    size: float = 10,
    anchor: str = "start",
    weight: str = "400",
    halo: bool = False,
) -> str:
    behind = ' stroke="#fff" stroke-width="3" paint-order="stroke"' if halo else ""
    style = f'fill="{fill}" font-size="{size:g}" text-anchor="{anchor}" font-weight="{weight}"{behind}'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def _head(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5 or 1.0
    ux, uy = (x2 - x1) / length, (y2 - y1) / length
    left = f"{x2 - 7 * ux - 3 * uy:.1f},{y2 - 7 * uy + 3 * ux:.1f}"
    right = f"{x2 - 7 * ux + 3 * uy:.1f},{y2 - 7 * uy - 3 * ux:.1f}"
    return f'<polygon points="{x2:.1f},{y2:.1f} {left} {right}" fill="{colour}"/>'


def _cross(x: float, y: float) -> str:
    red = COLOURS[Kind.FAULT]
    return _line(x - 4, y - 4, x + 4, y + 4, red, width=2) + _line(x - 4, y + 4, x + 4, y - 4, red, width=2)
