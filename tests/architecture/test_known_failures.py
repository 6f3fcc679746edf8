"""The page on reliability names tests that exist, and those of a known failure kind say so themselves.

Goal: a test that is renamed, or that loses its id, is noticed. Method: read the tables, find each test, and
look for the id in its docstring, or in the first paragraph of a transcript.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
PAGE = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([A-Z]\d\d) \| [^|]+ \| (`[^|]+) \|$", PAGE, flags=re.MULTILINE)
NAMED = sorted(set(re.findall(r"`((?:\w+/)+\w+\.(?:py::\w+|txt))`", PAGE)))


@functools.cache
def docstrings(path: Path) -> dict[str, str]:
    """What each function of a file says of itself."""
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {node.name: ast.get_docstring(node) or "" for node in functions}


def says(test: str) -> str | None:
    """What a test says of itself; None when there is no such test."""
    name, _, function = test.partition("::")
    path = TESTS / name
    if not path.exists():
        return None
    if path.suffix == ".txt":
        return path.read_text(encoding="utf-8").partition("\n\n")[0]
    return docstrings(path).get(function)


@pytest.mark.parametrize(("row", "cell"), ROWS, ids=[row for row, _ in ROWS])
def test_every_named_test_exists_and_carries_the_id(row: str, cell: str) -> None:
    tests = re.findall(r"`([^`]+)`", cell)
    assert tests
    for test in tests:
        text = says(test)
        assert text is not None, f"{test} does not exist"
        assert re.search(rf"\b{row}\b", text), f"{test} does not name {row}"


def test_every_test_that_the_page_names_exists() -> None:
    assert [test for test in NAMED if says(test) is None] == []


def test_what_was_found_is_held_down() -> None:
    found = PAGE.partition("## What it found")[2].partition("\n## ")[0]
    rows = [line for line in found.splitlines() if line.startswith("| ")][2:]
    assert len(rows) >= 20
    for row in rows:
        assert any(f"`{test}`" in row for test in NAMED), row


def test_every_protocol_and_agent_row_is_there_once() -> None:
    rows = [row for row, _ in ROWS if row[0] in "PA"]
    assert len(rows) == len(set(rows)) == 64


def test_a_name_that_leads_nowhere_is_noticed() -> None:
    assert says("unit/test_ids.py::test_nothing_of_that_name") is None
    assert says("unit/nowhere.py::test_x") is None
