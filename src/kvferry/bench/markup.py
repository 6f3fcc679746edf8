"""The tables of a report, as HTML. What they are given as text is escaped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape

from kvferry.bench.grid import Cell, tokens_text


def table(head: Iterable[str], rows: Iterable[Sequence[str]], *, text: bool = False) -> str:
    """Rows under a head; `text` sets all columns to the left."""
    kind = ' class="text"' if text else ""
    top = "".join(f"<th{kind}>{escape(one)}</th>" for one in head)
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table><tr>{top}</tr>{body}</table></div>'


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
