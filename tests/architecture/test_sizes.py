"""Functions, modules and classes stay short; a longer one means a missing noun.

Goal: a reader gets a whole package in an hour. Method: parse every module, list what is over a limit, and
compare with the exceptions below, which may only shrink: one that is no longer needed fails too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "kvferry"

FUNCTION_LINES_MAX = 60
MODULE_LINES_MAX = 500
CLASS_METHODS_MAX = 20

# "path:name" -> why it may be longer.
EXCEPTIONS: dict[str, str] = {
    "connector/connector.py:FerryConnector": "vLLM's interface has that many hooks; each only delegates",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def oversized(path: str, source: str) -> Iterator[tuple[str, str]]:
    """`(path:name, what is too large)` of everything over a limit in one module."""
    lines = source.count("\n") + 1
    if lines > MODULE_LINES_MAX:
        yield path, f"module of {lines} lines, at most {MODULE_LINES_MAX}"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Function):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES_MAX:
                yield f"{path}:{node.name}", f"function of {length} lines, at most {FUNCTION_LINES_MAX}"
        if isinstance(node, ast.ClassDef):
            methods = sum(isinstance(member, Function) for member in node.body)
            if methods > CLASS_METHODS_MAX:
                yield f"{path}:{node.name}", f"class of {methods} methods, at most {CLASS_METHODS_MAX}"


def all_oversized() -> dict[str, str]:
    found: dict[str, str] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        found.update(oversized(str(path.relative_to(SOURCE)), path.read_text(encoding="utf-8")))
    return found


def test_nothing_new_is_oversized_and_every_exception_is_still_needed() -> None:
    found = all_oversized()
    assert {name: size for name, size in found.items() if name not in EXCEPTIONS} == {}
    assert sorted(set(EXCEPTIONS) - set(found)) == []


def test_each_limit_is_seen() -> None:
    method = "    def m{}(self): ...\n"
    large_class = "class Large:\n" + "".join(method.format(i) for i in range(CLASS_METHODS_MAX + 1))
    long_function = "def long():\n" + "    pass\n" * FUNCTION_LINES_MAX
    long_module = "\n" * MODULE_LINES_MAX
    assert [name for name, _ in oversized("a.py", large_class)] == ["a.py:Large"]
    assert [name for name, _ in oversized("a.py", long_function)] == ["a.py:long"]
    assert [name for name, _ in oversized("a.py", long_module)] == ["a.py"]


def test_the_limits_themselves_are_allowed() -> None:
    method = "    def m{}(self): ...\n"
    class_at_limit = "class Large:\n" + "".join(method.format(i) for i in range(CLASS_METHODS_MAX))
    function_at_limit = "def long():\n" + "    pass\n" * (FUNCTION_LINES_MAX - 1)
    assert list(oversized("a.py", class_at_limit + function_at_limit)) == []
