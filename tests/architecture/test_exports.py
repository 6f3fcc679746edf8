"""What a package says it exports exists, and every module says what it is."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import kvferry

SOURCE = Path(__file__).parents[2] / "src" / "kvferry"
MODULES = sorted(SOURCE.rglob("*.py"))


def declared_exports(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets
        ):
            return [str(name) for name in ast.literal_eval(node.value)]
    return None


def bound_names(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_module_says_what_it_is_and_exports_what_it_has(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), f"{path} has no docstring"
    exports = declared_exports(tree)
    if exports is not None:
        assert exports == sorted(set(exports)), "__all__ is sorted and names each thing once"
        assert set(exports) <= bound_names(tree)


def test_the_top_level_offers_the_version_and_nothing_else() -> None:
    tree = ast.parse((SOURCE / "__init__.py").read_text(encoding="utf-8"))
    assert bound_names(tree) == {"__version__"}
    assert kvferry.__version__.count(".") == 2
