"""The tables of a report, as HTML. What they are given as text is escaped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape

from kvferry.bench.grid import Cell, tokens_text


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, labels: int = 2, prose: bool = False) -> str:
    """Rows under a head. The first `labels` columns are words, set to the left; `prose` may break lines."""
    kind = "text" if prose else "label"

    def line(texts: Sequence[str], tag: str) -> str:
        words = "".join(f'<{tag} class="{kind}">{escape(one)}</{tag}>' for one in texts[:labels])
        return f"<tr>{words}{''.join(f'<{tag}>{escape(one)}</{tag}>' for one in texts[labels:])}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f'<div class="scroll"><table>{line(head, "th")}{body}</table></div>'


def folded(title: str, content: str) -> str:
    """Content that shows when its title is pressed."""
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def by_load(cells: Sequence[Cell], shown: Callable[[Cell], str]) -> str:
    """Rates across, prompt lengths down; `shown` makes a cell's `td`, or nothing where there is none."""
    rates = sorted({cell.rate for cell in cells})
    lengths = sorted({cell.input_tokens for cell in cells})
    rows = [
        [shown(cell) if (cell := Cell(rate, tokens)) in cells else "" for rate in rates] for tokens in lengths
    ]
    if not any(map(any, rows)):
        return ""
    head = "".join(f"<th>{rate:g}/s</th>" for rate in rates)
    body = "".join(
        f"<tr><td>{tokens_text(tokens)}</td>{''.join(one or '<td></td>' for one in row)}</tr>"
        for tokens, row in zip(lengths, rows, strict=True)
    )
    return f"<table><tr><th>tokens</th>{head}</tr>{body}</table>"
