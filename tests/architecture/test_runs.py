"""Every folder of tests is run by `make test`.

Goal: a new folder of tests is not forgotten, since the targets name the folders. Method: the recipes of the
targets that `test` needs.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def recipe(target: str) -> str:
    """The lines that a target runs."""
    found = re.search(rf"^{target}:(?! export).*\n((?:\t.*\n)*)", MAKEFILE, flags=re.MULTILINE)
    assert found, f"the Makefile has no target {target!r}"
    return found[1]


def needed_by(target: str) -> list[str]:
    """The targets that a target's lines make."""
    made = re.findall(r"\$\(MAKE\)(?: -j \$\(WORKERS\))? (.*)", recipe(target))
    assert made, f"the Makefile's target {target!r} makes nothing"
    return " ".join(made).split()


def test_make_test_runs_every_folder_of_tests() -> None:
    with_tests = {
        path.relative_to(ROOT).parts[1] for path in (ROOT / "tests").rglob("test_*.py") if path.is_file()
    }
    lines = "".join(recipe(target) for target in needed_by("test"))
    assert set(re.findall(r"\btests/(\w+)", lines)) == with_tests


ENGINES = re.compile(r"from tests\.support\.(live|emulated_pair) import|\"bench\", \"compare\"|\"(demo|up)\"")
"""What a test that starts vLLM engines has in its text."""


def test_what_starts_engines_runs_alone_and_nothing_else_does() -> None:
    """Engines beside other engines starve on a small machine; what starts none need not wait for them."""
    texts = {
        path.name: path.read_text(encoding="utf-8")
        for path in (ROOT / "tests" / "integration").glob("test_*.py")
    }
    marked = {name for name, text in texts.items() if "pytest.mark.engines" in text}
    assert marked == {name for name, text in texts.items() if ENGINES.search(text)}
