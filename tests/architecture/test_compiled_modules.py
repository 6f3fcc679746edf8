"""What pyproject.toml lists for compilation exists, and has nothing that compiled code does not do safely."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent.parent
LISTED = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["tool"]["kvferry"]["compiled"]["modules"]
TASKS = (ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith, ast.Await, ast.Yield, ast.YieldFrom)


def offences(source: str) -> list[int]:
    """The lines with a coroutine, a generator function or an exception class."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        bases = [ast.unparse(base) for base in node.bases] if isinstance(node, ast.ClassDef) else []
        if isinstance(node, TASKS) or any(base.endswith(("Error", "Exception")) for base in bases):
            lines.append(getattr(node, "lineno", 0))
    return lines


@pytest.mark.parametrize("module", LISTED)
def test_a_listed_module_has_only_what_may_be_compiled(module: str) -> None:
    source = CHECKOUT / "src" / Path(*module.split(".")).with_suffix(".py")
    assert offences(source.read_text()) == []


@pytest.mark.parametrize(
    "source",
    ["async def f(): ...", "def f():\n yield 1", "class B(Exception): ...", "class A(KVError): ..."],
)
def test_the_rule_sees_what_it_forbids(source: str) -> None:
    assert offences(source)
