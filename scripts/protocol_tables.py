"""Writes the generated parts of docs/protocol.md from the code: messages, states, limits and reasons.

    .venv/bin/python scripts/protocol_tables.py            # write them anew
    .venv/bin/python scripts/protocol_tables.py --check    # exit 1 if they are not current

A generated part stands between `<!-- begin NAME -->` and `<!-- end NAME -->`; the rest of the page stays.
"""

from __future__ import annotations

import argparse
import ast
import enum
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from kvferry.host.settings import LIMIT_KEYS
from kvferry.protocol import reasons, states
from kvferry.protocol.consumer import CONSUMER_MESSAGES
from kvferry.protocol.limits import Limits
from kvferry.protocol.messages import AnyMessage
from kvferry.protocol.producer import PRODUCER_MESSAGES

PAGE = Path(__file__).parents[1] / "docs" / "protocol.md"
WRITE_AGAIN = "scripts/protocol_tables.py"

AnyTable = states.Table[Any, Any]

# Title, table, states and events of each machine, and where it starts.
MACHINES: tuple[tuple[str, AnyTable, type[enum.Enum], type[enum.Enum], enum.Enum], ...] = (
    (
        "Source: one transfer on a producer rank",
        states.SOURCE,
        states.SourceState,
        states.SourceEvent,
        states.SourceState.UNKNOWN,
    ),
    (
        "Delivery: one registration on a producer rank",
        states.DELIVERY,
        states.DeliveryState,
        states.DeliveryEvent,
        states.DeliveryState.ANNOUNCED,
    ),
    (
        "Reception: one transfer for one request on a consumer rank",
        states.RECEPTION,
        states.ReceptionState,
        states.ReceptionEvent,
        states.ReceptionState.ANNOUNCED,
    ),
    (
        "Part: one producer rank of a reception",
        states.PART,
        states.PartState,
        states.PartEvent,
        states.PartState.UNTOLD,
    ),
)


def messages() -> str:
    """Every message, by who says it."""
    rows = []
    for direction, wanted in (
        ("either", lambda kind: kind not in PRODUCER_MESSAGES | CONSUMER_MESSAGES),
        ("consumer to producer", PRODUCER_MESSAGES.__contains__),
        ("producer to consumer", CONSUMER_MESSAGES.__contains__),
    ):
        for kind in get_args(AnyMessage):
            if wanted(kind):
                fields = ", ".join(f"`{name}`" for name in kind.__struct_fields__)
                rows.append((direction, f"`{kind.__name__}`", fields, _first_paragraph(kind.__doc__)))
    return _table(("direction", "message", "fields", "meaning"), rows)


def machines() -> str:
    """Each machine: its states, a diagram, and the full product of states and events."""
    parts = []
    for title, table, state_type, event_type, start in MACHINES:
        parts += [f"### {title}", _diagram(table, start), _grid(table, state_type, event_type)]
        meanings = [*_meanings("state", state_type), *_meanings("event", event_type)]
        if meanings:
            parts.append("\n".join(meanings))
    return "\n\n".join(parts)


def limits() -> str:
    """Every limit with its default, the setting that changes it, and what happens at it."""
    keys = {field: key for key, field in LIMIT_KEYS.items()}
    told = _member_docstrings(Limits)
    defaults = Limits()
    rows = [
        (
            f"`{name}`",
            f"{getattr(defaults, name):g}" if name.endswith("_seconds") else str(getattr(defaults, name)),
            f"`{keys[name]}`" if name in keys else "fixed",
            told[name],
        )
        for name in Limits.__struct_fields__
    ]
    return _table(("limit", "default", "setting", "what happens"), rows)


def codes() -> str:
    """Every reason code."""
    return ", ".join(f"`{code}`" for code in sorted(reasons.CODES)) + "."


PARTS: dict[str, Callable[[], str]] = {
    "messages": messages,
    "machines": machines,
    "limits": limits,
    "codes": codes,
}


def current(page: str) -> str:
    """The page with every generated part as the code says now.

    Raises:
        ValueError: a part's marks are missing.
    """
    for name, make in PARTS.items():
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
        before, found, rest = page.partition(begin)
        old, also_found, after = rest.partition(end)
        del old
        if not found or not also_found:
            raise ValueError(f"{PAGE.name} lacks the marks of {name!r}: {begin.strip()} and {end}")
        page = f"{before}{begin}\n{make()}\n\n{end}{after}"
    return page


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description="generated parts of docs/protocol.md")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if they are not current")
    checking = parser.parse_args(arguments).check
    page = PAGE.read_text(encoding="utf-8")
    wanted = current(page)
    if checking:
        if page != wanted:
            print(f"{PAGE.name} is not current; run {WRITE_AGAIN}", file=sys.stderr)
        return int(page != wanted)
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


# --- parts of parts ------------------------------------------------------------------------------


def _diagram(table: AnyTable, start: enum.Enum) -> str:
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {start.value}"]
    arrows: dict[tuple[str, str], list[str]] = {}
    for (state, event), following in table.transitions.items():
        arrows.setdefault((state.value, following.value), []).append(event.value)
    lines += [
        f"    {source} --> {target}: {', '.join(events)}" for (source, target), events in arrows.items()
    ]
    return "\n".join([*lines, "```"])


def _grid(table: AnyTable, state_type: type[enum.Enum], event_type: type[enum.Enum]) -> str:
    rows = [
        (f"`{state.value}`", *(_cell(table, state, event) for event in event_type)) for state in state_type
    ]
    return _table(("state", *(f"`{event.value}`" for event in event_type)), rows)


def _meanings(kind: str, members: type[enum.Enum]) -> list[str]:
    told = _member_docstrings(members)
    return [f"- {kind} `{member.value}`: {told[member.name]}" for member in members if member.name in told]


def _cell(table: AnyTable, state: enum.Enum, event: enum.Enum) -> str:
    following = table.transitions.get((state, event))
    if following is not None:
        return str(following.value)
    return "-" if (state, event) in table.late else "!"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _first_paragraph(text: str | None) -> str:
    return " ".join((text or "").strip().split("\n\n")[0].split())


def _member_docstrings(owner: type) -> dict[str, str]:
    """Name -> the text under its assignment in the class."""
    tree = ast.parse(inspect.getsource(owner))
    definition = tree.body[0]
    assert isinstance(definition, ast.ClassDef)
    return dict(_documented(definition.body))


def _documented(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    for statement, following in itertools.pairwise(body):
        target: ast.expr | None = None
        if isinstance(statement, ast.Assign):
            target = statement.targets[0]
        elif isinstance(statement, ast.AnnAssign):
            target = statement.target
        if not isinstance(target, ast.Name) or not isinstance(following, ast.Expr):
            continue
        value = following.value
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield target.id, _first_paragraph(value.value)


if __name__ == "__main__":
    sys.exit(main())
